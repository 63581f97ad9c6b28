"""Trains the tasks of tasks.toml over seeds into results/learning.csv and results/curves.csv.

    python benchmarks/run.py cartpole cartpole-masked --seeds 1:30 --jobs 2
    python benchmarks/run.py details-cartpole-masked --methods nothing "no reset"
    python benchmarks/run.py memory-look       # results/memory-look.csv: what can be read from memories
    python benchmarks/run.py reward-scale      # results/reward-scale.csv: gradients of both losses

A run is what a user would start from the shell, in a process of its own. Its final agent then plays
100 deterministic episodes and 100 with sampled actions, the same starts, which training has not
seen. A run that has a row in learning.csv is skipped, a failed one too: delete its rows, there and in
curves.csv, to run it again. One that was interrupted goes on from its last minute, if the commit is
the same; its wall_seconds, which nobody knows, stay empty. Agents stay in --runs-dir.
"""

import argparse
import contextlib
import copy
import csv
import io
import json
import logging
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import numpy as np
import rows
from rows import RESULTS, ROOT

sys.path[:0] = [str(ROOT / "docs/tools"), str(ROOT / "docs/exercises")]
import train as exercises  # noqa: E402
from blocks import patched  # noqa: E402

TASKS, PEERS = rows.read_tasks()
POINTS = 30  # of a run's curve, at most
EPISODES = 100  # of a final agent, deterministic ones and as many sampled ones

# Mistakes in rppo_lstm.py, beside those of docs/exercises: the block, the old text, the new one.
CHANGES: dict[str, list[tuple[str, str, str]]] = {
    "no_reset_on_replay": [
        (
            "ResetLSTM.forward",
            "        x = torch.where(final.unsqueeze(-1), self.reset, x)\n",
            "",
        )
    ],
    "state_lost": [
        ("train", "        log_pis = []\n", "        log_pis, lstm_state = [], agent.initial_state(N)\n")
    ],
    "zero_state": [
        ("train", "lstm_states.transpose(0, 1).flatten(1, 2)", "0 * lstm_states.transpose(0, 1).flatten(1, 2)")
    ],
    "late_value": [
        (
            "train",
            "agent.step(tensor(obs[t]), lstm_state)",
            "agent.step(tensor(obs[t]), reset_state(lstm_state, final[t]))",
        )
    ],
    "axes": [
        (
            "to_sequences",
            """    x = x.unflatten(0, (-1, L))  # (T / L, L, N, ...)
    return x.transpose(0, 1).flatten(1, 2)
""",
            "    return x.reshape(-1, L, *x.shape[2:]).transpose(0, 1)\n",
        )
    ],
    "half_open": [("ResetLSTM.__init__", "nn.init.ones_(", "nn.init.zeros_(")],
    "torch_weights": [
        ("ResetLSTM.__init__", "        nn.init.orthogonal_(self.cell.weight_ih)\n", ""),
        ("ResetLSTM.__init__", "        nn.init.orthogonal_(self.cell.weight_hh)\n", ""),
    ],
    "early_statistics": [
        ("train", "            agent.obs_stats.update(tensor(obs[:T][valid]))\n", "            pass\n"),
        (
            "train",
            "        # Update, in minibatches",
            "        agent.obs_stats.update(tensor(obs[:T][valid]))\n        # Update, in minibatches",
        ),
    ],
    "stateless_evaluation": [("evaluate", "agent.predict(obs, agent_state,", "agent.predict(obs, None,")],
}  # fmt: skip


def changed(name: str, script: str = "rppo_lstm") -> str:
    """A script's text with one of CHANGES, or with that of an exercise."""
    text = (ROOT / f"{script}.py").read_text()
    if name not in CHANGES:
        return exercises.changed(name)
    for block, old, new in CHANGES[name]:
        text = patched(text, block, old, new)
    return text


def script_of(names: list[str]):
    """The script, with recipes or a change, of the words before a command's flags."""
    name, *others = names
    changes = [word.removeprefix("change:") for word in others if word.startswith("change:")]
    recipes = [word for word in others if not word.startswith("change:")]
    recipes = recipes[0].split(",") if recipes else []
    return rows.load_script(name, recipes, changed(changes[0], name) if changes else "")


def train(names: list[str], flags: list[str], steps: int, seed: int, run_dir: Path) -> dict:
    """Trains and evaluates one of the scripts, or goes on with an interrupted run -> results."""
    script = script_of(names)
    flags = [*flags, "--total-timesteps", str(steps), "--seed", str(seed), "--eval-episodes", "0"]
    flags += ["--runs-dir", str(run_dir.parent), "--run-name", run_dir.name]
    if (run_dir / "agent.pt").exists():
        flags = ["--resume", str(run_dir)]
    args = rows.parse(script, flags)
    agent = script.train(args)
    result = json.loads((run_dir / "result.json").read_text())
    frames = [None, script.EVAL_FRAMES] if hasattr(script, "EVAL_FRAMES") else []  # of Atari
    for name, deterministic in ("evaluation", True), ("sampled", False):
        envs = script.make_envs(args, EPISODES, *frames)
        env_seed = script.env_seed(seed, script.EVALUATION)
        result[name] = script.evaluate(agent, envs, env_seed, deterministic)
    return {**result, "curve": curve(run_dir)}


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """Environment step and mean return of the last 100 episodes, from TensorBoard's events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resumed run
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return []
    return [(s.step, s.value) for s in events.Scalars("charts/episodic_return")]


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of a curve's points, the last one among them; returns with four digits."""
    indices = np.linspace(0, len(points) - 1, min(POINTS, len(points))).round().astype(int)
    return [(points[i][0], float(f"{points[i][1]:.4g}")) for i in indices]


def peer(settings: dict, env_id: str, steps: int, seed: int) -> dict:
    """stable-baselines3's or sb3-contrib's algorithm, trained and evaluated. settings are its
    constructor's, and num_envs, normalize (running statistics of rewards and, unless it is
    "rewards", of real-valued observations), linear (what falls to 0), visible (the components that
    are not masked) and activation (a class of torch.nn)."""
    import gymnasium as gym
    import sb3_contrib
    import stable_baselines3
    import torch
    from gymnasium.wrappers import FlattenObservation, TransformObservation
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    rows.use()  # whose tasks are imported by name
    kwargs = copy.deepcopy(settings)
    kwargs.pop("like", None)
    algorithm = kwargs.pop("algorithm")
    names = ("num_envs", "normalize", "linear", "visible", "activation")
    num_envs, normalize, linear, visible, activation = (kwargs.pop(name, None) for name in names)
    if activation:
        kwargs["policy_kwargs"]["activation_fn"] = getattr(torch.nn, activation)

    def make(num_envs: int, seed: int):
        def wrap(env):
            if visible:
                return TransformObservation(env, lambda obs: obs * np.float32(visible), None)
            plain = isinstance(env.observation_space, gym.spaces.Box | gym.spaces.Discrete)
            return env if plain else FlattenObservation(env)  # sb3 knows no tuples

        return make_vec_env(env_id, num_envs, seed, wrapper_class=wrap)

    envs = make(num_envs or 1, seed)
    if normalize:
        real = normalize != "rewards" and envs.observation_space.dtype.kind == "f"
        envs = VecNormalize(envs, norm_obs=real, gamma=kwargs.get("gamma", 0.99))
    for name in linear or ():
        kwargs[name] = lambda remaining, first=kwargs[name]: remaining * first
    library = stable_baselines3 if hasattr(stable_baselines3, algorithm) else sb3_contrib
    policy = "MlpLstmPolicy" if algorithm.startswith("Recurrent") else "MlpPolicy"
    model = getattr(library, algorithm)(policy, envs, seed=seed, device="cpu", **kwargs)
    points: list[tuple[int, float]] = []

    class Record(BaseCallback):
        def _on_step(self) -> bool:
            done = self.num_timesteps
            if model.ep_info_buffer and (not points or points[-1][0] + 1000 < done):
                points.append((done, float(np.mean([x["r"] for x in model.ep_info_buffer]))))
            return True

    model.learn(steps, Record())
    fresh = make(1, 1_000_000 * seed)
    if normalize:
        fresh = VecNormalize(fresh, training=False, norm_obs=real, norm_reward=False)
        if real:
            fresh.obs_rms = envs.obs_rms
    result = {"global_step": model.num_timesteps, "curve": points}
    result["returns"] = [episode["r"] for episode in model.ep_info_buffer]
    for name, deterministic in ("evaluation", True), ("sampled", False):
        played = evaluate_policy(model, fresh, EPISODES, deterministic, return_episode_rewards=True)
        result[name] = played[0]
    return result


def run(task: str, method: str, seed: int, options: argparse.Namespace) -> str:
    """Trains, evaluates and records one run; returns a line to print."""
    names, flags = rows.split(TASKS[task].methods[method])
    steps = TASKS[task].steps
    texts = [f"{names[0]}.py", "docs/recipes"] if names[0] != "peer" else ["benchmarks/run.py"]
    commit = rows.commit(ROOT, *texts[: len(names)])
    name = f"{task}__{method}__{seed}".replace(" ", "-")
    run_dir = Path(options.runs_dir, commit or "unknown", name).resolve()
    if (run_dir / "result.json").exists():  # it has no row: begin anew
        shutil.rmtree(run_dir)
    row = {
        "task": task, "method": method, "script": " ".join(names), "flags": " ".join(flags),
        "seed": seed, "steps": steps, "date": time.strftime("%Y-%m-%d"), "commit": commit,
        "torch": version("torch"), "gymnasium": version("gymnasium"), "machine": rows.machine(),
    }  # fmt: skip
    interrupted = run_dir.exists()
    began = time.time()
    try:
        if names[0] == "peer":
            settings = PEERS[names[1]]
            row |= {"script": "peer", "flags": f"{names[1]} {names[2]} {json.dumps(settings)}"}
            result = peer(settings, names[2], steps, seed)
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                result = train(names, flags, steps, seed, run_dir)
        row |= {
            "eval_mean": f"{np.mean(result['evaluation']):.4f}", "eval_episodes": EPISODES,
            "eval_std": f"{np.std(result['evaluation']):.4f}",
            "sampled_mean": f"{np.mean(result['sampled']):.4f}",
            "global_step": result["global_step"],
            "return_100": f"{np.mean(result['returns'] or np.nan):.2f}",
            "wall_seconds": "" if interrupted else f"{time.time() - began:.1f}",
        }  # fmt: skip
        steps_of, returns = zip(*thin(result["curve"])) if result["curve"] else ((), ())
        curve_row = {"task": task, "method": method, "seed": seed}
        curve_row["steps"] = " ".join(map(str, steps_of))
        curve_row["returns"] = " ".join(f"{value:g}" for value in returns)
        rows.append(
            options.results / "curves.csv", rows.CURVES, [curve_row]
        )  # first: a row says that all is there
    except (Exception, SystemExit) as error:
        row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")
    rows.append(options.results / "learning.csv", rows.LEARNING, [row])
    return f"{task}, {method}, {seed}: {row.get('error') or row['eval_mean']}"


# --- What can be read from memories ---
LOOK = "task agent seed steps what at value".split()
CARTPOLE = {
    "env_id": "CartPole-v1", "mask_velocity": True, "total_timesteps": 100_000, "num_steps": 256,
    "update_epochs": 10, "gamma": 0.995,
}  # fmt: skip
REPEAT = {"env_id": "popgym:popgym-RepeatPreviousEasy-v0", "total_timesteps": 500_000}
RIDGES = {"R^2": 0.01, "R^2, weak traces too": 1e-6}


def snapshots(every: int, **flags):
    """Trains rppo_lstm.py -> script, Args, agents by the steps that they had been trained for, the
    first and the last included, and the mean return of the last 100 episodes at each step."""
    script = rows.load_script("rppo_lstm", [])
    agents = {}
    returns = {}

    class Run(script.Run):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            agents[0] = copy.deepcopy(self.agent).eval()

        def log(self, *inputs):
            super().log(*inputs)
            returns[self.step] = np.mean(self.returns or np.nan)
            ended = self.step >= self.args.total_timesteps
            if ended or self.step // every > max(agents) // every:
                agents[self.step] = copy.deepcopy(self.agent).eval()

    script.Run = Run
    with tempfile.TemporaryDirectory() as folder:
        args = script.Args(runs_dir=folder, run_name="run", eval_episodes=0, **flags)
        script.train(args)
    return script, args, agents, returns


def memory_look(seeds: list[int], steps: int | None = None) -> list[list]:
    """Rows of memory-look.csv. Networks of one seed are compared on the same episodes, those of the
    trained agent: what is read from h is then a property of the network alone. Columns: task,
    agent, seed, steps it was trained for, what was read, at (steps back, or the time step of a
    held-out episode), value (R^2, the share of right guesses, a velocity, or a return)."""
    look = rows.use().recipe("look_inside")
    table: list[list] = []
    short = {"total_timesteps": steps} if steps else {}

    def add(*row):
        table.append([*row[:-1], f"{row[-1]:.4f}"])

    for seed in seeds:
        flags = {**CARTPOLE, **short, "seed": seed}
        script, args, agents, returns = snapshots(10_000, **flags)
        _, _, controls, control_returns = snapshots(10**9, **flags, ablate_memory=True)
        last = max(agents)
        obs, actions, counts = look.play(script, args, agents[last])
        hidden = look.velocities(script, args, actions)
        held_out = np.flatnonzero(counts[:150, -1]) if seed == seeds[0] else []
        for velocity, y in hidden.items():
            for t in held_out:
                add("cartpole", "true", seed, "", velocity, t, y[t, -1, 0])
        for name, found in (
            ("lstm", agents),
            ("memoryless", {max(controls): controls[max(controls)]}),
        ):
            for n, agent in found.items():
                h = look.remember(agent, obs)
                for velocity, y in hidden.items():
                    for what, ridge in RIDGES.items():
                        r2 = look.decode(h, y, counts, ridge=ridge)[1]
                        add("cartpole", name, seed, n, f"{what}, {velocity}", "", r2)
                    guess, _ = look.decode(h, y, counts)
                    for t in held_out if n == max(found) else []:
                        add("cartpole", name, seed, n, f"{velocity}, read", t, guess[t, -1, 0])
        for name, of in ("lstm", returns), ("memoryless", control_returns):
            for n, mean in of.items():
                add("cartpole", name, seed, n, "return", "", mean)
    flags = {**REPEAT, **short}
    script, args, agents, _ = snapshots(10**9, **flags)
    flags["total_timesteps"] = min(100_000, flags["total_timesteps"])  # little to learn
    _, _, controls, _ = snapshots(10**9, **flags, ablate_memory=True)
    obs, _, counts = look.play(script, args, agents[max(agents)])
    held_out = counts & (np.arange(counts.shape[1]) >= counts.shape[1] // 2)
    networks = [("lstm", n, agent) for n, agent in agents.items()]
    for name, n, agent in [*networks, ("memoryless", max(controls), controls[max(controls)])]:
        h = look.remember(agent, obs)
        for k in range(look.BACK):
            guess, r2 = look.decode(h, obs, counts, k)
            right = guess.argmax(-1) == obs[: len(obs) - k].argmax(-1)
            add("repeat", name, 1, n, "R^2", k, r2)
            add("repeat", name, 1, n, "share right", k, right[held_out[k:]].mean())
    return table


# --- How much of a gradient step comes from each loss ---
SCALE = "norm_reward seed iteration policy value return_100".split()
SETTINGS = {
    "env_id": "CartPole-v1", "mask_velocity": True, "num_steps": 128, "update_epochs": 10,
    "learning_rate": 2e-3, "anneal_lr": False,
}  # fmt: skip
NORMS = """            shared = [*agent.encoder.parameters(), *agent.lstm.parameters()]
            gradients = torch.autograd.grad(policy_loss, shared, retain_graph=True)
            loss.backward()
            of_policy = torch.cat([g.flatten() for g in gradients])
            of_value = torch.cat([p.grad.flatten() for p in shared]) - of_policy
"""
CLIPPED = """
            factor = min(1.0, args.max_grad_norm / (grad_norm.item() + 1e-6))
            found = norms.setdefault(run.step, [])
            found.append((of_policy.norm().item() * factor, of_value.norm().item() * factor))
"""


def reward_scale(seeds: list[int], steps: int = 30_000) -> list[list]:
    """Rows of reward-scale.csv: the norms, after clipping, of the policy loss's and of the value
    loss's gradient in the shared encoder and LSTM, means over an iteration, with rewards divided by
    the standard deviation of returns, and with raw rewards."""
    text = (ROOT / "rppo_lstm.py").read_text()
    text = patched(text, "train", "            loss.backward()\n", NORMS)
    clip = "grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)\n"
    text = patched(text, "train", clip, clip.rstrip() + CLIPPED)
    script = rows.load_script("rppo_lstm", [], text)
    table: list[list] = []
    for divided in True, False:
        for seed in seeds:
            flags = dict(SETTINGS, norm_reward=divided, seed=seed, total_timesteps=steps)
            with tempfile.TemporaryDirectory() as folder:
                args = script.Args(runs_dir=folder, run_name="run", eval_episodes=0, **flags)
                script.norms = {}
                script.train(args)
                returns = json.loads(Path(folder, "run/result.json").read_text())["returns"]
            for iteration, found in enumerate(script.norms.values(), 1):
                means = [f"{x:.4g}" for x in np.mean(found, 0)]
                last = f"{np.mean(returns or math.nan):.1f}"
                table.append([divided, seed, iteration, *means, last])
    return table


MEASURED = {"memory-look": (memory_look, LOOK), "reward-scale": (reward_scale, SCALE)}


def seed_range(text: str) -> list[int]:
    """first:last, or one seed."""
    first, _, last = text.partition(":")
    seeds = [*range(int(first), int(last or first) + 1)]
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seed")
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = [*TASKS, *MEASURED]
    parser.add_argument(
        "tasks", nargs="+", choices=choices, metavar="TASK", help=", ".join(choices)
    )
    parser.add_argument("--methods", nargs="+", help="these only; default: all of a task")
    parser.add_argument(
        "--seeds", type=seed_range, help="first:last, or one (default 1:5; 1:3 of the measurements)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "learning")
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in [name for name in options.tasks if name in MEASURED]:
        measure, fields = MEASURED[name]
        table = measure(options.seeds or [1, 2, 3])
        with open(options.results / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([fields, *table])
    tasks = [name for name in options.tasks if name in TASKS]
    known = {method for task in tasks for method in TASKS[task].methods}
    for method in set(options.methods or ()) - known:
        parser.error(f"argument --methods: none of these tasks has {method!r}")
    found = rows.read(options.results / "learning.csv")
    have = {(row["task"], row["method"], row["seed"]) for row in found}
    jobs = []
    for seed in options.seeds or range(1, 6):
        for task in tasks:
            for method in TASKS[task].methods:
                if method in (options.methods or known) and (task, method, str(seed)) not in have:
                    jobs.append((task, method, seed, options))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, max_tasks_per_child=1) as pool:
        for finished in as_completed(pool.submit(run, *job) for job in jobs):
            print(finished.result(), flush=True)


if __name__ == "__main__":
    main()
