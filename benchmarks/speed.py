"""Training speed: environment steps a second (SPS), beside other libraries and other checkouts.

    python benchmarks/speed.py w1 w3                       # results/throughput.csv
    python benchmarks/speed.py w1 w1-pendulum w2 w3 w4 --against ../f77c437  # is ours slower now?
    python benchmarks/speed.py gpu-games gpu-atari gpu-lstm  # where there is a GPU: some ten minutes

w1           CartPole, LSTM 128 shared by actor and critic, 4 epochs, 4 minibatches of whole
             rollouts, beside sb3-contrib and skrl; then sb3-contrib's defaults: the critic has its
             own LSTM, hidden 256, 10 epochs, 128 steps a minibatch (our layer of 64 is before the
             LSTM, its two after it)
w1-pendulum  the first of these with Gaussian actions and running normalisation on both sides
w2           Breakout, one grey 84 x 84 frame, Nature CNN 512, GRU (rppo_gru_atari.py) or LSTM 128
w3           HalfCheetah, TRPO with sb3-contrib's defaults
w4           CartPole, PPO1's defaults beside a loop after Spinning Up's PPO (spinning_up.py), which
             makes 80 passes where ppo1_mpi.py makes 4; two ranks collect twice the steps of one (weak
             scaling)
w4-passes    the same work on both sides: 4,000 steps of all ranks, and then 80 passes over them
             (Spinning Up's policy may stop before)
scaling      the first of these, with 1 to 1,024 environments and sequences of 32 steps; with 32 to
             512 units, and with sequences of 8 to 128 steps; and what a product of two matrices
             of 1,024 x 1,024 float32 numbers reaches on this core
gpu-games    ale_py's games alone, at random actions, on the threads and in the groups that it names
gpu-atari    Breakout with 8, 64 and 256 games, on the GPU, with --amp, and on all cores
gpu-lstm     CartPole with 8 to 4,096 environments, 128 and 512 units, on the GPU and on all cores
speedrun     seconds to a return: 475 on CartPole without velocities; 18 on Pong, on the GPU

Each run is a process of its own, one torch thread on the first core that this process may use (MPI: a
core for each rank; gpu-* and speedrun: all cores). Systems take turns, every second time in the
opposite order. All train for as many steps, since the cost of padding falls as episodes grow; the
first iteration does not count. --against runs this project's script of both checkouts (git archive
COMMIT | tar -x -C ../COMMIT makes one), and prints the median of the ratios of neighbouring runs, by
the clock and, which other processes hardly disturb, by the processor's time.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import rows
from rows import RESULTS, ROOT, SPEED

WORK = "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 --hidden-size 128"
LSTM = "rppo_lstm --env-id CartPole-v1"
DEFAULTS = """rppo_lstm networks --critic separate --env-id CartPole-v1 --num-envs 8 --num-steps 128
    --num-minibatches 8 --update-epochs 10 --hidden-size 256 --learning-rate 3e-4"""
PENDULUM = "rppo_continuous --env-id Pendulum-v1"
BREAKOUT = "rppo_gru_atari --env-id ALE/Breakout-v5"
GRU = f"{BREAKOUT} {WORK}"
TRPO = """trpo --env-id HalfCheetah-v5 --num-steps 2048 --no-norm-obs --no-norm-reward
    --target-kl 0.01 --cg-max-steps 15 --cg-damping 0.1 --n-critic-updates 10 --batch-size 128"""
PPO1 = "ppo1_mpi --env-id CartPole-v1 --num-steps 256 --num-minibatches 4 --update-epochs 4"
PASSES = "ppo1_mpi --env-id CartPole-v1 --num-minibatches 1 --update-epochs 80"
SYSTEMS = [  # section, work, environment steps, system, what to run
    ("w1", "8 environments", 32_768, "ours", f"{LSTM} {WORK}"),
    ("w1", "8 environments", 32_768, "sb3-contrib", "peer CartPole-v1"),
    ("w1", "8 environments", 32_768, "skrl", "peer skrl"),
    ("w1", "64 environments", 131_072, "ours", f"{LSTM} {WORK}".replace("envs 8", "envs 64")),
    ("w1", "sb3-contrib's defaults", 8_192, "ours, whole rollouts", DEFAULTS),
    ("w1", "sb3-contrib's defaults", 8_192, "ours, sequences of 16", f"{DEFAULTS} --seq-len 16"),
    ("w1", "sb3-contrib's defaults", 8_192, "sb3-contrib", "peer defaults"),
    ("w1-pendulum", "8 environments", 32_768, "ours", f"{PENDULUM} {WORK}"),
    ("w1-pendulum", "8 environments", 32_768, "sb3-contrib", "peer Pendulum-v1"),
    ("w2", "8 environments", 8_192, "ours", GRU),
    ("w2", "8 environments", 8_192, "ours, --amp", f"{GRU} --amp"),
    ("w2", "8 environments", 8_192, "sb3-contrib", "peer atari"),
    ("w3", "1 environment", 16_384, "ours", f"{TRPO} --num-envs 1"),
    ("w3", "1 environment", 16_384, "sb3-contrib", "peer trpo-1"),
    ("w3", "2 environments", 32_768, "ours", f"{TRPO} --num-envs 2"),
    ("w3", "2 environments", 32_768, "sb3-contrib", "peer trpo-2"),
    ("w4", "1 rank", 24_000, "ours", f"mpiexec 1 {PPO1}"),
    ("w4", "1 rank", 24_000, "after Spinning Up", "mpiexec 1 spinning_up"),
    ("w4", "2 ranks", 48_000, "ours", f"mpiexec 2 {PPO1}"),
    ("w4", "2 ranks", 48_000, "after Spinning Up", "mpiexec 2 spinning_up"),
    ("w4-passes", "1 rank", 24_000, "ours", f"mpiexec 1 {PASSES} --num-steps 4000"),
    ("w4-passes", "1 rank", 24_000, "after Spinning Up", "mpiexec 1 spinning_up"),
    ("w4-passes", "2 ranks", 24_000, "ours", f"mpiexec 2 {PASSES} --num-steps 2000"),
    ("w4-passes", "2 ranks", 24_000, "after Spinning Up", "mpiexec 2 spinning_up"),
]  # fmt: skip
for what, values, flag in (  # 8 environments where nothing else is said
    ("environments", [2**i for i in range(11)], "--seq-len 32 --num-envs"),
    ("units", [32, 64, 128, 256, 512], "--hidden-size"),
    ("steps a sequence", [8, 16, 32, 64, 128], "--seq-len"),
):
    for value in values:
        steps = 5 * 128 * (max(8, value) if what == "environments" else 8)
        command = f"{LSTM} {WORK} {flag} {value}"
        SYSTEMS.append(("scaling", f"{value} {what}", steps, "ours", command))
SYSTEMS.append(("scaling", "GFLOP/s of a product of matrices", 200, "ours", "product"))
SECONDS = 6  # of a training on a GPU, and of a machine with one; two iterations at least
ON = {
    "ours, --cuda --amp": "--cuda --amp",
    "ours, --cuda": "--cuda",
    "ours, CPU": "--torch-threads 0",
}
for games, groups, threads in (
    (1, 1, 1), (64, 1, 8), (64, 1, 12), (64, 1, 15), (64, 1, 16), (64, 2, 8), (64, 2, 16),
):  # fmt: skip
    what = (
        f"{games} game{'s' * (games > 1)}"
        if groups == 1
        else f"{groups} groups of {games // groups}"
    )
    command = f"games {games} {groups} {threads}"
    SYSTEMS.append(("gpu-games", what, 0, f"{threads} threads", command))
for games in 64, 8, 256:
    for system, flag in ON.items():
        if games < 256 or "CPU" not in system:  # there an iteration takes half a minute
            command = f"{BREAKOUT} --num-envs {games} {flag}"
            SYSTEMS.append(("gpu-atari", f"{games} games", 0, system, command))
for carts in 8, 64, 512, 4096:
    for units in 128, 512:
        for system in "ours, --cuda", "ours, CPU":
            if carts * units < 10**6 or "CPU" not in system:
                flags = f"--num-envs {carts} --num-steps 128 --hidden-size {units} {ON[system]}"
                work = f"{carts} CartPoles, {units} units"
                SYSTEMS.append(("gpu-lstm", work, 0, system, f"{LSTM} {flags}"))
PONG = "rppo_gru_atari --env-id ALE/Pong-v5 --cuda --learning-rate 1e-3 --num-envs 64"
SYSTEMS += [
    ("speedrun", "475 on CartPole without velocities", 200_000, "ours", f"until 475 {LSTM} --mask-velocity"),
    ("speedrun", "18 on Pong", 10_000_000, "ours, --cuda", f"until 18 {PONG}"),
]  # fmt: skip
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Enough(Exception):
    """So many seconds have passed, or the return has been reached."""


def train(root: Path, command: str, steps: int, seconds: float, until: float | None) -> tuple:
    """One of the scripts -> SPS of its iterations but the first, by the clock and by the
    processor's time; or the seconds until the last 100 episodes have a mean return."""
    names, flags = rows.split(command)
    script = rows.load_script(names[0], names[1].split(",") if names[1:] else [], root=root)
    log = script.Run.log
    ended: list[tuple[int, float, float]] = []  # iterations: step, clock, processor

    def watched(run, *inputs):
        log(run, *inputs)
        ended.append((run.step, time.perf_counter(), time.process_time()))
        if until is not None and run.returns and np.mean(run.returns) >= until:
            raise Enough
        if seconds and len(ended) > 2 and ended[-1][1] - ended[0][1] > seconds:
            raise Enough

    script.Run.log = watched
    began = time.perf_counter()
    flags += ["--total-timesteps", str(steps or 10**9), "--seed", "1", "--eval-episodes", "0"]
    if "--torch-threads" not in flags:
        flags += ["--torch-threads", "1"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            script.train(rows.parse(script, [*flags, "--runs-dir", folder]))
        except Enough:
            pass
        finally:
            script.Run.log = log
    if until is not None:
        return ended[-1][1] - began, ended[-1][2]
    return tuple((ended[-1][0] - ended[0][0]) / (ended[-1][i] - ended[0][i]) for i in (1, 2))


def play(games: int, groups: int, threads: int, seconds: float) -> float:
    """Steps a second of ale_py's games at random actions. With two groups, one is sent its actions
    before the other's observations are awaited."""
    from ale_py import AtariVectorEnv

    size = games // groups
    made = [AtariVectorEnv("breakout", size, num_threads=threads // groups) for _ in range(groups)]
    actions = np.random.default_rng(1).integers(0, made[0].single_action_space.n, (1000, size))
    for envs in made:
        envs.reset(seed=1)
        envs.send(actions[0])
    began = time.perf_counter()
    played = 0
    while time.perf_counter() - began < seconds:
        for envs in made:
            envs.recv()
            envs.send(actions[played % 1000])
        played += 1
    return played * games / (time.perf_counter() - began)


def make_model(name: str):
    """The model of sb3-contrib that does a work."""
    import torch.nn as nn
    from sb3_contrib import TRPO, RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import FlattenExtractor
    from stable_baselines3.common.vec_env import VecNormalize

    class Encoder(FlattenExtractor):
        def __init__(self, space):
            super().__init__(space)
            self.net = nn.Sequential(nn.Linear(self.features_dim, 64), nn.Tanh())
            self._features_dim = 64

        def forward(self, obs):
            return self.net(obs)

    common = dict(n_steps=128, seed=1, device="cpu")
    shared = dict(lstm_hidden_size=128, shared_lstm=True, enable_critic_lstm=False, net_arch=[])
    work = dict(batch_size=256, n_epochs=4, policy_kwargs=shared, **common)
    if name.startswith("trpo"):
        envs = make_vec_env("HalfCheetah-v5", int(name[-1]), seed=1)
        return TRPO("MlpPolicy", envs, seed=1, device="cpu")
    if name == "defaults":
        return RecurrentPPO("MlpLstmPolicy", make_vec_env("CartPole-v1", 8, seed=1), **common)
    if name == "atari":
        work |= dict(learning_rate=2.5e-4, clip_range=0.1, ent_coef=0.01)
        return RecurrentPPO("CnnLstmPolicy", make_games(8), **work)
    envs = VecNormalize(make_vec_env(name, 8, seed=1), norm_obs=name == "Pendulum-v1")
    shared["features_extractor_class"] = Encoder
    return RecurrentPPO("MlpLstmPolicy", envs, learning_rate=1e-3, **work)


def make_games(num_envs: int):
    """Our vector environment of ale_py for stable-baselines3, whose own wrappers are slower."""
    from ale_py import AtariVectorEnv
    from stable_baselines3.common.vec_env import VecEnv

    class Games(VecEnv):
        close = env_method = set_attr = env_is_wrapped = None  # not called

        def __init__(self):
            mode = dict(stack_num=1, num_threads=1, autoreset_mode="SameStep")
            self.envs = AtariVectorEnv("breakout", num_envs, **mode)
            spaces = self.envs.single_observation_space, self.envs.single_action_space
            super().__init__(num_envs, *spaces)

        def get_attr(self, name, indices=None):
            return [None] * num_envs

        def reset(self):
            return self.envs.reset(seed=1)[0]

        def step_async(self, actions):
            self.result = self.envs.step(actions)

        def step_wait(self):
            obs, rewards, terminated, truncated, info = self.result
            infos = [{"TimeLimit.truncated": not x} for x in terminated]
            for n in np.flatnonzero(terminated | truncated):
                infos[n]["terminal_observation"] = info["final_obs"][n]
            return obs, np.sign(rewards).astype(np.float32), terminated | truncated, infos

    return Games()


def stable_baselines(name: str, steps: int) -> float:
    """SPS of a model of sb3-contrib, without its first iteration."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    starts = []  # of each rollout: steps until then, time

    class Clock(BaseCallback):
        def _on_rollout_start(self):
            starts.append((self.num_timesteps, time.perf_counter()))

        def _on_step(self):
            return True

    torch.set_num_threads(1)
    model = make_model(name)
    model.learn(steps, Clock())
    return (model.num_timesteps - starts[1][0]) / (time.perf_counter() - starts[1][1])


def skrl(steps: int) -> float:
    """SPS of skrl's PPO_RNN at CartPole, without its first iteration. The LSTM is replayed in
    pieces, each up to a step at which an episode of the minibatch ends. Values are normalised, as
    our rewards are: without that skrl does not learn here."""
    import gymnasium as gym
    import torch
    from skrl import logger
    from skrl.agents.torch.ppo import PPO_RNN
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer
    from torch import nn

    N, L, F, H = 8, 128, 64, 128  # environments, steps of a sequence, features, units

    class Network(CategoricalMixin, DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            DeterministicMixin.__init__(self)
            self.encoder = nn.Sequential(nn.Linear(self.num_observations, F), nn.Tanh())
            self.lstm = nn.LSTM(F, H, batch_first=True)
            self.heads = nn.ModuleDict(dict(policy=nn.Linear(H, 2), value=nn.Linear(H, 1)))
            self.shared = None  # what the policy computed, for the critic

        def get_specification(self):
            return {"rnn": {"sequence_length": L, "num_layers": 1, "sizes": [(1, N, H)] * 2}}

        def act(self, inputs, *, role):
            mixin = CategoricalMixin if role == "policy" else DeterministicMixin
            return mixin.act(self, inputs, role=role)

        def compute(self, inputs, role):
            h, state = self.shared or self.replay(inputs)
            self.shared = (h, state) if role == "policy" else None
            return self.heads[role](h), {"rnn": list(state)}

        def replay(self, inputs):
            x, state = self.encoder(inputs["observations"]), inputs["rnn"]
            if not self.training:
                h, state = self.lstm(x.unsqueeze(1), state)
                return h.squeeze(1), state
            x, done = x.view(-1, L, F), inputs["terminated"] | inputs["truncated"]
            done, pieces = done.view(-1, L), []
            state = [rows.view(1, -1, L, H)[:, :, 0].contiguous() for rows in state]
            ends = sorted({*(done.any(0).nonzero().flatten() + 1).tolist(), L})
            for begin, end in zip([0, *ends], ends):
                h, state = self.lstm(x[:, begin:end], tuple(state))
                state = [rows * ~done[:, end - 1, None] for rows in state]
                pieces.append(h)
            return torch.cat(pieces, 1).flatten(0, 1), state

    times = []

    class Agent(PPO_RNN):
        def update(self, **progress):
            super().update(**progress)
            times.append(time.perf_counter())

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    env = wrap_env(gym.make_vec("CartPole-v1", N), verbose=False)
    spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
    network = Network(device="cpu", **spaces)
    agent = Agent(
        models={"policy": network, "value": network},
        memory=RandomMemory(memory_size=L, num_envs=N, device="cpu"),
        device="cpu",
        cfg=dict(
            rollouts=L, learning_epochs=4, mini_batches=4, value_loss_scale=0.5, value_clip=0,
            value_preprocessor=RunningStandardScaler, value_preprocessor_kwargs=dict(size=1),
            experiment=dict(write_interval=0, checkpoint_interval=0),
        ),
        **spaces,
    )  # fmt: skip
    plan = dict(timesteps=steps // N, headless=True, disable_progressbar=True)
    SequentialTrainer(env=env, agents=agent, cfg=plan).train()
    return (len(times) - 1) * L * N / (times[-1] - times[0])


def product(repeats: int) -> float:
    """GFLOP/s of torch's float32 product of two matrices of 1,024 x 1,024 numbers."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.rand(2, 1024, 1024)
    began = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return repeats * 2 * 1024**3 / (time.perf_counter() - began) / 1e9


def child(root: str, command: str, steps: str, seconds: str) -> None:
    """Prints what one run measures, as JSON: SPS, by the clock and by the processor's time."""
    kind, *words = command.split()
    figures = None
    if kind == "peer":
        name = words[0]
        figures = skrl(int(steps)) if name == "skrl" else stable_baselines(name, int(steps))
    elif kind == "product":
        figures = product(int(steps))
    elif kind == "games":
        figures = play(*map(int, words), float(seconds))
    until = float(words.pop(0)) if kind == "until" else None
    if figures is None:
        command = " ".join(words) if kind == "until" else command
        figures = train(Path(root), command, int(steps), float(seconds), until)
    if os.environ.get("PMI_RANK", "0") == "0":  # mpiexec sets it
        print(json.dumps(np.broadcast_to(figures, 2).tolist()))


def measure(command: str, steps: int, root: Path, seconds: float, pinned: bool) -> list[float]:
    """What child prints, or spinning_up.py."""
    words, launcher = command.split(), []
    if words[0] == "mpiexec":
        mpiexec = Path(sys.executable).with_name("mpiexec")
        launcher = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", words[1]]
        words = words[2:]
    if CORES:  # which the processes started from here inherit
        count = len(CORES) if not pinned else int(launcher[2]) if launcher else 1
        os.sched_setaffinity(0, CORES[:count])
    run = [*launcher, sys.executable, __file__, "--child", str(root), " ".join(words)]
    run += [str(steps), str(seconds)]
    if words[0] == "spinning_up":
        run = [*launcher, sys.executable, str(ROOT / "benchmarks/spinning_up.py"), str(steps)]
    done = subprocess.run(
        run, capture_output=True, text=True, env={**os.environ, "TQDM_DISABLE": "1"}
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures if isinstance(figures, list) else [figures, np.nan]


def about(root: Path, command: str, device: str) -> dict:
    """What a row says of the checkout and the machine."""
    scripts = [f"{word}.py" for word in command.split() if (root / f"{word}.py").exists()]
    commit = rows.commit(root, *scripts) or root.name
    machine = f"{device}; {rows.machine()}" if device else rows.machine()
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit, "machine": machine}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=dict.fromkeys(s[0] for s in SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="not those of the table, for a quick look")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare ours with ours")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    parser.add_argument(
        "--dry", action="store_true", help="each once, tiny, without a GPU or a file"
    )
    options = parser.parse_args()
    device = ""
    if not options.dry and any(section.startswith("gpu") for section in options.sections):
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    works = [*dict.fromkeys(s[:2] for s in SYSTEMS if s[0] in options.sections)]
    if options.dry:  # the first work of each section
        works = [*{section: (section, work) for section, work in reversed(works)}.values()]
    for section, work in works:
        runs = []  # system, steps, command, checkout, figures of each repeat
        for *of, steps, system, command in SYSTEMS:
            ours = system.startswith("ours")
            plain = len(rows.split(command)[0]) == 1 or command.startswith("mpiexec")
            roots = [ROOT]
            if options.against:
                roots = [ROOT, options.against.resolve()] if ours and plain else []
            for root in roots if of == [section, work] else ():
                label = system if root == ROOT else f"{system}, {root.name}"
                steps = options.steps or steps
                if options.dry:
                    command = (
                        command.replace("--cuda", "").replace("--amp", "").replace("ads 0", "ads 1")
                    )
                    command = command.replace("games 64", "games 2").replace(
                        "until 18", "until -30"
                    )
                    command += " --num-envs 4 --num-steps 8" * ("--env-id" in command)
                    steps = 128
                runs.append((label, steps, command, root, []))
        pinned = not section.startswith(("gpu", "speedrun"))
        seconds = (0.5 if options.dry else SECONDS) * section.startswith("gpu")
        for i in range(1 if options.dry else options.repeats):
            for system, steps, command, root, figures in runs[:: -1 if i % 2 else 1]:
                try:
                    figures.append(measure(command, steps, root, seconds, pinned))
                except RuntimeError as error:  # an older checkout may not know a flag
                    print(f"{section}, {work}, {system}: {error}", file=sys.stderr)
                    if options.dry:
                        sys.exit(1)
        report(section, work, runs, device, options)


def report(section: str, work: str, runs: list[tuple], device: str, options) -> None:
    """Prints medians and ratios, and writes the rows."""
    peers = [run for run in runs if run[-1] and not run[0].startswith("ours")]
    peer = peers[0] if peers and not section.startswith("gpu") else None
    for system, steps, command, root, figures in [run for run in runs if run[-1]]:
        clock = [x[0] for x in figures]
        low, middle, high = min(clock), median(clock), max(clock)
        line = f"{section:11}  {work:28}  {system:24} {middle:10,.1f} ({low:,.1f} to {high:,.1f})"
        if peer:
            line += f" {middle / median(x[0] for x in peer[-1]):6.2f} x {peer[0]}"
        note = "compared with another checkout" if options.against else ""
        if options.against and root == ROOT:
            old = next(x[-1] for x in runs if x[3] != ROOT and x[0].startswith(system))
            ratios = [np.divide(new, before) for new, before in zip(figures, old)]
            if ratios:
                by_clock, by_processor = np.median(ratios, 0)
                line += f"  {by_clock:.3f} x {options.against.name}, {by_processor:.3f} by the processor"
        print(line, flush=True)
        row = about(root, command, device) | {"section": section, "work": work, "system": system}
        row |= {"steps": steps, "sps": " ".join(f"{x:.4g}" for x in clock), "note": note}
        row |= {"median": f"{middle:.4g}", "min": f"{low:.4g}", "max": f"{high:.4g}"}
        if not options.dry and not options.steps:
            rows.append(options.results / "throughput.csv", SPEED, [row])


if __name__ == "__main__":
    main()
