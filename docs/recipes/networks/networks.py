"""Layers, activations, and what the critic reads.

    python docs/recipes/use.py rppo_lstm networks --layers-before none --layers-after 64,64 \\
        --critic separate                                      # sb3-contrib's
    python docs/recipes/use.py rppo_lstm networks --layers-before none --layers-shared 64 \\
        --layers-after 64 --activation relu                    # recurrent-ppo-truncated-bptt's
    python docs/recipes/use.py trpo networks --layers-before 400,300 --no-orthogonal

A flag lists the units of each layer, separated by commas; "none" is no layer. Before the memory is
the encoder; after it are layers that actor and critic share, and then each one's own. The critic
has the actor's sizes unless its flags give others. --activation replaces every tanh between layers,
not the gates of a memory, nor the ReLU of a CNN.

--critic says whose memory the critic reads. shared: the actor's, which learns from both (the
scripts' default). detached: the actor's, but only the actor's loss trains it (shared_lstm of
sb3-contrib). separate: one of its own (enable_critic_lstm). memoryless: none, a linear layer
(neither of the two). With --no-share-encoder its encoder is its own, too. In trpo and ppo1_mpi
actor and critic share nothing: there --critic-layers-before has the sizes of the critic's encoder.
With gSDE the noise is a function of what the actor's last layer reads: the recipe sde comes along.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import use as driver

ACTIVATIONS = {
    "tanh": nn.Tanh, "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "gelu": nn.GELU,
    "silu": nn.SiLU,
}  # fmt: skip
DEPTHS = {"rppo_gru_atari": 0, "trpo": 2, "ppo1_mpi": 2}  # layers of a script's encoder; else 1


class Head(nn.Sequential):
    """Layers that end with a script's output layer, whose sizes and weight it shows as its own."""

    in_features = property(lambda self: self[-1].in_features)
    out_features = property(lambda self: self[-1].out_features)
    weight = property(lambda self: self[-1].weight)


class Part(nn.Module):
    """Some of the features, from `first` on; detached, if no gradient shall go back."""

    def __init__(self, first, size, detached=False):
        super().__init__()
        self.first, self.size, self.detached = first, size, detached

    def forward(self, x):
        part = x.narrow(-1, self.first, self.size)
        return part.detach() if self.detached else part


class Branch(nn.Module):
    """An encoder, then a memory, with a memory's methods."""

    def __init__(self, encoder, memory):
        super().__init__()
        self.encoder, self.memory = encoder, memory

    def initial_state(self, num_envs):
        return self.memory.initial_state(num_envs)

    def step(self, x, state):
        return self.memory.step(self.encoder(x), state)

    def forward(self, x, state, final):
        return self.memory(self.encoder(x), state, final)


class Branches(nn.Module):
    """The actor's memory and the critic's, whose outputs lie side by side, (..., 2 H)."""

    def __init__(self, actor, critic):
        super().__init__()
        stack = driver.recipe("stacked_lstm").Stack([actor, critic])
        self.actor, self.critic = actor, critic
        self.initial_state, self.pack, self.unpack = stack.initial_state, stack.pack, stack.unpack

    def step(self, x, state):
        actor_state, critic_state = self.unpack(state)
        h, actor_state = self.actor.step(x, actor_state)
        critic_h, critic_state = self.critic.step(x, critic_state)
        return torch.cat([h, critic_h], -1), self.pack([actor_state, critic_state])

    def forward(self, x, state, final):
        actor_state, critic_state = (part.contiguous() for part in self.unpack(state))
        h = self.actor(x, actor_state, final)
        return torch.cat([h, self.critic(x, critic_state, final)], -1)


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


def another(encoder):
    """A new encoder of the same layers, with weights of its own."""
    encoder = copy.deepcopy(encoder)
    for weight in encoder.parameters():
        if weight.dim() > 1:
            drawn = nn.init.orthogonal_(torch.empty(weight.shape), 2**0.5)
            weight.data.copy_(drawn)  # whose memory may be in another order, as the CNN's is
    return encoder


def use(script):
    shares = script.kind not in ("trpo", "ppo1_mpi")

    @dataclass
    class Layers(script.Args):
        layers_before: str | None = None  # units of the encoder's layers; None: the script's
        layers_after: str = "none"  # of each head's layers
        critic_layers_after: str | None = None  # of the critic's head; None: as the actor's
        activation: str = "tanh"  # of all layers: tanh, relu, leaky_relu, elu, gelu, silu
        orthogonal: bool = True  # initial weights are orthogonal; else torch's default

    @dataclass
    class Sharing(Layers):
        layers_shared: str = "none"  # units of layers after the memory that actor and critic share
        critic: Literal["shared", "detached", "separate", "memoryless"] = "shared"  # its memory
        share_encoder: bool = True  # actor and critic read one encoder

    @dataclass
    class Apart(Layers):
        critic_layers_before: str | None = None  # of the critic's encoder; None: as the actor's

    class Network(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            known = args.activation in ACTIVATIONS
            script.check(known, f"--activation {args.activation}: one of {', '.join(ACTIVATIONS)}")
            units = [str(getattr(args, "encoder_size", 0))] * DEPTHS.get(script.kind, 1)
            before = args.layers_before or ",".join(units) or "none"
            self.encoder, features = rebuilt(script, self.encoder, before)
            if shares:
                self.share(args, features)
            else:
                self.part(args, features, args.critic_layers_before or before)
            for module in list(self.modules()):
                for name, layer in list(module.named_children()):
                    if isinstance(layer, nn.Tanh):
                        setattr(module, name, ACTIVATIONS[args.activation]())
                if isinstance(module, (nn.Linear, nn.Conv2d)) and not args.orthogonal:
                    module.reset_parameters()

        def memory(self, features):
            name = f"Reset{driver.memory_name(script).upper()}"
            return getattr(script, name)(features, self.args.hidden_size)

        def share(self, args, features):
            """One memory, or two side by side, and two heads."""
            H = args.hidden_size
            own = args.critic in ("separate", "memoryless")
            script.check(args.share_encoder or own, "--no-share-encoder: needs --critic separate")
            memory = self.memory(features)
            if own:
                critic_memory = self.memory(features)
                if args.critic == "memoryless":
                    linear = script.linear(features, H)
                    critic_memory = driver.recipe("feedforward").NoMemory(linear)
                if not args.share_encoder:
                    critic_memory = Branch(another(self.encoder), critic_memory)
                    memory = Branch(self.encoder, memory)
                    self.encoder = nn.Identity()
                memory = Branches(memory, critic_memory)
            setattr(self, driver.memory_name(script), memory)
            shared, size = mlp(script, H, args.layers_shared)
            script.check(not (shared and own), "--layers-shared: not with a critic of its own")
            after, last = mlp(script, size, args.layers_after)
            outputs = self.actor.out_features
            self.actor = Head(Part(0, H), *shared, *after, script.linear(last, outputs, std=0.01))
            after, last = mlp(script, size, args.critic_layers_after or args.layers_after)
            seen = Part(H if own else 0, H, args.critic == "detached")
            self.critic = Head(seen, *shared, *after, script.linear(last, 1, std=1.0))

        def part(self, args, features, critic_before):
            """trpo's and ppo1_mpi's actor and critic, which share nothing."""
            size = critic_size = features
            if args.memory != "none":
                self.lstm = self.memory(features)
                size = critic_size = args.hidden_size
            if script.kind == "trpo":  # its critic reads observations
                critic, critic_size = rebuilt(script, self.critic, critic_before)
            else:
                self.critic_encoder, features = rebuilt(script, self.critic_encoder, critic_before)
                critic = []
                if args.memory != "none":
                    self.critic_lstm = self.memory(features)
                else:
                    critic_size = features
            after, last = mlp(script, size, args.layers_after)
            self.actor = Head(*after, script.linear(last, self.actor.out_features, std=0.01))
            after, last = mlp(script, critic_size, args.critic_layers_after or args.layers_after)
            self.critic = Head(*critic, *after, script.linear(last, 1, std=1.0))

    script.Args = Sharing if shares else Apart
    script.Agent = Network
    if script.kind == "rppo_continuous":
        driver.add(script, "sde")
