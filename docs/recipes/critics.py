"""What the critic reads: the actor's memory, one of its own, or none; and whose encoder.

    python docs/recipes/critics.py --critic memoryless
    python docs/recipes/critics.py rppo_continuous --critic separate --no-share-encoder

shared: the memory that the actor reads, which learns from both (the scripts' default). detached:
the same, but only the actor's loss trains it (shared_lstm of sb3-contrib). separate: a memory of
its own (enable_critic_lstm). memoryless: a linear layer in a memory's place (neither of the two).
trpo and ppo1_mpi share nothing, and have no such choice.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import use as driver
from feedforward import NoMemory


class Detach(nn.Module):
    """Passes numbers on, and no gradient back."""

    def forward(self, x):
        return x.detach()


class EncodedMemory(nn.Module):
    """A memory that reads what an encoder of its own makes of x."""

    def __init__(self, encoder, memory):
        super().__init__()
        self.encoder = encoder
        self.memory = memory

    def step(self, x, state):
        return self.memory.step(self.encoder(x), state)

    def forward(self, x, state, final):
        return self.memory(self.encoder(x), state, final)


def new_encoder(encoder):
    """A new encoder of the same layers, with weights of its own."""
    encoder = copy.deepcopy(encoder)
    for weight in encoder.parameters():
        if weight.dim() > 1:
            drawn = nn.init.orthogonal_(torch.empty(weight.shape), 2**0.5)
            weight.data.copy_(drawn)  # whose memory may be in another order, as the CNN's is
    return encoder


def use(script):
    recipes = driver.applied(script)
    if script.__name__ in ("trpo", "ppo1_mpi"):
        script.check("networks" in recipes, "critics: actor and critic share nothing here")
        return
    script.check("feedforward" not in recipes, "critics: not with feedforward")
    memory = driver.memory_name(script).removeprefix("Reset").lower()  # lstm or gru

    @dataclass
    class Args(script.Args):
        critic: Literal["shared", "detached", "separate", "memoryless"] = "shared"  # its memory
        share_encoder: bool = True  # actor and critic read one encoder

    class CriticAgent(script.Agent):
        def __init__(self, envs, args):
            known = "shared", "detached", "separate", "memoryless"
            script.check(args.critic in known, f"--critic {args.critic}: one of {', '.join(known)}")
            if args.critic in ("separate", "memoryless"):
                args.separate_critic = True
            super().__init__(envs, args)
            name = f"critic_{memory}"
            if args.critic == "memoryless":
                features = getattr(self, name).cell.input_size
                setattr(self, name, NoMemory(script.linear(features, args.hidden_size)))
            if args.critic == "detached":
                shared = not args.separate_critic
                script.check(shared, "--critic detached: not with --separate-critic")
                self.critic = nn.Sequential(Detach(), self.critic)
            if not args.share_encoder:
                script.check(args.separate_critic, "--no-share-encoder: needs --critic separate")
                encoder = new_encoder(self.encoder)
                setattr(self, name, EncodedMemory(encoder, getattr(self, name)))
                setattr(self, memory, EncodedMemory(self.encoder, getattr(self, memory)))
                self.encoder = nn.Identity()

    script.Args = Args
    script.FIXED = (*script.FIXED, "critic", "share_encoder")
    script.Agent = CriticAgent


if __name__ == "__main__":
    driver.main("critics")
