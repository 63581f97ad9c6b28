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
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import numpy as np
import rows
from rows import PEERS, RESULTS, ROOT, TASKS

POINTS = 30  # of a run's curve, at most


def train(names: list[str], flags: list[str], steps: int, seed: int, run_dir: Path) -> dict:
    """Trains and evaluates one of the scripts, or goes on with an interrupted run -> results."""
    script = rows.load_script(names[0], names[1:])
    flags = [*flags, "--total-timesteps", str(steps), "--seed", str(seed), "--eval-episodes", "0"]
    flags += ["--runs-dir", str(run_dir.parent), "--run-name", run_dir.name]
    if (run_dir / "agent.pt").exists():
        flags = ["--resume", str(run_dir)]
    args = rows.parse(script, flags)
    agent = script.train(args)
    result = json.loads((run_dir / "result.json").read_text())
    frames = [None, script.EVAL_FRAMES] if hasattr(script, "EVAL_FRAMES") else []  # of Atari
    for name, deterministic in ("evaluation", True), ("sampled", False):
        envs = script.make_envs(args, rows.EPISODES, *frames)
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


def run(task: str, method: str, seed: int, options: argparse.Namespace) -> str:
    """Trains, evaluates and records one run; returns a line to print."""
    names, flags = rows.split(TASKS[task].methods[method])
    steps = TASKS[task].steps
    texts = [f"{names[0]}.py", "docs/recipes"][: len(names)]
    commit = rows.commit(ROOT, *(texts if names[0] != "peer" else ["benchmarks/peers.py"]))
    run_dir = Path(options.runs_dir, commit or "unknown", f"{task}__{method}__{seed}")
    run_dir = run_dir.with_name(run_dir.name.replace(" ", "-")).resolve()
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
            import peers

            _, name, env_id = names
            row |= {"script": "peer", "flags": f"{name} {env_id} {json.dumps(PEERS[name])}"}
            result = peers.train(name, env_id, steps, seed)
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                result = train(names, flags, steps, seed, run_dir)
        row |= {
            "eval_mean": f"{np.mean(result['evaluation']):.4f}", "eval_episodes": rows.EPISODES,
            "eval_std": f"{np.std(result['evaluation']):.4f}",
            "sampled_mean": f"{np.mean(result['sampled']):.4f}",
            "global_step": result["global_step"],
            "return_100": f"{np.mean(result['returns'] or np.nan):.2f}",
            "wall_seconds": "" if interrupted else f"{time.time() - began:.1f}",
        }  # fmt: skip
        points = result["curve"]
        chosen = np.linspace(0, len(points) - 1, min(POINTS, len(points))).round().astype(int)
        curve_row = {"task": task, "method": method, "seed": seed}
        curve_row["steps"] = " ".join(str(points[i][0]) for i in chosen)
        curve_row["returns"] = " ".join(f"{points[i][1]:.4g}" for i in chosen)
        # First, because a row in learning.csv says that all is there
        rows.append(options.results / "curves.csv", rows.CURVES, [curve_row])
    except (Exception, SystemExit) as error:
        row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")
    rows.append(options.results / "learning.csv", rows.LEARNING, [row])
    return f"{task}, {method}, {seed}: {row.get('error') or row['eval_mean']}"


def trained(script, **flags):
    """Trains in a temporary folder -> Args, the returns of the last 100 episodes."""
    with tempfile.TemporaryDirectory() as folder:
        args = script.Args(runs_dir=folder, run_name="run", eval_episodes=0, **flags)
        script.train(args)
        return args, json.loads(Path(folder, "run/result.json").read_text())["returns"]


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
    args, _ = trained(script, **flags)
    return script, args, agents, returns


def memory_look(seeds: list[int]) -> list[list]:
    """Rows of memory-look.csv. Networks of one seed are compared on the same episodes, those of the
    trained agent: what is read from h is then a property of the network alone. Columns: task,
    agent, seed, steps it was trained for, what was read, at (steps back, or the time step of a
    held-out episode), value (R^2, the share of right guesses, a velocity, or a return)."""
    look = rows.use().recipe("look_inside")
    table: list[list] = []

    def add(*row):
        table.append([*row[:-1], f"{row[-1]:.4f}"])

    def with_control(every: int, control_steps: int, **flags):
        script, args, agents, returns = snapshots(every, **flags)
        flags |= {"ablate_memory": True, "total_timesteps": control_steps}
        (last, control) = max(snapshots(10**9, **flags)[2].items())
        networks = [("lstm", n, agent) for n, agent in agents.items()]
        return script, args, [*networks, ("memoryless", last, control)], returns

    for seed in seeds:
        script, args, networks, returns = with_control(10_000, 100_000, **CARTPOLE, seed=seed)
        obs, actions, counts = look.play(script, args, networks[-2][2])
        hidden = look.velocities(script, args, actions)
        held_out = np.flatnonzero(counts[:150, -1]) if seed == seeds[0] else []
        for velocity, y in hidden.items():
            for t in held_out:
                add("cartpole", "true", seed, "", velocity, t, y[t, -1, 0])
        for network in networks:
            name, n, agent = network
            h = look.remember(agent, obs)
            for velocity, y in hidden.items():
                for what, ridge in RIDGES.items():
                    r2 = look.decode(h, y, counts, ridge=ridge)[1]
                    add("cartpole", name, seed, n, f"{what}, {velocity}", "", r2)
                guess, _ = look.decode(h, y, counts)
                for t in held_out if network in networks[-2:] else []:
                    add("cartpole", name, seed, n, f"{velocity}, read", t, guess[t, -1, 0])
        for n, mean in returns.items():
            add("cartpole", "lstm", seed, n, "return", "", mean)
    script, args, networks, _ = with_control(
        10**9, 100_000, **REPEAT
    )  # the control: little to learn
    obs, _, counts = look.play(script, args, networks[-2][2])
    held_out = counts & (np.arange(counts.shape[1]) >= counts.shape[1] // 2)
    for name, n, agent in networks:
        h = look.remember(agent, obs)
        for k in range(look.BACK):
            guess, _ = look.decode(h, obs, counts, k)
            right = guess.argmax(-1) == obs[: len(obs) - k].argmax(-1)
            add("repeat", name, 1, n, "share right", k, right[held_out[k:]].mean())
    return table


# --- How much of a gradient step comes from each loss ---
SCALE = "norm_reward seed iteration policy value return_100".split()
SETTINGS = {
    "env_id": "CartPole-v1", "mask_velocity": True, "num_steps": 128, "update_epochs": 10,
    "learning_rate": 2e-3, "anneal_lr": False,
}  # fmt: skip


def reward_scale(seeds: list[int], steps: int = 30_000) -> list[list]:
    """Rows of reward-scale.csv: the norms, after clipping, of the policy loss's and of the value
    loss's gradient in the shared encoder and LSTM, means over an iteration, with rewards divided by
    the standard deviation of returns, and with raw rewards."""
    script = rows.load_script("rppo_lstm", ["change:gradient_norms"])
    table: list[list] = []
    for divided in True, False:
        for seed in seeds:
            script.norms = {}
            flags = dict(SETTINGS, norm_reward=divided, seed=seed, total_timesteps=steps)
            _, returns = trained(script, **flags)
            for iteration, found in enumerate(script.norms.values(), 1):
                means = [f"{x:.4g}" for x in np.mean(found, 0)]
                last = f"{np.mean(returns or math.nan):.1f}"
                table.append([divided, seed, iteration, *means, last])
    return table


MEASURED = {"memory-look": (memory_look, LOOK), "reward-scale": (reward_scale, SCALE)}


def seed_range(text: str) -> list[int]:
    """first:last, or one seed."""
    first, _, last = text.partition(":")
    return [*range(int(first), int(last or first) + 1)]


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
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs/learning")
    options = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in [name for name in options.tasks if name in MEASURED]:
        measure, fields = MEASURED[name]
        table = measure(options.seeds or [1, 2, 3])
        with open(options.results / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([fields, *table])
    tasks = [task for task in options.tasks if task in TASKS]
    known = {method for task in tasks for method in TASKS[task].methods}
    for method in set(options.methods or ()) - known:
        parser.error(f"argument --methods: none of these tasks has {method!r}")
    jobs = []
    found = rows.read(options.results / "learning.csv")
    have = {(row["task"], row["method"], row["seed"]) for row in found}
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
