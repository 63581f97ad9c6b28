"""PPO1 as its authors ran it: run_atari, run_mujoco and run_humanoid of openai/baselines.

    mpiexec -n 8 python docs/recipes/use.py ppo1_mpi ppo1 --env-id ALE/Pong-v5     # run_atari
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi ppo1 --env-id HalfCheetah-v5  # run_mujoco
    mpiexec -n 8 python docs/recipes/use.py ppo1_mpi ppo1 --env-id Humanoid-v5     # run_humanoid
    python docs/recipes/use.py rppo_continuous ppo1 --env-id Hopper-v5 --reward-scale 0.1

Presets and games are ppo1_mpi's. --reward-scale, which run_humanoid needs, is for every script but
rppo_gru_atari: rewards are multiplied by it for learning, and logs have them as they were.
(Baselines' minibatches have 64 steps: 2048 / 64 = 32.)

Games are those of rppo_gru_atari: ale_py's vector environments do what baselines' wrappers do, with
no-ops at the start, every fourth frame, 84 x 84 pixels in grey. Rewards count by their sign; logs
have the game's score. Two things are different: four frames are an observation (--frame-stack 1 for
baselines' one), and a lost life ends no episode. Policy and critic share one CNN, as in baselines.
Both need pip install ".[atari]" or ".[mujoco]".
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import use as driver
from gymnasium import spaces

ATARI = dict(
    total_timesteps=10_000_000, num_steps=256, clip_coef=0.2, ent_coef=0.01, update_epochs=4,
    learning_rate=1e-3, num_minibatches=4, gamma=0.99, gae_lambda=0.95, norm_obs=False,
)  # fmt: skip
MUJOCO = dict(
    total_timesteps=1_000_000, num_steps=2048, clip_coef=0.2, ent_coef=0.0, update_epochs=10,
    learning_rate=3e-4, num_minibatches=32, gamma=0.99, gae_lambda=0.95,
)  # fmt: skip
HUMANOID = dict(
    MUJOCO, total_timesteps=50_000_000, clip_coef=0.1, learning_rate=1e-4, anneal_lr=False,
    reward_scale=0.1,
)  # fmt: skip
GAMES = "BeamRider", "Breakout", "Enduro", "Pong", "Qbert", "Seaquest", "SpaceInvaders"
TASKS = (
    "Ant", "HalfCheetah", "Hopper", "InvertedDoublePendulum", "InvertedPendulum", "Pusher",
    "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip
LIMIT = 27_000  # frames of a game, four a step, after which it is truncated


class Scaled(driver.Wrapper):
    """Outside of what counts returns, so that these are as the environment gives them."""

    def __init__(self, envs, scale):
        super().__init__(envs)
        self.scale = scale

    def step(self, actions):
        obs, rewards, *others = self.env.step(actions)
        return obs, rewards * self.scale, *others


class Game(driver.Wrapper):
    """Frames (N, C, 84, 84) become vectors, and rewards their signs; scores are counted inside."""

    def __init__(self, envs):
        super().__init__(envs)
        self.frames = envs.single_observation_space.shape
        self.observe(int(np.prod(self.frames)))

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return obs.reshape(len(obs), -1), info

    def step(self, actions):
        obs, rewards, *others = self.env.step(actions)
        return obs.reshape(len(obs), -1), np.sign(rewards), *others


def is_game(args) -> bool:
    return args.env_id.startswith("ALE/")


def use_games(script):
    """Of ppo1_mpi: the environments, and one CNN for policy and critic."""
    make_envs = script.make_envs
    atari = driver.fresh("rppo_gru_atari")

    @dataclass
    class Args(script.Args):
        frame_stack: int = 4  # how many of the latest frames of a game are an observation
        sticky_actions: float = 0.0  # probability that a game repeats an action

    def make_games(args, num_envs, render_mode=None):
        if not is_game(args):
            return make_envs(args, num_envs, render_mode)
        try:
            return Game(atari.make_envs(args, num_envs, render_mode, LIMIT))
        except atari.ArgumentError as error:
            raise script.ArgumentError(str(error)) from error

    class GameAgent(script.Agent):
        def __init__(self, envs, args):
            seen = envs
            if is_game(args):
                script.check(not args.norm_obs, "ppo1: pixels need --no-norm-obs")
                seen = SimpleNamespace(single_action_space=envs.single_action_space)
                seen.single_observation_space = spaces.Box(-np.inf, np.inf, (512,))
            super().__init__(seen, args)
            if is_game(args):
                cnn = atari.NatureCNN(args.frame_stack, amp=False)
                self.cnn = cnn.to(memory_format=torch.contiguous_format)  # as MPI sends weights

        def normalize(self, obs):
            if not is_game(self.args):
                return super().normalize(obs)
            return self.cnn(obs.unflatten(-1, (-1, 84, 84)))

    script.Args = Args
    script.Agent = GameAgent
    script.make_envs = make_games
    presets = {(f"{task}-v5", False): MUJOCO for task in TASKS}
    presets |= {(f"ALE/{game}-v5", False): ATARI for game in GAMES}
    script.PRESETS = {**script.PRESETS, **presets, ("Humanoid-v5", False): HUMANOID}


def use(script):
    signs = "ppo1: rppo_gru_atari learns from the signs of rewards"
    script.check(script.kind != "rppo_gru_atari", signs)
    if script.kind == "ppo1_mpi":
        use_games(script)
    make_envs = script.make_envs

    @dataclass
    class Args(script.Args):
        reward_scale: float = 1.0  # rewards are multiplied by it for learning

    def make_scaled(args, *inputs, **options):
        return Scaled(make_envs(args, *inputs, **options), args.reward_scale)

    script.Args = Args
    script.make_envs = make_scaled
