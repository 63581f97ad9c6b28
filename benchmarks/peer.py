"""The same work for a peer: stable-baselines3's PPO or sb3-contrib's TRPO, several seeds -> benchmarks/results/NAME.json.

    python benchmarks/peer.py --env-id CartPole-v1 --steps 25000 --seeds 5 --name peer_ppo_cartpole
    python benchmarks/peer.py --env-id Hopper-v5 --steps 1000000 --seeds 3 --settings mujoco --name peer_ppo_hopper
    python benchmarks/peer.py --env-id Hopper-v5 --steps 1000000 --seeds 3 --settings trpo --name peer_trpo_hopper

Settings. `defaults`: stable-baselines3's own. `zoo-cartpole`: those of rl-baselines3-zoo for CartPole-v1 (8 environments,
32 rows, batches of 256, 20 epochs, lambda .8, gamma .98, stepsize 1e-3 and clip .2, both linear to 0). `mujoco`: PPO's
paper, and so the preset mujoco of ppo1_mpi.py: 2048 rows of one environment, batches of 64, 10 epochs, stepsize 3e-4 and
clip .2, both linear to 0, no entropy bonus, running statistics of observations and rewards (VecNormalize). `trpo`: those of
sb3-contrib's MuJoCo table, and so, but for Swimmer's lambda and Ant's first deviation, trpo.py's presets: 2 environments
of 1024 rows, 25 steps of conjugate gradient, 20 passes of the critic, gamma .99 (.9999 on Swimmer), VecNormalize.
One torch thread. Each final policy plays deterministic episodes with its statistics frozen and rewards as they are.
A finished seed is kept in RUNS_DIR/NAME, so the same command can be given until all are done; a killed seed starts again.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
import tyro
from learning import ROOT, interval, machine
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "zoo-cartpole": {
        "num_envs": 8, "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98,
        "learning_rate": 1e-3, "clip_range": 0.2, "linear": True,
    },
    "mujoco": {
        "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "clip_range": 0.2, "ent_coef": 0.0,
        "linear": True, "normalize": True,
    },
    "trpo": {"num_envs": 2, "n_steps": 1024, "cg_max_steps": 25, "n_critic_updates": 20, "normalize": True},
}  # fmt: skip


@dataclass
class Options:
    env_id: str  # Gymnasium id
    steps: int  # environment steps of each seed
    name: str  # of the result
    settings: Literal["defaults", "zoo-cartpole", "mujoco", "trpo"] = "defaults"  # hyperparameters: see above
    seeds: int = 5  # seeds 1 to this
    eval_episodes: int = 20  # deterministic episodes of each final policy
    runs_dir: str = "runs/peer"  # where finished seeds are kept


def train(options: Options, seed: int) -> dict[str, Any]:
    """One seed: evaluation and speed."""
    settings = dict(SETTINGS[options.settings])
    num_envs, linear, normalized = (settings.pop(name, x) for name, x in [("num_envs", 1), ("linear", 0), ("normalize", 0)])
    algorithm = TRPO if options.settings == "trpo" else PPO
    if algorithm is TRPO and options.env_id.startswith("Swimmer"):
        settings["gamma"] = 0.9999
    envs: Any = make_vec_env(options.env_id, num_envs, seed=seed)
    envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99)) if normalized else envs
    for name in ("learning_rate", "clip_range") if linear else ():  # sb3 calls a schedule with the share left to do
        settings[name] = lambda left, first=settings[name]: left * first
    model, started = algorithm("MlpPolicy", envs, seed=seed, device="cpu", **settings), time.perf_counter()
    model.learn(options.steps)
    seconds = time.perf_counter() - started
    fresh: Any = make_vec_env(options.env_id, 1, seed=1_000_000 + seed)
    if normalized:
        fresh = VecNormalize(fresh, training=False, norm_reward=False)
        fresh.obs_rms = envs.obs_rms
    returns, _ = evaluate_policy(model, fresh, options.eval_episodes, return_episode_rewards=True)
    return {
        "eval_mean": round(float(np.mean(returns)), 3), "eval_std": round(float(np.std(returns)), 3),
        "mean_return_100": float(np.mean([episode["r"] for episode in model.ep_info_buffer])),
        "global_step": model.num_timesteps, "sps": round(model.num_timesteps / seconds),
    }  # fmt: skip


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    result: dict[str, Any] = {
        "script": "benchmarks/peer.py", "flags": f"--env-id {options.env_id} --steps {options.steps} "
        f"--settings {options.settings}", "settings": SETTINGS[options.settings], "commit": commit.strip(),
        "machine": machine(), "eval_episodes": options.eval_episodes, "date": time.strftime("%Y-%m-%d"), "seeds": {},
        "versions": {"stable-baselines3": stable_baselines3.__version__, "torch": torch.__version__, "gymnasium": gym.__version__},
    }  # fmt: skip
    target = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    for seed in range(1, options.seeds + 1):
        kept = Path(options.runs_dir, options.name, f"seed{seed}.json")
        if not kept.exists():
            figures = train(options, seed)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(figures))
        result["seeds"][seed] = json.loads(kept.read_text())
        print(options.name, seed, result["seeds"][seed], flush=True)
        result["eval"] = interval(np.array([x["eval_mean"] for x in result["seeds"].values()]))
        target.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
