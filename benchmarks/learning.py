"""Trains the tasks below over seeds into results/learning.csv and results/curves.csv.

    python benchmarks/learning.py cartpole cartpole-masked --seeds 1:30 --jobs 2

A run is what a user would start from the shell. Its final agent then plays 100 deterministic
episodes, seeded from 1,000,000 x seed, so that no two agents meet the same starts, and 100 with
sampled actions. A run that has a row in learning.csv is skipped, a failed one too: delete its rows,
there and in curves.csv, to run it again. After a crash or kill -9 the same command continues:
finished runs are kept, a run that was interrupted is resumed from its last minute, and its
wall_seconds, which nobody knows, stay empty. Agents stay in --runs-dir.
"""

import argparse
import csv
import fcntl
import hashlib
import json
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
POINTS = 30  # of a run's curve, at most
EPISODES = 100  # of a final agent, deterministic ones and as many sampled ones
HINTS = "to go on:", "to continue:"  # how a script tells how to resume
SAVE_SECONDS = 60  # between the checkpoints of a peer; the scripts save by themselves

CARTPOLE = "rppo_lstm.py --env-id CartPole-v1"
LANDER = (
    "rppo_lstm.py --env-id LunarLander-v3 --mask-velocity --num-envs 16 --num-steps 256 "
    "--seq-len 64 --num-minibatches 16 --update-epochs 10 --gamma 0.995 --gae-lambda 0.98 "
    "--learning-rate 5e-4"
)
CONTINUOUS = "rppo_continuous.py --env-id"
FRAMES = "docs/recipes/frame_stack.py"
WALKER = (
    " --num-steps 256 --seq-len 16 --num-minibatches 16 --update-epochs 10 --hidden-size 64 "
    "--learning-rate 3e-4 --separate-critic"
)
TRPO = "trpo.py --env-id"
ATARI = "rppo_gru_atari.py --env-id"
PPO1 = "ppo1_mpi.py --env-id CartPole-v1"
# Peers; peer() reads these words. stable-baselines3's PPO has the hyperparameters of PPO's paper
# and the schedules and normalisation of OpenAI's baselines, sb3-contrib's RecurrentPPO the settings
# of rl-baselines3-zoo (2.9), its TRPO those of its MuJoCo table.
PPO_PAPER = (
    'PPO {} {{"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "ent_coef": 0.0, '
    '"learning_rate": 3e-4, "clip_range": 0.2, "linear": ["learning_rate", "clip_range"], '
    '"normalize": true}}'
)
ZOO_CARTPOLE = (
    'RecurrentPPO CartPole-v1 {"num_envs": 8, "normalize": true, "n_steps": 32, "batch_size": 256, '
    '"gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0, "learning_rate": 1e-3, '
    '"clip_range": 0.2, "linear": ["learning_rate", "clip_range"], "visible": [1, 0, 1, 0], '
    '"activation": "ReLU", "policy_kwargs": {"ortho_init": false, "lstm_hidden_size": 64, '
    '"enable_critic_lstm": true, "net_arch": {"pi": [64], "vf": [64]}}}'
)
ZOO_PENDULUM = (
    'RecurrentPPO Pendulum-v1 {"num_envs": 4, "normalize": true, "n_steps": 1024, "gamma": 0.9, '
    '"gae_lambda": 0.95, "n_epochs": 10, "ent_coef": 0.0, "learning_rate": 1e-3, '
    '"clip_range": 0.2, "use_sde": true, "sde_sample_freq": 4, "visible": [1, 1, 0], '
    '"activation": "ReLU", "policy_kwargs": {"ortho_init": false, "lstm_hidden_size": 64, '
    '"enable_critic_lstm": true, "net_arch": {"pi": [64], "vf": [64]}}}'
)
ZOO_MOUNTAINCAR = (
    'RecurrentPPO MountainCarContinuous-v0 {"num_envs": 8, "normalize": true, "n_steps": 1024, '
    '"batch_size": 256, "gamma": 0.9999, "gae_lambda": 0.9, "n_epochs": 10, "ent_coef": 0.00429, '
    '"vf_coef": 0.19, "learning_rate": 7.77e-05, "clip_range": 0.1, "max_grad_norm": 5, '
    '"use_sde": true, "sde_sample_freq": 8, "visible": [1, 0], "policy_kwargs": '
    '{"log_std_init": 0.0, "ortho_init": false, "lstm_hidden_size": 32, '
    '"enable_critic_lstm": true, "net_arch": {"pi": [64], "vf": [64]}}}'
)
ZOO_LANDER = (
    'RecurrentPPO {} {{"num_envs": 32, "normalize": true, "n_steps": 512, "batch_size": 128, '
    '"gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01, '
    '"visible": [1, 1, 0, 0, 1, 0, 1, 1], "activation": "ReLU", "policy_kwargs": '
    '{{"ortho_init": false, "lstm_hidden_size": 64, "enable_critic_lstm": true, '
    '"net_arch": {{"pi": [64], "vf": [64]}}}}}}'
)
ZOO_TRPO_LANDER = (
    'TRPO LunarLanderContinuous-v3 {"num_envs": 2, "normalize": true, "n_steps": 1024, '
    '"n_critic_updates": 20}'
)
ZOO_TRPO_MUJOCO = (
    'TRPO {} {{"num_envs": 2, "normalize": true, "n_steps": 1024, "batch_size": 128, '
    '"cg_max_steps": 25, "cg_damping": 0.1, "n_critic_updates": 20, "learning_rate": 1e-3{}}}'
)
ZOO_TRPO_EXTRA = {"HalfCheetah": ', "target_kl": 0.04', "Swimmer": ', "gamma": 0.9999'}
OURS = (  # rppo_lstm.py's hyperparameters
    'RecurrentPPO {} {{"num_envs": 8, "normalize": true, "n_steps": 128, '
    '"batch_size": 256, "n_epochs": 4, "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2, '
    '"linear": ["learning_rate"], "policy_kwargs": {{"lstm_hidden_size": 128, '
    '"net_arch": {{"pi": [64], "vf": [64]}}}}}}'
)
OURS_MINIGRID = (  # minigrid_memory.py's
    'RecurrentPPO minigrid_memory:MemoryS{}-v0 {{"num_envs": 16, "normalize": "rewards", '
    '"n_steps": 128, "batch_size": 256, "n_epochs": 4, "ent_coef": 0.03, "learning_rate": 1e-3, '
    '"clip_range": 0.2, "linear": ["learning_rate"], '
    '"policy_kwargs": {{"lstm_hidden_size": 128, "net_arch": {{"pi": [64], "vf": [64]}}}}}}'
)
# What people ask of a recurrent agent: flags, and the changes of docs/exercises.
ABLATIONS = {
    "unchanged": "unchanged",
    "sequences of 8": "unchanged --seq-len 8",
    "sequences of 16": "unchanged --seq-len 16",
    "sequences of 32": "unchanged --seq-len 32",
    "sequences of 32, states recomputed": "recompute --seq-len 32",
    "a critic with its own LSTM": "unchanged --separate-critic",
    "truncation not bootstrapped": "no_bootstrap",
    "final steps trained on": "final_steps",
    "rewards not normalised": "unchanged --no-norm-reward",
}

# Where two other systems have their layers.
NETWORKS = "docs/recipes/networks.py --env-id CartPole-v1 --mask-velocity --layers-before none"
LAYERS = {
    "sb3-contrib's layers": f"{NETWORKS} --layers-after 64,64 --separate-critic",
    "recurrent-ppo-truncated-bptt's layers": f"{NETWORKS} --layers-shared 64 --layers-after 64 "
    "--activation relu",
}


def ablations(flags: str) -> dict[str, str]:
    return {name: f"docs/exercises/train.py {change} {flags}" for name, change in ABLATIONS.items()}


def minigrid(size: int) -> dict[str, str]:
    env_id = f"MemoryS{size}-v0"
    return {
        "lstm": f"docs/recipes/minigrid_memory.py --env-id {env_id}",
        "ablated": f"docs/recipes/minigrid_memory.py --env-id {env_id} --ablate-memory",
        "frames": f"{FRAMES} --env-id minigrid_memory:{env_id} --num-envs 16 "
        "--num-minibatches 8 --learning-rate 1e-3 --ent-coef 0.03",
        "sb3-contrib": f"peer {OURS_MINIGRID.format(size)}",
    }


def popgym(name: str) -> dict[str, str]:
    flags = f"--env-id popgym:popgym-{name}-v0"
    return {
        "lstm": f"rppo_lstm.py {flags}",
        "ablated": f"rppo_lstm.py {flags} --ablate-memory",
        "frames": f"{FRAMES} {flags}",
        "lstm, previous action": f"docs/recipes/previous_action.py {flags}",
        "lstm, chrono": f"docs/recipes/long_memory.py {flags}",
        "lstm, gamma 0.5": f"rppo_lstm.py {flags} --gamma 0.5",
        "lstm, separate critic": f"rppo_lstm.py {flags} --separate-critic",
        "sb3-contrib": f"peer {OURS.format(flags.split()[1])}",
    }


def mujoco(name: str) -> tuple[int, dict[str, str]]:
    env_id = f"{name}-v5"
    lstm = f"{CONTINUOUS} {env_id}" + WALKER * (name != "HalfCheetah")  # which has a preset
    lstm += " --gamma 0.9999" * (name == "Swimmer")
    return 1_000_000, {
        "lstm": lstm,
        "lstm, sequences of 1": f"{lstm} --seq-len 1",
        "ablated": f"{lstm} --ablate-memory",
        "trpo": f"{TRPO} {env_id}",
        "ppo1": f"docs/recipes/ppo1_mujoco.py --env-id {env_id}",
        "sb3-ppo": f"peer {PPO_PAPER.format(env_id)}",
        "sb3-contrib-trpo": f"peer {ZOO_TRPO_MUJOCO.format(env_id, ZOO_TRPO_EXTRA.get(name, ''))}",
    }


def atari(name: str) -> dict[str, str]:
    gru = f"{ATARI} ALE/{name}-v5 --amp --learning-rate 1e-3"
    ablated = f"{gru} --ablate-memory"
    return {"gru": gru, "ablated": ablated, "frames": f"{ablated} --frame-stack 4"}


# A task: its environment steps, and for each method the script, or a recipe's path, and flags.
TASKS: dict[str, tuple[int, dict[str, str]]] = {
    "cartpole": (100_000, {"lstm": CARTPOLE}),
    "cartpole-masked": (
        100_000,
        {
            "lstm": f"{CARTPOLE} --mask-velocity",
            "ablated": f"{CARTPOLE} --mask-velocity --ablate-memory",
            "frames": f"{FRAMES} --env-id CartPole-v1 --mask-velocity",
            "sb3-contrib": f"peer {ZOO_CARTPOLE}",
        },
    ),
    "pendulum-masked": (
        100_000,
        {
            "lstm": f"{CONTINUOUS} Pendulum-v1 --mask-velocity",
            "ablated": f"{CONTINUOUS} Pendulum-v1 --mask-velocity --ablate-memory",
            "frames": f"{FRAMES} rppo_continuous --env-id Pendulum-v1 --mask-velocity",
            "sb3-contrib": f"peer {ZOO_PENDULUM}",
        },
    ),
    "mountaincarcontinuous-masked": (
        300_000,
        {
            "lstm": f"{CONTINUOUS} MountainCarContinuous-v0 --mask-velocity",
            "ablated": f"{CONTINUOUS} MountainCarContinuous-v0 --mask-velocity --ablate-memory",
            "frames": f"{FRAMES} rppo_continuous --env-id MountainCarContinuous-v0 --mask-velocity",
            "sb3-contrib": f"peer {ZOO_MOUNTAINCAR}",
        },
    ),
    "lunarlander-masked": (
        500_000,
        {
            "lstm": LANDER,
            "ablated": f"{LANDER} --ablate-memory",
            "frames": f"{FRAMES} {LANDER.split(maxsplit=1)[1]}".replace(" --seq-len 64", ""),
            "sb3-contrib": f"peer {ZOO_LANDER.format('LunarLander-v3')}",
        },
    ),
    "lunarlandercontinuous-masked": (
        1_000_000,
        {
            "lstm": f"{CONTINUOUS} LunarLanderContinuous-v3 --mask-velocity",
            "ablated": f"{CONTINUOUS} LunarLanderContinuous-v3 --mask-velocity --ablate-memory",
            "frames": f"{FRAMES} rppo_continuous --env-id LunarLanderContinuous-v3 --mask-velocity",
            "sb3-contrib": f"peer {ZOO_LANDER.format('LunarLanderContinuous-v3')}",
        },
    ),
    "poc-memory": (
        61_000,
        {
            "lstm": "docs/recipes/poc_memory.py",
            "ablated": "docs/recipes/poc_memory.py --ablate-memory",
            "frames": f"{FRAMES} --env-id poc_memory:PocMemory-v0",
            "sb3-contrib": f"peer {OURS.format('poc_memory:PocMemory-v0')}",
        },
    ),
    "minigrid-memory-s9": (1_500_000, minigrid(9)),
    "minigrid-memory-s9-pixels": (1_500_000, {"lstm": f"{minigrid(9)['lstm']} --pixels"}),
    "minigrid-memory-s13": (5_000_000, minigrid(13)),
    "popgym-repeat-previous-easy": (500_000, popgym("RepeatPreviousEasy")),
    "popgym-repeat-previous-medium": (2_000_000, popgym("RepeatPreviousMedium")),
    **{
        f"popgym-repeat-previous-medium-{millions}m": (
            millions * 1_000_000,
            {
                name: popgym("RepeatPreviousMedium")[name]
                for name in ("lstm", "lstm, chrono", "lstm, gamma 0.5")
            },
        )
        for millions in (5, 15)
    },
    "popgym-repeat-first-easy": (500_000, popgym("RepeatFirstEasy")),
    "popgym-count-recall-easy": (5_000_000, popgym("CountRecallEasy")),
    "popgym-autoencode-easy": (5_000_000, popgym("AutoencodeEasy")),
    "popgym-count-recall-easy-15m": (15_000_000, {"lstm": popgym("CountRecallEasy")["lstm"]}),
    "popgym-autoencode-easy-15m": (15_000_000, {"lstm": popgym("AutoencodeEasy")["lstm"]}),
    "popgym-higher-lower-easy": (500_000, popgym("HigherLowerEasy")),
    "popgym-cartpole-easy": (500_000, popgym("PositionOnlyCartPoleEasy")),
    "popgym-multiarmed-bandit-easy": (500_000, popgym("MultiarmedBanditEasy")),
    "layers-cartpole-masked": (100_000, LAYERS),
    "ablation-cartpole-masked": (
        50_000,
        ablations("--env-id CartPole-v1 --mask-velocity --learning-rate 1e-3"),
    ),
    "ablation-repeat-previous": (
        150_000,
        ablations("--env-id popgym:popgym-RepeatPreviousEasy-v0"),
    ),
    "ablation-repeat-first": (100_000, ablations("--env-id popgym:popgym-RepeatFirstEasy-v0")),
    "ppo1-cartpole": (25_000, {"ppo1": PPO1}),
    "ppo1-cartpole-masked": (300_000, {"ppo1, lstm": f"{PPO1} --mask-velocity"}),
    "trpo-cartpole": (100_000, {"trpo": f"{TRPO} CartPole-v1"}),
    "trpo-cartpole-masked": (
        100_000,
        {
            "trpo, lstm": f"{TRPO} CartPole-v1 --mask-velocity",
            "trpo": f"{TRPO} CartPole-v1 --mask-velocity --memory none",
        },
    ),
    "trpo-acrobot": (100_000, {"trpo": f"{TRPO} Acrobot-v1"}),
    "trpo-mountaincar": (100_000, {"trpo": f"{TRPO} MountainCar-v0"}),
    "trpo-pendulum": (100_000, {"trpo": f"{TRPO} Pendulum-v1"}),
    "trpo-mountaincarcontinuous": (50_000, {"trpo": f"{TRPO} MountainCarContinuous-v0"}),
    "trpo-lunarlander": (200_000, {"trpo": f"{TRPO} LunarLander-v3"}),
    "trpo-lunarlandercontinuous": (
        200_000,
        {
            "trpo": f"{TRPO} LunarLanderContinuous-v3",
            "trpo, gSDE": "docs/recipes/sde.py trpo --use-sde --sde-sample-freq 8 "
            "--log-std-init -1 --env-id LunarLanderContinuous-v3",
            "sb3-contrib-trpo": f"peer {ZOO_TRPO_LANDER}",
        },
    ),
    **{name.lower(): mujoco(name) for name in ("HalfCheetah", "Hopper", "Walker2d", "Swimmer")},
    "ant": (
        1_000_000,
        {
            # The zoo's; target KL and damping times 8, the components of an action
            "trpo": f"{TRPO} Ant-v5 --num-envs 2 --num-steps 1024 --cg-max-steps 25 "
            "--n-critic-updates 20 --target-kl 0.08 --cg-damping 0.8",
            "sb3-contrib-trpo": mujoco("Ant")[1]["sb3-contrib-trpo"],
        },
    ),
    "pong": (1_500_000, atari("Pong")),
    "breakout": (2_000_000, atari("Breakout")),
}
FIELDS = (
    "task method script flags seed steps eval_mean eval_std eval_episodes sampled_mean return_100 "
    "wall_seconds global_step date commit torch gymnasium machine error"
).split()
CURVE_FIELDS = "task method seed steps returns".split()  # the last two: numbers with spaces


def machine() -> str:
    """The processor's name and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def commit(root: Path = ROOT) -> str:
    """The short name of a checkout's commit, -dirty if a script differs; empty without git."""
    if shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(root)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"], capture_output=True)
    return name.stdout.strip() + "-dirty" * (differs.returncode == 1)


def last_line(stderr: str) -> str:
    """An error's last line with a word in it (tyro draws boxes), but not the hint how to resume."""
    lines = [line.strip(" │") for line in stderr.split("\n") if re.search(r"\w", line)]
    return next((line for line in reversed(lines) if not line.startswith(HINTS)), "")


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, fields: list[str], rows: list[dict]) -> None:
    """Adds rows, and the header to a new file; other processes may do the same at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        if file.seek(0, 2) == 0:
            writer.writeheader()
        writer.writerows(rows)


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of a curve's points, the last one among them; returns with four digits."""
    indices = np.linspace(0, len(points) - 1, min(POINTS, len(points))).round().astype(int)
    return [(points[i][0], float(f"{points[i][1]:.4g}")) for i in indices]


def read_curves(path: Path) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """Of each (task, method, seed) in curves.csv: steps, and the mean return of the last 100
    episodes there. A run is a row."""
    found = {}
    for row in read(path):
        points = zip(map(int, row["steps"].split()), map(float, row["returns"].split()))
        found[row["task"], row["method"], row["seed"]] = list(points)
    return found


def curve(run_dir: Path) -> list[tuple[int, float]]:
    """Environment step and mean return of the last 100 episodes, from TensorBoard's events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resumed run
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        return []
    return [(s.step, s.value) for s in events.Scalars("charts/episodic_return")]


def peer(algorithm: str, env_id: str, settings: str, steps: str, seed: str, run_dir: str) -> None:
    """stable-baselines3's or sb3-contrib's algorithm, trained and evaluated into result.json. It
    continues from the run's checkpoint.zip, if there is one, with other episodes and random numbers.
    settings (JSON) are its constructor's, and num_envs, normalize (running statistics of rewards
    and, unless it is "rewards", of real-valued observations), linear (what falls to 0), visible
    (the components that are not masked) and activation (a class of torch.nn)."""
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
    sys.path.append(str(ROOT / "docs" / "recipes"))  # the recipes' environments
    kwargs = json.loads(settings)
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

    envs = make(num_envs or 1, int(seed))
    if normalize:
        real = normalize != "rewards" and envs.observation_space.dtype.kind == "f"
        envs = VecNormalize(envs, norm_obs=real, gamma=kwargs.get("gamma", 0.99))
    for name in linear or ():
        kwargs[name] = lambda remaining, first=kwargs[name]: remaining * first
    library = stable_baselines3 if hasattr(stable_baselines3, algorithm) else sb3_contrib
    policy = "MlpLstmPolicy" if algorithm.startswith("Recurrent") else "MlpPolicy"
    model = getattr(library, algorithm)(policy, envs, seed=int(seed), device="cpu", **kwargs)
    model.curve, model.statistics = [], {}  # saved with the model, as all its attributes are
    checkpoint = Path(run_dir, "checkpoint.zip")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        model = model.load(checkpoint, envs, device="cpu")
        vars(envs).update(model.statistics)
        model.set_random_seed(int(seed) + model.num_timesteps)

    class Record(BaseCallback):
        """Notes the curve and saves the model."""

        saved = time.monotonic()

        def _on_step(self) -> bool:
            points = model.curve
            if model.ep_info_buffer and (not points or points[-1][0] + 1000 < model.num_timesteps):
                mean = float(np.mean([episode["r"] for episode in model.ep_info_buffer]))
                points.append((model.num_timesteps, mean))
            return True

        def _on_rollout_start(self) -> None:
            if time.monotonic() > self.saved + SAVE_SECONDS:
                model.statistics = {k: v for k, v in vars(envs).items() if k.endswith("_rms")}
                model.save(unfinished := checkpoint.with_name("unfinished.zip"))
                unfinished.replace(checkpoint)
                self.saved = time.monotonic()

    model.learn(int(steps) - model.num_timesteps, Record(), reset_num_timesteps=False)
    fresh = make(1, 1_000_000 * int(seed))
    if normalize:
        fresh = VecNormalize(fresh, training=False, norm_obs=real, norm_reward=False)
        if real:
            fresh.obs_rms = envs.obs_rms
    both = {
        name: evaluate_policy(model, fresh, EPISODES, deterministic, return_episode_rewards=True)[0]
        for name, deterministic in (("evaluation", True), ("sampled", False))
    }
    last = [episode["r"] for episode in model.ep_info_buffer]
    result = dict(global_step=model.num_timesteps, returns=last, curve=model.curve, **both)
    Path(run_dir, "result.json").write_text(json.dumps(result))


class Stopped(Exception):
    """A run was killed or interrupted, which is no failure of its own."""


def shell(command: list, **kwargs) -> None:
    """Runs a command; its error, if it fails, is a RuntimeError."""
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode < 0 or done.returncode == 130:
        raise Stopped
    if done.returncode:
        raise RuntimeError(last_line(done.stderr))


def names(flags: str) -> list[str]:
    """The words before the first flag: an exercise's change, the script that a recipe changes."""
    return list(takewhile(lambda word: word[0] != "-", flags.split()))


def evaluate(script: str, flags: str, run_dir: Path, seed: int, how: str) -> list[float]:
    """Returns of the final agent's episodes; how is the flag --deterministic or its opposite. A
    finished run that is resumed only evaluates; here it is a copy, so that it stays what it is."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(run_dir / "agent.pt", folder)
        command = [sys.executable, ROOT / script, *names(flags), "--resume", folder]
        command += ["--seed", str(1_000_000 * seed), "--eval-episodes", str(EPISODES), how]
        shell(command)
        return json.loads(Path(folder, "result.json").read_text())["evaluation"]


def overwrite(file, contents: dict) -> None:
    """Writes JSON to an open file, in the place of what it has."""
    file.truncate(0)
    file.write(json.dumps(contents))
    file.flush()


def fingerprint(script: str) -> str:
    """A hash of the text that a run depends on."""
    files = [Path(__file__ if script == "peer" else ROOT / script)]
    if "/" in script:  # a recipe, or an exercise on its page, changes one of the scripts
        files += sorted([*ROOT.glob("*.py"), *files[0].parent.glob("*.md")])
    return hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()


def run(task: str, method: str, seed: int, options: argparse.Namespace) -> str:
    """Trains, evaluates and records one run, or what is left of it; returns a line to print."""
    steps, methods = TASKS[task]
    script, _, flags = methods[method].partition(" ")
    name = f"{task}__{method}__{seed}"
    run_dir = Path(options.runs_dir, name).resolve()
    what = [script, flags, steps, fingerprint(script)]
    with open(run_dir.with_name(name + ".json"), "a+") as started:
        # The training process inherits this lock: if only the queue was killed, it may still run.
        fcntl.flock(started, fcntl.LOCK_EX)
        known = {(r["task"], r["method"], r["seed"]) for r in read(options.learning)}
        if (task, method, str(seed)) in known:
            return f"{name}: has a row"
        started.seek(0)
        before = json.loads(started.read() or "{}")
        interrupted = before.get("what") == what
        if not interrupted:  # begin anew; a directory of another command or script is no use
            shutil.rmtree(run_dir, ignore_errors=True)
            before = {"what": what, "commit": options.commit, "wall_seconds": ""}
            overwrite(started, before)
        row = {
            "task": task, "method": method, "script": script, "flags": flags, "seed": seed,
            "steps": steps, "date": time.strftime("%Y-%m-%d"), "commit": before["commit"],
            "torch": version("torch"), "gymnasium": version("gymnasium"), "machine": machine(),
        }  # fmt: skip
        command = [sys.executable, str(ROOT / script)]
        if script == "peer":
            words = [*flags.split(maxsplit=2), str(steps), str(seed), str(run_dir)]
            command = [sys.executable, __file__, "--peer", *words]
        elif (run_dir / "agent.pt").exists():
            command += [*names(flags), "--resume", str(run_dir)]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            command += [*flags.split(), "--total-timesteps", str(steps), "--seed", str(seed)]
            command += ["--eval-episodes", "0", "--runs-dir", str(run_dir.parent)]
            command += ["--run-name", name]
        result_file, points = run_dir / "result.json", []
        try:
            if not result_file.exists():
                began = time.time()
                shell(command, pass_fds=[started.fileno()])
                if not interrupted:
                    before["wall_seconds"] = f"{time.time() - began:.1f}"
                    overwrite(started, before)
            result = json.loads(result_file.read_text())
            run_of = script, flags, run_dir, seed
            returns = result["evaluation"] or evaluate(*run_of, "--deterministic")
            sampled = result.get("sampled") or evaluate(*run_of, "--no-deterministic")
            points = thin(result["curve"] if script == "peer" else curve(run_dir))
            row |= {
                "eval_mean": f"{np.mean(returns):.4f}", "eval_std": f"{np.std(returns):.4f}",
                "eval_episodes": len(returns), "sampled_mean": f"{np.mean(sampled):.4f}",
                "global_step": result["global_step"],
                "return_100": f"{np.mean(result['returns'] or np.nan):.2f}",
                "wall_seconds": before["wall_seconds"],
            }  # fmt: skip
        except Stopped:
            return f"{name}: stopped; the same command continues it"
        except RuntimeError as error:
            row["error"] = str(error)
        if points:
            curve_row = {
                "task": task, "method": method, "seed": seed,
                "steps": " ".join(str(step) for step, _ in points),
                "returns": " ".join(f"{value:g}" for _, value in points),
            }  # fmt: skip
            append(options.curves, CURVE_FIELDS, [curve_row])  # first: a row says that all is there
        append(options.learning, FIELDS, [row])
        overwrite(started, {})  # without its row it begins anew
    return f"{name}: {row.get('error') or row['eval_mean']}"


def seed_range(text: str) -> range:
    """first:last, or one seed."""
    first, _, last = text.partition(":")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seed")
    return seeds


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        return peer(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--methods", nargs="+", help="these only; default: all of a task")
    parser.add_argument(
        "--seeds", type=seed_range, default="1:5", help="first:last, or one (default 1:5)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "learning")
    options = parser.parse_args()
    for method in set(options.methods or ()).difference(
        *(TASKS[task][1] for task in options.tasks)
    ):
        parser.error(f"argument --methods: none of these tasks has {method!r}")
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    options.learning, options.curves = (options.results / f for f in ("learning.csv", "curves.csv"))
    options.commit = commit()
    runs = [
        (task, method, seed)
        for seed in options.seeds
        for task in options.tasks
        for method in TASKS[task][1]
        if method in (options.methods or TASKS[task][1])
    ]
    queue = ThreadPoolExecutor(options.jobs)
    try:
        for finished in as_completed(queue.submit(run, *of, options) for of in runs):
            print(finished.result(), flush=True)
    finally:
        queue.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
