"""Attention over the last steps: a transformer's look back, in an LSTM's place.

    python docs/recipes/use.py rppo_lstm attention --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py ppo1_mpi attention --attention-steps 64 --env-id CartPole-v1

The memory is no summary: its state is what it read in the last K - 1 steps of the episode, and each
step looks at those and itself. A query meets keys and, as they have no order of their own, a
learned vector for each distance in time (Shaw et al. 2018, arXiv:1803.02155):

    score[lag] = q . (k[t - lag] + r[lag]) / sqrt(d),  lag = 0 ... K - 1

Its price: nothing from K steps ago is left. Replay computes whole blocks of K queries, each with
its own block of keys and the one before (Child et al. 2019, arXiv:1904.10509, "local attention"),
so it costs as much a step for long sequences as for short ones.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import use as driver


class Attention(nn.Module):
    """K steps, in which each of `heads` heads looks for something else."""

    def __init__(self, input_size, hidden_size, K, heads):
        super().__init__()
        self.K, self.heads = K, heads
        self.inputs = nn.Linear(input_size, 3 * hidden_size)  # queries, keys and values
        self.lags = nn.Parameter(torch.randn(K, hidden_size) * 0.02)
        self.outputs = nn.Linear(hidden_size + input_size, hidden_size)
        for layer in self.inputs, self.outputs:
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def initial_state(self, num_envs):
        """The last inputs, the oldest first, and whether there was one: (1, N, K - 1, F + 1)."""
        return self.lags.new_zeros(1, num_envs, self.K - 1, self.inputs.in_features + 1)

    def look(self, x, query, key, value, lag, seen):
        """x (..., I, F) of I steps, query (..., I, H), key, value (..., J, H) of J steps, lag
        (I, J) from 0 to K - 1, seen (..., I, J) -> h (..., I, H)."""
        query, key, value = (y.unflatten(-1, (self.heads, -1)) for y in (query, key, value))
        place = self.lags.unflatten(-1, (self.heads, -1))[lag]  # (I, J, heads, d)
        score = torch.einsum("...ihd,...jhd->...ijh", query, key)
        score = score + torch.einsum("...ihd,ijhd->...ijh", query, place)
        score = score / query.shape[-1] ** 0.5
        weight = score.masked_fill(~seen.unsqueeze(-1), -torch.inf).softmax(-2)
        found = torch.einsum("...ijh,...jhd->...ihd", weight, value).flatten(-2)
        return self.outputs(torch.cat([found, x], -1)).tanh()

    def step(self, x, state):
        """x (N, F), state (1, N, K - 1, F + 1) -> h (N, H), the next state."""
        now = nn.functional.pad(x, (0, 1), value=1.0).unsqueeze(1)
        steps = torch.cat([state[0], now], 1)  # (N, K, F + 1)
        query, key, value = self.inputs(steps[..., :-1]).chunk(3, -1)
        lag = torch.arange(self.K - 1, -1, -1, device=x.device).unsqueeze(0)  # (1, K)
        seen = steps[..., -1].bool().unsqueeze(1)  # (N, 1, K)
        h = self.look(x.unsqueeze(1), query[:, -1:], key, value, lag, seen)
        return h.squeeze(1), steps[:, 1:].unsqueeze(0)

    def forward(self, x, state, final):
        """x (L, B, F), the state before them (1, B, K - 1, F + 1), final (L, B) -> h (L, B, H)."""
        L, B = final.shape
        K = self.K
        blocks = -(-L // K)
        before = state[0].transpose(0, 1)  # (K - 1, B, F + 1)
        # Blocks of K steps: one of the state, with a step in front that never was, then the
        # sequence, then steps that fill the last block.
        pad = (0, 0, 1, blocks * K - L)
        steps = torch.cat([before[..., :-1], x]).transpose(0, 1)  # (B, K - 1 + L, F)
        steps = nn.functional.pad(steps, pad).unflatten(1, (-1, K))  # (B, blocks + 1, K, F)
        exists = torch.cat([before[..., -1].bool(), torch.ones_like(final)]).T  # (B, K - 1 + L)
        exists = nn.functional.pad(exists, pad[2:]).unflatten(1, (-1, K))
        episode = torch.cat([torch.zeros_like(final[:1]), final[:-1]]).cumsum(0).T  # (B, L)
        episode = nn.functional.pad(episode, (K, blocks * K - L)).unflatten(1, (-1, K))

        query, key, value = self.inputs(steps).chunk(3, -1)
        key, value, exists, of_key = (
            torch.cat([y[:, :-1], y[:, 1:]], 2) for y in (key, value, exists, episode)
        )  # (B, blocks, 2 K, ...): the keys that a block's queries can see
        place = torch.arange(K, device=x.device)
        lag = K + place.unsqueeze(1) - torch.arange(2 * K, device=x.device)  # (K, 2 K)
        same = episode[:, 1:].unsqueeze(-1) == of_key.unsqueeze(-2)
        seen = same & exists.unsqueeze(-2) & (lag >= 0) & (lag < K)
        seen = seen | (lag == 0)  # a step that only fills a block sees itself: no NaN
        lag = lag.clamp(0, K - 1)
        h = self.look(steps[:, 1:], query[:, 1:], key, value, lag, seen)
        return h.flatten(1, 2)[:, :L].transpose(0, 1)


def use(script):
    @dataclass
    class Args(script.Args):
        attention_steps: int = 32  # K: how many steps are looked at, the present one included
        attention_heads: int = 4  # heads; they share the hidden units

    def make(args, input_size, hidden_size):
        K, heads = args.attention_steps, args.attention_heads
        script.check(K > 1, f"--attention-steps {K}: must be at least 2")
        fits = heads > 0 and hidden_size % heads == 0
        script.check(fits, f"--attention-heads {heads}: must divide --hidden-size {hidden_size}")
        return Attention(input_size, hidden_size, K, heads)

    script.Args = Args
    driver.replace_memory(script, make)
