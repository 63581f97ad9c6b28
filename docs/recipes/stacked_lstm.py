"""Two recurrent layers, each with the fused reset: LSTMs, GRUs, or one of each.

    python docs/recipes/stacked_lstm.py --env-id CartPole-v1 --mask-velocity  # and other flags

LAYERS says which. The state, (rows, N, H), is that of each layer in turn: h and c of an LSTM, h of
a GRU. Actor and critic read the last layer's h. A replay is the loop over both layers to 1e-12 in
float64, whatever ends in it.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm
from rppo_gru_atari import ResetGRU
from rppo_lstm import ResetLSTM

LAYERS: tuple = ResetLSTM, ResetLSTM  # ResetGRU, say, in the place of one


class Stack(nn.Module):
    """In the place of ResetLSTM; a layer is any module with its step and forward."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        sizes = [input_size] + [hidden_size] * (len(LAYERS) - 1)
        self.layers = nn.ModuleList(layer(size, hidden_size) for layer, size in zip(LAYERS, sizes))
        self.rows = [1 if layer is ResetGRU else 2 for layer in LAYERS]

    def step(self, x, state):
        """One step: x (N, F), state (rows, N, H) -> the next state."""
        states = []
        for layer, before in zip(self.layers, state.split(self.rows)):
            states.append(layer.step(x, before))
            x = states[-1][0]
        return torch.cat(states)

    def forward(self, x, state, final):
        """Sequences: x (L, B, F), the state before them (rows, B, H), final (L, B) -> h."""
        for layer, before in zip(self.layers, state.split(self.rows)):
            x = layer(x, before, final)
        return x


class StackedAgent(rppo_lstm.Agent):
    def __init__(self, envs, args):
        rppo_lstm.check(not args.separate_critic, "--separate-critic: not with these layers")
        super().__init__(envs, args)

    def initial_state(self, num_envs):
        rows = sum(self.lstm.rows)
        return self.actor.weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def step(self, obs, legal, state):
        state = self.lstm.step(self.encoder(obs), state)
        h = state[-self.lstm.rows[-1]]  # the last layer's
        logp, value = self.log_probs(h, legal), self.critic(h).squeeze(-1)
        return logp, value, torch.zeros_like(state) if self.args.ablate_memory else state

    def evaluate_actions(self, obs, legal, state, final, actions):
        h = self.lstm(self.encoder(obs), state, final)
        logp = self.log_probs(h, legal)
        logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        entropy = -(logp.exp() * logp).sum((-2, -1))
        return logprob, entropy, self.critic(h).squeeze(-1)


rppo_lstm.ResetLSTM, rppo_lstm.Agent = Stack, StackedAgent

if __name__ == "__main__":
    rppo_lstm.main()
