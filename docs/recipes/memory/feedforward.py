"""No memory: a layer without a state in the LSTM's place. Plain feed-forward PPO.

    python docs/recipes/use.py rppo_lstm feedforward --env-id CartPole-v1
    python docs/recipes/use.py rppo_continuous feedforward --env-id Pendulum-v1

Sequences mean nothing without a memory, so --seq-len is 1 and minibatches are of single steps.
--ablate-memory is another control: it keeps the LSTM and its weights, but not what it remembers.
"""

from dataclasses import dataclass

import torch.nn as nn
import use as driver


class NoMemory(nn.Module):
    """A layer in the place of a memory; its state is (1, N, 0)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def initial_state(self, num_envs):
        return next(self.parameters()).new_zeros(1, num_envs, 0)

    def step(self, x, state):
        return self.layer(x), state

    def forward(self, x, state, final):
        return self.layer(x)


def use(script):
    none = "feedforward: the script has no memory unless you say --memory lstm"
    script.check(not hasattr(script.Args, "memory"), none)

    @dataclass
    class Args(script.Args):
        seq_len: int = 1  # length of a sequence (L), which means nothing without a memory

    def make(args, inputs, units):
        return NoMemory(nn.Sequential(script.linear(inputs, units), nn.Tanh()))

    script.Args = Args
    if hasattr(script, "PRESETS"):
        script.PRESETS = {task: {**x, "seq_len": 1} for task, x in script.PRESETS.items()}
    driver.replace_memory(script, make)
