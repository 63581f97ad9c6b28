"""More of gSDE: expln, one standard deviation for all actions, squashed actions; gSDE in trpo.

    python docs/recipes/sde.py --use-sde --use-expln --env-id Pendulum-v1 --mask-velocity
    python docs/recipes/sde.py trpo --use-sde --env-id LunarLanderContinuous-v3

gSDE, generalised state-dependent exploration (Raffin et al. 2021, arXiv:2005.05719): the noise in
an action is a matrix times the features that the actor's last layer reads, and the same matrix for
many steps. With --squash-output actions are tanh of what the policy samples, stretched to the
bounds; their densities are corrected for that, and the entropy is an estimate from a sample.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import use as driver
from gymnasium import spaces
from torch.distributions import Independent, Normal


class Squashed(Independent):
    """Densities of tanh(u), as a function of u."""

    def log_prob(self, u):
        return super().log_prob(u) - (1 - u.tanh() ** 2 + 1e-6).log().sum(-1)

    def entropy(self):
        return -self.log_prob(self.rsample())


def use(script):
    name = script.__name__
    fits = name in ("rppo_continuous", "trpo")
    script.check(fits, "sde: of rppo_continuous and trpo, for actions that are real numbers")
    plain_to_env = script.to_env

    def squashed_to_env(actions, space):
        share = (actions.tanh().cpu().numpy().reshape(-1, *space.shape) + 1) / 2  # from 0 to 1
        return (space.low + share * (space.high - space.low)).astype(space.dtype)

    if name == "trpo":

        @dataclass
        class Base(script.Args):
            use_sde: bool = False  # gSDE: the noise in an action is a matrix times features
            sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for each rollout

        script.Args = Base
        script.FIXED = (*script.FIXED, "use_sde")

    @dataclass
    class Args(script.Args):
        full_std: bool = True  # gSDE's standard deviations: for each feature and action
        use_expln: bool = False  # they grow slowly above 1: log1p(x) + 1 in the place of exp(x)
        squash_output: bool = False  # actions are tanh of what is sampled, stretched to the bounds

    class SdeAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            space = self.action_space
            script.check(isinstance(space, spaces.Box), f"sde: {space} is no Box of actions")
            squash = args.squash_output
            script.check(
                not squash or space.is_bounded(), "--squash-output: actions have no bounds"
            )
            script.to_env = squashed_to_env if squash else plain_to_env
            if args.use_sde:
                K, features = self.actor.weight.shape
                columns = K if args.full_std else 1
                self.log_std = nn.Parameter(torch.full((features, columns), args.log_std_init))
            self.noise = None  # in trpo: (N, features, K), and for how many steps it was used
            self.uses = 0

        def std(self):
            """Standard deviations: (features, K), or (K,) without gSDE."""
            x = self.log_std
            std = x.exp()
            if self.args.use_expln:
                std = torch.where(x > 0, x.clamp(min=0).log1p() + 1, std)
            return std.expand(-1, len(self.actor.weight)) if x.dim() == 2 else std

        def features(self, h):
            """What the actor's last layer reads."""
            layers = list(self.actor)[:-1] if isinstance(self.actor, nn.Sequential) else []
            for layer in layers:
                h = layer(h)
            return h

        def policy(self, h, *legal):
            std = self.std()
            if self.args.use_sde:
                std = (self.features(h).detach() ** 2 @ std**2 + 1e-6).sqrt()
            normal = Normal(self.actor(h), std, validate_args=False)
            kind = Squashed if self.args.squash_output else Independent
            return kind(normal, 1, validate_args=False)

        def sample_noise(self, *shape):
            if name == "trpo" and self.args.use_sde and len(shape) == 2:
                return [None] * shape[0]  # of a rollout: `act` draws matrices when it needs them
            std = self.std()
            return torch.randn(*shape, *std.shape).to(std.device) * std

        def act(self, h, *others):
            """others: noise or, in trpo, legal choices and noise."""
            if not self.args.use_sde:
                return super().act(h, *others)
            noise = others[-1]
            if name == "trpo":
                old = self.noise is None or len(self.noise) != len(h)
                if old or self.uses == self.args.sde_sample_freq:
                    self.noise = self.sample_noise(len(h))
                    self.uses = 0
                self.uses += 1
                noise = self.noise
            return self.actor(h) + (self.features(h)[:, None] @ noise)[:, 0]

    class SdeRun(script.Run):
        def log(self, *inputs):
            super().log(*inputs)
            self.agent.noise = None  # every rollout begins with new noise

    script.Args = Args
    script.FIXED = (*script.FIXED, "full_std", "use_expln", "squash_output")
    script.Agent = SdeAgent
    script.Run = SdeRun


if __name__ == "__main__":
    driver.main("sde")
