"""No memory at all: a layer without a state in the LSTM's place. Plain feed-forward PPO.

    python docs/recipes/feedforward.py --env-id CartPole-v1
    python docs/recipes/feedforward.py rppo_continuous --env-id Pendulum-v1

Sequences have no meaning without a memory, so --seq-len is 1 and minibatches are of single steps.
--ablate-memory is another control: it keeps the LSTM and its weights, but not what it remembers.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import use as driver


class NoMemory(nn.Module):
    """In the place of a memory. The state has the shape of a memory's, and is not read."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def step(self, x, state):
        """x (N, F), state (rows, N, H or more) -> a state whose first row ends with h."""
        h = self.layer(x)
        h = nn.functional.pad(h, (state.shape[-1] - h.shape[-1], 0))
        return torch.cat([h.unsqueeze(0), state[1:]])

    def forward(self, x, state, final):
        return self.layer(x)


def use(script):
    none = "the script has no memory unless you say --memory lstm"
    script.check(not hasattr(script.Args, "memory"), f"feedforward: {none}")

    class Feedforward(NoMemory):
        def __init__(self, input_size, hidden_size):
            super().__init__(nn.Sequential(script.linear(input_size, hidden_size), nn.Tanh()))

    @dataclass
    class Args(script.Args):
        seq_len: int = 1  # length of a sequence (L), which has no meaning without a memory

    script.Args = Args
    if hasattr(script, "PRESETS"):
        script.PRESETS = {task: {**x, "seq_len": 1} for task, x in script.PRESETS.items()}
    setattr(script, driver.memory_name(script), Feedforward)


if __name__ == "__main__":
    driver.main("feedforward")
