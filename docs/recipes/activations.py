"""Activations and initial weights: ReLU, ELU, GELU or SiLU instead of tanh; torch's initialisation.

    python docs/recipes/activations.py --activation relu --env-id CartPole-v1 --mask-velocity
    python docs/recipes/activations.py trpo --no-orthogonal

Every tanh between layers becomes another function; the gates of a memory do not change, nor does
the ReLU of a CNN. With --no-orthogonal linear and convolutional layers, the last ones included,
have torch's default initialisation. The recipe networks brings this one along.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn as nn
import use as driver

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU}


def use(script):
    @dataclass
    class Args(script.Args):
        activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = "tanh"  # of all layers
        orthogonal: bool = True  # initial weights are orthogonal; else torch's default

    class ActivatedAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            name = args.activation
            known = ", ".join(ACTIVATIONS)
            script.check(name in ACTIVATIONS, f"--activation {name}: one of {known}")
            for module in list(self.modules()):
                for part, layer in list(module.named_children()):
                    if isinstance(layer, nn.Tanh):
                        setattr(module, part, ACTIVATIONS[name]())
                if isinstance(module, (nn.Linear, nn.Conv2d)) and not args.orthogonal:
                    module.reset_parameters()

    script.Args = Args
    script.FIXED = (*script.FIXED, "activation")
    script.Agent = ActivatedAgent


if __name__ == "__main__":
    driver.main("activations")
