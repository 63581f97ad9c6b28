"""Several recurrent layers, LSTMs or GRUs, each with the fused reset; or one of the other kind.

    python docs/recipes/stacked_lstm.py --env-id CartPole-v1 --mask-velocity
    python docs/recipes/stacked_lstm.py rppo_continuous --recurrent-layers gru,gru
    python docs/recipes/stacked_lstm.py rppo_gru_atari --recurrent-layers lstm

The layers' states lie side by side in the first row of the script's state, the last layer's h at
the end, which actor and critic read. A separate critic has as many layers of its own.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import use as driver

from rppo_gru_atari import ResetGRU
from rppo_lstm import ResetLSTM


class Stack(nn.Module):
    """In the place of a memory; its state is (rows, N, W), with c and h of an LSTM, h of a GRU."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rows = [2 if isinstance(layer.cell, nn.LSTMCell) else 1 for layer in layers]

    cell = property(lambda self: self.layers[0].cell)

    def unpack(self, state):
        """state (rows, N, W) -> each layer's own: (2, N, H) of an LSTM, (1, N, H) of a GRU."""
        H = self.cell.hidden_size
        parts = state[0].split([rows * H for rows in self.rows], -1)
        return [part.unflatten(-1, (-1, H)).movedim(-2, 0).flip(0) for part in parts]

    def step(self, x, state):
        """One step: x (N, F), state (rows, N, W) -> the next state."""
        parts = []
        for layer, before in zip(self.layers, self.unpack(state)):
            after = layer.step(x, before)
            x = after[0]
            parts.append(after.flip(0).movedim(0, -2).flatten(-2))
        return torch.cat([torch.cat(parts, -1).unsqueeze(0), state[1:]])

    def forward(self, x, state, final):
        """Sequences: x (L, B, F), the state before them (rows, B, W), final (L, B) -> h."""
        for layer, before in zip(self.layers, self.unpack(state)):
            x = layer(x, before, final)
        return x


def use(script):
    script.check("feedforward" not in driver.applied(script), "stacked_lstm: not with feedforward")
    memory = driver.memory_name(script)
    own = memory.removeprefix("Reset").lower()
    kinds = {"lstm": ResetLSTM, "gru": ResetGRU, own: getattr(script, memory)}

    @dataclass
    class Args(script.Args):
        recurrent_layers: str = "lstm,lstm"  # each lstm or gru, from the first to the last

    class StackedAgent(script.Agent):
        def __init__(self, envs, args):
            names = args.recurrent_layers.split(",")
            script.check({*names} <= {*kinds}, "--recurrent-layers: lstm and gru, with commas")
            lstm = getattr(args, "memory", "lstm") == "lstm"
            script.check(lstm, "stacked_lstm: needs --memory lstm")

            def stack(inputs, H):
                sizes = [inputs] + [H] * (len(names) - 1)
                return Stack([kinds[x](size, H) for x, size in zip(names, sizes)])

            setattr(script, memory, stack)
            self.width = sum(stack(1, 1).rows)  # of the state, in units of H
            super().__init__(envs, args)
            heads = [self.actor] if script.__name__ == "trpo" else [self.actor, self.critic]
            for head in heads:
                head.register_forward_pre_hook(lambda _, inputs: self.last(inputs[0]))

        def last(self, h):
            return h[..., -self.args.hidden_size :]

        def initial_state(self, num_envs):
            return super().initial_state(num_envs).repeat(1, 1, self.width)

        def step(self, *inputs):
            *outputs, state = super().step(*inputs)
            outputs = [self.last(x) if x.dim() == 2 else x for x in outputs]  # h, not a value
            return *outputs, state

    script.Args = Args
    script.FIXED = (*script.FIXED, "recurrent_layers")
    script.Agent = StackedAgent


if __name__ == "__main__":
    driver.main("stacked_lstm")
