"""Frame stacking: the last 4 observations instead of an LSTM, where they are memory enough.

    python docs/recipes/use.py rppo_lstm frame_stack --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py rppo_continuous frame_stack --env-id Pendulum-v1 --mask-velocity

A layer without a state takes the LSTM's place (the recipe feedforward); it reads several
observations at once, an episode's first one repeated. In trpo and ppo1_mpi, which have no memory
unless told so, only the observations change. Images have --image-stack, and Atari --frame-stack.
"""

from dataclasses import dataclass

import numpy as np
import use as driver
from gymnasium import spaces


class FrameStack(driver.Wrapper):
    """Observations (N, n) become those of the last steps, (N, k n), the oldest first."""

    def __init__(self, envs, frames):
        super().__init__(envs)
        self.k = frames
        self.observe(frames * spaces.flatdim(envs.single_observation_space))

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.frames = np.repeat(obs[:, None], self.k, 1)  # (N, k, n)
        self.done = np.zeros(self.num_envs, bool)
        return self.frames.reshape(self.num_envs, -1), info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.frames = np.concatenate([self.frames[:, 1:], obs[:, None]], 1)
        self.frames[self.done] = obs[self.done, None]  # a new episode's first
        self.done = terminated | truncated
        return self.frames.reshape(self.num_envs, -1), rewards, terminated, truncated, info


def use(script):
    script.check(script.kind != "rppo_gru_atari", "frame_stack: Atari has --frame-stack")
    vectors = "images" not in script.recipes
    script.check(vectors, "frame_stack: with images use --image-stack")
    make_envs = script.make_envs
    if hasattr(script.Args, "memory"):
        script.PRESETS = {task: {**x, "memory": "none"} for task, x in script.PRESETS.items()}
    else:
        driver.add(script, "feedforward")

    @dataclass
    class Args(script.Args):
        frames: int = 4  # observations that are read at once

    def make_stacks(args, *inputs, **options):
        return FrameStack(make_envs(args, *inputs, **options), args.frames)

    script.Args = Args
    script.make_envs = make_stacks
