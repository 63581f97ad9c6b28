"""LRU, the linear recurrent unit: complex numbers that turn and fade, replayed by a parallel scan.

    python docs/recipes/use.py rppo_lstm lru --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py rppo_continuous lru --env-id Pendulum-v1 --mask-velocity

Orvieto et al. 2023, arXiv:2303.06349. The memory is linear and has no gates; what it keeps doesn't
depend on what it reads:

    s[t] = lambda s[t-1] + gamma B x,  lambda = exp(-exp(nu) + i exp(theta)),
    gamma = sqrt(1 - |lambda|^2),      y = Re(C s[t]) + D x,  h = y sigmoid(W y)

All s are complex and of H units. The absolute value of lambda is below 1, so a state can't explode;
near 1 it fades slowly, and the angle of lambda tells how long ago something was seen. The gate at
the end is the only nonlinearity, as in state space models like S5. Resets go inside the scan: where
step t - 1 was final, lambda is 0 (Lu et al. 2023, arXiv:2303.03982). The recipe min_gru has that
scan.
"""

import math

import torch
import torch.nn as nn
import use as driver

SLOWEST, FASTEST = 0.999, 0.9  # the absolute values of lambda, at first
ANGLE = math.pi / 10  # the largest angle of lambda, at first


class LRU(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        F, H = input_size, hidden_size
        radius = torch.empty(H).uniform_(FASTEST**2, SLOWEST**2).sqrt()  # uniform on the ring
        angle = torch.empty(H).uniform_(0.001, ANGLE)
        self.nu = nn.Parameter((-radius.log()).log())
        self.theta = nn.Parameter(angle.log())
        self.B = nn.Parameter(torch.randn(2, H, F) / (2 * F) ** 0.5)  # real and imaginary parts
        self.C = nn.Parameter(torch.randn(2, H, H) / H**0.5)
        self.D = nn.Parameter(nn.init.orthogonal_(torch.empty(H, F)))
        self.gate = nn.Linear(H, H)

    def initial_state(self, num_envs):
        """Real and imaginary parts, (2, N, H)."""
        return self.nu.new_zeros(2, num_envs, len(self.nu))

    def coefficients(self, x):
        """x (..., F) -> lambda (H,), gamma B x (..., H), complex."""
        size = (-self.nu.exp()).exp()  # the absolute value of lambda
        angle = self.theta.exp()
        gamma = (1 - size**2).sqrt()
        real, imaginary = (x @ part.T * gamma for part in self.B)
        return torch.polar(size, angle), torch.complex(real, imaginary)

    def output(self, s, x):
        """s (..., H) complex, x (..., F) -> h (..., H)."""
        y = s.real @ self.C[0].T - s.imag @ self.C[1].T + x @ self.D.T
        return y * self.gate(y).sigmoid()

    def step(self, x, state):
        """x (N, F), state (2, N, H) -> h (N, H), the next state."""
        decay, driven = self.coefficients(x)
        s = decay * torch.complex(state[0], state[1]) + driven
        return self.output(s, x), torch.stack([s.real, s.imag])

    def forward(self, x, state, final):
        """x (L, B, F), the state before them (2, B, H), final (L, B) -> h (L, B, H)."""
        decay, driven = self.coefficients(x)
        before = torch.complex(state[0], state[1])
        s = driver.recipe("min_gru").scan(decay.expand_as(driven), driven, before, final)
        return self.output(s, x)


def use(script):
    driver.replace_memory(script, lambda args, *sizes: LRU(*sizes))
