"""The last action and reward as inputs, beside the observation: for tasks that hide their rules.

    python docs/recipes/use.py rppo_lstm previous_action \
        --env-id popgym:popgym-MultiarmedBanditEasy-v0

What an agent has just done, and what it got for it, is part of what it must remember: in a bandit,
say, nothing else tells which arm pays. The LSTM can't know the action otherwise: it is sampled
after the LSTM has run. Both are 0 where an episode begins. POPGym: pip install ".[popgym]".
"""

import numpy as np
import use as driver
from gymnasium import spaces


class PreviousAction(driver.Wrapper):
    """Observations (N, n) become (N, n + A + 1): A is the action's size, one-hot if Discrete."""

    def __init__(self, envs):
        super().__init__(envs)
        self.more = spaces.flatdim(envs.single_action_space) + 1
        self.observe(spaces.flatdim(envs.single_observation_space) + self.more)

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.zeros(self.num_envs, bool)
        return np.pad(obs, ((0, 0), (0, self.more))), info

    def step(self, actions):
        # Before the step: an environment may change its actions in place.
        flat = [spaces.flatten(self.single_action_space, action) for action in actions]
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        before = np.column_stack([flat, rewards]).astype(np.float32)
        before[self.done] = 0.0  # obs is an episode's first
        self.done = terminated | truncated
        return np.hstack([obs, before]), rewards, terminated, truncated, info


def use(script):
    vectors = script.kind != "rppo_gru_atari"
    script.check(vectors, "previous_action: Atari's frames aren't vectors")
    make_envs = script.make_envs

    def make_more(*inputs, **options):
        return PreviousAction(make_envs(*inputs, **options))

    script.make_envs = make_more
