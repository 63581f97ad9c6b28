"""Three tasks for the exercises. Each shows a bug that CartPole hides.

python docs/exercises/train.py carry_state --env-id tasks:Bell-v0
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Bell(gym.Env):
    """Has the bell rung in this episode? In half of the episodes it rings once, within the first
    four steps. Episodes last 4 to 16 steps. The return is the share of right answers."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.rung = 0, False
        self.when = self.np_random.integers(8)  # from 4 on: never
        self.length = self.np_random.integers(4, 17)
        return self.observe(), {}

    def observe(self):
        rings = self.t == self.when < 4
        self.rung |= rings
        return np.array([rings], np.float32)

    def step(self, action):
        reward = float(action == self.rung) / self.length
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class Repeat(gym.Env):
    """Shows one of four symbols at each of 32 steps, and asks for the one of three steps before.
    The return is the share of right answers; a guess is worth 0.25."""

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.Discrete(4)
    delay, length = 3, 32

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = [self.np_random.integers(4)]
        return self.observe(), {}

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.shown[-1]]

    def step(self, action):
        t = len(self.shown) - 1
        right = t >= self.delay and action == self.shown[t - self.delay]
        self.shown.append(self.np_random.integers(4))
        done = len(self.shown) > self.length
        return self.observe(), float(right) / (self.length - self.delay), done, False, {}


class Exit(gym.Env):
    """Action 0 stays, which pays 1; with probability 0.2 the time is up. Action 1 leaves, for 4."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, scale: float = 1.0):
        self.scale = scale  # of all rewards

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        obs = np.ones(1, np.float32)
        if action == 1:
            return obs, 4.0 * self.scale, True, False, {}
        return obs, self.scale, False, bool(self.np_random.random() < 0.2), {}


gym.register("Bell-v0", Bell)
gym.register("Repeat-v0", Repeat)
gym.register("Exit-v0", Exit)
