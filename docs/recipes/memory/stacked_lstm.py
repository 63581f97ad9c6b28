"""Stacked layers: several memories, one on top of the other, or one of another kind.

    python docs/recipes/use.py rppo_lstm stacked_lstm --env-id CartPole-v1 --mask-velocity
    python docs/recipes/use.py rppo_continuous stacked_lstm --recurrent-layers gru,gru
    python docs/recipes/use.py rppo_gru_atari stacked_lstm --recurrent-layers lstm
    python docs/recipes/use.py rppo_lstm stacked_lstm --recurrent-layers min_gru,lstm

Each layer has --hidden-size units and reads the outputs of the one below it; actor and critic read
the last one's. The fused reset works for each layer by itself, since no loss reads what a layer
puts out at a final step.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import use as driver


class Stack(nn.Module):
    """Layers, whose states (rows, N, ...) are the rows of one, (1, N, numbers)."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.shapes = [layer.initial_state(1).movedim(1, 0)[0].shape for layer in layers]

    def pack(self, states):
        return torch.cat([state.movedim(1, 0).flatten(1) for state in states], 1).unsqueeze(0)

    def unpack(self, state):
        parts = state[0].split([shape.numel() for shape in self.shapes], 1)
        return [x.unflatten(1, shape).movedim(0, 1) for x, shape in zip(parts, self.shapes)]

    def initial_state(self, num_envs):
        return self.pack([layer.initial_state(num_envs) for layer in self.layers])

    def step(self, x, state):
        """x (N, F), state (1, N, numbers) -> h (N, H), the next state."""
        states = []
        for layer, before in zip(self.layers, self.unpack(state)):
            x, after = layer.step(x, before)
            states.append(after)
        return x, self.pack(states)

    def forward(self, x, state, final):
        """x (L, B, F), the state before them (1, B, numbers), final (L, B) -> h (L, B, H)."""
        for layer, before in zip(self.layers, self.unpack(state)):
            x = layer(x, before.contiguous(), final)
        return x


def use(script):
    script.check("feedforward" not in script.recipes, "stacked_lstm: not with feedforward")
    kinds = {
        "lstm": driver.fresh("rppo_lstm").ResetLSTM,
        "gru": driver.fresh("rppo_gru_atari").ResetGRU,
        "min_gru": driver.recipe("min_gru").MinGRU,
        "lru": driver.recipe("lru").LRU,
    }
    own = driver.memory_name(script)
    kinds[own] = getattr(script, f"Reset{own.upper()}")  # with what other recipes change in it

    @dataclass
    class Args(script.Args):
        recurrent_layers: str = "lstm,lstm"  # from the first to the last: lstm, gru, min_gru, lru

    def make(args, inputs, units):
        names = args.recurrent_layers.split(",")
        known = f"--recurrent-layers {args.recurrent_layers}: {', '.join(kinds)}, with commas"
        script.check({*names} <= {*kinds}, known)
        sizes = [inputs] + [units] * (len(names) - 1)
        return Stack([kinds[name](size, units) for name, size in zip(names, sizes)])

    script.Args = Args
    driver.replace_memory(script, make)
