"""Memory Gym: Mortar Mayhem, Mystery Path and Searing Spotlights, tasks of pixels and memory.

    python docs/recipes/use.py rppo_lstm memory_gym_tasks --env-id MortarMayhem-Grid-v0
    python docs/recipes/use.py rppo_lstm memory_gym_tasks --env-id MortarMayhem-Grid-v0 --ablate-memory
    python docs/recipes/use.py rppo_lstm memory_gym_tasks \\
        --task '{"command_count": [4], "explosion_delay": [2]}'
    python docs/recipes/use.py --play runs/RUN --render video

Pleines et al. 2023. pip install --no-deps memory-gym==1.0.2: its pinned dependencies are old, and
--no-deps leaves yours as they are. --task has what the environments take as reset(options=...). The
recipe images comes along, for its CNN; with --cnn-channels 32 --cnn-kernels 12 --cnn-strides 12
training is three times as fast on a CPU. Three things are added: an episode of Mystery Path that
reaches its step limit is truncated, where the environment says terminated; closing one environment
leaves pygame running for the others; sound is off.
"""

import json
import os
from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import use as driver

NAMES = (
    "MortarMayhem", "MortarMayhem-Grid", "MortarMayhemB", "MortarMayhemB-Grid", "MysteryPath",
    "MysteryPath-Grid", "SearingSpotlights", "Endless-MortarMayhem", "Endless-MysteryPath",
    "Endless-SearingSpotlights",
)  # fmt: skip


class Task(gym.Wrapper):
    def __init__(self, env, options, pool=0):
        super().__init__(env)
        self.options = options
        self.pool = pool
        self.draws = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        if self.pool:
            if seed is not None:
                self.draws = np.random.default_rng(seed)
            seed = int(self.draws.integers(self.pool))
        return self.env.reset(seed=seed, options=options or self.options)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        goal = self.env.unwrapped.reset_params.get("reward_goal", 0)
        limit = getattr(self.env.unwrapped, "max_episode_steps", 0)
        out_of_time = terminated and self.steps == limit and reward < goal
        return obs, float(reward), terminated and not out_of_time, truncated or out_of_time, info

    def close(self):
        """Not the environment's, which ends pygame for all others of this process."""


def make(name: str, options: dict, pool: int = 0, render_mode=None):
    """The environment; its package registers it."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # else `kill` does not end a run
    try:
        env = gym.make(f"memory_gym:{name}", render_mode=render_mode, disable_env_checker=True)
    except ModuleNotFoundError as error:
        hint = f"{error}; pip install --no-deps memory-gym==1.0.2"
        raise gym.error.DependencyNotInstalled(hint) from error
    return Task(env, options, pool)


for name in NAMES:
    gym.register(f"{name}Task-v0", make, kwargs={"name": f"{name}-v0", "options": {}},
                 disable_env_checker=True)  # fmt: skip


def use(script):
    fits = script.kind != "rppo_gru_atari"
    script.check(fits, "memory_gym_tasks: rppo_gru_atari plays only games of ale_py")
    make_envs = script.make_envs

    @dataclass
    class Args(script.Args):
        env_id: str = "MortarMayhem-Grid-v0"  # a task of Memory Gym
        task: str = "{}"  # its reset parameters, as JSON
        seed_pool: int = 0  # every episode has one of so many seeds; 0: any

    def make_tasks(args, *inputs, **others):
        name = args.env_id.removesuffix("-v0")
        script.check(name in NAMES, f"--env-id {args.env_id}: one of {', '.join(NAMES)}, and -v0")
        try:
            options = json.loads(args.task)
        except ValueError as error:
            raise script.ArgumentError(f"--task: {error}") from error
        kwargs = gym.registry[f"{name}Task-v0"].kwargs
        kwargs.update(options=options, pool=args.seed_pool)
        return make_envs(replace(args, env_id=f"{name}Task-v0"), *inputs, **others)

    script.Args = Args
    script.make_envs = make_tasks
    driver.add(script, "images")
