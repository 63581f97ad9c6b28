"""MiniGrid-Memory: remember an object, walk down a corridor, turn to the same one at its end.

    python docs/recipes/use.py rppo_lstm minigrid_memory  # S9; pip install ".[minigrid]"
    python docs/recipes/use.py rppo_lstm minigrid_memory --env-id MemoryS13-v0  # and others
    python docs/recipes/use.py rppo_lstm minigrid_memory,images  # 84 x 84 pixels, as the original
    python docs/recipes/use.py rppo_lstm minigrid_memory,envpool_tasks  # the same task in C++
    python docs/recipes/use.py rppo_lstm minigrid_memory --ablate-memory  # the control
    python docs/recipes/use.py --play runs/RUN  # to watch the agent
    python docs/recipes/use.py --play runs/RUN --env-id MemoryS17Random-v0  # in a larger maze

As in Pleines et al. (recurrent-ppo-truncated-bptt), the agent sees 3 x 3 cells, and turns left,
turns right or walks. Which way is right is the exclusive or of what it saw and what it
sees now, so neither helps alone: returns stay at chance for hundreds of thousands of steps. Three
things shorten the wait. Forget gates begin nearly open, with a bias of FORGET. A cell's kind sets
one of five inputs to SCALE, and its colour is left out; that also makes the task easier than the
original's pixels. And in rppo_lstm there are many gradient steps, each on two environments, at a
high entropy coefficient.

With the recipe images the agent reads 84 x 84 pixels. The CNN is not trained here, for at this
learning rate its units soon saturate. Each of 16 random kernels covers a cell. Their means are
zero, so that a cell of one colour, such as a wall, gives next to nothing. Their weights are GAIN
times as large as that recipe's, so that a key and a ball differ even more than their symbols do.
"""

from dataclasses import dataclass, replace

import gymnasium as gym
import numpy as np
import torch.nn as nn
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import TransformAction, TransformObservation

FORGET = 2.0  # the bias of forget gates, where a script has 1
SCALE = 3.0  # the value of the input that tells a cell's kind
GAIN = 16.0  # how much larger a kernel's weights are than in the recipe images
KINDS = 0, 1, 2, 5, 6  # unseen, empty, wall, key, ball: MiniGrid's numbers
TABLE = SCALE * np.eye(11, dtype=np.float32)[:, KINDS]


def make(size: str, pixels: bool = False, render_mode=None):
    """The environment; observations are a one-hot vector for each of 9 cells, or pixels."""
    try:
        from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper
    except ModuleNotFoundError as error:
        raise gym.error.DependencyNotInstalled(f'{error}; pip install ".[minigrid]"') from error
    name = f"MiniGrid-MemoryS{size}-v0"
    env = gym.make(name, render_mode=render_mode, agent_view_size=3, disable_env_checker=True)
    if pixels:  # 3 cells of 28 pixels a side
        env = ImgObsWrapper(RGBImgPartialObsWrapper(env, tile_size=28))
    else:
        env = TransformObservation(
            env, lambda obs: TABLE[obs["image"][..., 0]].ravel(), spaces.Box(0, SCALE, (45,))
        )
    return TransformAction(env, lambda action: action, spaces.Discrete(3))


class Cells(gym.vector.VectorWrapper):
    """EnvPool's MiniGrid, cut to what `make` shows. Its view is 7 x 7, so that now and then the agent
    sees a wall that with 3 x 3 is hidden from it."""

    def __init__(self, envs):
        super().__init__(envs)
        self.single_observation_space = spaces.Box(0, SCALE, (45,))
        self.observation_space = batch_space(self.single_observation_space, envs.num_envs)
        self.single_action_space = spaces.Discrete(3)
        self.action_space = batch_space(self.single_action_space, envs.num_envs)

    def cut(self, obs):
        return TABLE[obs["image"][:, 2:5, 4:, 0]].reshape(self.num_envs, -1)

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return self.cut(obs), info

    def step(self, actions):
        obs, *others = self.env.step(actions)
        return self.cut(obs), *others


SIZES = "7", "9", "11", "13", "13Random", "17Random"
for size in SIZES:
    for kind in "", "Pixels":
        name = f"MemoryS{size}{kind}-v0"
        gym.register(name, make, disable_env_checker=True,
                     kwargs={"size": size, "pixels": kind == "Pixels"})  # fmt: skip


def use(script):
    fits = script.kind in ("rppo_lstm", "trpo", "ppo1_mpi")
    script.check(fits, "minigrid_memory: works only with rppo_lstm, trpo and ppo1_mpi")
    pixels, pool = "images" in script.recipes, "envpool_tasks" in script.recipes
    script.check(not (pixels and pool), "minigrid_memory: EnvPool has no pixels")
    make_envs = script.make_envs
    if pool:
        make_vec = script.gym.make_vec

        def make_cells(env_id, num_envs, mode=None, **options):
            if "render_mode" in options:
                return make_vec(env_id, num_envs, mode, **options)
            return Cells(make_vec(f"MiniGrid-{env_id}", num_envs, **options))

        script.gym.make_vec = make_cells

    class GridAgent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    weight = module.weight.detach()
                    del module.weight, module.bias  # no parameters, so not trained
                    module.weight = nn.Buffer(GAIN * (weight - weight.mean((1, 2, 3), True)))
                    module.bias = None

    class OpenLSTM(script.ResetLSTM):
        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            nn.init.constant_(self.cell.bias_ih.detach().chunk(4)[1], FORGET)  # gates i, f, g, o

    @dataclass
    class Args(script.Args):
        env_id: str = "MemoryS9-v0"  # one of the recipe's, or another
        norm_obs: bool = False  # normalise observations

    @dataclass
    class Kernels(Args):
        cnn_channels: str = "16"  # of each convolution
        cnn_kernels: str = "28"  # sides of their kernels: a cell
        cnn_strides: str = "28"  # pixels from one place of a kernel to the next

    script.Args = Kernels if pixels else Args

    @dataclass
    class Rates(script.Args):  # many gradient steps, each on two environments, at a high entropy
        total_timesteps: int = 1_500_000  # environment steps to train for
        num_envs: int = 16  # parallel environments (N)
        num_steps: int = 128  # time steps of a rollout (T)
        num_minibatches: int = 8  # minibatches in an epoch, each of whole sequences
        learning_rate: float = 1e-3  # Adam's, at first
        ent_coef: float = 0.03  # weight of the entropy bonus

    def make_grids(args, *inputs, **options):
        if pixels:
            args = replace(args, env_id=args.env_id.replace("-v0", "Pixels-v0"))
        return make_envs(args, *inputs, **options)

    if script.kind == "rppo_lstm":
        script.Args = Rates
    else:
        presets = {(f"MemoryS{size}-v0", False): dict(memory="lstm") for size in SIZES}
        script.PRESETS = {**script.PRESETS, **presets}
    script.Agent = GridAgent
    script.ResetLSTM = OpenLSTM
    script.make_envs = make_grids
