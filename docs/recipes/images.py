"""Images: a CNN for every image of an observation, be it a Dict or a Tuple of images and vectors.

    python docs/recipes/images.py rppo_lstm --env-id my_module:MyEnv-v0
    python docs/recipes/images.py rppo_continuous --env-id CarRacing-v3 --grey --image-size 64
    python docs/recipes/images.py trpo --env-id my_module:MyEnv-v0 --image-stack 4

The scripts flatten an observation into one vector; this recipe takes it apart again. Every uint8
image, channels last or first, gets the CNN of Mnih et al. 2015, or one of other sizes; its features
and all other numbers are what the script's own networks read. Where the critic has a network of its
own, it has CNNs of its own. Pixels are divided by 255 and not normalised: --norm-obs applies to the
other numbers. A rollout holds frames as float32, so mind --num-envs and --num-steps.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
import use as driver
from gymnasium import spaces


class Eyes(nn.Module):
    """Flat observations (..., n): entries, then other numbers -> features (..., F)."""

    def __init__(self, script, entries, args):
        super().__init__()
        names = "channels", "kernels", "strides"
        sizes = [driver.numbers(script, f"--cnn-{x}", getattr(args, f"cnn_{x}")) for x in names]
        fits = len({len(numbers) for numbers in sizes}) == 1
        script.check(fits, "--cnn-channels, --cnn-kernels, --cnn-strides: must be equally many")
        self.divisor = args.pixel_scale
        self.entries = entries
        self.sizes = [torch.Size(shape).numel() for shape in entries]
        self.cnns = nn.ModuleList()
        for shape in entries:
            if len(shape) == 3:
                layers: list[nn.Module] = []
                for before, channels, kernel, stride in zip([shape[0], *sizes[0]], *sizes):
                    convolution = nn.Conv2d(before, channels, kernel, stride)
                    nn.init.orthogonal_(convolution.weight, 2**0.5)
                    nn.init.zeros_(convolution.bias)
                    layers += [convolution, nn.ReLU()]
                self.cnns.append(nn.Sequential(*layers, nn.Flatten()))
        try:
            self.features = self(torch.zeros(1, sum(self.sizes))).shape[1]
        except RuntimeError as error:  # a kernel is larger than what it is to read
            raise script.ArgumentError(f"--env-id: an image is too small: {error}") from error

    def forward(self, obs):
        *parts, rest = obs.split([*self.sizes, obs.shape[-1] - sum(self.sizes)], -1)
        cnns = iter(self.cnns)
        features = []
        for x, shape in zip(parts, self.entries):
            if len(shape) == 3:
                x = next(cnns)(x.reshape(-1, *shape) / self.divisor).unflatten(0, obs.shape[:-1])
            features.append(x)
        return torch.cat([*features, rest], -1)


def use(script):
    script.check(script.__name__ != "rppo_gru_atari", "images: rppo_gru_atari has a CNN of its own")
    driver.add(script, "image_frames")

    @dataclass
    class Args(script.Args):
        norm_obs: bool = False  # normalise observations, except images
        cnn_channels: str = "32,64,64"  # of each convolution
        cnn_kernels: str = "8,4,3"  # sides of their kernels
        cnn_strides: str = "4,2,1"  # pixels from one place of a kernel to the next
        pixel_scale: float = 255.0  # pixels are divided by it; 1: they are from 0 to 1 already

    class ImageAgent(script.Agent):
        def __init__(self, envs, args):
            n = spaces.flatdim(envs.single_observation_space)
            eyes = Eyes(script, envs.entries, args)
            script.check(eyes.cnns or n < 1000, "images: no uint8 image with three axes")
            more = n - sum(eyes.sizes)  # numbers that other recipes add
            seen = SimpleNamespace(single_action_space=envs.single_action_space)
            seen.single_observation_space = spaces.Box(-1, 1, (eyes.features + more,))
            super().__init__(seen, args)  # the script's networks, which read features
            self.encoder.insert(0, eyes)
            if hasattr(self, "critic_encoder") and len(self.critic_encoder):
                self.critic_encoder.insert(0, Eyes(script, envs.entries, args))
            elif script.__name__ in ("trpo", "ppo1_mpi"):
                self.critic.insert(0, Eyes(script, envs.entries, args))
            self.obs_stats = script.RunningMeanStd((n,))
            pixels = [len(x) == 3 for x in eyes.entries for _ in range(torch.Size(x).numel())]
            self.pixels = nn.Buffer(torch.tensor(pixels + more * [False]), persistent=False)

        def normalize(self, obs):
            normal = super().normalize(obs)
            return obs if normal is obs else torch.where(self.pixels, obs, normal)

    script.Args = Args
    script.FIXED = (*script.FIXED, "cnn_channels", "cnn_kernels", "cnn_strides", "pixel_scale")
    script.Agent = ImageAgent
    driver.without_warning(script, "pixels become a long vector")


if __name__ == "__main__":
    driver.main("images")
