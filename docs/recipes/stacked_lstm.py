"""Two LSTM layers, each with the fused reset: a ResetLSTM of ResetLSTMs.

    python docs/recipes/stacked_lstm.py --env-id CartPole-v1 --mask-velocity  # and other flags

Its state (2 LAYERS, N, H) is h and c of each layer in turn; actor and critic read the last
layer's h, row -2.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import rppo_lstm

LAYERS = 2


class StackedLSTM(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        sizes = [input_size] + [hidden_size] * (LAYERS - 1)
        self.layers = nn.ModuleList(ResetLSTM(size, hidden_size) for size in sizes)

    def step(self, x, state):
        """One step: x (N, F), state (2 LAYERS, N, H) -> the next state."""
        states = []
        for layer, before in zip(self.layers, state.split(2)):
            states.append(layer.step(x, before))
            x = states[-1][0]
        return torch.cat(states)

    def forward(self, x, state, final):
        """Sequences: x (L, B, F), the state before them (2 LAYERS, B, H), final (L, B) -> h."""
        for layer, before in zip(self.layers, state.split(2)):
            x = layer(x, before, final)
        return x


class StackedAgent(rppo_lstm.Agent):
    def initial_state(self, num_envs):
        return super().initial_state(num_envs).repeat(LAYERS, 1, 1)

    def step(self, obs, legal, state):
        x = self.encoder(obs)
        next_state = self.lstm.step(x, state)
        h = next_state[-2]
        return self.log_probs(h, legal), self.critic(h).squeeze(-1), next_state

    def evaluate_actions(self, obs, legal, state, final, actions):
        h = self.lstm(self.encoder(obs), state, final)
        logp = self.log_probs(h, legal)
        logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        entropy = -(logp.exp() * logp).sum((-2, -1))
        return logprob, entropy, self.critic(h).squeeze(-1)


ResetLSTM = rppo_lstm.ResetLSTM
rppo_lstm.ResetLSTM, rppo_lstm.Agent = StackedLSTM, StackedAgent

if __name__ == "__main__":
    rppo_lstm.main()
