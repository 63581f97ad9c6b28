# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9,<2.14", "gymnasium[classic-control]>=1.2", "tyro>=1.0", "tensorboard", "tqdm",
#   "mpi4py", "mpich"]
# ///
"""PPO1: proximal policy optimisation by data-parallel workers, one environment on each MPI rank.

    mpiexec -n 8 python ppo1_mpi.py --env-id CartPole-v1  # train on 8 ranks; without mpiexec it is one rank
    python ppo1_mpi.py --play runs/RUN                    # watch it; --resume runs/RUN continues it

PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7. GAE: Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.
PPO1: openai/baselines, ppo1/pposgd_simple.py, common/mpi_adam.py and common/mpi_running_mean_std.py.

Each of W ranks plays its own environment and draws minibatches from its own rollout. Once a minibatch, an
allreduce averages the gradients of all ranks, and each makes the same step of its own Adam: weights that are
equal at the start stay equal to the bit. The effective minibatch is W times that of a rank.

Rows. T = num_steps rows a rollout, N environments a rank; rollout tensors are (T, N, ...). Gymnasium's vector
environments return the last observation of an episode as a row of its own: final[t] says that obs[t] is one.
Its action is ignored, it is no environment step, and no loss or statistic counts it; but its value bootstraps
a truncated episode. After it the state of the memory is zero.
Shapes: B sequences of L rows in a minibatch (L = 1 without memory), F features, H hidden units, S rows of
rnn_state (h and c of each layer, first the policy's), K action components of at most A choices each.
"""
import io
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
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

SCRIPT = "ppo1_mpi"
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2 or AVX512
    # On AMD's processors MKL takes 13 times as long for a tanh, 7 for an exp, unless it is told 5, AVX2.
    os.environ.setdefault("MKL_VML_DEBUG_CPU_TYPE", "5")
Schedule = Literal["constant", "linear", "middle_drop", "double_linear_con", "double_middle_drop"]

@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id; CartPoleNoVel-v1 means --mask-velocity
    preset: Literal["auto", "none", "atari", "mujoco", "humanoid"] = "auto"  # auto: the environment's, if any
    mask_velocity: bool = False  # set the velocities in observations to 0, so that memory is needed
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: its own for several, else sync
    total_timesteps: int = 1_000_000  # environment steps to train for, those of all ranks together
    seed: int = 1  # of the weights; a rank's own seed is this + 10000 rank
    torch_threads: int = 1  # CPU threads of each rank, so that ranks do not fight over the cores

    num_envs: int = 1  # environments of each rank (N)
    num_steps: int = 256  # rows of a rollout in each environment (T)
    num_minibatches: int = 4  # minibatches an epoch, by default of 64 rows of each rank
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_obs: bool = True  # observed vectors less their mean, over their deviation, clipped to +-5
    reward_scale: float = 1.0  # multiplies rewards
    clip_reward: bool = False  # learn from the sign of a reward only

    encoder_sizes: tuple[int, ...] = (64, 64)  # layers of policy and of value function; images: one CNN
    activation: Literal["tanh", "relu"] = "tanh"  # of these layers
    memory: Literal["none", "lstm"] = "none"  # lstm: one for the policy and one for the value
    hidden_size: int = 128  # units of an LSTM layer (H)
    num_layers: int = 1  # LSTM layers
    seq_len: int = 16  # rows of a training sequence of --memory lstm (L), before which no gradient goes back
    ablate_memory: bool = False  # zero the memory at every row: the memoryless control

    learning_rate: float = 1e-3  # of Adam, times the schedule
    clip_coef: float = 0.2  # epsilon of the clipped surrogate, times the schedule
    schedule: Schedule = "linear"  # of both: what multiplies them as the run goes on (SCHEDULES)
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 1.0  # weight of the value loss
    target_kl: float | None = None  # the update stops where all ranks' mean KL passes 1.5 times this

    pretrain: str | None = None  # .npz file of an expert to imitate before training; --record writes one
    pretrain_epochs: int = 10  # passes over it

    runs_dir: str = "runs"  # where run directories are made
    run_name: str | None = None  # None: env_id__exp_name__seed__time
    exp_name: str = SCRIPT  # part of the run's name
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no network)
    wandb_project: str = "recurrent-ppo"  # its project
    wandb_entity: str | None = None  # its team
    checkpoint_every: int = 0  # iterations between checkpoints, which reset environments; 0: a tenth, >= 5
    eval_every: int = 0  # environment steps between evaluations; 0: one at the end
    eval_episodes: int = 0  # episodes of a deterministic evaluation; 0: none, but 10 if one is asked for
    resume: str | None = None  # run directory to go on with, bit for bit with as many ranks as it had
    init_from: str | None = None  # run directory or .pt file whose weights to start from
    play: str | None = None  # run directory or .pt file to watch instead of training
    capture_video: bool = False  # --play writes videos/*.mp4 beside the agent instead of opening a window
    record: str | None = None  # --play writes what it shows to this .npz file instead, for --pretrain

PRESETS: dict[str, dict[str, Any]] = {  # by name of a preset, or for an environment
    "atari": {"total_timesteps": 10_000_000, "clip_reward": True},
    "mujoco": {"total_timesteps": 1_000_000, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
               "learning_rate": 3e-4, "ent_coef": 0.0},
    "humanoid": {"total_timesteps": 50_000_000, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
                 "learning_rate": 1e-4, "ent_coef": 0.0, "clip_coef": 0.1, "reward_scale": 0.1,
                 "schedule": "constant"},
    "CartPole-v1": {"total_timesteps": 25_000, "norm_obs": False, "pretrain_epochs": 30},
    "CartPoleNoVel-v1": {"total_timesteps": 100_000, "memory": "lstm"},
}  # fmt: skip
MUJOCO = "Ant HalfCheetah Hopper InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer Walker2d"
FAMILIES = {  # the presets of environments by the first word of their ids
    "ALE": "atari", "Humanoid": "humanoid", "HumanoidStandup": "humanoid",
    **dict.fromkeys(MUJOCO.split(), "mujoco"),
}  # fmt: skip
SCHEDULES: dict[str, Callable[[float], float]] = {  # what multiplies stepsize and clip at progress p
    "constant": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075,
    "double_linear_con": lambda p: max(1 - 2 * p, 0.125),
    "double_middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075 if 1 - p >= 0.25 else 0.125,
}
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
        own = spec and spec.vector_entry_point and num_envs > 1  # for one environment sync takes less time
        if args.env_id.startswith("ALE/"):  # its own preprocessing is DeepMind's; the score stays as it is
            options: dict[str, Any] = {"reward_clipping": False, "repeat_action_probability": 0.0}
            envs = gym.make_vec(args.env_id, num_envs, "vector_entry_point", **options)
        elif own and args.vectorization == "auto" and render_mode is None:
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

class RowPolicy:
    """The actor's outputs for a row of a vector, without memory, in NumPy, whose calls take a fraction of the
    time of torch's: one environment waits for each. Its arrays are views of the agent's tensors."""

    def __init__(self, agent: Any):
        layers = [*agent.encoders[0].mlp, *agent.actor]
        self.relu = any(isinstance(layer, nn.ReLU) for layer in layers)
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linear]
        self.norm_obs = agent.norm_obs
        self.mean, self.std = agent.obs_stats.mean.numpy(), agent.obs_stats.std.numpy()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Observation (N, n) -> the actor's outputs (N, ...)."""
        if self.norm_obs:
            x = ((x - self.mean) / self.std).clip(-5, 5)
        for weight, bias in self.layers[:-1]:
            x = x @ weight + bias
            x = np.maximum(x, 0) if self.relu else np.tanh(x)
        return x @ self.layers[-1][0] + self.layers[-1][1]

class Agent(nn.Module):
    """Policy and value function, each a network of its own (images share one CNN), and statistics of vectors.

    Its obs are what observe returns, as tensors, not normalised yet. Actions (..., K) count from 0, or are
    the Gaussian's own samples: to_env clips them, and their density stays the Gaussian's.
    """
    ILLEGAL = -1e9  # a logit of probability exactly 0, whose entropy term is 0 and not nan as that of -inf
    missing: Tensor
    log_std: Any  # of a Gaussian
    memories: Any

    def __init__(self, observation_space: spaces.Space, action_space: Any, args: Args):
        super().__init__()
        self.observation_space, self.action_space, self.args = observation_space, action_space, args
        self.box = isinstance(action_space, spaces.Box) and np.issubdtype(action_space.dtype, np.floating)
        self.binary = isinstance(action_space, spaces.MultiBinary)
        if isinstance(action_space, spaces.Discrete):
            choices = np.array([action_space.n])
        elif isinstance(action_space, spaces.MultiDiscrete):
            choices = action_space.nvec.ravel()
        elif self.box or self.binary:
            choices = np.full(action_space.shape, 2).ravel()
        else:
            raise ArgumentError(f"--env-id {args.env_id}: its actions are {action_space}; unsupported")
        self.exists = np.arange(max(choices)) < choices[:, None]  # (K, A): a component may have fewer choices
        self.register_buffer("missing", torch.from_numpy(~self.exists), persistent=False)
        self.ragged = bool((~self.exists).any())

        example = self.observe(gym.vector.utils.batch_space(observation_space).sample(), {})
        networks = 1 if any(image.ndim == 4 for image in example) else 2
        encoders = [Encoder(example, args.encoder_sizes, args.activation) for _ in range(networks)]
        features, hidden, recurrent = encoders[0].num_features, args.hidden_size, args.memory == "lstm"
        memories = [ResetLSTM(features, hidden, args.num_layers) for _ in range(2 * recurrent)]
        self.encoders, self.memories = nn.ModuleList(encoders), nn.ModuleList(memories)
        self.state_rows = sum(memory.state_rows for memory in memories)
        features = hidden if recurrent else features
        num_outputs = len(choices) if self.box or self.binary else self.exists.size
        self.actor = mlp([features], args.activation, num_outputs, std=0.01)
        self.critic = mlp([features], args.activation, 1)
        if self.box:
            self.log_std = nn.Parameter(torch.zeros(len(choices)))
        self.norm_obs = args.norm_obs and example[0].ndim == 2  # images are only scaled
        self.obs_stats = MpiRunningMeanStd(example[0].shape[1:] if self.norm_obs else ())

    def observe(self, obs: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """N raw observations -> [vector, images], as far as there are any; info is not needed here."""
        return preprocess(self.observation_space, obs)

    def initial_state(self, num_envs: int) -> Tensor:
        """rnn_state (S, N, H) after a reset: zeros, of no rows without memory."""
        return self.obs_stats.mean.new_zeros(self.state_rows, num_envs, self.args.hidden_size)

    def next_state(self, state: Tensor, final: Tensor) -> Tensor:
        """The state (S, N, H) that the next row starts from, where final (N,) says what this row was."""
        return state.where(~final[:, None], 0.0)

    def normalize_obs(self, obs: list[Tensor]) -> list[Tensor]:
        """obs with its vector normalised by the running statistics."""
        if not self.norm_obs:
            return obs
        vector = ((obs[0] - self.obs_stats.mean) / self.obs_stats.std).clamp(-5, 5)
        return [vector.to(self.obs_stats.mean.dtype), *obs[1:]]

    def encode(self, obs: list[Tensor]) -> list[Tensor]:
        """obs -> features (..., F) of the policy's encoder and, if there is one, of the value function's."""
        scaled = self.normalize_obs(obs)
        return [encoder(scaled) for encoder in self.encoders]

    def step(self, obs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One row: obs (N, ...), state (S, N, H) -> what head returns, value (N,), next state."""
        features = self.encode(obs)
        policy, critic = features[0], features[-1]
        if self.memories:
            halves = state.chunk(2)
            policy_memory, critic_memory = self.memories
            policy, policy_state = policy_memory.step(policy, halves[0])
            critic, critic_state = critic_memory.step(critic, halves[1])
            state = torch.cat([policy_state, critic_state])
            state = torch.zeros_like(state) if self.args.ablate_memory else state
        return self.head(policy), self.critic(critic).squeeze(-1), state

    def replay(self, memory: Any, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """A memory over sequences: x (L, B, F), state (S / 2, B, H), final (L, B) -> outputs (L, B, H)."""
        if self.args.ablate_memory:  # each row is a sequence of its own, from zeros
            zeros = state.new_zeros(len(state), final.numel(), self.args.hidden_size)
            return memory(x.flatten(0, 1)[None], zeros, final.view(1, -1)).view(*final.shape, -1)
        return memory(x, state, final)

    def head(self, latent: Tensor) -> Tensor:
        """The memory's output (..., H), or features -> the log-probability of every choice (..., K, A), or
        the means (..., K) of the Gaussian, whose deviations are exp(log_std) everywhere."""
        return self.normalize_logits(self.actor(latent))

    def normalize_logits(self, logits: Tensor) -> Tensor:
        """The actor's outputs (..., n) -> what head returns."""
        if self.box:
            return logits
        if self.binary:  # Bernoulli(sigmoid(l)) is a choice between the logits 0 and l
            logits = F.pad(logits.unsqueeze(-1), (1, 0))
        else:
            logits = logits.unflatten(-1, self.exists.shape)
            logits = logits.masked_fill(self.missing, self.ILLEGAL) if self.ragged else logits
        return logits.log_softmax(-1)

    def log_prob(self, distribution: Tensor, action: Tensor) -> Tensor:
        """Of action (..., K) under what head returned -> (...), summed over the components."""
        if self.box:
            z = (action - distribution) / self.log_std.exp()
            return -(0.5 * z**2 + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        return distribution.gather(-1, action.unsqueeze(-1)).sum((-2, -1))

    def entropy(self, distribution: Tensor) -> Tensor:
        """Of what head returned -> (...), summed over the components."""
        if self.box:
            return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(distribution).sum(-1)
        return -(distribution.exp() * distribution).sum((-2, -1))

    def sample(self, distribution: Tensor) -> Tensor:
        """Actions (..., K) from what head returned."""
        if self.box:
            return distribution + self.log_std.exp() * torch.randn_like(distribution)
        race = torch.empty_like(distribution).exponential_()  # argmax of p / Exp(1) is distributed as p
        return (distribution.exp() / race).argmax(-1)

    def act(self, obs: list[Tensor], state: Tensor):
        """One row: obs (N, ...), state (S, N, H) -> action (N, K), logprob (N,), value (N,), next state."""
        distribution, value, state = self.step(obs, state)
        action = self.sample(distribution)
        return action, self.log_prob(distribution, action), value, state

    def get_value(self, obs: list[Tensor], state: Tensor) -> Tensor:
        """One row: obs (N, ...), state (S, N, H) -> value (N,)."""
        return self.step(obs, state)[1]

    def evaluate_actions(self, obs: list[Tensor], state: Tensor, final: Tensor, action: Tensor):
        """Sequences: obs (L, B, ...), state (S, B, H) before the first row, final (L, B), action (L, B, K)
        -> logprob, entropy, value, all (L, B); on final rows they mean nothing if there is a memory."""
        features = self.encode(obs)
        policy, critic = features[0], features[-1]
        if self.memories:
            halves = state.chunk(2)
            policy = self.replay(self.memories[0], policy, halves[0], final)
            critic = self.replay(self.memories[1], critic, halves[1], final)
        distribution = self.head(policy)
        value = self.critic(critic).squeeze(-1)
        return self.log_prob(distribution, action), self.entropy(distribution), value

    def to_env(self, action: Tensor) -> np.ndarray:
        """Actions (N, K) in the form that the environments take, a Gaussian's within their bounds."""
        array, space = action.cpu().numpy().reshape(-1, *self.action_space.shape), self.action_space
        array = array.clip(space.low, space.high) if self.box else array + getattr(space, "start", 0)
        return array.astype(space.dtype, copy=False)

    def from_env(self, action: np.ndarray) -> Tensor:
        """The inverse of to_env: actions (N, ...) of the environment -> (N, K)."""
        array = action.reshape(len(action), -1)
        if self.box:
            return torch.from_numpy(array).to(self.obs_stats.mean.dtype)
        return torch.from_numpy(array.astype(np.int64) - np.ravel(getattr(self.action_space, "start", 0)))

    def batch(self, obs: Any) -> tuple[list[Tensor], bool]:
        """One observation of the environment or a batch of N -> what the methods above take, was it one?"""
        leaf, value = self.observation_space, obs
        while isinstance(leaf, (spaces.Dict, spaces.Tuple)):
            key: Any = next(iter(leaf)) if isinstance(leaf, spaces.Dict) else 0
            leaf, value = leaf[key], value[key]
        single = np.ndim(value) == len(leaf.shape or ())
        if single:
            empty: Any = gym.vector.utils.create_empty_array(self.observation_space, 1)
            obs = gym.vector.utils.concatenate(self.observation_space, [obs], empty)
        return [torch.from_numpy(np.ascontiguousarray(x)) for x in self.observe(obs, {})], single

    @torch.inference_mode()
    def predict(self, obs: Any, state=None, episode_start=None, deterministic=False, info=None):
        """One observation of the environment or a batch of N -> (action, state), for use in any program.

        state is what the last call returned, None for zeros; it is zeroed first where episode_start (N,) is
        set. info is not needed.
        """
        row, single = self.batch(obs)
        state = self.initial_state(len(row[0])) if state is None else state
        if episode_start is not None:
            state = self.next_state(state, torch.as_tensor(episode_start, dtype=torch.bool).reshape(-1))
        if deterministic:
            distribution, _, state = self.step(row, state)
            action = distribution if self.box else distribution.argmax(-1)
        else:
            action, _, _, state = self.act(row, state)
        return self.to_env(action)[0 if single else slice(None)], state

    @torch.inference_mode()
    def action_probability(self, obs: Any, action: Any = None, state: Tensor | None = None) -> Any:
        """The policy at one observation or at a batch of N (as in stable-baselines).

        Without an action: the probabilities (N, A) of a Discrete's choices, a list of such arrays for the
        components of a MultiDiscrete, that of ones (N, K) for a MultiBinary; mean and deviation, both (N, K),
        for a Box. With one, as the environment takes it: its probability or density (N,), of all components.
        """
        row, single = self.batch(obs)
        first = 0 if single else slice(None)
        distribution = self.step(row, self.initial_state(len(row[0])) if state is None else state)[0]
        if action is not None:
            actions = self.from_env(np.asarray(action).reshape(len(row[0]), *self.action_space.shape))
            return self.log_prob(distribution, actions).exp().numpy()[first]
        if self.box:
            return distribution.numpy()[first], self.log_std.exp().expand_as(distribution).numpy()[first]
        probabilities = distribution.exp().numpy()[first]
        if self.binary:
            return probabilities[..., 1]
        parts = [probabilities[..., k, : sum(exists)] for k, exists in enumerate(self.exists)]
        return parts[0] if isinstance(self.action_space, spaces.Discrete) else parts

# --- The mathematics ----------------------------------------------------------------------------------------

class MpiRunningMeanStd(nn.Module):
    """Mean and deviation of the rows that any rank saw, of float64 sums: saved with the agent, frozen in
    evaluation. The first count of 0.01 and the least variance of 0.01 are baselines'."""
    sum: Tensor
    squares: Tensor
    count: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("sum", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.full(shape, 1e-2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape))  # what the agent reads, in its precision
        self.register_buffer("std", torch.ones(shape))

    def update(self, rows: Tensor, comm: Any) -> None:
        """Adds each rank's rows (M, *shape), of which each may have another number."""
        rows = rows.double()
        local = torch.cat([rows.sum(0).flatten(), (rows**2).sum(0).flatten(), rows.new_tensor([len(rows)])])
        total = torch.empty_like(local)
        comm.Allreduce(local.numpy(), total.numpy())
        sums, squares = total[:-1].view(2, *self.mean.shape)
        self.sum, self.squares, self.count = self.sum + sums, self.squares + squares, self.count + total[-1]
        mean = self.sum / self.count
        self.std.copy_((self.squares / self.count - mean**2).clamp(min=1e-2).sqrt())
        self.mean.copy_(mean)

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

def ppo_loss(logprob: Tensor, old_logprob: Tensor, advantages: Tensor, weight: Tensor, clip_coef: float):
    """The clipped surrogate (Schulman et al. 2017, eq. 7), negated, of tensors (L, B) -> loss, approximate KL
    (Schulman 2020, "Approximating KL divergence", k3: the mean of (r - 1) - log r), clipped fraction."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)
    with torch.no_grad():
        approx_kl = weighted_mean(ratio - 1 - log_ratio, weight)
        clip_fraction = weighted_mean(((ratio - 1).abs() > clip_coef).to(ratio.dtype), weight)
    return -weighted_mean(surrogate, weight), approx_kl, clip_fraction

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

class Recorder(gym.vector.VectorWrapper):
    """Keeps what one environment shows and is told, in the arrays that an expert's file has."""

    def reset(self, **kwargs):
        self.rows: list[tuple[Any, ...]] = []  # (observation, action, reward, is it an episode's first?)
        self.returns: list[float] = []
        obs, info = self.env.reset(**kwargs)
        self.obs, self.start, self.final, self.total = obs[0].copy(), True, False, 0.0
        return obs, info

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.env.step(actions)
        if not self.final:
            self.rows.append((self.obs, np.array(actions[0]), reward[0], self.start))
            self.total += float(reward[0])
        self.start, self.final = self.final, bool(terminated[0] | truncated[0])
        if self.final:
            self.returns.append(self.total)
            self.total = 0.0
        self.obs = obs[0].copy()
        return obs, reward, terminated, truncated, info

    def save(self, file: Path) -> None:
        """Writes obs, actions, rewards and episode_starts, a row a step, and episode_returns."""
        obs, actions, rewards, starts = (np.stack(column) for column in zip(*self.rows))
        np.savez_compressed(file, obs=obs, actions=actions, rewards=rewards, episode_starts=starts,
                            episode_returns=np.array(self.returns))  # fmt: skip

def load_expert(path: str, agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    """The obs (M, ...) and actions (M, ...) of an expert's .npz file, as the environment gives and takes
    them. Raises ArgumentError if it is none, or of other spaces than the agent's."""
    spaces_of = {"obs": agent.observation_space, "actions": agent.action_space}
    try:
        with np.load(path, allow_pickle=False) as file:
            names = {"obs", "actions", "rewards", "episode_returns", "episode_starts"}
            if missing := sorted(names - set(file.files)):
                raise ValueError(f"it has no {', '.join(missing)}")
            arrays, rows = {name: file[name] for name in spaces_of}, len(file["episode_starts"])
        for name, space in spaces_of.items():
            if arrays[name].shape != (rows, *(space.shape or ())) or rows < 2:
                raise ValueError(f"its {name} are {arrays[name].shape}, not {rows} (2 at least) of {space}")
            arrays[name] = arrays[name].astype(space.dtype, copy=False)
            box = isinstance(space, spaces.Box)
            if not (np.isfinite(arrays[name]).all() if box else all(map(space.contains, arrays[name]))):
                raise ValueError(f"its {name} are not all in {space}")
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ArgumentError(f"--pretrain {path}: {reason or type(error).__name__}") from error
    return arrays["obs"], arrays["actions"]

def pretrain(agent: Agent, obs: np.ndarray, actions: np.ndarray, epochs: int) -> float:
    """Behaviour cloning as in stable-baselines: Adam, stepsize 1e-4, minibatches of 64 from 7/10 of the rows.
    Returns the cross-entropy of discrete actions or squared error of a Gaussian's mean on the others."""
    inputs, targets = [torch.from_numpy(x) for x in agent.observe(obs, {})], agent.from_env(actions)
    seen, unseen = torch.randperm(len(targets)).tensor_split([len(targets) * 7 // 10])
    if agent.norm_obs:
        agent.obs_stats.update(inputs[0][seen], OneRank())
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-4, eps=1e-8, fused=True)

    def loss(rows: Tensor) -> Tensor:
        policy = agent.head(agent.encode([x[rows] for x in inputs])[0])
        if agent.box:
            return F.mse_loss(policy, targets[rows])
        return -agent.log_prob(policy, targets[rows]).mean()

    for _ in range(epochs):
        for rows in seen[torch.randperm(len(seen))].split(64):
            optimizer.zero_grad(set_to_none=False)
            loss(rows).backward()
            optimizer.step()
    with torch.no_grad():
        return loss(unseen).item()

def play(args: Args) -> None:
    """Shows, films or records deterministic episodes of a trained agent and prints their returns."""
    source = Path(str(args.play))
    if args.capture_video and args.env_id.startswith("ALE/"):
        raise ArgumentError("--capture-video True: Atari's own vector environment has no pictures to film")
    videos = (source if source.is_dir() else source.parent) / "videos" if args.capture_video else None
    envs = make_envs(args, 1, None if args.record else "rgb_array" if args.capture_video else "human", videos)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    load(str(source), agent)
    envs = Recorder(envs) if args.record else envs
    for number, episode_return in enumerate(evaluate(agent, envs, args.eval_episodes or 10, args.seed)):
        print(f"episode {number}: return {episode_return:.2f}")
    if args.record:
        envs.save(Path(args.record))

# --- Training -----------------------------------------------------------------------------------------------

class OneRank:
    """As much of mpi4py's communicator as this script uses, for a process that runs alone."""
    rank, size = 0, 1

    def bcast(self, contents: Any) -> Any:
        return contents

    def allgather(self, contents: Any) -> list[Any]:
        return [contents]

    def Bcast(self, array: np.ndarray) -> None:
        """In place: every rank's array becomes that of rank 0."""

    def Allreduce(self, array: np.ndarray, total: np.ndarray) -> None:
        """total = the sum of every rank's array."""
        total[...] = array

    def Abort(self, code: int) -> None:
        """Ends every rank at once."""
        sys.exit(code)

def communicator() -> Any:
    """The ranks that mpiexec started; one rank without it. Raises ArgumentError if no MPI joins them."""
    sizes = [os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in os.environ]
    if not sizes and "PMIX_RANK" not in os.environ:
        return OneRank()
    try:
        from mpi4py import MPI  # this starts MPI
    except (ImportError, RuntimeError) as error:
        raise ArgumentError(f"mpiexec: {error}; pip install mpi4py mpich") from error
    if sizes and MPI.COMM_WORLD.size != int(sizes[0]):  # each would take itself for the only one
        library = MPI.Get_library_version().split(",")[0].split("\n")[0]
        raise ArgumentError(f"mpiexec: {sizes[0]} ranks were started by another MPI than mpi4py's {library}")
    return MPI.COMM_WORLD

def flatten_parameters(agent: nn.Module) -> tuple[Tensor, Tensor]:
    """Moves an agent's parameters into one vector (P,) and their gradients into another (P + 5,), of which
    they become views: one allreduce and one step of Adam serve them all. The 5 losses travel behind them."""
    parameters = list(agent.parameters())
    sizes = [p.numel() for p in parameters]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    gradient = flat.new_zeros(len(flat) + 5)
    for p, x, g in zip(parameters, flat.split(sizes), gradient[: len(flat)].split(sizes)):
        p.data, p.grad = x.view_as(p), g.view_as(p)
    return flat, gradient

def average(comm: Any, local: Tensor, mean: Tensor) -> None:
    """mean = the mean of every rank's local vector, the same on every rank to the bit."""
    comm.Allreduce(local.numpy(), mean.numpy())
    mean /= comm.size

def check_synced(comm: Any, flat: Tensor) -> None:
    """Raises TrainingError, on every rank, where a rank's weights are not rank 0's bit for bit."""
    reference = flat.clone()
    comm.Bcast(reference.numpy())
    synced = comm.allgather(reference.numpy().tobytes() == flat.numpy().tobytes())
    if not all(synced):
        raise TrainingError(f"the weights of rank {synced.index(False)} are no longer those of rank 0")

def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work."""
    flags, wrong = vars(args), []
    counts = {"num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_size", "num_layers",
              "seq_len", "encoder_sizes", "torch_threads"}  # fmt: skip
    for flag, value in flags.items():
        for x in value if isinstance(value, tuple) else [value] if isinstance(value, (int, float)) else []:
            if not (flag in counts) <= x < float("inf"):
                wrong.append((flag, f"must be a finite number, at least {int(flag in counts)}"))
            if flag in ("gamma", "gae_lambda") and x > 1:
                wrong.append((flag, "must be at most 1"))
    seq_len = args.seq_len if args.memory == "lstm" else 1
    if not wrong and args.num_steps % seq_len:
        wrong = [("seq_len", f"must divide --num-steps {args.num_steps}")]
    if not wrong:
        count = args.num_envs * args.num_steps // seq_len
        if count % args.num_minibatches:
            what = "sequences" if args.memory == "lstm" else "rows"
            wrong = [("num_minibatches", f"must divide the {count} {what} of a rank's rollout")]
    if args.pretrain and args.memory == "lstm":
        wrong += [("pretrain", "imitates row by row; needs --memory none")]
    if args.record and not args.play:
        wrong += [("record", "records what --play shows; --play RUN is missing")]
    for flag, why in wrong[:1]:
        raise ArgumentError(f"--{flag.replace('_', '-')} {flags[flag]}: {why}")

def train(args: Args) -> Agent:
    """One run: rollout, advantages, update, until the steps are done. Rank 0 writes its files, in
    runs_dir/run_name. All ranks leave each loop together, as what decides that is reduced over them."""
    check_args(args)
    comm = communicator()
    T, N, rank, ranks = args.num_steps, args.num_envs, comm.rank, comm.size
    torch.set_num_threads(args.torch_threads)
    envs = make_envs(args, N)
    torch.manual_seed(args.seed)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    flat, local = flatten_parameters(agent)
    mean = torch.zeros_like(local)
    flat.grad = mean[: len(flat)]
    policy = None if agent.memories or agent.encoders[0].cnns else RowPolicy(agent)
    optimizer = torch.optim.Adam([flat], eps=1e-5, fused=True)
    run: dict[str, Any] = {"iteration": 0, "global_step": 0, "episodes": 0, "recent": [], "wall_seconds": 0.0}
    run |= {"timed_steps": 0, "rollout_seconds": 0.0, "update_seconds": 0.0}  # without the first iteration
    run |= {"updates": 0}
    rank_seed = args.seed + 10_000 * rank
    torch.manual_seed(rank_seed)
    if args.resume:
        saved = load(f"{args.runs_dir}/{args.run_name}/checkpoint.pt", agent)
        optimizer.load_state_dict(saved["optimizer"])
        run = saved["run"]
        if ranks == len(saved["rng"]):
            torch.set_rng_state(saved["rng"][rank])
        else:
            torch.manual_seed(rank_seed + run["iteration"])
            print(f"{len(saved['rng'])} ranks wrote the checkpoint, {ranks} go on: not the same to the bit")
    elif args.init_from:
        load(args.init_from, agent)
    if args.pretrain and not args.resume:
        error = pretrain(agent, *load_expert(args.pretrain, agent), args.pretrain_epochs)
        print(f"imitated {args.pretrain}: error {error:.4f} on the rows left out")
    for tensor in flat, *agent.buffers():
        comm.Bcast(tensor.numpy())
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}".replace("/", "-")
    args.run_name = comm.bcast(args.run_name or name)
    run_dir = Path(args.runs_dir, args.run_name)
    if rank == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
            (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1))
            writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] or None)
        except FileExistsError as error:
            why = f"{run_dir} exists; --resume continues it"
            raise ArgumentError(f"--run-name {args.run_name}: {why}") from error
        except OSError as error:
            raise ArgumentError(f"--runs-dir {args.runs_dir}: {error}") from error
    if args.track and rank == 0:
        import wandb
        wandb.init(project=args.wandb_project, entity=args.wandb_entity, name=args.run_name, dir=str(run_dir),
                   config=asdict(args), sync_tensorboard=True)

    # What environments return is stored as numpy arrays, what the agent returns as tensors.
    raw, info = attempt("its first reset", envs.reset, seed=rank_seed)
    obs = [np.zeros((T + 1, *x.shape), x.dtype) for x in agent.observe(raw, info)]
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((T, N), bool), np.zeros((T, N), bool)
    values, logprobs = torch.zeros(T + 1, N), torch.zeros(T, N)
    actions = torch.zeros(T + 1, N, len(agent.exists), dtype=None if agent.box else torch.long)
    seq_len = args.seq_len if agent.memories else 1
    starts = torch.arange(0, T, seq_len)  # first rows of the sequences
    seq_rows = starts + torch.arange(seq_len)[:, None]  # (L, starts): their rows
    states = torch.zeros(len(starts), *agent.initial_state(N).shape)  # before their first rows

    checkpoint_every = args.checkpoint_every or max(5, -(-args.total_timesteps // (10 * ranks * N * T)))
    recent, started, fresh, sps = deque(run["recent"], 100), time.time() - run["wall_seconds"], True, 0.0
    bar = tqdm(total=args.total_timesteps, initial=run["global_step"], unit="step", mininterval=0.5,
               disable=rank > 0)  # fmt: skip
    while run["global_step"] < args.total_timesteps:
        iteration_start = time.perf_counter()
        if fresh or run["iteration"] % checkpoint_every == 0:
            # Environments cannot be saved, so at a checkpoint they start afresh, also in a run that goes on.
            run |= {"recent": list(recent), "wall_seconds": time.time() - started}
            rng = [torch.from_numpy(x) for x in comm.allgather(torch.get_rng_state().numpy())]
            if rank == 0:
                save(run_dir / "checkpoint.pt", args=asdict(args), agent=agent.state_dict(), run=run, rng=rng,
                     optimizer=optimizer.state_dict())  # fmt: skip
            seed = np.random.SeedSequence([rank_seed, run["iteration"]]).generate_state(1)[0] // 2
            raw, info = attempt(f"the reset of iteration {run['iteration']}", envs.reset, seed=int(seed))
            for x, first in zip(obs, agent.observe(raw, info)):
                x[0] = first
            final[0], fresh, state = False, False, agent.initial_state(N)
            episode_return, episode_length = np.zeros(N), np.zeros(N, int)

        # --- rollout ---
        returned, lengths = [], []  # of the episodes that end in it
        with torch.inference_mode():
            for t in range(T):
                if agent.memories and t % seq_len == 0:
                    states[t // seq_len] = state
                row = [torch.from_numpy(x[t]) for x in obs]
                if agent.memories:
                    actions[t], logprobs[t], values[t], state = agent.act(row, state)
                    if final[t].any():
                        state = agent.next_state(state, torch.from_numpy(final[t]))
                elif policy:  # what can wait is computed behind the loop, for all rows at once
                    actions[t] = agent.sample(agent.normalize_logits(torch.from_numpy(policy(obs[0][t]))))
                else:
                    actions[t] = agent.sample(agent.head(agent.encode(row)[0]))
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
            if agent.memories:
                values[T] = agent.get_value([torch.from_numpy(x[T]) for x in obs], state)
        for what, x in ("observation", obs[0]), ("reward", rewards):
            if not np.isfinite(x).all():
                where = "in row {} of environment {}".format(*np.argwhere(~np.isfinite(x))[0])
                where += f" of iteration {run['iteration']}"
                raise TrainingError(f"{what} is not finite {where}")
        update_start = time.perf_counter()

        # --- advantages, normalised over the rank's own rollout ---
        b_obs = [torch.from_numpy(x) for x in obs]
        b_rewards, b_terminated, b_truncated, b_final = (
            torch.from_numpy(x) for x in (rewards, terminated, truncated, final)
        )
        if not agent.memories:
            with torch.no_grad():
                logprobs, _, values = agent.evaluate_actions(b_obs, state, b_final, actions)
        valid, done = ~b_final[:T], b_terminated | b_truncated
        b_rewards = args.reward_scale * (b_rewards.sign() if args.clip_reward else b_rewards)
        advantages = compute_gae(b_rewards, values, b_terminated, done, args.gamma, args.gae_lambda)
        returns, weights = advantages + values[:T], valid.to(advantages.dtype)
        advantages = normalize(advantages, weights)

        # --- update: minibatches of the rank's own rows, or sequences ---
        multiplier = SCHEDULES[args.schedule](run["global_step"] / args.total_timesteps)
        learning_rate, clip_coef = args.learning_rate * multiplier, args.clip_coef * multiplier
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        table = torch.stack([logprobs[:T], returns, advantages, weights])  # one gather, not four
        losses, minibatches = [], args.update_epochs * args.num_minibatches
        order = torch.cat([torch.randperm(len(starts) * N) for _ in range(args.update_epochs)])
        for which, env in zip((order // N).chunk(minibatches), (order % N).chunk(minibatches)):
            at = seq_rows[:, which], env  # the rows (L, B) and environments (B,) of the minibatch
            state_b = states[which, :, env].movedim(0, 1)
            old_logprob, return_, advantage, weight = table[:, at[0], at[1]]
            logprob, entropy, value = agent.evaluate_actions(
                [x[at] for x in b_obs], state_b, b_final[at], actions[at]
            )
            policy_loss, approx_kl, clipfrac = ppo_loss(logprob, old_logprob, advantage, weight, clip_coef)
            v_loss = weighted_mean((value - return_) ** 2, weight)  # no factor 1/2, no clip
            mean_entropy = weighted_mean(entropy, weight)
            local.zero_()
            (policy_loss + args.vf_coef * v_loss - args.ent_coef * mean_entropy).backward()
            with torch.no_grad():
                local[len(flat) :] = torch.stack([policy_loss, v_loss, mean_entropy, approx_kl, clipfrac])
            average(comm, local, mean)
            if not mean.isfinite().all():  # on every rank, as all have the same mean
                finite = comm.allgather(bool(local.isfinite().all()))
                culprits = ", ".join(str(r) for r in range(ranks) if not finite[r])
                where = f"in iteration {run['iteration']}, on rank {culprits}"
                raise TrainingError(f"the loss or a gradient is not finite {where}")
            losses.append(mean[len(flat) :].tolist())
            if args.target_kl is not None and losses[-1][3] > 1.5 * args.target_kl:
                break
            optimizer.step()
            run["updates"] += 1
            if run["updates"] % 100 == 0:
                check_synced(comm, flat)
        if not flat.isfinite().all():
            raise TrainingError(f"a weight is not finite in iteration {run['iteration']}")
        if agent.norm_obs:  # not before: the old log-probabilities are of observations as normalised till now
            agent.obs_stats.update(b_obs[0][:T][valid], comm)

        # --- log ---
        gathered = comm.allgather((int(valid.sum()), returned, lengths))
        steps, returned, lengths = (sum(column[1:], column[0]) for column in zip(*gathered))
        if run["iteration"] > 0:
            run["timed_steps"] += steps
            run["rollout_seconds"] += update_start - iteration_start
            run["update_seconds"] += time.perf_counter() - update_start
        run |= {"iteration": run["iteration"] + 1, "global_step": run["global_step"] + steps}
        run["episodes"] += len(returned)
        recent.extend(returned)
        sps = run["timed_steps"] / max(run["rollout_seconds"] + run["update_seconds"], 1e-9)
        unexplained = float((returns - values[:T])[valid].var() / returns[valid].var())
        names = "policy_loss value_loss entropy approx_kl clipfrac explained_variance".split()
        logs = {f"losses/{name}": x for name, x in zip(names, [*np.mean(losses, 0), 1 - unexplained])}
        logs |= {"charts/learning_rate": learning_rate, "charts/SPS": sps}
        if returned:
            logs |= {"charts/episodic_return": np.mean(returned), "charts/episodic_length": np.mean(lengths)}
        passed = args.eval_every and run["global_step"] % args.eval_every < steps  # a multiple of eval_every
        if passed and rank == 0:
            evaluated = evaluate(agent, make_envs(args, N), args.eval_episodes or 10, args.seed)
            logs["charts/eval_return"] = np.mean(evaluated)
        for name, scalar in logs.items() if rank == 0 else ():
            writer.add_scalar(name, scalar, run["global_step"])
        bar.update(steps)
        bar.set_postfix({"return": np.mean(recent) if recent else float("nan"), "SPS": int(sps)})
        for x in *obs, final:
            x[0] = x[T]

    # --- results ---
    bar.close()
    envs.close()
    if rank > 0:
        return agent
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

def parse_args(argv: list[str], rank: int = 0) -> Args:
    """Flags over the defaults, which are those of the run to resume or play, or the environment's preset."""
    known, speaks = [flag for flag in argv if flag not in ("-h", "--help")], rank == 0
    early, _ = tyro.cli(Args, args=known, return_unknown_args=True, console_outputs=speaks)
    name = early.env_id.replace("-", "NoVel-") if early.mask_velocity else early.env_id
    name = FAMILIES.get(re.split("[-/]", name)[0], name) if early.preset == "auto" else early.preset
    preset = PRESETS.get(name, {})
    if early.resume:
        run_dir = Path(early.resume).parent if early.resume.endswith(".pt") else Path(early.resume)
        saved = load(str(run_dir / "checkpoint.pt"))["args"]
        saved |= {"runs_dir": str(run_dir.parent), "run_name": run_dir.name}
    elif early.play:
        saved = load(early.play)["args"]
    else:
        saved = preset
    args = tyro.cli(Args, args=argv, default=Args(**saved), description=__doc__, console_outputs=speaks)
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
    args, code, what, comm = Args(), 0, "", OneRank()
    try:
        comm = communicator()
        sys.stdout = sys.stdout if comm.rank == 0 else open(os.devnull, "w")
        args = parse_args(sys.argv[1:] if argv is None else argv, comm.rank)
        if not args.play:
            train(args)
        elif comm.rank == 0:
            play(args)
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
    except Exception:  # a fault of this program's: the other ranks must not wait for this one
        if comm.size == 1:
            raise
        code, what = 1, traceback.format_exc()
    checkpoint = Path(args.runs_dir, args.run_name or "", "checkpoint.pt")
    if code not in (0, 2) and checkpoint.exists():
        launcher = f"mpiexec -n {comm.size} " if comm.size > 1 else ""
        resume = f"{launcher}python {sys.argv[0]} --resume {checkpoint.parent}"
        what += f"; last checkpoint {checkpoint}; go on with: {resume}"
    if code and comm.size > 1:
        time.sleep(0.5 * (comm.rank > 0))  # where all ranks fail alike, rank 0 speaks and ends the others
        what = f"\nrank {comm.rank}: {what}"  # on a line of its own, behind rank 0's progress bar
    if code:
        print(what, file=sys.stderr, flush=True)
        comm.Abort(code)


if __name__ == "__main__":
    main()
