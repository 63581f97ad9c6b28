"""No memory, but the last 4 observations: instead of an LSTM where little is to be remembered.

    python docs/recipes/frame_stack.py --env-id CartPole-v1 --mask-velocity  # rppo_lstm.py's flags
    python docs/recipes/frame_stack.py rppo_continuous --env-id Pendulum-v1 --mask-velocity

A layer without a state takes the LSTM's place; it reads FRAMES observations at once, an episode's
first one repeated. Sequences have no meaning then: --seq-len is 1, so that minibatches are of
single steps. Measured: masked CartPole after 100,000 steps, 100 deterministic episodes for each of
seeds 1 to 5: 392, 499, 462, 479 and 497 (with the LSTM 500 on each).
"""

import importlib
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.vector.utils import batch_space

sys.path.append(str(Path(__file__).parent / "../.."))
name = sys.argv.pop(1) if sys.argv[1:2] == ["rppo_continuous"] else "rppo_lstm"
script = importlib.import_module(name)
FRAMES = 4


class FrameStack(gym.vector.VectorWrapper):
    """Observations (N, n) become those of the last steps, (N, FRAMES n), the oldest first."""

    def __init__(self, envs):
        super().__init__(envs)
        self.return_queue, self.length_queue = envs.return_queue, envs.length_queue
        space = envs.single_observation_space
        low, high = np.tile(space.low, FRAMES), np.tile(space.high, FRAMES)
        self.single_observation_space = gym.spaces.Box(low, high, dtype=space.dtype)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.frames = np.repeat(obs[:, None], FRAMES, 1)  # (N, FRAMES, n)
        self.done = np.zeros(self.num_envs, bool)
        return self.frames.reshape(self.num_envs, -1), info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.frames = np.concatenate([self.frames[:, 1:], obs[:, None]], 1)
        self.frames[self.done] = obs[self.done, None]  # a new episode's first
        self.done = terminated | truncated
        return self.frames.reshape(self.num_envs, -1), rewards, terminated, truncated, info


class Feedforward(nn.Module):
    """In the place of ResetLSTM. Its state is what an LSTM's would be in shape, and not read."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.layer = nn.Sequential(script.linear(input_size, hidden_size), nn.Tanh())

    def step(self, x, state):
        return torch.stack([self.layer(x), state[1]])

    def forward(self, x, state, final):
        return self.layer(x)


def make_envs(*args):
    return FrameStack(make_single_envs(*args))


make_single_envs = script.make_envs
script.make_envs, script.ResetLSTM = make_envs, Feedforward

if __name__ == "__main__":
    sys.argv[0] += f" {name}" * (name != "rppo_lstm")  # the command that goes on after Ctrl-C
    if not {"--resume", "--play"} & {flag.split("=")[0] for flag in sys.argv}:
        sys.argv[1:1] = ["--seq-len", "1"]
    script.main()
