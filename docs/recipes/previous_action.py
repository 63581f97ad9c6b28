"""The last action and reward as inputs, beside the observation: for tasks that hide their rules.

    python docs/recipes/previous_action.py --env-id popgym:popgym-MultiarmedBanditEasy-v0

What an agent has just done, and what it got for it, is part of what it must remember: in a bandit,
say, nothing else tells which arm pays. The state has no other way to the action, which is sampled
after the LSTM. Both are 0 where an episode begins. POPGym's tasks need pip install ".[popgym]".
Measured after 500,000 steps on seeds 1 to 3: a bandit, .39, .41, .39, and without .23, .12, .02.
Where the action says nothing new it does no harm: RepeatFirst and RepeatPrevious 1.00 with and
without, HigherLower .49.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm


class PreviousAction(gym.vector.VectorWrapper):
    """Observations (N, n) become (N, n + A + 1): A is the action's size, one-hot if Discrete."""

    def __init__(self, envs):
        super().__init__(envs)
        self.return_queue, self.length_queue = envs.return_queue, envs.length_queue
        space, self.more = (
            envs.single_observation_space,
            spaces.flatdim(envs.single_action_space) + 1,
        )
        low = np.append(space.low, [-np.inf] * self.more)
        high = np.append(space.high, [np.inf] * self.more)
        self.single_observation_space = spaces.Box(np.float32(low), np.float32(high))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.zeros(self.num_envs, bool)
        return np.pad(obs, ((0, 0), (0, self.more))), info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        flat = [spaces.flatten(self.single_action_space, action) for action in actions]
        before = np.column_stack([flat, rewards]).astype(np.float32)
        before[self.done] = 0.0  # obs is an episode's first
        self.done = terminated | truncated
        return np.hstack([obs, before]), rewards, terminated, truncated, info


def make_envs(*args):
    return PreviousAction(make_plain_envs(*args))


make_plain_envs = rppo_lstm.make_envs
rppo_lstm.make_envs = make_envs

if __name__ == "__main__":
    rppo_lstm.main()
