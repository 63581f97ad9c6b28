"""PocMemory, a small memory task in one file: which side was the good one?

    python docs/recipes/use.py rppo_lstm poc_memory                  # 61,000 steps
    python docs/recipes/use.py rppo_lstm poc_memory --ablate-memory  # the control, which can't do it
    python docs/recipes/use.py --play runs/RUN --render none

The memory task of Pleines et al. (recurrent-ppo-truncated-bptt), and an example of an environment
of your own. The goals, +1 and -1 in random order, are visible in the first three observations only:
two steps in which nothing moves, and the one where the first move is chosen. Each move costs 0.1,
except one that reaches an end: that gives 1.6 times the goal there. The optimum is a mean return of
1.2 with a success of 100 %; the best policy without memory gets 70 %.

How a run can fail, as one of 18 did with an earlier version of the script: within ten rollouts the
policy always walked to one side, with an entropy of 0.1. The critic, which had seen the goals, then
foresaw every return. Advantages were noise, and nothing more was learned. With --ent-coef 0.01
that seed, too, was solved.
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np


class PocMemory(gym.Env):
    """Observation: [left goal, position, right goal]. Action 1 moves 0.2 right, 0 left."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        goals = self.goals if self.steps <= 2 else (0, 0)
        return np.array([goals[0], self.fifths / 5, goals[1]], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goals = self.np_random.permutation([-1, 1])
        self.fifths = int(self.np_random.integers(-2, 3))  # the position, in exact steps of 0.2
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        if self.steps <= 2:  # the goals are visible, and nothing moves
            return self.observe(), 0.0, False, False, {}
        self.fifths += 1 if action == 1 else -1
        arrived = abs(self.fifths) == 5
        reward = 1.6 * self.goals[int(self.fifths > 0)] if arrived else -0.1
        return self.observe(), float(reward), arrived, False, {}


# A time limit, because a bad policy may walk back and forth forever.
gym.register("PocMemory-v0", PocMemory, max_episode_steps=128)


def use(script):
    fits = script.kind in ("rppo_lstm", "trpo", "ppo1_mpi")
    script.check(fits, "poc_memory: works only with rppo_lstm, trpo and ppo1_mpi")

    @dataclass
    class Args(script.Args):
        env_id: str = "PocMemory-v0"  # the recipe's, or another
        total_timesteps: int = 61_000  # environment steps to train for

    script.Args = Args
    if hasattr(script.Args, "memory"):
        script.PRESETS = {**script.PRESETS, ("PocMemory-v0", False): dict(memory="lstm")}
