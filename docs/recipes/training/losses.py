"""Other losses: advantages as they are, and a clipped value loss.

    python docs/recipes/use.py rppo_lstm losses --no-norm-advantage
    python docs/recipes/use.py rppo_lstm losses --clip-value max  # AgileRL's, and many others'

The value loss of PPO2 keeps a prediction V within clip_coef of the old one, V_old, which is no part
of PPO's paper, and doesn't help (Andrychowicz et al. 2021, arXiv:2006.05990, "What matters in
on-policy reinforcement learning"):

    V_clipped = V_old + clip(V - V_old, -epsilon, epsilon)
    max:    the larger of (V - R)^2 and (V_clipped - R)^2
    inside: (V_clipped - R)^2, as clip_range_vf in Stable-Baselines3

--clip-value-coef gives it an epsilon of its own. Its scale is that of normalised rewards.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch


def clipped(value, old_value, return_, epsilon: float, kind: str):
    """(M,) -> the prediction (M,) whose squared error counts."""
    inside = old_value + (value - old_value).clamp(-epsilon, epsilon)
    if kind == "inside":
        return inside
    larger = (value - return_).square() >= (inside - return_).square()
    return torch.where(larger, value, inside)


def use(script):
    script.check(script.kind != "trpo", "losses: trpo has none of PPO's losses")
    compute_gae, to_sequences = script.compute_gae, script.to_sequences
    minibatches, normalize = script.minibatches, getattr(script, "normalize_advantage", None)
    now = SimpleNamespace()  # this update's rollout and sequences, and this minibatch's rows

    @dataclass
    class Args(script.Args):
        norm_advantage: bool = True  # advantages of a minibatch have mean 0 and deviation 1
        clip_value: Literal["none", "max", "inside"] = "none"  # the value loss
        clip_value_coef: float = 0.0  # its epsilon; 0: --clip-coef

    def normalized(advantage):
        return normalize(advantage) if now.norm_advantage else advantage

    def gae(rewards, values, *inputs):
        advantages = compute_gae(rewards, values, *inputs)
        now.rollout = torch.as_tensor(values[:-1]), torch.as_tensor(advantages + values[:-1])
        return advantages

    def sequences(x, L):
        if x.dtype == torch.bool:  # the final steps, of the same rollout
            now.value, now.return_ = (to_sequences(y.to(x.device), L) for y in now.rollout)
            now.final = to_sequences(x, L)
        return to_sequences(x, L)

    def batches(*inputs):
        for batch in minibatches(*inputs):
            valid = ~now.final[:, batch]
            now.rows = now.value[:, batch][valid], now.return_[:, batch][valid]
            yield batch

    class ClippedAgent(script.Agent):
        def __init__(self, envs, args):
            always = normalize or args.norm_advantage
            script.check(always, f"--no-norm-advantage: {script.kind} normalises over a rollout")
            super().__init__(envs, args)
            now.norm_advantage = args.norm_advantage

        def evaluate_actions(self, *inputs):
            logprob, entropy, value = super().evaluate_actions(*inputs)
            args = self.args
            if args.clip_value != "none":
                epsilon = args.clip_value_coef or args.clip_coef
                value = clipped(value, *now.rows, epsilon, args.clip_value)
            return logprob, entropy, value

    script.Args = Args
    script.Agent = ClippedAgent
    script.compute_gae = gae
    script.to_sequences = sequences
    script.minibatches = batches
    if normalize:
        script.normalize_advantage = normalized
