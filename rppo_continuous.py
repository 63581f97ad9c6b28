# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9,<2.14", "gymnasium[classic-control]>=1.2", "tyro>=1.0", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO for continuous actions: rppo_lstm.py with a Gaussian policy, gSDE and running normalisation.

    python rppo_continuous.py --env-id Pendulum-v1 --mask-velocity  # train; --help lists every flag
    python rppo_continuous.py --play runs/RUN                       # watch it; --resume runs/RUN continues it

PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7. GAE: Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.
gSDE: Raffin et al. 2021, arXiv:2005.05719, eq. 6 to 9; the reference is stable-baselines3.
Replay from stored states: Kapturowski et al. 2019 (R2D2). Resets inside a sequence: see ResetLSTM.

Rows. T = num_steps rows a rollout, N environments; rollout tensors are (T, N, ...). Gymnasium's vector
environments return the last observation of an episode as a row of its own: final[t] says that obs[t] is one.
Its action is ignored, it is no environment step, and no loss or statistic counts it; but its value, computed
with the state that the memory has there, bootstraps a truncated episode. After it the state is zero.
Shapes: B sequences of L rows in a minibatch, F features, H hidden units, S rows of rnn_state (h and c of each
layer), K action components, E features that gSDE's noise multiplies (the inputs of the last policy layer).
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_continuous"
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2 or AVX512
    # On AMD's processors MKL takes 13 times as long for a tanh, 7 for an exp, unless it is told 5, AVX2.
    os.environ.setdefault("MKL_VML_DEBUG_CPU_TYPE", "5")

@dataclass
class Args:
    env_id: str = "Pendulum-v1"  # Gymnasium id; PendulumNoVel-v1 means --mask-velocity
    preset: Literal["auto", "none"] = "auto"  # auto: the environment's tuned defaults where PRESETS has them
    mask_velocity: bool = False  # set the velocities in observations to 0, so that memory is needed
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: its own vector version, else sync
    total_timesteps: int = 500_000  # environment steps to train for
    seed: int = 1  # of everything; the same on the same machine and thread count gives the same weights
    cuda: bool = False  # train on the GPU
    torch_threads: int = 0  # CPU threads; 0: one for vector observations, every core for images

    num_envs: int = 8  # parallel environments (N)
    num_steps: int = 128  # rows of a rollout in each environment (T)
    num_minibatches: int = 4  # minibatches an epoch, of whole sequences
    update_epochs: int = 4  # passes over a rollout
    seq_len: int = 0  # rows of a training sequence (L), before which no gradient goes back; 0: num_steps
    seq_stride: int = 0  # rows from one sequence's start to the next one's; 0: seq_len, so that none overlap
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_obs: bool = True  # observed vectors less their running mean, over their deviation, clipped to +-10
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return, clip to +-10
    norm_adv: Literal["minibatch", "batch", "none"] = "minibatch"  # rows that normalise advantages

    encoder_sizes: tuple[int, ...] = (64,)  # layers before the memory; images take the Nature CNN
    hidden_size: int = 128  # units of an LSTM layer (H)
    num_layers: int = 1  # LSTM layers
    head_sizes: tuple[int, ...] = ()  # widths of the layers between the memory and each output
    activation: Literal["tanh", "relu"] = "tanh"  # of the encoder and the heads
    critic: Literal["shared", "separate", "detached", "none"] = "shared"  # reads the actor's memory, its own,
    # the actor's without sending gradients into it, or the encoder, memoryless
    reset_state: bool = True  # zero the memory after an episode; --no-reset-state carries it on
    ablate_memory: bool = False  # zero the memory at every row: the memoryless control

    log_std_init: float = 0.0  # the policy's first log standard deviation, or that of gSDE's noise matrix
    squash_output: bool = False  # tanh of the action, rescaled to the bounds, instead of clipping to them
    use_sde: bool = False  # gSDE: noise that is a function of the features, the same for many steps
    sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for a rollout
    sde_full_std: bool = True  # a deviation for each feature and action; --no-sde-full-std: for each feature
    sde_expln: bool = False  # deviations grow as log(1 + x) + 1 and not exp(x) where x > 0

    learning_rate: float = 1e-3  # of Adam
    learning_rate_final: float | None = 0.0  # annealed to this over the run; None: constant
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_coef_final: float | None = None  # annealed to this over the run; None: constant
    ent_coef: float = 0.0  # weight of the entropy bonus
    ent_coef_final: float | None = None  # annealed to this over the run; None: constant
    anneal_power: float = 1.0  # exponent of the polynomial annealing; 1: linear
    weight_decay: float = 0.0  # above 0 Adam is AdamW
    vf_coef: float = 0.5  # weight of the value loss
    clip_vloss: bool = False  # the larger of the clipped and the unclipped value loss
    clip_coef_vf: float | None = None  # range of --clip-vloss; None: that of the policy
    max_grad_norm: float = 0.5  # the norm to which gradients are clipped
    target_kl: float | None = None  # the update stops where the approximate KL passes 1.5 times this

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

PRESETS: dict[str, dict[str, Any]] = {  # what an environment needs beside the defaults
    "PendulumNoVel-v1": {
        "total_timesteps": 100_000, "num_envs": 16, "num_steps": 64, "num_minibatches": 8,
        "update_epochs": 10, "gamma": 0.95, "hidden_size": 256, "learning_rate": 5e-4, "use_sde": True,
        "sde_sample_freq": 4, "log_std_init": -1.0,
    },
    "MountainCarContinuousNoVel-v0": {  # after the zoo's
        "total_timesteps": 300_000, "num_steps": 512, "seq_len": 128, "num_minibatches": 8,
        "update_epochs": 10, "gamma": 0.9999, "gae_lambda": 0.9, "hidden_size": 32, "learning_rate": 3e-4,
        "clip_coef": 0.1, "ent_coef": 0.00429, "vf_coef": 0.19, "max_grad_norm": 5.0, "use_sde": True,
        "sde_sample_freq": 8,
    },
    "LunarLanderContinuousNoVel-v3": {
        "total_timesteps": 1_000_000, "num_envs": 16, "num_steps": 256, "seq_len": 128, "num_minibatches": 8,
        "gamma": 0.999, "gae_lambda": 0.98, "use_sde": True, "sde_sample_freq": 16, "log_std_init": -2.0,
    },
    "HalfCheetah-v5": {
        "total_timesteps": 1_000_000, "seq_len": 16, "num_minibatches": 8, "update_epochs": 8, "gamma": 0.98,
        "gae_lambda": 0.92, "hidden_size": 64, "learning_rate": 5e-4, "log_std_init": -1.5,
    },
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
    """Encoder, memory, actor, critic, and the statistics that belong to them.

    Its obs are what observe returns, as tensors, not normalised yet. Actions (..., K) are the Gaussian's own
    samples: to_env clips or squashes them, and their density stays the Gaussian's.
    """
    noise = torch.empty(0)  # gSDE's matrices (N, E, K), one for each environment

    def __init__(self, observation_space: spaces.Space, action_space: Any, args: Args):
        super().__init__()
        self.observation_space, self.action_space, self.args = observation_space, action_space, args
        if not isinstance(action_space, spaces.Box) or not np.issubdtype(action_space.dtype, np.floating):
            discrete = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
            use = "use rppo_lstm.py" if isinstance(action_space, discrete) else "unsupported"
            raise ArgumentError(f"--env-id {args.env_id}: its actions are {action_space}; {use}")
        if args.squash_output and not action_space.is_bounded():
            raise ArgumentError(f"--squash-output True: {args.env_id} has unbounded actions {action_space}")
        self.low, self.high = action_space.low.ravel(), action_space.high.ravel()  # (K,)

        example = self.observe(gym.vector.utils.batch_space(observation_space).sample(), {})
        self.encoder = Encoder(example, args.encoder_sizes, args.activation)
        features, hidden, separate = self.encoder.num_features, args.hidden_size, args.critic == "separate"
        self.memory = ResetLSTM(features, hidden, args.num_layers)
        self.critic_memory = ResetLSTM(features, hidden, args.num_layers) if separate else None
        critic_input = features if args.critic == "none" else hidden
        self.actor = mlp([hidden, *args.head_sizes], args.activation, self.low.size, std=0.01)
        self.critic = mlp([critic_input, *args.head_sizes], args.activation, 1)
        sde_shape = [hidden, *args.head_sizes][-1], self.low.size if args.sde_full_std else 1  # (E, K or 1)
        shape = sde_shape if args.use_sde else self.low.shape
        self.log_std = nn.Parameter(torch.full(shape, args.log_std_init))
        self.norm_obs = args.norm_obs and example[0].ndim == 2  # images are only scaled
        self.obs_stats = RunningMeanStd(example[0].shape[1:] if self.norm_obs else ())
        self.return_stats = RunningMeanStd(())

    def observe(self, obs: Any, info: dict[str, Any]) -> list[np.ndarray]:
        """N raw observations -> [vector, images], as far as there are any; info is not needed here."""
        return preprocess(self.observation_space, obs)

    def initial_state(self, num_envs: int) -> Tensor:
        """rnn_state (S, N, H) after a reset: zeros; a separate critic's rows follow the actor's."""
        rows = self.memory.state_rows * (1 if self.critic_memory is None else 2)
        return self.memory.token_weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def next_state(self, state: Tensor, final: Tensor) -> Tensor:
        """The state (S, N, H) that the next row starts from, where final (N,) says what this row was."""
        return state.where(~final[:, None], 0.0) if self.args.reset_state else state

    def encode(self, obs: list[Tensor]) -> Tensor:
        """obs -> features (..., F); the vector is normalised by the running statistics first."""
        if self.norm_obs:
            vector = (obs[0] - self.obs_stats.mean) / (self.obs_stats.var + 1e-8).sqrt()
            obs = [vector.clamp(-10, 10).to(self.log_std.dtype), *obs[1:]]
        return self.encoder(obs)

    def step(self, obs: list[Tensor], state: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        """One row: obs (N, ...), state (S, N, H) -> what distribution returns, value (N,), next state."""
        features, rows = self.encode(obs), self.memory.state_rows
        policy, new_state = self.memory.step(features, state[:rows])
        critic = features if self.args.critic == "none" else policy
        if self.critic_memory is not None:
            critic, critic_state = self.critic_memory.step(features, state[rows:])
            new_state = torch.cat([new_state, critic_state])
        new_state = torch.zeros_like(state) if self.args.ablate_memory else new_state
        return self.distribution(policy), self.critic(critic).squeeze(-1), new_state

    def replay(self, memory: ResetLSTM, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """A memory over sequences: x (L, B, F), state (S, B, H), final (L, B) -> outputs (L, B, H)."""
        if self.args.ablate_memory:  # each row is a sequence of its own, from zeros
            zeros = state.new_zeros(len(state), final.numel(), self.args.hidden_size)
            rows, no_end = x.flatten(0, 1)[None], torch.zeros_like(final).view(1, -1)
            return memory(rows, zeros, no_end).view(*final.shape, -1)
        return memory(x, state, final if self.args.reset_state else torch.zeros_like(final))

    def distribution(self, policy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The memory's output (..., H) -> mean and deviation (..., K), and the features (..., E) of gSDE."""
        *layers, last = self.actor
        features = policy
        for layer in layers:
            features = layer(features)
        mean = last(features)
        if self.args.use_sde:  # its deviation sends no gradient into the features
            std = sde_deviation(features.detach(), sde_sigma(self.log_std, self.args.sde_expln))
        else:
            std = self.log_std.exp()
        return mean, std.expand_as(mean), features

    def sample_noise(self, num_envs: int) -> None:
        """New gSDE matrices, whose entries are N(0, sigma): (N, E, K)."""
        sigma = sde_sigma(self.log_std.detach(), self.args.sde_expln)
        self.noise = torch.randn(num_envs, len(sigma), self.low.size, device=sigma.device) * sigma

    def act(self, obs: list[Tensor], state: Tensor):
        """One row: obs (N, ...), state (S, N, H) -> action (N, K), its Gaussian's mean and deviation
        (N, K), of which the density is computed once a rollout, value (N,), next state."""
        (mean, std, features), value, state = self.step(obs, state)
        if self.args.use_sde:
            if len(self.noise) != len(mean):
                self.sample_noise(len(mean))
            action = mean + (features[:, None] @ self.noise)[:, 0]
        else:
            action = mean + std * torch.randn_like(mean)
        return action, (mean, std), value, state

    def get_value(self, obs: list[Tensor], state: Tensor) -> Tensor:
        """One row: obs (N, ...), state (S, N, H) -> value (N,)."""
        return self.step(obs, state)[1]

    def evaluate_actions(self, obs: list[Tensor], state: Tensor, final: Tensor, action: Tensor):
        """Sequences: obs (L, B, ...), state (S, B, H) before the first row, final (L, B), action (L, B, K)
        -> logprob, entropy, value, all (L, B); on final rows they mean nothing."""
        features, rows = self.encode(obs), self.memory.state_rows
        policy = self.replay(self.memory, features, state[:rows], final)
        critic = {"detached": policy.detach(), "none": features}.get(self.args.critic, policy)
        if self.critic_memory is not None:
            critic = self.replay(self.critic_memory, features, state[rows:], final)
        mean, std, _ = self.distribution(policy)
        logprob = gaussian_log_prob(action, mean, std, self.args.squash_output)
        entropy = -logprob if self.args.squash_output else gaussian_entropy(std)
        return logprob, entropy, self.critic(critic).squeeze(-1)

    def to_env(self, action: Tensor) -> np.ndarray:
        """Actions (N, K) in the form that the environments take: within their bounds."""
        array = action.cpu().numpy()
        if self.args.squash_output:
            array = self.low + (np.tanh(array) + 1) / 2 * (self.high - self.low)
        array = array.clip(self.low, self.high).reshape(-1, *self.action_space.shape)
        return array.astype(self.action_space.dtype, copy=False)

    @torch.inference_mode()
    def predict(self, obs: Any, state=None, episode_start=None, deterministic=False, info=None):
        """One observation of the environment or a batch of N -> (action, state), for use in any program.

        state is what the last call returned, None for zeros; it is zeroed first where episode_start (N,) is
        set. gSDE's noise is a new one at each call.
        """
        device, leaf, value = self.log_std.device, self.observation_space, obs
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
        if deterministic:
            (action, _, _), _, state = self.step(row, state)
        else:
            self.noise = torch.empty(0)
            action, _, _, state = self.act(row, state)
        return self.to_env(action)[0 if single else slice(None)], state

# --- The mathematics ----------------------------------------------------------------------------------------

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

def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor, clip_coef: float | None):
    """Half the squared error of tensors (L, B); with clip_coef the larger of it and the error of the value
    clipped to that distance from the old one (openai/baselines, ppo2)."""
    error = (value - returns) ** 2
    if clip_coef is not None:
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
        error = torch.max(error, (clipped - returns) ** 2)
    return 0.5 * weighted_mean(error, weight)

def anneal(initial: float, final: float | None, progress: float, power: float) -> float:
    """(initial - final) (1 - progress)^power + final; constant where final is None."""
    return initial if final is None else (initial - final) * (1 - min(progress, 1.0)) ** power + final

def sequence_starts(num_steps: int, seq_len: int, seq_stride: int) -> list[int]:
    """First rows of a rollout's sequences, of which the last ends with the rollout: no row is left out."""
    seq_len = seq_len or num_steps
    return [*range(0, num_steps - seq_len, seq_stride or seq_len), num_steps - seq_len]

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
    counts = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_size",
              "num_layers", "encoder_sizes", "head_sizes")  # fmt: skip
    least = dict.fromkeys(counts, 1) | {"log_std_init": -20, "sde_sample_freq": -1}
    for flag, value in flags.items():
        for x in value if isinstance(value, tuple) else [value] if isinstance(value, (int, float)) else []:
            if not least.get(flag, 0) <= x < float("inf"):
                wrong.append((flag, f"must be a finite number, at least {least.get(flag, 0)}"))
            if flag in ("gamma", "gae_lambda") and x > 1:
                wrong.append((flag, "must be at most 1"))
    if not wrong and args.seq_len and args.num_steps % args.seq_len:
        wrong = [("seq_len", f"must divide --num-steps {args.num_steps}")]
    if not wrong:
        count = args.num_envs * len(sequence_starts(args.num_steps, args.seq_len, args.seq_stride))
        if count % args.num_minibatches:
            wrong = [("num_minibatches", f"must divide the {count} sequences of --num-envs {args.num_envs}")]
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
    parameters = list(agent.parameters())
    optimizer = torch.optim.AdamW(parameters, eps=1e-5, weight_decay=args.weight_decay, fused=True)
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

    # What environments return is stored in numpy arrays, what the agent returns in a list of rows.
    raw, info = attempt("its first reset", envs.reset, seed=args.seed)
    obs = [np.zeros((T + 1, *x.shape), x.dtype) for x in agent.observe(raw, info)]
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((T, N), bool), np.zeros((T, N), bool)
    starts = sequence_starts(T, args.seq_len, args.seq_stride)
    seq_rows = torch.tensor(starts) + torch.arange(args.seq_len or T)[:, None]  # (L, starts): their rows
    copies = torch.bincount(seq_rows.flatten())[:, None].to(device)  # (T, 1): the sequences that a row is in
    states = torch.zeros(len(starts), *agent.initial_state(N).shape, device=device)  # before their first rows

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
        acted, returned, lengths = [], [], []  # of its rows; of the episodes that end in it
        with torch.inference_mode():
            for t in range(T):
                if t in starts:
                    states[starts.index(t)] = state
                if args.use_sde and (t == 0 or args.sde_sample_freq > 0 and t % args.sde_sample_freq == 0):
                    agent.sample_noise(N)
                row = [torch.from_numpy(x[t]).to(device) for x in obs]
                action, (mean, std), value, state = agent.act(row, state)
                acted.append((action, mean, std, value))
                if final[t].any():
                    state = agent.next_state(state, torch.from_numpy(final[t]).to(device))
                where = f"row {t} of iteration {run['iteration']}"
                raw, rewards[t], terminated[t], truncated[t], info = attempt(
                    where, envs.step, agent.to_env(action)
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
            last_value = agent.get_value([torch.from_numpy(x[T]).to(device) for x in obs], state)
            actions, mus, sigmas, values = map(torch.stack, zip(*acted))  # (T, N, ...)
            values = torch.cat([values, last_value[None]])  # (T + 1, N)
            logprobs = gaussian_log_prob(actions, mus, sigmas, args.squash_output)
        for what, x in ("observation", obs[0]), ("reward", rewards):
            if not np.isfinite(x).all():
                where = "in row {} of environment {}".format(*np.argwhere(~np.isfinite(x))[0])
                where += f" of iteration {run['iteration']}"
                raise TrainingError(f"{what} is not finite {where}")
        update_start = time.perf_counter()

        # --- advantages ---
        b_obs = [torch.from_numpy(x).to(device) for x in obs]
        b_rewards, b_terminated, b_truncated, b_final = (
            torch.from_numpy(x).to(device) for x in (rewards, terminated, truncated, final)
        )
        valid, done = ~b_final[:T], b_terminated | b_truncated
        if args.norm_reward:  # else values in the hundreds drown the policy's gradient in a shared memory
            sums, carried = discounted_sums(b_rewards, done, carried, args.gamma)
            agent.return_stats.update(sums[valid])
            b_rewards = (b_rewards / (agent.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)
        advantages = compute_gae(b_rewards, values, b_terminated, done, args.gamma, args.gae_lambda)
        returns, weights = advantages + values[:T], valid / copies
        if args.norm_adv == "batch":
            advantages = normalize(advantages, weights)

        # --- update: minibatches of whole sequences ---
        progress = run["global_step"] / args.total_timesteps
        learning_rate = anneal(args.learning_rate, args.learning_rate_final, progress, args.anneal_power)
        clip_coef = anneal(args.clip_coef, args.clip_coef_final, progress, args.anneal_power)
        ent_coef = anneal(args.ent_coef, args.ent_coef_final, progress, args.anneal_power)
        vf_clip = (args.clip_coef_vf or clip_coef) if args.clip_vloss else None
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        table = torch.stack([logprobs, values[:T], returns, advantages, weights])  # one gather, not five
        losses, minibatches = [], args.update_epochs * args.num_minibatches
        order = torch.cat([torch.randperm(len(starts) * N) for _ in range(args.update_epochs)])
        for which, env in zip((order // N).chunk(minibatches), (order % N).chunk(minibatches)):
            at = seq_rows[:, which], env  # the rows (L, B) and environments (B,) of the minibatch
            state_b = states[which, :, env].movedim(0, 1)
            old_logprob, old_value, return_, advantage, weight = table[:, at[0], at[1]]
            logprob, entropy, value = agent.evaluate_actions(
                [x[at] for x in b_obs], state_b, b_final[at], actions[at]
            )
            if args.norm_adv == "minibatch":
                advantage = normalize(advantage, weight)
            policy_loss, approx_kl, clipfrac = ppo_loss(logprob, old_logprob, advantage, weight, clip_coef)
            v_loss = value_loss(value, old_value, return_, weight, vf_clip)
            mean_entropy = weighted_mean(entropy, weight)
            losses.append(torch.stack([policy_loss, v_loss, mean_entropy, approx_kl, clipfrac]).detach())
            if args.target_kl is not None and approx_kl > 1.5 * args.target_kl:
                break
            loss = policy_loss + args.vf_coef * v_loss
            if ent_coef:  # else its backward pass is time for nothing
                loss = loss - ent_coef * mean_entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
        if agent.norm_obs:  # not before: old log-probabilities are of observations as they were normalised
            agent.obs_stats.update(b_obs[0][:T][valid])
        means = torch.stack(losses).mean(0).tolist()
        if not (np.isfinite(means).all() and all(p.isfinite().all() for p in agent.parameters())):
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
        names = "policy_loss value_loss entropy approx_kl clipfrac explained_variance".split()
        logs = {f"losses/{name}": x for name, x in zip(names, [*means, 1 - unexplained])}
        logs |= {"charts/learning_rate": learning_rate, "charts/SPS": sps}
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
