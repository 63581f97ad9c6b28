"""Action masks: the environment says in info["action_mask"] which choices are legal.

    python docs/recipes/use.py rppo_lstm action_masks --env-id my_module:MyEnv-v0

A mask is 1 or 0 for each choice (Discrete), or for each choice of each component (MultiDiscrete,
which needs the recipe multi_discrete, too): one array, or a tuple of arrays. It may be missing at
any step, and then all choices are legal. An illegal choice gets the logit -1e9, so its probability
is 0, when the agent acts and when the update computes that step's probability again
(Huang & Ontanon 2022, arXiv:2006.14171).

A mask belongs to a step as its observation does, so it travels as the last columns of the
observation: a wrapper appends it, encoder and memory pass it on, and the actor applies it. train
knows nothing of it. Other networks don't see these columns.
"""

import numpy as np
import torch
import use as driver
from gymnasium import spaces


class Masks(driver.Wrapper):
    """Observations (N, n) become (N, n + K A): the last columns say which choices are legal."""

    def __init__(self, script, envs):
        super().__init__(envs)
        self.unmasked = envs
        self.check = script.check
        space = envs.single_action_space
        script.check(not isinstance(space, spaces.Box), f"action_masks: actions of {space}")
        nvec = driver.choices(space)
        self.exists = np.arange(nvec.max()) < nvec[:, None]  # (K, A)
        self.observe(spaces.flatdim(envs.single_observation_space) + self.exists.size)

    def legal(self, info: dict, final) -> np.ndarray:
        """The masks (N, K, A). A final step needs no legal choice."""
        legal = self.exists[None].repeat(len(final), 0)
        masks = info.get("action_mask")
        if masks is None:
            return legal
        sent = info.get("_action_mask", np.ones(len(final), bool))  # (N,): by which environments
        for i in np.flatnonzero(sent & ~final):
            mask = np.hstack(masks[i])
            fits = mask.size == self.exists.sum() and np.isin(mask, (0, 1)).all()
            what = f"a 0 or a 1 for each of the {self.exists.sum()} choices"
            self.check(fits, f'info["action_mask"] is {masks[i]}: must have {what}')
            legal[i, self.exists] = mask
            left = legal[i].any(-1).all()
            self.check(left, f'info["action_mask"] leaves no choice: {masks[i]}')
        return legal

    def join(self, obs, info: dict, final):
        """Observations with their masks, and info without."""
        obs = np.hstack([obs, self.legal(info, final).reshape(len(obs), -1)])
        return obs, {key: info[key] for key in info if key not in ("action_mask", "_action_mask")}

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return self.join(obs, info, np.zeros(self.num_envs, bool))

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        obs, info = self.join(obs, info, terminated | truncated)
        return obs, rewards, terminated, truncated, info


def use(script):
    masked = script.kind in ("rppo_lstm", "trpo", "ppo1_mpi")
    script.check(masked, f"action_masks: {script.kind} has no masks")
    make_envs = script.make_envs

    class MaskedAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs.unmasked, args)
            M = self.mask_size = envs.exists.size
            n = spaces.flatdim(envs.unmasked.single_observation_space)

            def passed_on(features, x):
                return torch.cat([features, x[..., -M:]], -1)

            def step(memory, x, state):
                h, state = memory(x[..., :-M], state)
                return passed_on(h, x), state

            def forward(memory, x, *inputs):
                return passed_on(memory(x[..., :-M], *inputs), x)

            def choose(actor, h):
                logits = actor(h[..., :-M])
                return logits.masked_fill(h[..., -M:].reshape(logits.shape) == 0, -1e9)

            def drop(module, x, *inputs):
                if script.kind == "trpo":  # obs and h, each with the mask, or obs alone
                    x = torch.cat([x[..., :n], x[..., n + M :]], -1)
                    return module(x if x.shape[-1] == n else x[..., :-M])
                return module(x[..., :-M], *inputs)

            driver.change(self.encoder, forward=forward)
            driver.change(self.actor, forward=choose)
            if hasattr(self, "lstm"):
                driver.change(self.lstm, step=step, forward=forward)
            # The first of the critic's own networks drops the mask.
            names = "critic_encoder", "critic_lstm", "critic"
            critic = next(getattr(self, name) for name in names if hasattr(self, name))
            driver.change(critic, forward=drop)
            if hasattr(critic, "step"):
                driver.change(critic, step=drop)
            driver.change(self.obs_stats, update=lambda update, rows: update(rows[:, :-M]))

        def normalize(self, obs):
            M = self.mask_size
            return torch.cat([super().normalize(obs[..., :-M]), obs[..., -M:]], -1)

    def make_masked(*inputs, **options):
        return Masks(script, make_envs(*inputs, **options))

    script.Agent = MaskedAgent
    script.make_envs = make_masked
