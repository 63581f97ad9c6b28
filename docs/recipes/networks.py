"""Layers: how many, and how wide, before and after the memory.

    python docs/recipes/networks.py --layers-before none --layers-after 64,64     # sb3-contrib's
    python docs/recipes/networks.py --layers-before none --layers-shared 64 --layers-after 64 \\
        --activation relu                                   # recurrent-ppo-truncated-bptt's
    python docs/recipes/networks.py trpo --layers-before 400,300 --no-orthogonal

A flag lists the units of each layer, separated by commas; "none" is no layer. Before the memory is
the encoder; after it are layers that actor and critic share, and then each one's own. The critic's
head has the actor's sizes unless --critic-layers-after gives others. In trpo and ppo1_mpi, whose
critic is a network of its own, --critic-layers-before does the same for its encoder.
Two recipes come along: activations, with --activation and --no-orthogonal, and critics, whose flags
say what a critic reads.
"""

from dataclasses import dataclass

import torch.nn as nn
import use as driver

DEPTHS = {"rppo_gru_atari": 0, "trpo": 2, "ppo1_mpi": 2}  # layers of a script's encoder; else 1


class Head(nn.Sequential):
    """Hidden layers, then a script's output layer, whose sizes and weight it shows as its own."""

    def __init__(self, inputs, layers, last):
        super().__init__(*layers, last)
        self.in_features = inputs
        self.out_features = last.out_features

    weight = property(lambda self: self[-1].weight)


def mlp(script, inputs: int, flag: str):
    """Layers of the sizes that a flag has -> a list of modules, and the size of the last."""
    layers: list[nn.Module] = []
    sizes = [] if flag == "none" else driver.numbers(script, "layers", flag)
    for size in sizes:
        layers += [script.linear(inputs, size), nn.Tanh()]
        inputs = size
    return layers, inputs


def rebuilt(script, old, flag: str):
    """The same, in place of an old network's linear layers. Atari's CNN has 512 features."""
    parts = old if isinstance(old, nn.Sequential) else [old]
    kept = [layer for layer in parts if not isinstance(layer, (nn.Linear, nn.Tanh))]
    inputs = next((layer.in_features for layer in parts if isinstance(layer, nn.Linear)), 512)
    layers, size = mlp(script, inputs, flag)
    return nn.Sequential(*kept, *layers), size


def use(script):
    @dataclass
    class Args(script.Args):
        layers_before: str | None = None  # units of the encoder's layers; None: the script's
        layers_shared: str = "none"  # of layers after the memory that actor and critic share
        layers_after: str = "none"  # of each head's layers
        critic_layers_before: str | None = None  # of the critic's encoder; None: as the actor's
        critic_layers_after: str | None = None  # of the critic's head; None: as the actor's

    class Network(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            units = [str(getattr(args, "encoder_size", 0))] * DEPTHS.get(script.__name__, 1)
            before = args.layers_before or ",".join(units) or "none"
            critic_before = args.critic_layers_before or before
            fits = args.critic_layers_before is None or hasattr(args, "memory")
            script.check(fits, "--critic-layers-before: only in trpo and ppo1_mpi")
            self.encoder, features = rebuilt(script, self.encoder, before)
            critic_features = features
            if hasattr(self, "critic_encoder"):
                encoder, critic_features = rebuilt(script, self.critic_encoder, critic_before)
                self.critic_encoder = encoder
            memories = driver.memories(self)
            for name in memories:
                size = critic_features if name.startswith("critic") else features
                memory = getattr(script, driver.memory_name(script))
                setattr(self, name, memory(size, args.hidden_size))
            h = args.hidden_size if memories else features
            shared, size = mlp(script, h, args.layers_shared)
            after, last = mlp(script, size, args.layers_after)
            actor = script.linear(last, self.actor.out_features, std=0.01)
            self.actor = Head(h, [*shared, *after], actor)
            if hasattr(args, "memory"):  # trpo, ppo1_mpi
                script.check(not shared, "--layers-shared: actor and critic share nothing here")
                size = critic_features if not memories else h
            if isinstance(self.critic, nn.Sequential):  # trpo's, which reads observations
                shared, size = rebuilt(script, self.critic, critic_before)
            after, last = mlp(script, size, args.critic_layers_after or args.layers_after)
            self.critic = Head(size, [*shared, *after], script.linear(last, 1, std=1.0))

    script.Args = Args
    script.FIXED = (*script.FIXED, *Args.__annotations__)  # all five
    script.Agent = Network
    if "feedforward" not in driver.applied(script):
        driver.add(script, "critics")
    driver.add(script, "activations")


if __name__ == "__main__":
    driver.main("networks")
