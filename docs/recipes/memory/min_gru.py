"""minGRU: a gated memory that replays a sequence without a loop, by a parallel scan.

    python docs/recipes/use.py rppo_lstm min_gru,poc_memory
    python docs/recipes/use.py rppo_continuous min_gru --env-id Pendulum-v1 --mask-velocity

Feng et al. 2024, arXiv:2410.01201, "Were RNNs all we needed?" A GRU whose gate and candidate read
x[t] alone, not h[t-1]:

    z = sigmoid(W_z x + b_z),  h[t] = (1 - z) h[t-1] + z W_h x

That is h[t] = a[t] h[t-1] + b[t] with a and b known before the replay begins, and two such steps
make one: the scan needs log2(L) rounds instead of L steps. The reset is a[t] = 0 after a final
step. The price: what such a memory keeps always fades, so it can't hold a bit for as long as it
likes, as an LSTM can.
"""

import torch
import torch.nn as nn
import use as driver

LONGEST = 128  # a gate begins so that its unit remembers from 1 to so many steps


class Scan(torch.autograd.Function):
    """h[t] = a[t] h[t-1] + b[t], with h[-1] = 0; a, b and h are (L, ...), real or complex."""

    @staticmethod
    def scan(a, b):
        """Hillis & Steele 1986: after each round, b[t] sums up twice as many steps."""
        shift = 1
        while shift < len(b):
            b = torch.cat([b[:shift], b[shift:] + a[shift:] * b[:-shift]])
            a = torch.cat([a[:shift], a[shift:] * a[:-shift]])
            shift *= 2
        return b

    @staticmethod
    def forward(ctx, a, b):
        h = Scan.scan(a, b)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, gradient):
        """The gradients of b are a scan, too, from the last step to the first."""
        a, h = ctx.saved_tensors
        zero = torch.zeros_like(h[:1])
        next_a = torch.cat([a[1:], zero]).conj()
        of_b = Scan.scan(next_a.flip(0), gradient.flip(0)).flip(0)
        return of_b * torch.cat([zero, h[:-1]]).conj(), of_b


def scan(a, b, h, final):
    """The same from a state h (B, ...) on, which is zero after final steps (L, B)."""
    begins = torch.cat([torch.zeros_like(final[:1]), final[:-1]])  # t - 1 was final
    a = a.masked_fill(begins.unsqueeze(-1), 0.0)
    b = torch.cat([b[:1] + a[:1] * h, b[1:]])
    return Scan.apply(a, b)


class MinGRU(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.gate = nn.Linear(input_size, hidden_size)
        self.candidate = nn.Linear(input_size, hidden_size)
        for layer in self.gate, self.candidate:
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)
        n = torch.empty(hidden_size).uniform_(1, LONGEST - 1)
        self.gate.bias.data = -n.log()  # z = 1 / (n + 1): chrono initialisation, as in long_memory

    def initial_state(self, num_envs):
        return self.gate.weight.new_zeros(1, num_envs, self.gate.out_features)

    def step(self, x, state):
        """x (N, F), state (1, N, H) -> h (N, H), the next state."""
        z = self.gate(x).sigmoid()
        h = (1 - z) * state[0] + z * self.candidate(x)
        return h, h.unsqueeze(0)

    def forward(self, x, state, final):
        """x (L, B, F), the state before them (1, B, H), final (L, B) -> h (L, B, H)."""
        z = self.gate(x).sigmoid()
        return scan(1 - z, z * self.candidate(x), state[0], final)


def use(script):
    driver.replace_memory(script, lambda args, *sizes: MinGRU(*sizes))
