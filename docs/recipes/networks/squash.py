"""Squashed actions: tanh of what the policy samples, stretched to the bounds.

    python docs/recipes/use.py rppo_continuous squash --squash-output --env-id Pendulum-v1
    python docs/recipes/use.py trpo squash --squash-output --env-id LunarLanderContinuous-v3

Otherwise actions beyond the bounds are clipped. The density of a squashed action is corrected for
tanh; the entropy then has no closed form, and is estimated from a sample.
"""

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch.distributions import Independent


class SquashedBox(spaces.Box):
    """Bounds to which tanh of an action is stretched."""


def before_tanh(actions, space):
    """Actions (..., K) between the bounds -> what they were before the tanh, (..., K)."""
    low, high = (torch.as_tensor(x.ravel(), dtype=actions.dtype) for x in (space.low, space.high))
    share = 2 * (actions - low) / (high - low) - 1
    return share.clamp(-1 + 1e-6, 1 - 1e-6).atanh()  # at a bound u is infinite


class Squashed(Independent):
    """Densities of tanh(u), as a function of u."""

    def log_prob(self, u):
        return super().log_prob(u) - (1 - u.tanh() ** 2 + 1e-6).log().sum(-1)

    def entropy(self):
        return -self.log_prob(self.rsample())


def use(script):
    fits = script.kind in ("rppo_continuous", "trpo")
    script.check(fits, "squash: works only with rppo_continuous and trpo, on real-valued actions")
    clipped = script.to_env

    def stretched(actions, space):
        """actions (N, K), any real numbers -> (N, *shape) between the bounds."""
        if not isinstance(space, SquashedBox):
            return clipped(actions, space)
        share = (actions.tanh().numpy(force=True).reshape(-1, *space.shape) + 1) / 2  # 0 to 1
        stretch = space.low + share * (space.high - space.low)
        return stretch.clip(space.low, space.high).astype(space.dtype)  # rounding can leave them

    @dataclass
    class Args(script.Args):
        squash_output: bool = False  # actions are tanh of what is sampled, stretched to the bounds

    class SquashedAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            if args.squash_output:
                space = self.action_space
                bounded = isinstance(space, spaces.Box) and space.is_bounded()
                script.check(bounded, "--squash-output: actions must have bounds")
                self.action_space = SquashedBox(space.low, space.high, dtype=space.dtype)

        def policy(self, h):
            plain = super().policy(h)
            if not self.args.squash_output:
                return plain
            return Squashed(plain.base_dist, 1, validate_args=False)

    script.Args = Args
    script.Agent = SquashedAgent
    script.to_env = stretched
