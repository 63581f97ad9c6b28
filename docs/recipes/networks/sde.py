"""More of gSDE: expln, one standard deviation for all actions, and gSDE in trpo.

    python docs/recipes/use.py rppo_continuous sde --use-sde --use-expln --env-id Pendulum-v1
    python docs/recipes/use.py trpo sde --use-sde --env-id LunarLanderContinuous-v3

gSDE, generalised state-dependent exploration (Raffin et al. 2021, arXiv:2005.05719): the noise in
an action is a random matrix times the features that the actor's last layer reads, and the matrix
is kept for many steps.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
from gymnasium import spaces
from torch.distributions import Independent, Normal


def use(script):
    fits = script.kind in ("rppo_continuous", "trpo")
    script.check(fits, "sde: works only with rppo_continuous and trpo, on real-valued actions")
    if script.kind == "trpo":

        @dataclass
        class Base(script.Args):
            use_sde: bool = False  # gSDE: the noise in an action is a matrix times features
            sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for each rollout

        script.Args = Base

    @dataclass
    class Args(script.Args):
        full_std: bool = True  # gSDE's standard deviations: for each feature and action
        use_expln: bool = False  # they grow slowly above 1: log1p(x) + 1 in the place of exp(x)

    class SdeAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            space = self.action_space
            script.check(isinstance(space, spaces.Box), f"sde: actions must be a Box, not {space}")
            every = args.sde_sample_freq
            script.check(every == -1 or every > 0, f"--sde-sample-freq {every}: -1, or positive")
            if args.use_sde:
                K, features = self.actor.weight.shape
                columns = K if args.full_std else 1
                self.log_std = nn.Parameter(torch.full((features, columns), args.log_std_init))

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

        def policy(self, h):
            std = self.std()
            if self.args.use_sde:
                std = (self.features(h).detach() ** 2 @ std**2 + 1e-6).sqrt()
            normal = Normal(self.actor(h), std, validate_args=False)
            return Independent(normal, 1, validate_args=False)

        def sample_noise(self, *shape):
            """Matrices (*shape, features, K), or noise (*shape, K) without gSDE, from the CPU."""
            std = self.std()
            return torch.randn(*shape, *std.shape).to(std.device) * std

        def act(self, h, noise):
            if not self.args.use_sde:
                return self.actor(h) + noise
            return self.actor(h) + (self.features(h)[:, None] @ noise)[:, 0]

    class SdeTrpo(SdeAgent):
        """trpo's train asks for a rollout's noise, (T, N), and reads it step by step."""

        def sample_noise(self, *shape):
            every = self.args.sde_sample_freq
            if not self.args.use_sde or len(shape) == 1:
                return super().sample_noise(*shape)
            T, N = shape
            every = every if every > 0 else T
            matrices = [super(SdeTrpo, self).sample_noise(N) for _ in range(0, T, every)]
            return [matrices[t // every] for t in range(T)]

    script.Args = Args
    script.Agent = SdeTrpo if script.kind == "trpo" else SdeAgent
