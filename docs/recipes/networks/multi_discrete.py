"""MultiDiscrete and MultiBinary actions: K choices at each step, from one network.

    python docs/recipes/use.py rppo_lstm multi_discrete --env-id my_module:MyEnv-v0
    python docs/recipes/use.py trpo multi_discrete,action_masks --env-id my_module:MyEnv-v0

Given the observation, the components of an action are independent: the actor has K rows of logits
(..., K, A), one for each component, and A is the largest number of choices. Choices that a smaller
component doesn't have get the logit -1e9, hence the probability 0. A joint log-probability is the
sum of the components', and so are the entropy and the KL divergence.
"""

import numpy as np
import torch
import torch.nn as nn
import use as driver
from gymnasium import spaces
from torch.distributions import Categorical, Independent


class OneActor(driver.Wrapper):
    """What the script's own Agent sees: one Discrete choice with all K A logits."""

    def __init__(self, envs, outputs: int):
        super().__init__(envs)
        self.single_action_space = spaces.Discrete(outputs)


def components(space) -> spaces.MultiDiscrete:
    """A space of K choices as one of K numbers; `env_space` is what the environments take."""
    start = space.start if hasattr(space, "start") else 0
    nvec = driver.choices(space)
    flat = spaces.MultiDiscrete(nvec, start=np.broadcast_to(np.ravel(start), nvec.shape).copy())
    flat.env_space = space
    return flat


def use(script):
    script.check(script.kind != "rppo_continuous", "multi_discrete: use rppo_lstm for choices")

    class MultiAgent(script.Agent):
        def __init__(self, envs, args):
            given = envs.single_action_space
            script.check(not isinstance(given, spaces.Box), f"multi_discrete: actions of {given}")
            space = components(given)
            exists = np.arange(space.nvec.max()) < space.nvec[:, None]  # (K, A)
            super().__init__(OneActor(envs, exists.size), args)
            self.action_space = space
            self.exists = nn.Buffer(torch.from_numpy(exists), persistent=False)
            driver.change(self.actor, forward=self.rows)

        def rows(self, actor, h):
            """h (..., H) -> logits (..., K, A); -1e9 and not -inf, because 0 * inf is NaN."""
            return actor(h).unflatten(-1, self.exists.shape).masked_fill(~self.exists, -1e9)

    if hasattr(script.Agent, "policy"):  # trpo, ppo1_mpi
        sample_noise = script.Agent.sample_noise

        def policy(self, h):
            return Independent(Categorical(logits=self.actor(h), validate_args=False), 1)

        def rows_of_noise(self, *shape):
            return sample_noise(self, *shape).unflatten(-1, self.exists.shape)

        MultiAgent.policy, MultiAgent.sample_noise = policy, rows_of_noise
    else:
        select, entropy = script.select, script.entropy
        script.select = lambda log_pi, actions: select(log_pi, actions).sum(-1)
        script.entropy = lambda log_pi: entropy(log_pi).sum(-1)

    def to_env(actions, space):
        """Actions (N, K), counted from 0 -> as the environments take them."""
        numbers = actions.numpy(force=True) + space.start
        return numbers.reshape(-1, *space.env_space.shape).astype(space.env_space.dtype)

    script.Agent = MultiAgent
    script.to_env = to_env
