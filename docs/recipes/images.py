"""Images: a CNN encoder, also for a Dict or a Tuple of images and vectors.

    python docs/recipes/images.py rppo_lstm --env-id my_module:MyEnv-v0  # and other flags
    python docs/recipes/images.py rppo_continuous --env-id CarRacing-v3  # pip install ".[box2d]"

The scripts flatten an observation into one vector; this encoder takes it apart again. The CNN of
Mnih et al. 2015 reads each image, uint8, channels last or first, 36 pixels a side at least; a
linear layer all else. The tests solve a Dict that needs both."""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from gymnasium import spaces

sys.path.append(str(Path(__file__).parent / "../.."))


class ImageCNN(nn.Module):
    """Images as vectors (..., h w c) or (..., c h w), from 0 to 255 -> features (..., F)."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.channels_last = shape, shape[-1] < shape[0]
        self.layers = nn.Sequential(
            nn.Conv2d(min(shape[0], shape[-1]), 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x):
        x = x.unflatten(-1, self.shape) / 255
        x = x.movedim(-1, -3) if self.channels_last else x
        return self.layers(x.flatten(0, -4)).unflatten(0, x.shape[:-3])


class Encoder(nn.Module):
    """Flat observations (..., n) of these entries of a space -> features (..., size)."""

    def __init__(self, script, entries, size):
        super().__init__()
        self.sizes, self.parts = [spaces.flatdim(entry) for entry in entries], nn.ModuleList()
        for entry in entries:
            image = entry.dtype == np.uint8 and len(entry.shape) == 3
            fine = not image or sorted(entry.shape)[1] >= 36
            script.check(fine, f"--env-id: an image of {entry.shape} is too small")
            self.parts.append(ImageCNN(entry.shape) if image else nn.Identity())
        features = sum(part(torch.zeros(1, n)).shape[1] for part, n in zip(self.parts, self.sizes))
        self.layer = nn.Sequential(script.linear(features, size), nn.Tanh())

    def forward(self, obs):
        split = zip(self.parts, obs.split(self.sizes, -1))
        return self.layer(torch.cat([part(x) for part, x in split], -1))


def use(script):
    class ImageAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            space = envs.unwrapped.single_observation_space  # before it was flattened
            entries = list(space) if isinstance(space, spaces.Tuple) else [space]
            entries = list(space.values()) if isinstance(space, spaces.Dict) else entries
            self.encoder = Encoder(script, entries, args.encoder_size)

    script.Agent = ImageAgent


if __name__ == "__main__":
    if sys.argv[1:2] not in (["rppo_lstm"], ["rppo_continuous"]):
        print("error: say rppo_lstm or rppo_continuous, then its flags", file=sys.stderr)
        sys.exit(2)
    script = importlib.import_module(sys.argv[1])
    use(script)
    old = {"--resume", "--play"} & {flag.split("=")[0] for flag in sys.argv}
    plain = [] if old or sys.argv[1] == "rppo_lstm" else ["--no-norm-obs"]  # pixels need none
    sys.argv[:2] = [" ".join(sys.argv[:2]), *plain]
    script.main()
