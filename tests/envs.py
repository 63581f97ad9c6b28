"""Toy and misbehaving environments: --env-id envs:Clock-v0, with Box before the name for actions
of a Box. The variable FAULT says what those called Faulty do: nothing if it is not set."""

import os
import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


class Clock(gym.Env):
    """Episodes of `steps` steps, so that a rollout of steps + 1 has exactly one. Observations tell
    the time, whatever the seed; the reward falls with the action's distance from 0 and 1 in turn.
    It has no render_mode."""

    observation_space: spaces.Space = spaces.Box(-2, 2, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, steps: int = 31):
        self.steps = steps

    def observation(self):
        return np.array([np.sin(self.t), self.t / self.steps], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        reward = -abs(float(np.mean(action)) - self.t % 2)
        return self.observation(), reward, False, self.t == self.steps, {}


class Faulty(Clock):
    """What FAULT names happens in the environment of seed 3, after 49 further steps of its life:
    in time step 50 if it began at 0, since one was the end of an episode."""

    def __init__(self, steps: int = 31):
        super().__init__(steps)
        self.fault, self.life, self.cursed = os.environ.get("FAULT", ""), 0, False
        if self.fault == "init":
            raise RuntimeError("the simulator exploded in __init__")

    def reset(self, *, seed=None, options=None):
        self.cursed = seed == 3 if seed is not None else self.cursed
        if self.fault == "reset" and self.cursed:
            raise RuntimeError("the simulator exploded in reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.cursed and self.life == 50:
            if self.fault == "step":
                raise RuntimeError("the simulator\nexploded in step")
            if self.fault == "exit":
                os._exit(7)
            if self.fault == "leave":
                sys.exit()
            assert self.fault != "assert"
            obs[1] = np.nan if self.fault == "obs" else obs[1]
            reward = {"reward": np.nan, "infinite": -np.inf, "huge": 1e30}.get(self.fault, reward)
        return obs, reward, terminated, truncated, info


class Blind(Clock):
    """It takes a render_mode, but has none."""

    def __init__(self, render_mode: str | None = None):
        super().__init__()
        self.render_mode = render_mode


class Counting(Clock):
    """Episode n of its life, of two steps, pays n."""

    def __init__(self):
        super().__init__(steps=2)
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(self.episodes * truncated), terminated, truncated, info


class Outside(Clock):
    """Its observations are outside their space: 7 of 4."""

    observation_space = spaces.Discrete(4)

    def observation(self):
        return 7 if self.t else 3


class SameStep(gym.vector.SyncVectorEnv):
    """A vector environment of its own that returns an episode's last observation nowhere."""

    def __init__(self, num_envs: int, **kwargs):
        super().__init__([Clock] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


for kind in Blind, Clock, Counting, Faulty, Outside:
    gym.register(f"{kind.__name__}-v0", kind)
    box = type(f"Box{kind.__name__}", (kind,), {"action_space": spaces.Box(-1, 1, (1,))})
    gym.register(f"Box{kind.__name__}-v0", box)
gym.register("SameStep-v0", Clock, vector_entry_point=SameStep)
