# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9,<2.14", "gymnasium[classic-control]>=1.2", "tyro>=1.0", "tensorboard", "tqdm"]
# ///
"""Trust region policy optimisation, feed-forward or, with --memory lstm, recurrent.

    python trpo.py --env-id HalfCheetah-v5  # train; --help lists every flag and its default
    python trpo.py --env-id CartPole-v1 --mask-velocity --memory lstm
    python trpo.py --play runs/RUN          # watch it; --resume runs/RUN continues it

TRPO: Schulman et al. 2015, arXiv:1502.05477, eq. 14 and appendix C. GAE: Schulman et al. 2016,
arXiv:1506.02438. gSDE: Raffin et al. 2021, arXiv:2005.05719. Resets inside a sequence: see ResetLSTM.
From rppo_continuous.py it differs in the update, in a critic that shares no parameter with the policy, and in
taking every kind of action. Its defaults are sb3-contrib's, but the KL is joint: summed over components.

Rows. T = num_steps rows a rollout, N environments; rollout tensors are (T, N, ...). Gymnasium's vector
environments return the last observation of an episode as a row of its own: final[t] says that obs[t] is one.
Its action is ignored, it is no environment step, and no loss or statistic counts it; but its value, computed
with the state that the memory has there, bootstraps a truncated episode. After it the state is zero.
Shapes: B sequences of L rows, F features, H hidden units, S rows of rnn_state (h and c of each layer, none
without a memory), K action components of at most A choices each, P parameters of the policy, E features of
the policy's last layer.
"""
import io
import json
import math
import os
import signal
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium import spaces
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "trpo"
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2 or AVX512
    # On AMD's processors MKL takes 13 times as long for a tanh, 7 for an exp, unless it is told 5, AVX2.
    os.environ.setdefault("MKL_VML_DEBUG_CPU_TYPE", "5")
Dist = tuple[Tensor, ...]  # choices' log-probabilities (..., K, A); or a Gaussian's mean, deviation (..., K)
Policy = Callable[[Tensor], Dist]  # parameters (P,) -> distribution in every row of a rollout

@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id; CartPoleNoVel-v1 means --mask-velocity
    preset: Literal["auto", "none"] = "auto"  # auto: the environment's tuned defaults where PRESETS has them
    mask_velocity: bool = False  # set the velocities in observations to 0, so that memory is needed
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: its own vector version, else sync
    total_timesteps: int = 1_000_000  # environment steps to train for
    seed: int = 1  # of everything; the same on the same machine and thread count gives the same weights
    cuda: bool = False  # train on the GPU
    torch_threads: int = 0  # CPU threads; 0: one for vector observations, every core for images

    num_envs: int = 1  # parallel environments (N)
    num_steps: int = 2048  # rows of a rollout in each environment (T)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_obs: bool = True  # observed vectors less their running mean, over their deviation, clipped to +-10
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return, clip to +-10
    normalize_advantage: bool = True  # advantages of a rollout less their mean, over their deviation

    memory: Literal["none", "lstm"] = "none"  # lstm: the policy has a recurrent state
    encoder_sizes: tuple[int, ...] = (64, 64)  # layers of policy and critic; images: the Nature CNN
    hidden_size: int = 64  # units of an LSTM layer (H), behind the policy's encoder
    num_layers: int = 1  # LSTM layers
    activation: Literal["tanh", "relu"] = "tanh"  # of the encoders

    log_std_init: float = 0.0  # the policy's first log standard deviation, or that of gSDE's noise matrix
    squash_output: bool = False  # tanh of the action, rescaled to the bounds, instead of clipping to them
    use_sde: bool = False  # gSDE: noise that is a function of the features, the same for many steps
    sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for a rollout
    sde_full_std: bool = True  # a deviation for each feature and action; --no-sde-full-std: for each feature
    sde_expln: bool = False  # deviations grow as log(1 + x) + 1 and not exp(x) where x > 0

    target_kl: float = 0.01  # delta, the largest mean KL of the new policy from the old one
    cg_max_steps: int = 15  # steps of conjugate gradient
    cg_damping: float = 0.1  # added to the Fisher matrix's diagonal
    sub_sampling_factor: int = 1  # every k-th row, or with a memory environment, is in the Fisher matrix
    line_search_shrinking_factor: float = 0.8  # of the step, each time that the line search refuses it
    line_search_max_iter: int = 10  # steps that the line search tries
    learning_rate: float = 1e-3  # of the critic's Adam
    n_critic_updates: int = 10  # the critic's passes over a rollout
    batch_size: int = 128  # rows of the critic's minibatches

    runs_dir: str = "runs"  # where run directories are made
    run_name: str | None = None  # None: env_id__exp_name__seed__time
    exp_name: str = SCRIPT  # part of the run's name
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no network)
    wandb_project: str = "recurrent-ppo"  # its project
    wandb_entity: str | None = None  # its team
    checkpoint_every: int = 0  # iterations between checkpoints, which reset environments; 0: a tenth, >= 5
    eval_every: int = 0  # environment steps between evaluations; 0: one at the end
    eval_episodes: int = 0  # episodes of a deterministic evaluation; 0: none, but 10 if one is asked for
    resume: str | None = None  # run directory to go on with, bit for bit; other flags override the run's own
    init_from: str | None = None  # run directory or .pt file whose weights to start from
    play: str | None = None  # run directory or .pt file to watch instead of training
    capture_video: bool = False  # --play writes videos/*.mp4 beside the agent instead of opening a window

# After rl-baselines3-zoo. Its KL is a mean over the action's components and this one their sum: target_kl and
# cg_damping are its times their number. With its lambda of 0.95 Swimmer often stays in a gait worth 150; with
# its noise of deviation 1 Ant-v5, which unlike v3 charges for contacts, first learns to fall at once.
MUJOCO = {"num_envs": 2, "num_steps": 1024, "cg_max_steps": 25, "n_critic_updates": 20}
PRESETS: dict[str, dict[str, Any]] = {  # what an environment needs beside the defaults
    "CartPole-v1": {"total_timesteps": 100_000, "num_envs": 2, "num_steps": 512, "batch_size": 512,
                    "cg_damping": 1e-3, "gae_lambda": 0.98, "n_critic_updates": 20},
    "CartPoleNoVel-v1": {"memory": "lstm", "total_timesteps": 200_000, "num_envs": 8, "num_steps": 256,
                         "cg_damping": 0.01, "n_critic_updates": 20, "batch_size": 256},
    "Acrobot-v1": {"total_timesteps": 100_000, "num_envs": 2, "num_steps": 1024},
    "MountainCar-v0": {"total_timesteps": 100_000, "num_envs": 2, "num_steps": 1024, "n_critic_updates": 20},
    "Pendulum-v1": {"total_timesteps": 100_000, "num_envs": 2, "num_steps": 1024, "gamma": 0.9,
                    "n_critic_updates": 15, "use_sde": True, "sde_sample_freq": 4, "norm_obs": False,
                    "norm_reward": False},
    "MountainCarContinuous-v0": {"total_timesteps": 50_000, "num_envs": 2, "use_sde": True,
                                 "sde_sample_freq": 16},
    "LunarLander-v3": {"total_timesteps": 200_000, "num_envs": 4, "num_steps": 512, "cg_damping": 0.01,
                       "gae_lambda": 0.98, "n_critic_updates": 30, "norm_obs": False, "norm_reward": False},
    "LunarLanderContinuous-v3": {"total_timesteps": 200_000, "num_envs": 4, "num_steps": 512,
                                 "n_critic_updates": 20, "target_kl": 0.04, "cg_damping": 0.4,
                                 "gae_lambda": 0.98, "use_sde": True, "sde_sample_freq": 16,
                                 "log_std_init": -2.0},
    "BipedalWalker-v3": {**MUJOCO, "target_kl": 0.04, "cg_damping": 0.4},
    "HalfCheetah-v5": {**MUJOCO, "target_kl": 0.24, "cg_damping": 0.6},
    "Swimmer-v5": {**MUJOCO, "target_kl": 0.02, "cg_damping": 0.2, "gamma": 0.9999, "gae_lambda": 0.99},
    "Hopper-v5": {**MUJOCO, "target_kl": 0.03, "cg_damping": 0.3},
    "Walker2d-v5": {**MUJOCO, "target_kl": 0.06, "cg_damping": 0.6},
    "Ant-v5": {**MUJOCO, "target_kl": 0.08, "cg_damping": 0.8, "log_std_init": -2.0},
}  # fmt: skip
VELOCITIES = {  # the entries of observations that --mask-velocity hides
    "CartPole": [1, 3], "MountainCar": [1], "MountainCarContinuous": [1], "Pendulum": [2],
    "LunarLander": [2, 3, 5], "LunarLanderContinuous": [2, 3, 5],
}  # fmt: skip

class ArgumentError(ValueError):
    """A flag, file or environment that cannot be used, found before any work is done: exit code 2."""

class TrainingError(RuntimeError):
    """A run that cannot go on: exit code 1."""

# --- Environments -------------------------------------------------------------------------------------------

def make_env(args: Args, render_mode: str | None, video_dir: Path | None) -> gym.Env:
    """One environment, which RecordVideo films into video_dir if that is given."""
    env = gym.make(args.env_id, render_mode=render_mode)
    if video_dir is not None:
        env = gym.wrappers.RecordVideo(env, str(video_dir), episode_trigger=lambda _: True)
    return env

def make_envs(args: Args, num_envs: int, render_mode: str | None = None, video_dir: Path | None = None):
    """num_envs environments as one VectorEnv. Raises ArgumentError where the environment cannot be had."""
    try:
        for prefix, module in ("ALE/", "ale_py"), ("MiniGrid-", "minigrid"):
            if args.env_id.startswith(prefix):
                __import__(module)  # registers its environments
        spec = gym.registry.get(args.env_id)
        if args.vectorization == "auto" and render_mode is None and spec and spec.vector_entry_point:
            envs = gym.make_vec(args.env_id, num_envs=num_envs, vectorization_mode="vector_entry_point")
        else:
            vector = gym.vector.AsyncVectorEnv if args.vectorization == "async" else gym.vector.SyncVectorEnv
            envs = vector([lambda: make_env(args, render_mode, video_dir)] * num_envs, copy=False)
    except ModuleNotFoundError as error:
        package = str(error.name).replace("_", "-")
        raise ArgumentError(f"--env-id {args.env_id}: {package} is missing; pip install {package}") from error
    except Exception as error:  # Gymnasium's message names a near id, or a missing simulator's pip command
        raise ArgumentError(f"--env-id {args.env_id}: {' '.join(str(error).split())}") from error
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise ArgumentError(f"--env-id {args.env_id}: autoreset is not NEXT_STEP; try --vectorization sync")
    if args.mask_velocity:
        name = args.env_id.split("-")[0]
        if name not in VELOCITIES:
            raise ArgumentError(f"--mask-velocity: {name} is not one of {', '.join(VELOCITIES)}")
        visible = np.ones(envs.single_observation_space.shape or (), np.float32)
        visible[VELOCITIES[name]] = 0.0
        envs = gym.wrappers.vector.TransformObservation(envs, lambda obs: obs * visible)
    return envs

def attempt(where: str, call: Any, *inputs: Any, **options: Any) -> Any:
    """call(*inputs, **options) of an environment, whose exceptions become a TrainingError of one line."""
    try:
        return call(*inputs, **options)
    except Exception as error:
        raise TrainingError(f"the environment raised {error!r} in {where}") from error

def flatten_obs(space: Any, obs: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """N observations of any space -> vectors (N, n), choices as one-hot, and images (N, C, height, width)."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        children = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        parts = [flatten_obs(child, obs[key]) for key, child in children]
        return [v for vectors, _ in parts for v in vectors], [i for _, images in parts for i in images]
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        if len(space.shape) == 3 and sorted(space.shape)[1] >= 36:  # the CNN needs 36 pixels
            return [], [np.moveaxis(obs, -1, 1) if space.shape[-1] < space.shape[0] else obs]
        return [obs.reshape(len(obs), -1) / 255.0], []
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return [obs.reshape(len(obs), -1)], []
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        raise ArgumentError(f"--env-id: no script has an encoder for observations of {space}")
    columns = (obs - space.start).reshape(len(obs), -1).T
    sizes = space.nvec.ravel() if isinstance(space, spaces.MultiDiscrete) else [space.n]
    return [np.eye(n)[column] for n, column in zip(sizes, columns)], []

def preprocess(space: spaces.Space, obs: Any) -> list[np.ndarray]:
    """N observations of any space -> [vector (N, n), unless there are images only, and each image]."""
    vectors, images = flatten_obs(space, obs)
    return ([np.concatenate(vectors, 1, dtype=np.float32)] if vectors else []) + images

# --- Networks -----------------------------------------------------------------------------------------------

def init(layer: Any, std: float = 2**0.5) -> nn.Module:
    """Orthogonal weights and zero biases (Huang et al. 2022, "The 37 implementation details of PPO", 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer

def mlp(sizes: list[int], activation: str, num_outputs: int = 0, std: float = 1.0) -> nn.Sequential:
    """Layers of the given widths, an activation behind each; num_outputs adds a linear layer without one."""
    layers: list[nn.Module] = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [init(nn.Linear(a, b)), nn.ReLU() if activation == "relu" else nn.Tanh()]
    return nn.Sequential(*layers, *([init(nn.Linear(sizes[-1], num_outputs), std)] if num_outputs else []))

def nature_cnn(channels: int, height: int, width: int) -> nn.Sequential:
    """Images (M, C, height, width), scaled to [0, 1] -> features (M, 512) (Mnih et al. 2015)."""
    layers: list[nn.Module] = []
    for filters, kernel, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
        layers += [init(nn.Conv2d(channels, filters, kernel, stride)), nn.ReLU(inplace=True)]
        channels, height, width = filters, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten(), init(nn.Linear(channels * height * width, 512)), nn.ReLU())

class Encoder(nn.Module):
    """A vector (..., n) and images (..., C, height, width) -> features (..., F) of an MLP and CNNs."""

    def __init__(self, example: list[np.ndarray], sizes: tuple[int, ...], activation: str):
        super().__init__()
        widths = [example[0].shape[1], *sizes] if example[0].ndim == 2 else []
        self.mlp = mlp(widths, activation) if widths else None
        self.cnns = nn.ModuleList(nature_cnn(*image.shape[1:]) for image in example if image.ndim == 4)
        self.num_features = sum(widths[-1:]) + 512 * len(self.cnns)

    def forward(self, obs: list[Tensor]) -> Tensor:
        features = [self.mlp(obs[0])] if self.mlp is not None else []
        for cnn, image in zip(self.cnns, obs[len(features) :]):
            features.append(cnn(image.flatten(0, -4) / 255.0).unflatten(0, image.shape[:-3]))
        return torch.cat(features, -1) if len(features) > 1 else features[0]

class ResetLSTM(nn.Module):
    """LSTM layers whose state is zero after every *final* row, replayed in one fused call a layer.

    No loss uses a final row's output, so on replay the row is free to be the reset itself: its features are
    zeroed, and one more input feature, -C, shuts the input, forget and output gates. sigmoid(-C) is exactly
    0, so c = 0 and h = 0 exactly, and no gradient crosses. That feature's weights (1 for the gates, 0 for the
    candidate) are a constant, joined to the learned ones for the call. rnn_state (S, N, H) is h and c of each
    layer in turn.
    """
    C = 1e4
    token_weight: Tensor

    def __init__(self, input_size: int, hidden_size: int, num_layers: int):
        super().__init__()
        self.state_rows, sizes = 2 * num_layers, [input_size] + [hidden_size] * num_layers
        self.cells: Any = nn.ModuleList(nn.LSTMCell(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        gates = torch.tensor([1.0, 1.0, 0.0, 1.0]).repeat_interleave(hidden_size)  # i, f, g, o
        self.register_buffer("token_weight", gates[:, None], persistent=False)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One row, its observation as it is: x (N, F), state (S, N, H) -> output (N, H), next state."""
        states, before = [], state.unbind()
        for cell, h, c in zip(self.cells, before[0::2], before[1::2]):
            x, c = torch.lstm_cell(x, (h, c), cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            states += [x, c]
        return x, torch.stack(states)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), state (S, B, H) before the first row, final (L, B) -> outputs (L, B, H)."""
        alive = (~final).unsqueeze(-1).to(x.dtype)
        token = self.C * (alive - 1)
        for cell, h, c in zip(self.cells, state[0::2], state[1::2]):
            weight_ih, *others = cell.parameters()
            weights = [torch.cat([weight_ih, self.token_weight], 1), *others]  # the first one is (4 H, F + 1)
            x = torch.cat([x * alive, token], -1)  # (L, B, F + 1)
            x = torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, self.training, False, False)[0]
        return x

class Agent(nn.Module):
    """Policy, critic, and the statistics that belong to them; they share no parameter.

    Its obs are what observe returns, as tensors, not normalised yet. Actions (..., K) count from 0, or are
    a Gaussian's own samples: to_env clips or squashes them, and their density stays the Gaussian's.
    """
    ILLEGAL = -1e9  # a logit of probability exactly 0, whose entropy term is 0 and not nan as that of -inf
    noise = torch.empty(0)  # gSDE's matrices (N, E, K), one for each environment
    missing: Tensor
    actor: Any

    def __init__(self, observation_space: spaces.Space, action_space: Any, args: Args):
        super().__init__()
        self.observation_space, self.action_space, self.args = observation_space, action_space, args
        self.binary = isinstance(action_space, spaces.MultiBinary)
        self.box = isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)
        discrete = isinstance(action_space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
        if not (self.box or discrete):
            raise ArgumentError(f"--env-id {args.env_id}: its actions are {action_space}; unsupported")
        if self.box:
            self.low, self.high = action_space.low.ravel(), action_space.high.ravel()  # (K,)
            choices = np.ones(self.low.size, int)
        elif isinstance(action_space, spaces.Discrete):
            choices = np.array([action_space.n])
        elif isinstance(action_space, spaces.MultiDiscrete):
            choices = action_space.nvec.ravel()
        else:
            choices = np.full(action_space.shape, 2).ravel()
        for flag in ("squash_output", "use_sde"):
            if getattr(args, flag) and not (self.box and (flag == "use_sde" or action_space.is_bounded())):
                why = f"{args.env_id} has the actions {action_space}"
                raise ArgumentError(f"--{flag.replace('_', '-')} True: {why}")
        self.exists = np.arange(max(choices)) < choices[:, None]  # (K, A): a component may have fewer choices
        self.register_buffer("missing", torch.from_numpy(~self.exists), persistent=False)

        example = self.observe(gym.vector.utils.batch_space(observation_space).sample(), {})
        self.norm_obs = args.norm_obs and example[0].ndim == 2  # images are only scaled
        self.obs_stats = RunningMeanStd(example[0].shape[1:] if self.norm_obs else ())
        self.return_stats = RunningMeanStd(())
        self.encoder = Encoder(example, args.encoder_sizes, args.activation)
        width, self.memory = self.encoder.num_features, None
        if args.memory == "lstm":  # the critic reads what the policy remembers, too
            self.memory, width = ResetLSTM(width, args.hidden_size, args.num_layers), args.hidden_size
            example = self.join(example, np.zeros((len(example[0]), width), np.float32), np.concatenate)
        num_logits = len(choices) if self.box or self.binary else self.exists.size
        self.actor = mlp([width], args.activation, num_logits, std=0.01)
        if self.box:
            sde_shape = width, self.low.size if args.sde_full_std else 1  # (E, K or 1)
            shape = sde_shape if args.use_sde else self.low.shape
            self.log_std = nn.Parameter(torch.full(shape, args.log_std_init))
        self.vectors_only = args.memory == "none" and not len(self.encoder.cnns)
        self.critic_encoder = Encoder(example, args.encoder_sizes, args.activation)
        self.critic = mlp([self.critic_encoder.num_features], args.activation, 1)

    def observe(self, obs: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """N raw observations -> [vector, images], as far as there are any; info is not needed here."""
        return preprocess(self.observation_space, obs)

    def normalize_obs(self, obs: list[Tensor]) -> list[Tensor]:
        """obs, of which the vector is normalised by the running statistics."""
        if not self.norm_obs:
            return obs
        vector = (obs[0] - self.obs_stats.mean) / (self.obs_stats.var + 1e-8).sqrt()
        return [vector.clamp(-10, 10).to(self.actor[0].weight.dtype), *obs[1:]]

    def initial_state(self, num_envs: int) -> Tensor:
        """rnn_state (S, N, H) after a reset: zeros; without a memory it has no rows."""
        rows = 0 if self.memory is None else self.memory.state_rows
        return self.actor[0].weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def next_state(self, state: Tensor, final: Tensor) -> Tensor:
        """The state (S, N, H) that the next row starts from, where final (N,) says what this row was."""
        return state.where(~final[:, None], 0.0)

    @staticmethod
    def join(obs: list[Any], latent: Any, cat: Any) -> list[Any]:
        """obs with the policy's features (..., E) beside the vector, or as the vector if there is none."""
        vector = [x for x in obs if x.ndim == latent.ndim]
        return [cat([*vector, latent], -1), *obs[len(vector) :]]

    def value(self, obs: list[Tensor], latent: Tensor) -> Tensor:
        """The critic (...), of normalised obs and, if there is a memory, its output, without a gradient."""
        joined = obs if self.memory is None else self.join(obs, latent.detach(), torch.cat)
        return self.critic(self.critic_encoder(joined)).squeeze(-1)

    def latent(self, obs: list[Tensor], state: Tensor, final: Tensor) -> Tensor:
        """The policy's features (L, B, E) of sequences: normalised obs (L, B, ...), state (S, B, H) before
        the first row, final (L, B)."""
        features = self.encoder(obs)
        return features if self.memory is None else self.memory(features, state, final)

    def head(self, latent: Tensor) -> Dist:
        """The policy's features (..., E) -> distribution."""
        return self.distribution(latent, self.actor(latent))

    def distribution(self, latent: Tensor, logits: Tensor) -> Dist:
        """The policy's features (..., E) and the actor's outputs for them -> distribution."""
        if self.box:
            std = self.log_std.exp()
            if self.args.use_sde:  # with its gradient: the trust region is one of the whole distribution
                std = sde_deviation(latent, sde_sigma(self.log_std, self.args.sde_expln))
            return logits, std.expand_as(logits)
        if self.binary:  # Bernoulli(sigmoid(l)) is a choice between the logits 0 and l
            logits = F.pad(logits.unsqueeze(-1), (1, 0))
        else:
            logits = logits.unflatten(-1, self.exists.shape)
            logits = logits if self.exists.all() else logits.masked_fill(self.missing, self.ILLEGAL)
        return (logits.log_softmax(-1),)

    def forward(self, obs: list[Tensor], state: Tensor, final: Tensor) -> Dist:
        """The policy's distribution in every row of sequences, as latent takes them."""
        return self.head(self.latent(obs, state, final))

    def policy_parameters(self) -> dict[str, nn.Parameter]:
        """What the natural gradient moves: all but the critic's."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("critic")}

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Policy parameters as one vector (P,) -> by name, in their shapes."""
        parameters = self.policy_parameters()
        parts = theta.split([p.numel() for p in parameters.values()])
        return {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts)}

    def policy(self, theta: Tensor, obs: list[Tensor], state: Tensor, final: Tensor) -> Dist:
        """forward with the policy parameters theta (P,), which the agent does not take on."""
        return torch.func.functional_call(self, self.unflatten(theta), (obs, state, final))

    def recall(self, obs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """One row: obs (N, ...), state (S, N, H) -> the policy's features (N, E), next state."""
        latent = self.encoder(self.normalize_obs(obs))
        return (latent, state) if self.memory is None else self.memory.step(latent, state)

    def sample_noise(self, num_envs: int) -> None:
        """New gSDE matrices, whose entries are N(0, sigma): (N, E, K)."""
        sigma = sde_sigma(self.log_std.detach(), self.args.sde_expln)
        self.noise = torch.randn(num_envs, len(sigma), self.low.size, device=sigma.device) * sigma

    def sample(self, latent: Tensor, logits: Tensor) -> Tensor:
        """The policy's features (N, E) and the actor's outputs for them -> action (N, K)."""
        dist = self.distribution(latent, logits)
        if self.args.use_sde:
            if len(self.noise) != len(latent):
                self.sample_noise(len(latent))
            return dist[0] + (latent[:, None] @ self.noise)[:, 0]
        if self.box:
            return dist[0] + dist[1] * torch.randn_like(dist[0])
        race = torch.empty_like(dist[0]).exponential_()  # the argmax of p / Exp(1) has the distribution p
        return (dist[0].exp() / race).argmax(-1)

    def act(self, obs: list[Tensor], state: Tensor):
        """One row: obs (N, ...), state (S, N, H) -> action (N, K), logprob (N,), value (N,), next state."""
        latent, state = self.recall(obs, state)
        action = self.sample(latent, self.actor(latent))
        logprob = log_prob(self.head(latent), action, self.args.squash_output)
        return action, logprob, self.value(self.normalize_obs(obs), latent), state

    def get_value(self, obs: list[Tensor], state: Tensor) -> Tensor:
        """One row: obs (N, ...), state (S, N, H) -> value (N,)."""
        return self.value(self.normalize_obs(obs), self.recall(obs, state)[0])

    def evaluate_actions(self, obs: list[Tensor], state: Tensor, final: Tensor, action: Tensor):
        """Sequences: obs (L, B, ...), state (S, B, H) before the first row, final (L, B), action (L, B, K)
        -> logprob, entropy, value, all (L, B); on final rows they mean nothing."""
        obs = self.normalize_obs(obs)
        latent = self.latent(obs, state, final)
        dist = self.head(latent)
        logprob = log_prob(dist, action, self.args.squash_output)
        return logprob, -logprob if self.args.squash_output else entropy(dist), self.value(obs, latent)

    def to_env(self, action: Tensor) -> np.ndarray:
        """Actions (N, K) in the form that the environments take: within their bounds."""
        array, space = action.cpu().numpy(), self.action_space
        if self.args.squash_output:
            array = self.low + (np.tanh(array) + 1) / 2 * (self.high - self.low)
        array = array.clip(self.low, self.high) if self.box else array + getattr(space, "start", 0)
        return array.reshape(-1, *space.shape).astype(space.dtype, copy=False)

    @torch.inference_mode()
    def predict(self, obs: Any, state=None, episode_start=None, deterministic=False, info=None):
        """One observation of the environment or a batch of N -> (action, state), for use in any program.

        state is what the last call returned, None for zeros; it is zeroed first where episode_start (N,) is
        set. gSDE's noise is a new one at each call.
        """
        device, leaf, value = self.missing.device, self.observation_space, obs
        while isinstance(leaf, (spaces.Dict, spaces.Tuple)):
            key: Any = next(iter(leaf)) if isinstance(leaf, spaces.Dict) else 0
            leaf, value = leaf[key], value[key]
        single = np.ndim(value) == len(leaf.shape or ())
        if single:
            empty: Any = gym.vector.utils.create_empty_array(self.observation_space, 1)
            obs = gym.vector.utils.concatenate(self.observation_space, [obs], empty)
        row = [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in self.observe(obs, info or {})]
        state = self.initial_state(len(row[0])) if state is None else state
        if episode_start is not None:
            starts = torch.as_tensor(episode_start, dtype=torch.bool, device=device).reshape(-1)
            state = self.next_state(state, starts)
        latent, state = self.recall(row, state)
        if deterministic:
            action = self.head(latent)[0] if self.box else self.head(latent)[0].argmax(-1)
        else:
            self.noise = torch.empty(0)
            action = self.sample(latent, self.actor(latent))
        return self.to_env(action)[0 if single else slice(None)], state

class RowPolicy:
    """A feed-forward policy on vectors, for the rows of one rollout, in NumPy, whose calls take a fraction of
    the time of torch's: the environments wait for each row."""

    def __init__(self, agent: Agent):
        linear = [x for x in (*agent.encoder.mlp, *agent.actor) if isinstance(x, nn.Linear)]  # type: ignore
        self.layers = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in linear]
        self.relu, self.norm_obs = agent.args.activation == "relu", agent.norm_obs
        self.mean, self.std = agent.obs_stats.mean.numpy(), (agent.obs_stats.var + 1e-8).sqrt().numpy()

    def __call__(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        """Observations (N, n) -> the policy's features (N, E), and the actor's outputs for them."""
        if self.norm_obs:
            x = ((x - self.mean) / self.std).clip(-10, 10).astype(np.float32)
        for weight, bias in self.layers[:-1]:
            x = x @ weight + bias
            x = np.maximum(x, 0.0) if self.relu else np.tanh(x)
        return torch.from_numpy(x), torch.from_numpy(x @ self.layers[-1][0] + self.layers[-1][1])

# --- The mathematics ----------------------------------------------------------------------------------------

def log_prob(dist: Dist, action: Tensor, squash: bool = False) -> Tensor:
    """Of actions (..., K), summed over components -> (...); squash as in gaussian_log_prob."""
    if len(dist) == 1:
        return dist[0].gather(-1, action.unsqueeze(-1)).sum((-2, -1))
    return gaussian_log_prob(action, dist[0], dist[1], squash)

def entropy(dist: Dist) -> Tensor:
    """Of a distribution, summed over components -> (...)."""
    return -(dist[0].exp() * dist[0]).sum((-2, -1)) if len(dist) == 1 else gaussian_entropy(dist[1])

def kl_divergence(old: Dist, new: Dist) -> Tensor:
    """The joint D_KL(old || new), summed over components (...,): sum p (log p - log q) of choices, and
    log(s' / s) + (s^2 + (m - m')^2) / (2 s'^2) - 1/2 of Gaussians."""
    if len(old) == 1:
        return (old[0].exp() * (old[0] - new[0])).sum((-2, -1))
    (mean, std), (new_mean, new_std) = old, new
    return ((new_std / std).log() + (std**2 + (mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).sum(-1)

def fisher_metric(dist: Dist, tangent: Dist) -> Dist:
    """M u, where M is the Fisher matrix of a distribution in its own coordinates and u a change of them:
    p u of log-probabilities, u / s^2 of a Gaussian's mean and 2 u / s^2 of its deviation."""
    if len(dist) == 1:
        return (dist[0].exp() * tangent[0],)
    return tangent[0] / dist[1] ** 2, 2 * tangent[1] / dist[1] ** 2

def gaussian_log_prob(action: Tensor, mean: Tensor, std: Tensor, squash: bool) -> Tensor:
    """log N(action; mean, std) of (..., K), summed over K -> (...). squash: of tanh(action), whose density
    is divided by tanh' = 1 - tanh^2 (Haarnoja et al. 2018, arXiv:1801.01290, eq. 21)."""
    logprob = -0.5 * ((action - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    if squash:
        logprob = logprob - (1 - action.tanh() ** 2 + 1e-6).log()
    return logprob.sum(-1)

def gaussian_entropy(std: Tensor) -> Tensor:
    """Of the diagonal Gaussian with deviations (..., K) -> (...)."""
    return (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

def sde_sigma(log_std: Tensor, expln: bool) -> Tensor:
    """Deviations (E, K or 1) of the entries of gSDE's noise matrix; expln lets them grow as log(1 + x) + 1
    where x = log_std > 0, and not as exp(x)."""
    if not expln:
        return log_std.exp()
    return torch.where(log_std > 0, log_std.clamp(min=0).log1p() + 1, log_std.clamp(max=0).exp())

def sde_deviation(features: Tensor, sigma: Tensor) -> Tensor:
    """Deviation of features (..., E) @ noise (E, K), noise ~ N(0, sigma (E, K or 1)) -> (..., K or 1)."""
    return (features**2 @ sigma**2 + 1e-6).sqrt()

class RunningMeanStd(nn.Module):
    """Mean and variance of the rows seen, float64 buffers: saved with the agent, frozen in evaluation."""
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        for name, value in ("mean", 0.0), ("var", 1.0), ("count", 0.0):
            self.register_buffer(name, torch.full(shape, value, dtype=torch.float64))

    def update(self, rows: Tensor) -> None:
        """Merges rows (M, *shape) (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        if not len(rows):
            return
        n, rows = len(rows), rows.double()
        delta, total = rows.mean(0) - self.mean, self.count + n
        squares = self.var * self.count + rows.var(0, correction=0) * n + delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, squares / total, total

def discounted_sums(rewards: Tensor, done: Tensor, carried: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """G_t = r_t + gamma G_{t-1} within an episode, whose deviation divides rewards: rewards, done (T, N),
    carried (N,) = gamma G_{-1} of the rollout before -> G (T, N), and what the next rollout carries (N,)."""
    sums, carry, ends = rewards.cpu().numpy().copy(), carried.cpu().numpy(), done.cpu().numpy()
    for t in range(len(sums)):  # in NumPy, as in compute_gae
        sums[t] += carry
        carry = gamma * sums[t]
        carry[ends[t]] = 0.0
    return torch.from_numpy(sums).to(rewards.device), torch.from_numpy(carry).to(rewards.device)

def compute_gae(rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, gamma: float, lam: float):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 11 to 16): values (T + 1, N), else (T, N).
    Where an episode is truncated V_{t+1} is the value of its final observation, and so bootstraps it.

    delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t,  A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}
    """
    deltas = (rewards + gamma * values[1:].where(~terminated, 0.0) - values[:-1]).cpu().numpy()
    advantages, carried, ends = np.zeros_like(deltas), np.zeros_like(deltas[0]), done.cpu().numpy()
    for t in reversed(range(len(deltas))):  # in NumPy, whose calls on short rows cost a sixth of torch's
        carried[ends[t]] = 0.0
        advantages[t] = carried = deltas[t] + gamma * lam * carried
    return torch.from_numpy(advantages).to(rewards.device)

def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Of x (L, B) over rows that count: weight is 0 on final rows, 1/k on rows in k sequences, else 1."""
    return (x * weight).sum() / weight.sum().clamp(min=1e-8)

def normalize(advantages: Tensor, weight: Tensor) -> Tensor:
    """Advantages of mean 0 and (biased, so that one row has it too) deviation 1."""
    centred = advantages - weighted_mean(advantages, weight)
    return centred / (weighted_mean(centred**2, weight).sqrt() + 1e-8)

def surrogate(dist: Dist, old: Dist, action: Tensor, advantages: Tensor, weight: Tensor) -> Tensor:
    """The mean of pi(a|s) / pi_old(a|s) A (Schulman et al. 2015, eq. 14) in rows (L, B). The tanh of a
    squashed action cancels in the ratio, as it does in the KL."""
    ratio = (log_prob(dist, action) - log_prob(old, action)).exp()
    return weighted_mean(ratio * advantages, weight)

def fisher_vector_product(policy: Policy, theta: Tensor, dist: Dist, weight: Tensor, damping: float,
                          v: Tensor) -> Tensor:  # fmt: skip
    """(F + damping I) v, where F = E[J' M J] is the Hessian of the mean KL at theta (Schulman et al. 2015,
    appendix C.1): theta and v (P,), weight (L, B), dist = policy(theta) with its graph.

    J v, the distribution's change along v, is a central difference, because the fused LSTM has neither
    forward mode nor second derivatives; M is fisher_metric; J' is reverse mode, through dist's graph.
    """
    eps = torch.finfo(v.dtype).eps ** 0.25 / v.norm().clamp(min=torch.finfo(v.dtype).tiny)
    with torch.no_grad():
        ends = zip(policy(theta + eps * v), policy(theta - eps * v))
        changes = fisher_metric(dist, tuple((a - b) / (2 * eps) for a, b in ends))
        rows = weight / weight.sum()
        cotangent = [x * rows.view(*rows.shape, *[1] * (x.ndim - rows.ndim)) for x in changes]
    return torch.autograd.grad(dist, theta, cotangent, retain_graph=True)[0] + damping * v

def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, max_steps: int, tolerance=1e-10):
    """x with A x = b, from 0, where product(v) is A v, until |b - A x|^2 < tolerance (Nocedal & Wright 2006,
    algorithm 5.2). Where A shows no positive, finite curvature it returns the x before."""
    x, residual, direction, norm = torch.zeros_like(b), b, b, b @ b
    for _ in range(max_steps):
        if not norm >= tolerance:
            break
        image = product(direction)
        curvature = direction @ image
        if not 0 < curvature < float("inf"):
            break
        step = norm / curvature
        x, residual = x + step * direction, residual - step * image
        norm, previous = residual @ residual, norm
        direction = residual + norm / previous * direction
    return x

def line_search(measure: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor, step: Tensor,
                target_kl: float, shrinking_factor: float, max_iter: int):  # fmt: skip
    """The first fraction shrinking_factor^i of step whose KL is below target_kl and whose surrogate improves
    (Schulman et al. 2015, appendix C): measure gives both at a theta -> fraction, improvement, KL; zeros if
    there is none. A comparison with nan is false, so that a policy that is not finite is refused."""
    surrogate_before, _ = measure(theta)
    for i in range(max_iter):
        improved, kl = measure(theta + shrinking_factor**i * step)
        improvement = float(improved - surrogate_before)
        if kl < target_kl and 0 < improvement < float("inf"):
            return shrinking_factor**i, improvement, float(kl)
    return 0.0, 0.0, 0.0

def surrogate_and_kl(policy: Policy, old: Dist, action: Tensor, advantages: Tensor, weight: Tensor,
                     theta: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both sides of eq. 14 at theta: the mean to maximise, and the mean KL that is its constraint."""
    dist = policy(theta)
    return surrogate(dist, old, action, advantages, weight), weighted_mean(kl_divergence(old, dist), weight)

def trpo_step(agent: Agent, args: Args, obs: list[Tensor], state: Tensor, final: Tensor, action: Tensor,
              advantages: Tensor, weight: Tensor) -> dict[str, Any]:  # fmt: skip
    """One step of the policy (Schulman et al. 2015, appendix C): along s = F^-1 g, as far as the trust region
    s' F s / 2 = target_kl and then the line search let it. Sequences as Agent.forward takes them; weight is 0
    on final rows. Until the line search has accepted a step the agent keeps its parameters."""
    parameters = agent.policy_parameters()
    theta = nn.utils.parameters_to_vector(parameters.values()).detach().requires_grad_()
    policy = partial(agent.policy, obs=obs, state=state, final=final)
    dist = policy(theta)
    old = tuple(x.detach() for x in dist)
    gradient = torch.autograd.grad(surrogate(dist, old, action, advantages, weight), theta)[0]

    every = slice(None, None, args.sub_sampling_factor)
    few = (every,) if agent.memory is None else (slice(None), every)  # rows, or whole sequences
    sampled = partial(agent.policy, obs=[x[few] for x in obs], state=state[:, few[-1]], final=final[few])
    product = partial(fisher_vector_product, sampled, theta, sampled(theta), weight[few], args.cg_damping)
    direction = conjugate_gradient(product, gradient, args.cg_max_steps)
    curvature = direction @ product(direction)
    scale = (2 * args.target_kl / curvature).sqrt() if curvature > 0 else torch.zeros_like(curvature)
    step = scale * direction

    with torch.no_grad():
        measure = partial(surrogate_and_kl, policy, old, action, advantages, weight)
        search = args.target_kl, args.line_search_shrinking_factor, args.line_search_max_iter
        fraction, improvement, kl = line_search(measure, theta, step, *search)
        for name, x in agent.unflatten(theta + fraction * step).items() if fraction else ():
            parameters[name].copy_(x)
    logs = {"line_search_success": float(fraction > 0), "step_fraction": fraction, "kl": kl}
    return logs | {"improvement": improvement, "expected_improvement": fraction * float(gradient @ step)}

def fit_critic(agent: Agent, args: Args, optimizer: torch.optim.Optimizer, obs: list[Tensor], latent: Tensor,
               returns: Tensor) -> float:  # fmt: skip
    """Passes of Adam over minibatches of normalised rows (M, ...), with the policy's features (M, E) there ->
    the mean squared error over all of them."""
    losses = []
    for _ in range(args.n_critic_updates):
        order = torch.randperm(len(returns))
        columns = [x[order].split(args.batch_size) for x in (returns, latent, *obs)]
        for target, features, *rows in zip(*columns):
            loss = F.mse_loss(agent.value(rows, features), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean().item()

# --- Checkpoint, evaluate, play -----------------------------------------------------------------------------

def save(path: Path, **contents: Any) -> None:
    """Writes a file that is either the old one or the whole new one, whatever happens."""
    buffer = io.BytesIO()
    torch.save({"script": SCRIPT, **contents}, buffer)
    with open(path.with_suffix(".tmp"), "wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".tmp"), path)

def load(path: str, agent: Agent | None = None) -> dict[str, Any]:
    """Reads a .pt file (in a run directory: agent.pt, else checkpoint.pt), running no code in it, and puts
    its weights into the agent. Raises ArgumentError if it is damaged, another script's or another shape."""
    file = next((f for f in (Path(path, "agent.pt"), Path(path, "checkpoint.pt")) if f.exists()), Path(path))
    try:
        if zipfile.ZipFile(file).testzip() is not None:  # finds flipped bits by their checksum
            raise ValueError("it is damaged")
        contents = torch.load(file, map_location="cpu", weights_only=True)
        if contents["script"] != SCRIPT:
            raise ValueError(f"{contents['script']}.py wrote it")
        Args(**contents["args"])
        if agent is not None:
            agent.load_state_dict(contents["agent"])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ArgumentError(f"{file}: {SCRIPT}.py cannot use it: {reason or type(error).__name__}") from error
    return contents

def evaluate(agent: Agent, envs: gym.vector.VectorEnv, episodes: int, seed: int) -> list[float]:
    """Returns of deterministic episodes, of which each environment plays its share, be they short or long."""
    share = np.array([len(range(n, episodes, envs.num_envs)) for n in range(envs.num_envs)])
    start, final, total = np.ones(envs.num_envs, bool), np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs)
    obs, info = attempt("an evaluation", envs.reset, seed=seed)
    state, returns = None, []
    while share.any():
        action, state = agent.predict(obs, state, start, deterministic=True, info=info)
        obs, reward, terminated, truncated, info = attempt("an evaluation", envs.step, action)
        start, final, total = final, terminated | truncated, total + reward
        for n in np.flatnonzero(final & (share > 0)):
            returns.append(float(total[n]))
            share[n] -= 1
        total[final] = 0.0
    envs.close()
    return returns

def play(args: Args) -> None:
    """Shows, or films, deterministic episodes of a trained agent and prints their returns."""
    source = Path(str(args.play))
    videos = (source if source.is_dir() else source.parent) / "videos" if args.capture_video else None
    envs = make_envs(args, 1, "rgb_array" if args.capture_video else "human", videos)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    load(str(source), agent)
    for number, episode_return in enumerate(evaluate(agent, envs, args.eval_episodes or 10, args.seed)):
        print(f"episode {number}: return {episode_return:.2f}")

# --- Training -----------------------------------------------------------------------------------------------

def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work."""
    flags, wrong = vars(args), []
    counts = ("total_timesteps", "num_envs", "num_steps", "hidden_size", "num_layers", "encoder_sizes",
              "cg_max_steps", "sub_sampling_factor", "line_search_max_iter", "n_critic_updates",
              "batch_size")  # fmt: skip
    least = dict.fromkeys(counts, 1) | {"log_std_init": -20, "sde_sample_freq": -1}
    for flag, value in flags.items():
        for x in value if isinstance(value, tuple) else [value] if isinstance(value, (int, float)) else []:
            if not least.get(flag, 0) <= x < float("inf"):
                wrong.append((flag, f"must be a finite number, at least {least.get(flag, 0)}"))
            if flag in ("gamma", "gae_lambda", "line_search_shrinking_factor") and x > 1:
                wrong.append((flag, "must be at most 1"))
    if args.cuda and not torch.cuda.is_available():
        wrong += [("cuda", "torch finds no GPU here")]
    for flag, why in wrong[:1]:
        raise ArgumentError(f"--{flag.replace('_', '-')} {flags[flag]}: {why}")

def train(args: Args) -> Agent:
    """One run: rollout, advantages, update, until the steps are done. Its files are in runs_dir/run_name."""
    check_args(args)
    T, N, device = args.num_steps, args.num_envs, torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    torch.set_num_threads(1)  # the first weights are the same with any number of threads
    torch.manual_seed(args.seed)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    torch.set_num_threads(args.torch_threads or (os.cpu_count() or 1 if len(agent.encoder.cnns) else 1))
    critic = [p for name, p in agent.named_parameters() if name.startswith("critic")]
    optimizer = torch.optim.Adam(critic, args.learning_rate, eps=1e-5, fused=True)
    run: dict[str, Any] = {"iteration": 0, "global_step": 0, "episodes": 0, "recent": [], "wall_seconds": 0.0}
    run |= {"timed_steps": 0, "rollout_seconds": 0.0, "update_seconds": 0.0}  # without the first iteration
    if args.resume:
        saved = load(f"{args.runs_dir}/{args.run_name}/checkpoint.pt", agent)
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"][0])
        torch.cuda.set_rng_state_all(saved["rng"][1:])
        run = saved["run"]
    elif args.init_from:
        load(args.init_from, agent)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}".replace("/", "-")
    args.run_name = args.run_name or name
    run_dir = Path(args.runs_dir, args.run_name)
    try:
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1))
        writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] or None)
    except FileExistsError as error:
        raise ArgumentError(f"--run-name {args.run_name}: {run_dir} exists; --resume continues it") from error
    except OSError as error:
        raise ArgumentError(f"--runs-dir {args.runs_dir}: {error}") from error
    if args.track:
        import wandb
        wandb.init(project=args.wandb_project, entity=args.wandb_entity, name=args.run_name, dir=str(run_dir),
                   config=asdict(args), sync_tensorboard=True)

    # What environments return is stored as numpy arrays, what the agent returns as tensors.
    raw, info = attempt("its first reset", envs.reset, seed=args.seed)
    obs = [np.zeros((T + 1, *x.shape), x.dtype) for x in agent.observe(raw, info)]
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((T, N), bool), np.zeros((T, N), bool)
    latents = torch.zeros(T + 1, N, agent.actor[0].in_features, device=device)
    kind = torch.float32 if agent.box else torch.long
    actions = torch.zeros(T, N, len(agent.exists), dtype=kind, device=device)

    checkpoint_every = args.checkpoint_every or max(5, -(-args.total_timesteps // (10 * N * T)))
    recent, started, fresh, sps = deque(run["recent"], 100), time.time() - run["wall_seconds"], True, 0.0
    bar = tqdm(total=args.total_timesteps, initial=run["global_step"], unit="step", mininterval=0.5)
    while run["global_step"] < args.total_timesteps:
        iteration_start = time.perf_counter()
        if fresh or run["iteration"] % checkpoint_every == 0:
            # Environments cannot be saved, so at a checkpoint they start afresh, also in a run that goes on.
            run |= {"recent": list(recent), "wall_seconds": time.time() - started}
            rng = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
            save(run_dir / "checkpoint.pt", args=asdict(args), agent=agent.state_dict(), run=run, rng=rng,
                 optimizer=optimizer.state_dict())  # fmt: skip
            seed = np.random.SeedSequence([args.seed, run["iteration"]]).generate_state(1)[0] // 2
            raw, info = attempt(f"the reset of iteration {run['iteration']}", envs.reset, seed=int(seed))
            for x, first in zip(obs, agent.observe(raw, info)):
                x[0] = first
            final[0], fresh, state, carried = False, False, agent.initial_state(N), torch.zeros(N).to(device)
            episode_return, episode_length = np.zeros(N), np.zeros(N, int)

        # --- rollout ---
        returned, lengths = [], []  # of the episodes that end in it
        first_state = state.clone()  # before the rollout's first row
        fast = RowPolicy(agent) if agent.vectors_only and not args.cuda else None
        with torch.inference_mode():
            for t in range(T):
                if args.use_sde and (t == 0 or args.sde_sample_freq > 0 and t % args.sde_sample_freq == 0):
                    agent.sample_noise(N)
                if fast is not None:
                    latent, logits = fast(obs[0][t])
                else:
                    latent, state = agent.recall([torch.from_numpy(x[t]).to(device) for x in obs], state)
                    logits = agent.actor(latent)
                latents[t], actions[t] = latent, agent.sample(latent, logits)
                if final[t].any():
                    state = agent.next_state(state, torch.from_numpy(final[t]).to(device))
                where = f"row {t} of iteration {run['iteration']}"
                raw, rewards[t], terminated[t], truncated[t], info = attempt(
                    where, envs.step, agent.to_env(actions[t])
                )
                for x, new in zip(obs, agent.observe(raw, info)):
                    x[t + 1] = new
                final[t + 1] = terminated[t] | truncated[t]
                episode_return += rewards[t]
                episode_length += ~final[t]
                for n in np.flatnonzero(final[t + 1]):
                    returned.append(float(episode_return[n]))
                    lengths.append(int(episode_length[n]))
                    episode_return[n], episode_length[n] = 0.0, 0
            latents[T], _ = agent.recall([torch.from_numpy(x[T]).to(device) for x in obs], state)
        for what, x in ("observation", obs[0]), ("reward", rewards):
            if not np.isfinite(x).all():
                where = "in row {} of environment {}".format(*np.argwhere(~np.isfinite(x))[0])
                where += f" of iteration {run['iteration']}"
                raise TrainingError(f"{what} is not finite {where}")
        update_start = time.perf_counter()

        # --- advantages ---
        b_obs = [torch.from_numpy(x).to(device) for x in obs]
        rows = agent.normalize_obs(b_obs)
        with torch.no_grad():
            values = agent.value(rows, latents)  # of final rows, too, whose features a replay does not give
        b_rewards, b_terminated, b_truncated, b_final = (
            torch.from_numpy(x).to(device) for x in (rewards, terminated, truncated, final)
        )
        valid, done = ~b_final[:T], b_terminated | b_truncated
        if args.norm_reward:
            sums, carried = discounted_sums(b_rewards, done, carried, args.gamma)
            agent.return_stats.update(sums[valid])
            b_rewards = (b_rewards / (agent.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)
        advantages = compute_gae(b_rewards, values, b_terminated, done, args.gamma, args.gae_lambda)
        returns, weights = advantages + values[:T], valid.to(advantages.dtype)
        if args.normalize_advantage:
            advantages = normalize(advantages, weights)

        # --- update: the policy by one step in its trust region, then the critic ---
        rows, ends = [x[:T] for x in rows], b_final[:T]
        logs = trpo_step(agent, args, rows, first_state, ends, actions, advantages, weights)
        with torch.no_grad():
            latent = agent.latent(rows, first_state, ends)  # of the policy as it is now
            mean_entropy = float(weighted_mean(entropy(agent.head(latent)), weights))
        v_loss = fit_critic(agent, args, optimizer, [x[valid] for x in rows], latent[valid], returns[valid])
        if agent.norm_obs:  # not before: old log-probabilities are of observations as they were normalised
            agent.obs_stats.update(b_obs[0][:T][valid])
        logs |= {"value_loss": v_loss, "entropy": mean_entropy}
        if not (np.isfinite([*logs.values()]).all() and all(p.isfinite().all() for p in agent.parameters())):
            raise TrainingError(f"the loss or a weight is not finite in iteration {run['iteration']}")

        # --- log ---
        steps = int(valid.sum())
        if run["iteration"] > 0:
            run["timed_steps"] += steps
            run["rollout_seconds"] += update_start - iteration_start
            run["update_seconds"] += time.perf_counter() - update_start
        run |= {"iteration": run["iteration"] + 1, "global_step": run["global_step"] + steps}
        run["episodes"] += len(returned)
        recent.extend(returned)
        sps = run["timed_steps"] / max(run["rollout_seconds"] + run["update_seconds"], 1e-9)
        unexplained = float((returns - values[:T])[valid].var() / returns[valid].var())
        logs["explained_variance"] = 1 - unexplained
        logs = {f"losses/{name}": x for name, x in logs.items()}
        logs |= {"charts/learning_rate": args.learning_rate, "charts/SPS": sps}
        if returned:
            logs |= {"charts/episodic_return": np.mean(returned), "charts/episodic_length": np.mean(lengths)}
        if args.eval_every and run["global_step"] % args.eval_every < steps:  # it has just passed a multiple
            evaluated = evaluate(agent, make_envs(args, N), args.eval_episodes or 10, args.seed)
            logs["charts/eval_return"] = np.mean(evaluated)
        for name, scalar in logs.items():
            writer.add_scalar(name, scalar, run["global_step"])
        bar.update(steps)
        bar.set_postfix({"return": np.mean(recent) if recent else float("nan"), "SPS": int(sps)})
        for x in *obs, final:
            x[0] = x[T]

    # --- results ---
    bar.close()
    envs.close()
    writer.close()
    save(run_dir / "agent.pt", args=asdict(args), agent=agent.state_dict())
    result = {name: run[name] for name in ("global_step", "rollout_seconds", "update_seconds", "episodes")}
    result |= {"wall_seconds": time.time() - started, "sps": sps}
    result |= {"eval_mean_return": None, "eval_std_return": None}
    result["mean_return_100"] = np.mean(recent) if recent else None
    if args.eval_episodes:
        returned = evaluate(agent, make_envs(args, min(N, args.eval_episodes)), args.eval_episodes, args.seed)
        result |= {"eval_mean_return": np.mean(returned), "eval_std_return": np.std(returned)}
    (run_dir / "result.json").write_text(json.dumps(result, indent=1))
    print(f"{run_dir}: " + ", ".join(f"{name} {value}" for name, value in result.items()))
    return agent

# --- Command line -------------------------------------------------------------------------------------------

def parse_args(argv: list[str]) -> Args:
    """Flags over the defaults, which are those of the run to resume or play, or the environment's preset."""
    known = [flag for flag in argv if flag not in ("-h", "--help")]
    early, _ = tyro.cli(Args, args=known, return_unknown_args=True)
    name = early.env_id.replace("-", "NoVel-") if early.mask_velocity else early.env_id
    preset = PRESETS.get(name, {}) if early.preset == "auto" else {}
    if early.resume:
        run_dir = Path(early.resume).parent if early.resume.endswith(".pt") else Path(early.resume)
        saved = load(str(run_dir / "checkpoint.pt"))["args"]
        saved |= {"runs_dir": str(run_dir.parent), "run_name": run_dir.name}
    elif early.play:
        saved = load(early.play)["args"]
    else:
        saved = preset
    args = tyro.cli(Args, args=argv, default=Args(**saved), description=__doc__)
    if "NoVel-" in args.env_id:
        args.env_id, args.mask_velocity = args.env_id.replace("NoVel-", "-"), True
    if args.env_id != saved.get("env_id", args.env_id):
        raise ArgumentError(f"--env-id {args.env_id}: {early.resume or early.play} has {saved['env_id']}")
    if saved is preset and preset:
        print(f"preset of {name}: {preset}")
    return args

def main(argv: list[str] | None = None) -> None:
    """Exits with 0, or one line and 2 (an argument), 1 (the run failed), 130 (Ctrl-C) or 143 (SIGTERM)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gym.logger.min_level = gym.logger.ERROR + 1  # the tracebacks of its workers would bury the one line,
    threading.excepthook = lambda _: None  # and that of TensorBoard's writer, whose error comes here, too
    args, code, what = Args(), 0, ""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        play(args) if args.play else train(args)
    except ArgumentError as error:
        code, what = 2, f"error: {error}"
    except (TrainingError, OSError) as error:
        code, what = 1, f"error: {error}"
        sys.unraisablehook = lambda _: None  # closing environments whose worker died raises once more
    except KeyboardInterrupt:
        code, what = 130, "interrupted"
    except SystemExit as stop:
        if stop.code != 143:
            raise
        code, what = 143, "terminated"
    checkpoint = Path(args.runs_dir, args.run_name or "", "checkpoint.pt")
    if code not in (0, 2) and checkpoint.exists():
        resume = f"python {sys.argv[0]} --resume {checkpoint.parent}"
        what += f"; last checkpoint {checkpoint}; go on with: {resume}"
    if code:
        sys.exit(print(what, file=sys.stderr) or code)


if __name__ == "__main__":
    main()
