"""The images of an observation in grey, at another size, or the last few of them stacked.

    python docs/recipes/use.py rppo_lstm images --env-id my_module:MyEnv-v0 --grey --image-size 64

The recipe images has these flags, too, because it uses this one; without its CNN there is little to
be said for pixels. An image is an entry of uint8 with three axes; its channels may come last or
first. Afterwards observations are vectors (N, n) of float32: the space's entries in their order,
each image with its channels first, (C, height, width), then numbers that other recipes add.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import use as driver
from gymnasium import spaces

LUMA = torch.tensor([0.299, 0.587, 0.114])  # of red, green, blue: ITU-R BT.601


class Frames(driver.Wrapper):
    """entries are the shapes of what an observation holds: (C, height, width), or (numbers,)."""

    def __init__(self, envs, args):
        super().__init__(envs)
        self.args = args
        space = envs.unwrapped.single_observation_space  # before it was flattened
        entries = getattr(space, "spaces", [space])  # of a Dict, a Tuple, or the only one
        self.parts = list(entries.values() if isinstance(space, spaces.Dict) else entries)
        self.sizes = [spaces.flatdim(part) for part in self.parts]
        self.done = np.ones(1, bool)
        self.stacks = {}
        seen = self.look(np.zeros((1, sum(self.sizes))))
        self.entries = [x.shape[1:] for x in seen]
        self.observe(sum(x.size for x in seen))

    def look(self, obs):
        """Flat observations (N, n) -> each entry's (N, C, height, width), or (N, numbers)."""
        pieces = np.split(np.float32(obs), np.cumsum(self.sizes)[:-1], 1)
        for place, part in enumerate(self.parts):
            if part.dtype == np.uint8 and len(part.shape) == 3:
                images = torch.from_numpy(pieces[place].reshape(-1, *part.shape))
                pieces[place] = self.change(images, place).numpy()
        return pieces

    def change(self, x, place):
        """One entry's images (N, ...) -> (N, C, height, width)."""
        if x.shape[-1] < x.shape[1]:
            x = x.movedim(-1, 1)
        if self.args.grey and x.shape[1] == 3:
            x = torch.einsum("nchw,c->nhw", x, LUMA)[:, None]
        if self.args.image_size:
            x = nn.functional.interpolate(x, [self.args.image_size] * 2, mode="area")
        first = x.repeat(1, self.args.image_stack, 1, 1)  # an episode's first image, repeated
        last = self.stacks.get((place, len(x)), first)  # __init__ looks at one row
        moved = torch.cat([last[:, x.shape[1] :], x], 1)  # the oldest first
        done = torch.from_numpy(self.done)[:, None, None, None]
        self.stacks[place, len(x)] = torch.where(done, first, moved)
        return self.stacks[place, len(x)]

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.done = np.ones(self.num_envs, bool)
        obs = self.flat(obs)
        self.done = np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        obs = self.flat(obs)
        self.done = terminated | truncated  # the next observation is an episode's first
        return obs, rewards, terminated, truncated, info

    def flat(self, obs):
        return np.hstack([x.reshape(len(x), -1) for x in self.look(obs)])


def use(script):
    script.check(script.__name__ != "rppo_gru_atari", "image_frames: Atari's frames are 84 x 84")
    make_envs = script.make_envs

    @dataclass
    class Args(script.Args):
        grey: bool = False  # turn RGB images grey
        image_size: int = 0  # width and height of every image, in pixels; 0: unchanged
        image_stack: int = 1  # how many of the latest frames are an observation

    def make_frames(args, *inputs, **options):
        return Frames(make_envs(args, *inputs, **options), args)

    script.Args = Args
    script.FIXED = (*script.FIXED, "grey", "image_size", "image_stack")
    script.make_envs = make_frames


if __name__ == "__main__":
    driver.main("image_frames")
