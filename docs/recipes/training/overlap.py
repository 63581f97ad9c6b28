"""Overlapping sequences: a step is replayed from several states, each time with less history cut.

    python docs/recipes/use.py rppo_lstm overlap --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py rppo_lstm overlap --seq-len 1 --overlap-len 16  # AgileRL's MAXIMUM

A sequence begins every --seq-len steps, with the state that the agent had there, and is --overlap-len
steps long. The defaults, 8 and 16, are AgileRL's FIFTY_PERCENT_OVERLAP with max_seq_len 16; equal
numbers are its CHUNKED, and the script's own way. In truncated backpropagation a step near its
sequence's beginning has little past to learn from; here each step is also in a sequence in which it
comes late.

Nothing is dropped at a rollout's end, where sequences are cut short. A step that is in k sequences
weighs 1 / k in the gradient, so that the objective is the same; logged means count it k times. An
epoch costs as many times more as sequences overlap.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import use as driver


def cut(x, stride: int, length: int):
    """A rollout (T, N, ...) -> (length, S, ...), S = N T / stride. Steps after T are final."""
    more = x.new_full((length - stride, *x.shape[1:]), x.dtype == torch.bool)
    x = torch.cat([x, more]).unfold(0, length, stride)  # (T / stride, N, ..., length)
    return x.movedim(-1, 0).flatten(1, 2)


def weights(T: int, stride: int, length: int):
    """1 / k of the steps of each sequence, (T / stride, length), if a step is in k of them."""
    steps = torch.arange(T + length - stride).unfold(0, length, stride)
    return 1 / steps.flatten().bincount()[steps]


def use(script):
    fits = script.kind != "trpo"
    script.check(fits, "overlap: trpo replays whole rollouts")
    script.check("recompute" not in script.recipes, "overlap: not with recompute")
    minibatches, advantage = script.minibatches, getattr(script, "normalize_advantage", None)
    now = SimpleNamespace()  # this update's sequences, and the weights of this minibatch's rows

    @dataclass
    class Args(script.Args):
        seq_len: int = 8  # steps from the beginning of a sequence to that of the next
        overlap_len: int = 16  # steps of a sequence

    def to_sequences(x, stride):
        length = max(now.length, stride)
        sequences = cut(x, stride, length)
        if x.dtype == torch.bool:
            now.final = sequences
            weight = weights(len(x), stride, length).T.to(x.device)
            now.weight = weight.repeat_interleave(x.shape[1], 1)  # (length, S)
        return sequences

    def weighed_minibatches(*inputs):
        for batch in minibatches(*inputs):
            row = now.weight[:, batch][~now.final[:, batch]]  # (M,)
            now.row = row / row.mean()
            yield batch

    def weighed_advantage(x):
        mean = (now.row * x).mean()
        variance = (now.row * (x - mean) ** 2).mean()
        return (x - mean) / (variance.sqrt() + 1e-8)

    def weigh(x):
        """The same numbers, but gradients times the weights."""
        return now.row * x + ((1 - now.row) * x).detach()

    class Overlapping(script.Agent):
        def __init__(self, envs, args):
            script.check(args.seq_len > 0, "overlap: --seq-len must be positive")
            script.check(not args.ablate_memory, "overlap: not with --ablate-memory")
            super().__init__(envs, args)
            script.check(driver.memories(self), "overlap: needs --memory lstm")
            now.length = args.overlap_len

        def evaluate_actions(self, *inputs):
            return tuple(weigh(x) for x in super().evaluate_actions(*inputs))

    script.Args = Args
    script.Agent = Overlapping
    script.to_sequences = to_sequences
    script.minibatches = weighed_minibatches
    if advantage:  # else the script normalises them over the rollout
        script.normalize_advantage = weighed_advantage
