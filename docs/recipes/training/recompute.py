"""Recomputed states: in each epoch, sequences begin with the states that the agent would have by now.

    python docs/recipes/use.py rppo_continuous recompute --seq-len 16 --env-id Walker2d-v5

Sequences that are shorter than a rollout begin with stored states, which go stale while the weights
change (Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning").
This plays the rollout back, step by step, before each epoch but the first. The state before the
rollout stays what it was. Exercise 8 looks at the difference.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch
import use as driver


def use(script):
    script.check(script.kind != "trpo", "recompute: trpo replays whole rollouts")
    minibatches, to_sequences = script.minibatches, script.to_sequences
    now = SimpleNamespace(obs=None, before=None, last=None, states=None)

    def watched(x, L):
        sequences = to_sequences(x, L)
        if x.dtype == torch.bool:
            now.final, now.N = sequences, x.shape[1]
        elif now.obs is None:  # what train cuts first
            now.obs = sequences
        return sequences

    def epochs(final, args):
        first = now.before if now.before is not None else torch.zeros_like(now.last)
        now.before = now.last  # the next rollout's
        for epoch in range(args.update_epochs):
            now.states = now.agent.recompute(first) if epoch else None
            for now.batch in minibatches(final, replace(args, update_epochs=1)):
                yield now.batch

    class Recomputing(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            script.check(driver.memories(self), "recompute: needs --memory lstm")
            now.agent = self

        def step(self, obs, state):
            now.last = state  # at last, the one before the next rollout's first step
            now.obs = None
            return super().step(obs, state)

        @torch.no_grad()
        def recompute(self, state):
            """The state (rows, N, ...) before a rollout -> before each of its sequences."""
            states = []
            for n in range(0, now.final.shape[1], now.N):  # in the order of time
                states.append(state)
                for obs, final in zip(now.obs[:, n : n + now.N], now.final[:, n : n + now.N]):
                    *_, state = super().step(obs, state)
                    state = script.reset_state(state, final)
            return torch.cat(states, 1)

        def evaluate_actions(self, obs, state, *others):
            if now.states is not None:
                state = now.states[:, now.batch]
            return super().evaluate_actions(obs, state, *others)

    script.Agent, script.minibatches, script.to_sequences = Recomputing, epochs, watched
