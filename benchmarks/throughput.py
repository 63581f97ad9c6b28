"""Training speed beside other libraries' on the same work: environment steps a second (SPS).

    python benchmarks/throughput.py w1 w3 [--repeats 5] [--against ../other-checkout]

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

This project's script is run from the shell, a peer is a process of this file. They take turns on the
first core that this process may use (MPI: a core for each rank), with one torch thread. All train
for as many steps, since the cost of padding falls as episodes grow, and the first iteration does
not count. Medians and their ratios are printed; all figures go to results/throughput.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from learning import RESULTS, ROOT, append, commit, last_line, machine

WORK = "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 --hidden-size 128"
LSTM = "rppo_lstm.py --env-id CartPole-v1"
DEFAULTS = f"""{LSTM} --num-envs 8 --num-steps 128 --num-minibatches 8 --update-epochs 10
    --hidden-size 256 --separate-critic --learning-rate 3e-4"""
PENDULUM = "rppo_continuous.py --env-id Pendulum-v1"
GRU = f"rppo_gru_atari.py --env-id ALE/Breakout-v5 {WORK}"
TRPO = """trpo.py --env-id HalfCheetah-v5 --num-steps 2048 --no-norm-obs --no-norm-reward
    --target-kl 0.01 --cg-max-steps 15 --cg-damping 0.1 --n-critic-updates 10 --batch-size 128"""
PPO1 = "ppo1_mpi.py --env-id CartPole-v1 --num-steps 256 --num-minibatches 4 --update-epochs 4"
PASSES = "ppo1_mpi.py --env-id CartPole-v1 --num-minibatches 1 --update-epochs 80"
SPINNING_UP = "benchmarks/spinning_up.py"
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
    ("w4", "1 rank", 24_000, "ours", f"mpiexec -n 1 {PPO1}"),
    ("w4", "1 rank", 24_000, "after Spinning Up", f"mpiexec -n 1 {SPINNING_UP}"),
    ("w4", "2 ranks", 48_000, "ours", f"mpiexec -n 2 {PPO1}"),
    ("w4", "2 ranks", 48_000, "after Spinning Up", f"mpiexec -n 2 {SPINNING_UP}"),
    ("w4-passes", "1 rank", 24_000, "ours", f"mpiexec -n 1 {PASSES} --num-steps 4000"),
    ("w4-passes", "1 rank", 24_000, "after Spinning Up", f"mpiexec -n 1 {SPINNING_UP}"),
    ("w4-passes", "2 ranks", 24_000, "ours", f"mpiexec -n 2 {PASSES} --num-steps 2000"),
    ("w4-passes", "2 ranks", 24_000, "after Spinning Up", f"mpiexec -n 2 {SPINNING_UP}"),
]  # fmt: skip
SCALING = [  # what is scaled, its values, the flag; 8 environments where nothing else is said
    ("environments", [2**i for i in range(11)], "--seq-len 32 --num-envs"),
    ("units", [32, 64, 128, 256, 512], "--hidden-size"),
    ("steps a sequence", [8, 16, 32, 64, 128], "--seq-len"),
]
for what, values, flag in SCALING:
    for value in values:
        steps = 5 * 128 * (max(8, value) if what == "environments" else 8)
        SYSTEMS.append(
            ("scaling", f"{value} {what}", steps, "ours", f"{LSTM} {WORK} {flag} {value}")
        )
SYSTEMS.append(("scaling", "GFLOP/s of a product of matrices", 200, "ours", "product"))
FIELDS = "date commit machine section work system steps sps median min max note".split()
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


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


def measure(run: str, steps: int, root: Path) -> float:
    """SPS of one run: one of the five scripts with flags, or a peer, after mpiexec -n RANKS if any."""
    words, launcher = run.split(), []
    if words[0] == "mpiexec":
        mpiexec = Path(sys.executable).with_name("mpiexec")
        launcher, words = [str(mpiexec) if mpiexec.exists() else "mpiexec", *words[1:3]], words[3:]
    if CORES:  # which the processes started from here inherit
        os.sched_setaffinity(0, CORES[: int(launcher[2]) if launcher else 1])
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, sys.executable]
        if words[0] == "peer":
            command += [__file__, "--peer", words[1], str(steps)]
        elif words[0] == "product":
            command += [__file__, "--product", str(steps)]
        elif words[0] == SPINNING_UP:
            command += [str(ROOT / SPINNING_UP), str(steps)]
        else:
            command += [str(root / words[0]), *words[1:], "--total-timesteps", str(steps)]
            command += ["--eval-episodes", "0", "--torch-threads", "1", "--seed", "1"]
            command += ["--runs-dir", folder, "--run-name", "run"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(last_line(done.stderr))
        if words[0] in ("peer", "product", SPINNING_UP):
            return float(done.stdout.split()[-1])
        return json.loads(Path(folder, "run", "result.json").read_text())["sps"]


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        name, steps = sys.argv[2], int(sys.argv[3])
        return print(skrl(steps) if name == "skrl" else stable_baselines(name, steps))
    if sys.argv[1:2] == ["--product"]:
        return print(product(int(sys.argv[2])))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="+", choices=dict.fromkeys(s[0] for s in SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="not those of the table, for a quick look")
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    parser.add_argument("--note", default="", help="for the rows")
    options = parser.parse_args()
    roots = [ROOT, *(root.resolve() for root in options.against)]
    medians: dict[tuple[str, str, str], float] = {}
    for section, work in dict.fromkeys(s[:2] for s in SYSTEMS if s[0] in options.sections):
        runs = []  # system, environment steps, what to run, checkout, SPS of each repeat
        for *of, steps, system, run in SYSTEMS:
            for root in roots if of == [section, work] else ():
                if root == ROOT or system.startswith("ours"):
                    label = system if root == ROOT else f"{system}, {root.name}"
                    runs.append((label, options.steps or steps, run, root, []))
        for _ in range(options.repeats):
            for system, steps, run, root, sps in runs:
                try:
                    sps.append(measure(run, steps, root))
                except RuntimeError as error:  # an older checkout may not know a flag
                    print(f"{section}, {work}, {system}: {error}", file=sys.stderr)
        first_peer = next((run for run in runs if not run[0].startswith("ours")), runs[-1])
        base = median(first_peer[-1] or [0]) or np.nan
        for system, steps, _, root, sps in [r for r in runs if r[-1]]:
            low, middle, high = min(sps), median(sps), max(sps)
            medians[section, work, system] = middle
            print(f"{section:11}  {work:22}  {system:24} {middle:8,.0f} SPS ({low:,.0f} to "
                  f"{high:,.0f}) {middle / base:6.2f} x", flush=True)  # fmt: skip
            figures = " ".join(f"{x:.0f}" for x in sps), *(round(x) for x in (middle, low, high))
            today, where = time.strftime("%Y-%m-%d"), (commit(root), machine())
            row = today, *where, section, work, system, steps, *figures, options.note
            append(options.results / "throughput.csv", FIELDS, [dict(zip(FIELDS, row))])
    one, two = ("w4", "1 rank", "ours"), ("w4", "2 ranks", "ours")
    if {one, two} <= medians.keys():
        scaling = medians[two] / medians[one]
        print(f"w4           weak scaling: two ranks are {scaling:.2f} x one")


if __name__ == "__main__":
    main()
