"""Images: a CNN for every image of an observation, be it a Dict or a Tuple of images and vectors.

    python docs/recipes/use.py rppo_lstm images --env-id my_module:MyEnv-v0
    python docs/recipes/use.py rppo_continuous images --env-id CarRacing-v3 --grey --resize 64
    python docs/recipes/use.py trpo images --env-id my_module:MyEnv-v0 --image-stack 4

The scripts flatten an observation into one vector; this recipe takes it apart again. An image is an
entry with three axes, of bytes or of floats. A wrapper turns it grey, resizes it or stacks the
latest few, as you ask; then it gets the CNN of Mnih et al. 2015, or one of other sizes. The CNN's
features and all other numbers are what the script's own networks read; --image-layers puts layers
after each CNN, --vector-layers before the other numbers are read. Where the critic has a network of
its own, it has CNNs of its own. --norm-obs leaves pixels alone: bytes are divided by 255. A rollout
holds frames as float32, so mind --num-envs and --num-steps.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import use as driver
from gymnasium import spaces

LUMA = torch.tensor([0.299, 0.587, 0.114])  # of red, green, blue: ITU-R BT.601


def channels_first(shape, channels: str) -> tuple[bool, bool]:
    """Are an image's channels its first axis? And is that certain?"""
    if channels != "auto":
        return channels == "first", True
    first, last = shape[0] in (1, 3, 4), shape[2] in (1, 3, 4)
    if first != last:
        return first, True
    return shape[1] == shape[2] or shape[0] < shape[2], False  # likely: what's left is a square


class Frames(driver.Wrapper):
    """Flat observations (N, n) -> the space's entries in their order, each image with its channels
    first. `entries` has their shapes: (C, height, width), or (numbers,)."""

    def __init__(self, script, envs, args):
        super().__init__(envs)
        self.args = args
        space = envs.unwrapped.single_observation_space  # before it was flattened
        entries = getattr(space, "spaces", [space])  # of a Dict, a Tuple, or the only one
        self.parts = list(entries.values() if isinstance(space, spaces.Dict) else entries)
        self.sizes = [spaces.flatdim(part) for part in self.parts]
        self.images = [i for i, part in enumerate(self.parts) if len(part.shape or ()) == 3]
        self.first = {}
        for i in self.images:
            shape = self.parts[i].shape
            self.first[i], certain = channels_first(shape, args.channels)
            if not certain and not hasattr(script, "said_channels") and driver.is_first(script):
                script.said_channels = "first" if self.first[i] else "last"
                print(
                    f"images: {shape} has channels {script.said_channels}, unless --channels says no"
                )
        self.done = np.ones(1, bool)
        self.stacks = {}
        seen = self.look(np.zeros((1, sum(self.sizes)), np.float32))
        self.entries = [x.shape[1:] for x in seen]
        self.observe(sum(x.size for x in seen))

    def look(self, obs):
        """Flat observations (N, n) -> each entry's (N, C, height, width), or (N, numbers)."""
        pieces = np.split(np.float32(obs), np.cumsum(self.sizes)[:-1], 1)
        for i in self.images:
            images = torch.from_numpy(pieces[i].reshape(-1, *self.parts[i].shape))
            pieces[i] = self.change(images if self.first[i] else images.movedim(-1, 1), i).numpy()
        return pieces

    def change(self, x, entry: int):
        """One entry's images (N, C, height, width) -> the same, changed as the flags say."""
        if self.args.grey and x.shape[1] == 3:
            x = torch.einsum("nchw,c->nhw", x, LUMA)[:, None]
        if self.args.resize:
            x = nn.functional.interpolate(x, [self.args.resize] * 2, mode="area")
        first = x.repeat(1, self.args.image_stack, 1, 1)  # an episode's first image, repeated
        last = self.stacks.get((entry, len(x)), first)
        moved = torch.cat([last[:, x.shape[1] :], x], 1)  # the oldest first
        done = torch.from_numpy(self.done)[:, None, None, None]
        self.stacks[entry, len(x)] = torch.where(done, first, moved)
        return self.stacks[entry, len(x)]

    def transformed(self, obs):
        return np.hstack([x.reshape(len(x), -1) for x in self.look(obs)])

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.ones(self.num_envs, bool)
        obs = self.transformed(obs)
        self.done = np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        obs = self.transformed(obs)
        self.done = terminated | truncated  # the next observation is an episode's first
        return obs, rewards, terminated, truncated, info


class Eyes(nn.Module):
    """Flat observations (..., n): entries, then other numbers -> features (..., F)."""

    def __init__(self, script, envs, args):
        super().__init__()
        names = "channels", "kernels", "strides"
        sizes = [driver.numbers(script, f"--cnn-{x}", getattr(args, f"cnn_{x}")) for x in names]
        fits = len({len(numbers) for numbers in sizes}) == 1
        script.check(fits, "--cnn-channels, --cnn-kernels, --cnn-strides: must be equally many")
        self.entries, self.images = envs.entries, envs.images
        self.sizes = [torch.Size(shape).numel() for shape in self.entries]
        self.cnns, self.scales = nn.ModuleList(), []
        mlp = driver.recipe("networks").mlp
        for i in self.images:
            layers: list[nn.Module] = []
            for before, channels, kernel, stride in zip([self.entries[i][0], *sizes[0]], *sizes):
                convolution = nn.Conv2d(before, channels, kernel, stride)
                nn.init.orthogonal_(convolution.weight, 2**0.5)
                nn.init.zeros_(convolution.bias)
                layers += [convolution, nn.ReLU()]
            cnn = nn.Sequential(*layers, nn.Flatten())
            try:
                size = cnn(torch.zeros(1, *self.entries[i])).shape[1]
            except RuntimeError as error:  # a kernel is larger than what it is to read
                what = f"--cnn-kernels {args.cnn_kernels}: an image is too small"
                raise script.ArgumentError(f"{what}: {error}") from error
            self.cnns.append(cnn.extend(mlp(script, size, args.image_layers)[0]))
            bytes_ = envs.parts[i].dtype == np.uint8
            self.scales.append(args.pixel_scale or (255.0 if bytes_ else 1.0))
        self.others = [i for i in range(len(self.sizes)) if i not in self.images]
        size = sum(self.sizes[i] for i in self.others)
        script.check(size or args.vector_layers == "none", "--vector-layers: there are only images")
        self.vectors = nn.Sequential(*mlp(script, size, args.vector_layers)[0])
        self.features = self(torch.zeros(1, sum(self.sizes))).shape[1]

    def forward(self, obs):
        *parts, rest = obs.split([*self.sizes, obs.shape[-1] - sum(self.sizes)], -1)
        for i, cnn, scale in zip(self.images, self.cnns, self.scales):
            images = parts[i].reshape(-1, *self.entries[i]) / scale
            parts[i] = cnn(images).unflatten(0, obs.shape[:-1])
        if self.vectors:
            vector = torch.cat([parts[i] for i in self.others], -1)
            parts = [*(parts[i] for i in self.images), self.vectors(vector)]
        return torch.cat([*parts, rest], -1)


def use(script):
    script.check(script.kind != "rppo_gru_atari", "images: rppo_gru_atari has a CNN of its own")
    make_envs = script.make_envs

    @dataclass
    class Args(script.Args):
        norm_obs: bool = False  # normalise observations, except images
        channels: Literal["auto", "first", "last"] = "auto"  # the axis of an image's channels
        grey: bool = False  # turn RGB images grey
        resize: int = 0  # width and height of every image, in pixels; 0: unchanged
        image_stack: int = 1  # how many of the latest frames are an observation
        cnn_channels: str = "32,64,64"  # of each convolution
        cnn_kernels: str = "8,4,3"  # sides of their kernels
        cnn_strides: str = "4,2,1"  # pixels from one place of a kernel to the next
        image_layers: str = "none"  # units of layers after each CNN
        vector_layers: str = "none"  # units of layers that read what is no image
        pixel_scale: float | None = None  # pixels are divided by it; None: bytes by 255

    class ImageAgent(script.Agent):
        def __init__(self, envs, args):
            script.check(envs.images, "images: the observation has none, an entry with three axes")
            n = spaces.flatdim(envs.single_observation_space)
            eyes = Eyes(script, envs, args)
            more = n - sum(eyes.sizes)  # numbers that other recipes add
            seen = SimpleNamespace(single_action_space=envs.single_action_space)
            seen.single_observation_space = spaces.Box(-1, 1, (eyes.features + more,))
            super().__init__(seen, args)  # the script's networks, which read features
            self.encoder.insert(0, eyes)
            if hasattr(self, "critic_encoder"):
                self.critic_encoder.insert(0, Eyes(script, envs, args))
            elif script.kind == "trpo":
                self.critic.insert(0, Eyes(script, envs, args))
            self.obs_stats = script.RunningMeanStd((n,))
            pixels = [i in eyes.images for i, size in enumerate(eyes.sizes) for _ in range(size)]
            self.pixels = nn.Buffer(torch.tensor(pixels + more * [False]), persistent=False)

        def normalize(self, obs):
            normal = super().normalize(obs)
            return obs if normal is obs else torch.where(self.pixels, obs, normal)

    script.Args = Args
    script.Agent = ImageAgent
    script.make_envs = lambda args, *inputs, **options: Frames(
        script, make_envs(args, *inputs, **options), args
    )
