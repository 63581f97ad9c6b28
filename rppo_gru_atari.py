# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9,<2.14", "gymnasium>=1.2", "ale-py>=0.11", "tyro>=1.0", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO with a GRU on Atari: memory instead of stacked frames, on any number of processes.

    python rppo_gru_atari.py --env-id ALE/Breakout-v5 --amp  # train; --help lists every flag and its default
    torchrun --nproc-per-node=2 rppo_gru_atari.py            # the same in two processes; --cuda: on two GPUs
    python rppo_gru_atari.py --play runs/RUN                 # watch it; --resume runs/RUN continues it

PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7. GAE: Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16.
Replay from stored states: Kapturowski et al. 2019 (R2D2). GRU: Cho et al. 2014, arXiv:1406.1078; ResetGRU.
Differs from rppo_lstm.py in the GRU, in the CNN over the uint8 frames of ale_py's vector environment, and in
data parallelism: each process plays its share of the environments, and gradients are summed over all.

Rows. T = num_steps rows a rollout, N environments; rollout tensors are (T, N, ...). Gymnasium's vector
environments return the last observation of an episode as a row of its own: final[t] says that obs[t] is one.
Its action is ignored, it is no environment step, and no loss or statistic counts it; but its value, computed
with the state that the memory has there, bootstraps a truncated episode. After it the state is zero.
Shapes: B sequences of L rows in a minibatch, F features, H hidden units, S rows of rnn_state (one a layer),
C stacked frames of 84 x 84, A actions.
"""
import ctypes
import io
import json
import os
import signal
import sys
import threading
import time
import zipfile
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium import spaces
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_gru_atari"
if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # AVX2 or AVX512
    # On AMD's processors MKL takes 13 times as long for a tanh, 7 for an exp, unless it is told 5, AVX2.
    os.environ.setdefault("MKL_VML_DEBUG_CPU_TYPE", "5")
if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    # glibc returns freed activations to the kernel and faults them in again, up to a tenth of an iteration,
    # unless it is told how much to keep (M_TOP_PAD is -2).
    libc.mallopt(-2, 2**31 - 1)

@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"  # an Atari game of ale_py
    frame_stack: int = 1  # last frames in an observation (C); 1 leaves motion to the memory, 4 is DQN's
    sticky_actions: float = 0.0  # probability that an action is repeated (Machado et al. 2018: 0.25)
    terminal_on_life_loss: bool = False  # a lost life ends the return, but neither the game nor the memory
    clip_rewards: bool = True  # learn from the sign of rewards; what is logged is always the game's score
    max_episode_frames: int = 108_000  # emulator frames, four a step, after which a game is truncated
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: ale_py's own; else Python's, one a game
    total_timesteps: int = 10_000_000  # environment steps to train for
    seed: int = 1  # of everything; the same on the same machine and thread count gives the same weights
    cuda: bool = False  # train on the GPU, each process on its own
    amp: bool = False  # the CNN in bfloat16; the memory and the losses stay in float32
    torch_threads: int = 0  # CPU threads of a process; 0: its share of the cores

    num_envs: int = 8  # parallel environments, of all processes together
    num_steps: int = 128  # rows of a rollout in each environment (T)
    num_minibatches: int = 4  # minibatches an epoch, of whole sequences of every process
    update_epochs: int = 4  # passes over a rollout
    seq_len: int = 0  # rows of a training sequence (L), before which no gradient goes back; 0: num_steps
    seq_stride: int = 0  # rows from one sequence's start to the next one's; 0: seq_len, so that none overlap
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_adv: Literal["minibatch", "batch", "none"] = "minibatch"  # rows that normalise advantages

    hidden_size: int = 128  # units of a GRU layer (H)
    num_layers: int = 1  # GRU layers
    critic: Literal["shared", "separate", "detached", "none"] = "shared"  # reads the actor's memory, its own,
    # the actor's without sending gradients into it, or the encoder, memoryless
    ablate_memory: bool = False  # zero the memory at every row: the memoryless control

    learning_rate: float = 2.5e-4  # of Adam
    learning_rate_final: float | None = 0.0  # annealed to this over the run; None: constant
    clip_coef: float = 0.1  # epsilon of the clipped surrogate
    clip_coef_final: float | None = None  # annealed to this over the run; None: constant
    ent_coef: float = 0.01  # weight of the entropy bonus
    ent_coef_final: float | None = None  # annealed to this over the run; None: constant
    anneal_power: float = 1.0  # exponent of the polynomial annealing; 1: linear
    vf_coef: float = 0.5  # weight of the value loss
    clip_vloss: bool = True  # the larger of the clipped and the unclipped value loss
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

class ArgumentError(ValueError):
    """A flag, file or environment that cannot be used, found before any work is done: exit code 2."""

class TrainingError(RuntimeError):
    """A run that cannot go on: exit code 1."""

# --- Environments -------------------------------------------------------------------------------------------

def area_weights(size: int) -> np.ndarray:
    """(84, size): what each of a line's pixels weighs in the means of the 84 areas that divide the line."""
    edges, pixels = np.linspace(0, size, 85), np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return overlap.clip(0) * (84 / size)

class AtariFrames(gym.Wrapper):
    """Does to a game what ale_py's vector environment does, in Python, so that it can be shown and filmed.

    A step is four emulator frames; an observation is the larger of the last two, averaged over areas down to
    84 x 84. A game starts with FIRE, where there is that, and up to 30 emulator frames without action.
    """
    def __init__(self, env: gym.Env, frame_stack: int):
        super().__init__(env)
        self.frames: deque[np.ndarray] = deque(maxlen=frame_stack)
        self.observation_space = spaces.Box(0, 255, (frame_stack, 84, 84), np.uint8)
        self.rows, self.columns = (area_weights(size) for size in env.observation_space.shape or ())

    def observe(self, screens: list[np.ndarray]) -> np.ndarray:
        area = self.rows @ np.maximum(screens[0], screens[-1]).astype(np.float64) @ self.columns.T
        self.frames.append(np.rint(area).astype(np.uint8))
        return np.stack(self.frames)

    def reset(self, *, seed=None, options=None):
        screen, info = self.env.reset(seed=seed, options=options)
        game = self.unwrapped
        fire = [1] if game.get_action_meanings()[1] == "FIRE" else []
        for action in fire + [0] * int(self.np_random.integers(31)):
            screen, *_, info = self.env.step(action)
        self.frames.extend([np.zeros((84, 84), np.uint8)] * self.frames.maxlen)
        return self.observe([screen]), info

    def step(self, action):
        screens, total = [], 0.0
        for _ in range(4):
            screen, reward, terminated, truncated, info = self.env.step(action)
            screens, total = [*screens[-1:], screen], total + float(reward)
            if terminated or truncated:
                break
        return self.observe(screens), total, terminated, truncated, info

def cores() -> int:
    """This process's share of the CPU cores that it may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

def make_env(args: Args, render_mode: str | None, video_dir: Path | None) -> gym.Env:
    """One game, from Python."""
    env = gym.make(args.env_id, render_mode=render_mode, frameskip=1, obs_type="grayscale",
                   repeat_action_probability=args.sticky_actions,
                   max_num_frames_per_episode=args.max_episode_frames)  # fmt: skip
    env = AtariFrames(env, args.frame_stack)
    if video_dir is not None:
        env = gym.wrappers.RecordVideo(env, str(video_dir), episode_trigger=lambda _: True)
    return env

def make_envs(args: Args, num_envs: int, render_mode: str | None = None, video_dir: Path | None = None):
    """num_envs games as one VectorEnv. Raises ArgumentError where the environment cannot be had."""
    if not args.env_id.startswith("ALE/"):
        why = "use rppo_lstm.py, or rppo_continuous.py if its actions are continuous"
        raise ArgumentError(f"--env-id {args.env_id}: not an Atari game like ALE/Pong-v5; {why}")
    try:
        import ale_py  # registers its environments
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
        if args.vectorization == "auto" and render_mode is None:
            envs = gym.make_vec(
                args.env_id, num_envs=num_envs, vectorization_mode="vector_entry_point",
                stack_num=args.frame_stack, repeat_action_probability=args.sticky_actions,
                max_num_frames_per_episode=args.max_episode_frames, reward_clipping=False,
                num_threads=min(num_envs, cores()),
            )  # fmt: skip
        else:
            vector = gym.vector.AsyncVectorEnv if args.vectorization == "async" else gym.vector.SyncVectorEnv
            envs = vector([lambda: make_env(args, render_mode, video_dir)] * num_envs, copy=False)
    except ModuleNotFoundError as error:
        package = str(error.name).replace("_", "-")
        raise ArgumentError(f"--env-id {args.env_id}: {package} is missing; pip install {package}") from error
    except Exception as error:  # Gymnasium's message names a near id
        raise ArgumentError(f"--env-id {args.env_id}: {' '.join(str(error).split())}") from error
    envs.metadata = dict(envs.metadata)  # ale_py shares one dict between all its vector environments
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.NEXT_STEP:
        raise ArgumentError(f"--env-id {args.env_id}: autoreset is not NEXT_STEP; try --vectorization sync")
    return envs

def attempt(where: str, call: Any, *inputs: Any, **options: Any) -> Any:
    """call(*inputs, **options) of an environment, whose exceptions become a TrainingError of one line."""
    try:
        return call(*inputs, **options)
    except Exception as error:
        raise TrainingError(f"the environment raised {error!r} in {where}") from error

# --- Networks -----------------------------------------------------------------------------------------------

def init(layer: Any, std: float = 2**0.5) -> nn.Module:
    """Orthogonal weights and zero biases (Huang et al. 2022, "The 37 implementation details of PPO", 2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer

class ColumnConv2d(nn.Conv2d):
    """The same convolution, which takes as many columns as its stride has for one with so many times the
    channels. Where channels come last in memory that is a view, and kernels for few channels are slow."""
    def forward(self, x: Tensor) -> Tensor:
        """Images (M, C, height, width) -> (M, filters, ...); stride divides the width and the kernel's."""
        s = self.stride[1]
        x = x.permute(0, 2, 3, 1).unflatten(2, (-1, s)).flatten(3).permute(0, 3, 1, 2)
        weight = self.weight.unflatten(3, (-1, s)).permute(0, 4, 1, 2, 3).flatten(1, 2)
        return nn.functional.conv2d(x, weight, self.bias, (s, 1))

def nature_cnn(channels: int, height: int, width: int) -> nn.Sequential:
    """Images (M, C, height, width), scaled to [0, 1] -> features (M, 512) (Mnih et al. 2015). Channels come
    last in memory; a convolution as large as its input is the linear layer that needs no copy for that."""
    layers: list[nn.Module] = []
    for filters, kernel, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
        layers += [init(ColumnConv2d(channels, filters, kernel, stride)), nn.ReLU(inplace=True)]
        channels, height, width = filters, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    layers += [init(nn.Conv2d(channels, 512, (height, width))), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

class Encoder(nn.Module):
    """uint8 frames (..., C, 84, 84) -> features (..., 512); amp computes them in bfloat16."""
    num_features = 512

    def __init__(self, shape: tuple[int, ...], amp: bool):
        super().__init__()
        self.amp, self.cnn = amp, nature_cnn(*shape)

    def forward(self, obs: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        # Frames become floats only here, a minibatch at a time; a pixel's 8 bits fit into bfloat16.
        frames = obs.flatten(0, -4).to(memory_format=torch.channels_last)
        frames = frames.to(torch.bfloat16 if self.amp else dtype)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            features = self.cnn(frames / 255.0)
        return features.to(dtype).unflatten(0, obs.shape[:-3])

class GRULayer(torch.autograd.Function):
    """One GRU layer for CPUs, its backward pass written out, which takes half the time of torch.gru's when
    sequences are few: that one records and differentiates a dozen small operations a row.

    With r, z and n as in ResetGRU and m = U_n h + c_n, a = dloss/dh' is carried from row to row. By the sums
    that tanh and sigmoid are taken of, the derivatives are d_n = (1 - z) (1 - n^2) a, d_r = m r (1 - r) d_n,
    d_z = z (1 - z) (h - n) a and d_m = r d_n. By h they are z a + U^T (d_r, d_z, d_m).
    """
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, W: Tensor, U: Tensor, c: Tensor) -> Tensor:
        """x (L, B, F), h (B, H), W (3 H, F), U (3 H, H), c (3 H) -> outputs (L, B, H)."""
        H = h.shape[-1]
        gates = nn.functional.linear(x, W)  # row by row they become r, z, n
        hidden = torch.empty_like(gates)  # U h + c
        states = torch.cat([h[None], torch.empty_like(gates[..., :H])])  # (L + 1, B, H)
        (rz, n), (h_rz, m) = gates.split((2 * H, H), -1), hidden.split((2 * H, H), -1)
        rows = zip(hidden, h_rz, m, rz, *rz.chunk(2, -1), n, states, states[1:])
        for hidden_t, h_rz_t, m_t, rz_t, r_t, z_t, n_t, before, after in rows:
            torch.addmm(c, before, U.T, out=hidden_t)
            rz_t.add_(h_rz_t).sigmoid_()
            n_t.addcmul_(r_t, m_t).tanh_()
            torch.lerp(n_t, before, z_t, out=after)
        ctx.save_for_backward(x, W, U, gates, m, states)
        return states[1:]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, W, U, gates, m, states = ctx.saved_tensors
        (r, z, n), before = gates.chunk(3, -1), states[:-1]
        d_n = (1 - z) * (1 - n * n)
        d = torch.stack([m * r * (1 - r) * d_n, z * (1 - z) * (before - n), r * d_n, z], -2)  # times a, below
        d_hidden, d_before = d[..., :3, :].flatten(-2), d[..., 3, :]  # views: by U h + c, by h itself
        a, carried = grad.clone(), torch.zeros_like(grad[0])
        rows = (reversed(y.unbind()) for y in (a, a.unsqueeze(-2), d, d_hidden, d_before))
        for a_t, factor, d_t, d_hidden_t, d_before_t in zip(*rows):
            a_t += carried
            d_t *= factor
            carried = torch.addmm(d_before_t, d_hidden_t, U)
        d_x = torch.cat([d[..., :2, :].flatten(-2), d_n * a], -1).flatten(0, 1)  # by W x
        d_hidden, all_x, all_h = d_hidden.flatten(0, 1), x.flatten(0, 1), before.flatten(0, 1)
        return (d_x @ W).view_as(x), carried, d_x.T @ all_x, d_hidden.T @ all_h, d_hidden.sum(0)

class ResetGRU(nn.Module):
    """GRU layers whose state is zero after every *final* row, replayed in one fused call a layer.

    r = sigmoid(W_r x + b_r + U_r h + c_r), z likewise, n = tanh(W_n x + b_n + r (U_n h + c_n)),
    h' = (1 - z) n + z h.

    No loss uses a final row's output, so on replay the row is free to be the reset itself. h' is 0 if z = 0
    and n = 0, and n is 0 if r = 0 and neither input nor b is left. So b is handed over as the weights of an
    input feature that is 1, but 0 on a final row, as the others are there; and one more feature, -C on it,
    shuts r and z. sigmoid(-C) is exactly 0, so h' = 0 exactly, and no gradient crosses. The last feature's
    weights (1 for r and z, 0 for n) are a constant. rnn_state (S, N, H) has a row a layer.
    """
    C = 1e4
    token_weight: Tensor

    def __init__(self, input_size: int, hidden_size: int, num_layers: int):
        super().__init__()
        self.state_rows, sizes = num_layers, [input_size] + [hidden_size] * num_layers
        self.cells: Any = nn.ModuleList(nn.GRUCell(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        gates = torch.tensor([1.0, 1.0, 0.0]).repeat_interleave(hidden_size)  # r, z, n
        self.register_buffer("token_weight", gates[:, None], persistent=False)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One row, its observation as it is: x (N, F), state (S, N, H) -> output (N, H), next state."""
        states = []
        for cell, h in zip(self.cells, state):
            x = torch.gru_cell(x, h, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            states.append(x)
        return x, torch.stack(states)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), state (S, B, H) before the first row, final (L, B) -> outputs (L, B, H)."""
        alive = (~final).unsqueeze(-1).to(x.dtype)
        token = self.C * (alive - 1)
        for cell, h in zip(self.cells, state):
            weight_ih, weight_hh, bias_ih, bias_hh = cell.parameters()
            weight = torch.cat([weight_ih, bias_ih[:, None], self.token_weight], 1)  # (3 H, F + 2)
            x = torch.cat([x * alive, alive, token], -1)  # (L, B, F + 2)
            if x.device.type == "cpu":
                x = GRULayer.apply(x, h, weight, weight_hh, bias_hh)
            else:  # cuDNN's
                weights = [weight, weight_hh, torch.zeros_like(bias_ih), bias_hh]
                x = torch.gru(x, h[None], weights, True, 1, 0.0, self.training, False, False)[0]
        return x

class Agent(nn.Module):
    """Encoder, memory, actor and critic. obs are uint8 frames (..., C, 84, 84), actions (...) integers."""

    def __init__(self, observation_space: Any, action_space: Any, args: Args):
        super().__init__()
        self.observation_space, self.args = observation_space, args
        self.encoder = Encoder(observation_space.shape, args.amp)
        features, hidden, separate = self.encoder.num_features, args.hidden_size, args.critic == "separate"
        self.memory = ResetGRU(features, hidden, args.num_layers)
        self.critic_memory = ResetGRU(features, hidden, args.num_layers) if separate else None
        self.actor = init(nn.Linear(hidden, int(action_space.n)), std=0.01)
        self.critic = init(nn.Linear(features if args.critic == "none" else hidden, 1), std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """rnn_state (S, N, H) after a reset: zeros; a separate critic's rows follow the actor's."""
        rows = self.memory.state_rows * (1 if self.critic_memory is None else 2)
        return self.memory.token_weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def next_state(self, state: Tensor, final: Tensor) -> Tensor:
        """The state (S, N, H) that the next row starts from, where final (N,) says what this row was."""
        return state.where(~final[:, None], 0.0)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One row: obs (N, C, 84, 84), state (S, N, H) -> log-probabilities (N, A), value, next state."""
        features, rows = self.encoder(obs), self.memory.state_rows
        policy, new_state = self.memory.step(features, state[:rows])
        critic = features if self.args.critic == "none" else policy
        if self.critic_memory is not None:
            critic, critic_state = self.critic_memory.step(features, state[rows:])
            new_state = torch.cat([new_state, critic_state])
        new_state = torch.zeros_like(state) if self.args.ablate_memory else new_state
        return self.log_probs(policy), self.critic(critic).squeeze(-1), new_state

    def replay(self, memory: ResetGRU, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """A memory over sequences: x (L, B, F), state (S, B, H), final (L, B) -> outputs (L, B, H)."""
        if self.args.ablate_memory:  # each row is a sequence of its own, from zeros
            zeros = state.new_zeros(len(state), final.numel(), self.args.hidden_size)
            rows, no_end = x.flatten(0, 1)[None], torch.zeros_like(final).view(1, -1)
            return memory(rows, zeros, no_end).view(*final.shape, -1)
        return memory(x, state, final)

    def log_probs(self, policy: Tensor) -> Tensor:
        """The memory's output (..., H) -> the log-probability of every action (..., A)."""
        return self.actor(policy).log_softmax(-1)

    def act(self, obs: Tensor, state: Tensor):
        """One row: obs (N, C, 84, 84), state (S, N, H) -> action, logprob, value (N,), next state."""
        logprobs, value, state = self.step(obs, state)
        race = torch.empty_like(logprobs).exponential_()  # the argmax of p / Exp(1) has the distribution p
        action = (logprobs.exp() / race).argmax(-1, keepdim=True)
        return action.squeeze(-1), logprobs.gather(-1, action).squeeze(-1), value, state

    def get_value(self, obs: Tensor, state: Tensor) -> Tensor:
        """One row: obs (N, C, 84, 84), state (S, N, H) -> value (N,)."""
        return self.step(obs, state)[1]

    def evaluate_actions(self, obs: Tensor, state: Tensor, final: Tensor, action: Tensor):
        """Sequences: obs (L, B, C, 84, 84), state (S, B, H) before the first row, final and action (L, B)
        -> logprob, entropy, value, all (L, B); on final rows they mean nothing."""
        features, rows = self.encoder(obs), self.memory.state_rows
        policy = self.replay(self.memory, features, state[:rows], final)
        critic = {"detached": policy.detach(), "none": features}.get(self.args.critic, policy)
        if self.critic_memory is not None:
            critic = self.replay(self.critic_memory, features, state[rows:], final)
        logprobs = self.log_probs(policy)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprob = logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return logprob, entropy, self.critic(critic).squeeze(-1)

    @torch.inference_mode()
    def predict(self, obs: Any, state=None, episode_start=None, deterministic=False, info=None):
        """One observation of the environment or a batch of N -> (action, state), for use in any program.

        state is what the last call returned, None for zeros; it is zeroed first where episode_start (N,) is
        set. info is not read: every script's agent is called in the same way.
        """
        device, single = self.memory.token_weight.device, np.shape(obs) == self.observation_space.shape
        row = torch.from_numpy(np.array(obs)).to(device)
        row = row[None] if single else row
        state = self.initial_state(len(row)) if state is None else state
        if episode_start is not None:
            starts = torch.as_tensor(episode_start, dtype=torch.bool, device=device).reshape(-1)
            state = self.next_state(state, starts)
        if deterministic:
            logprobs, _, state = self.step(row, state)
            action = logprobs.argmax(-1)
        else:
            action, _, _, state = self.act(row, state)
        return action.cpu().numpy()[0 if single else slice(None)], state

# --- The mathematics ----------------------------------------------------------------------------------------

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

def collective(call: Any, *inputs: Any) -> None:
    """call(*inputs) of torch.distributed, whose failure, as when a process has died, is one line."""
    try:
        call(*inputs)
    except RuntimeError as error:
        raise TrainingError(f"another process is gone: {' '.join(str(error).split())}") from error

def all_sum(x: Tensor) -> Tensor:
    """The sum of x over the processes, the same to the bit in each; x itself if there is only one."""
    if dist.is_initialized():
        collective(dist.all_reduce, x := x.clone())
    return x

def mean_and_var(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of x over the rows of every process that count, as weighted_mean has it of this one's."""
    x, weight = x.double(), weight.double()
    total, first, second = all_sum(torch.stack([weight.sum(), (x * weight).sum(), (x**2 * weight).sum()]))
    mean = first / total.clamp(min=1e-8)
    return mean, (second / total.clamp(min=1e-8) - mean**2).clamp(min=0)

def normalize(advantages: Tensor, weight: Tensor) -> Tensor:
    """Advantages of mean 0 and (biased, so that one row has it too) deviation 1 over every process's rows."""
    mean, var = mean_and_var(advantages, weight)
    return (advantages - mean) / (var.sqrt() + 1e-8)

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

def sum_gradients(agent: nn.Module, statistics: Tensor) -> Tensor:
    """Sums gradients over the processes, with statistics (n,) behind them, in one flat all_reduce -> the
    statistics' sums. Each process's loss is divided by the rows of all, so the sum is the mean over those."""
    gradients = [p.grad for p in agent.parameters() if p.grad is not None]
    if dist.is_initialized():
        flat = all_sum(torch.cat([*(gradient.flatten() for gradient in gradients), statistics]))
        *parts, statistics = flat.split([*(gradient.numel() for gradient in gradients), len(statistics)])
        for gradient, part in zip(gradients, parts):
            gradient.copy_(part.view_as(gradient))
    return statistics

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

def join_processes(args: Args) -> tuple[int, int, torch.device]:
    """Joins the processes that torchrun started, if it did -> this one's rank, their number, its device."""
    rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    if world and not dist.is_initialized():  # the timeout is for one that hangs: a dead one is seen at once
        dist.init_process_group("nccl" if args.cuda else "gloo", timeout=timedelta(minutes=10))
    return rank, max(world, 1), device

def gather(x: Any) -> list[Any]:
    """The x of every process, in the order of their ranks."""
    parts = [x]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        collective(dist.all_gather_object, parts, x)
    return parts

def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work."""
    flags, wrong = vars(args), []
    counts = {"total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_size",
              "num_layers", "frame_stack", "max_episode_frames"}  # fmt: skip
    processes = int(os.environ.get("WORLD_SIZE", 1))
    for flag, value in flags.items():
        for x in [value] if isinstance(value, (int, float)) else []:
            if not (flag in counts) <= x < float("inf"):
                wrong.append((flag, f"must be a finite number, at least {int(flag in counts)}"))
            if flag in ("gamma", "gae_lambda", "sticky_actions") and x > 1:
                wrong.append((flag, "must be at most 1"))
    if not wrong and args.seq_len and args.num_steps % args.seq_len:
        wrong = [("seq_len", f"must divide --num-steps {args.num_steps}")]
    if not wrong and args.num_envs % processes:
        wrong = [("num_envs", f"must be a multiple of the {processes} processes that torchrun started")]
    if not wrong:
        count = args.num_envs // processes
        count *= len(sequence_starts(args.num_steps, args.seq_len, args.seq_stride))
        if count % args.num_minibatches:
            each = f" in each of {processes} processes" if processes > 1 else ""
            why = f"must divide the {count} sequences of --num-envs {args.num_envs}{each}"
            wrong = [("num_minibatches", why)]
    if args.cuda and torch.cuda.device_count() <= int(os.environ.get("LOCAL_RANK", 0)):
        wrong += [("cuda", f"torch finds {torch.cuda.device_count()} GPUs here, and each process needs one")]
    for flag, why in wrong[:1]:
        raise ArgumentError(f"--{flag.replace('_', '-')} {flags[flag]}: {why}")

def train(args: Args) -> Agent:
    """One run: rollout, advantages, update, until the steps are done. Its files are in runs_dir/run_name."""
    check_args(args)
    rank, world, device = join_processes(args)
    T, N = args.num_steps, args.num_envs // world  # N of the environments are this process's
    envs = make_envs(args, N)
    torch.set_num_threads(1)  # the first weights are the same with any number of threads
    torch.manual_seed(args.seed)  # the same weights in every process, then random numbers of its own
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    torch.manual_seed(int(np.random.SeedSequence([args.seed, rank]).generate_state(1, np.uint64)[0]))
    torch.set_num_threads(args.torch_threads or cores())
    torch.backends.cudnn.deterministic = True
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters, eps=1e-5, fused=True)
    run: dict[str, Any] = {"iteration": 0, "global_step": 0, "episodes": 0, "recent": [], "wall_seconds": 0.0}
    run |= {"timed_steps": 0, "rollout_seconds": 0.0, "update_seconds": 0.0}  # without the first iteration
    if args.resume:
        saved = load(f"{args.runs_dir}/{args.run_name}/checkpoint.pt", agent)
        if len(saved["rng"]) != world:
            why = f"its processes were {len(saved['rng'])}, not {world}; set torchrun's --nproc-per-node"
            raise ArgumentError(f"--resume {args.resume}: {why}")
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"][rank][0])
        torch.cuda.set_rng_state_all(saved["rng"][rank][1:])
        run = saved["run"]
    elif args.init_from:
        load(args.init_from, agent)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 10**6}".replace("/", "-")
    args.run_name = args.run_name or name
    run_dir = Path(args.runs_dir, args.run_name)
    try:
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
            (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=1))
            writer = SummaryWriter(str(run_dir), purge_step=run["global_step"] or None)
    except FileExistsError as error:
        raise ArgumentError(f"--run-name {args.run_name}: {run_dir} exists; --resume continues it") from error
    except OSError as error:
        raise ArgumentError(f"--runs-dir {args.runs_dir}: {error}") from error
    if args.track and rank == 0:
        import wandb
        wandb.init(project=args.wandb_project, entity=args.wandb_entity, name=args.run_name, dir=str(run_dir),
                   config=asdict(args), sync_tensorboard=True)

    # What environments return is stored as numpy arrays, but for frames; what the agent reads, as tensors.
    shape = envs.single_observation_space.shape
    obs = torch.zeros(T + 1, N, *shape, dtype=torch.uint8, device=device)
    arrived = torch.zeros(N, *shape, dtype=torch.uint8, pin_memory=args.cuda)  # a GPU copies frames from it
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((T, N), bool), np.zeros((T, N), bool)
    starts = sequence_starts(T, args.seq_len, args.seq_stride)
    seq_rows = torch.tensor(starts) + torch.arange(args.seq_len or T)[:, None]  # (L, starts): their rows
    copies = torch.bincount(seq_rows.flatten())[:, None].to(device)  # (T, 1): the sequences that a row is in
    states = torch.zeros(len(starts), *agent.initial_state(N).shape, device=device)  # before their first rows

    checkpoint_every = args.checkpoint_every or max(5, -(-args.total_timesteps // (10 * args.num_envs * T)))
    recent, started, fresh, sps = deque(run["recent"], 100), time.time() - run["wall_seconds"], True, 0.0
    bar = tqdm(total=args.total_timesteps, initial=run["global_step"], unit="step", mininterval=0.5,
               disable=rank > 0)  # fmt: skip
    while run["global_step"] < args.total_timesteps:
        iteration_start = time.perf_counter()
        if fresh or run["iteration"] % checkpoint_every == 0:
            # Environments cannot be saved, so at a checkpoint they start afresh, also in a run that goes on.
            run |= {"recent": list(recent), "wall_seconds": time.time() - started}
            rng = gather([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
            if rank == 0:
                save(run_dir / "checkpoint.pt", args=asdict(args), agent=agent.state_dict(), run=run, rng=rng,
                     optimizer=optimizer.state_dict())  # fmt: skip
            seed = int(np.random.SeedSequence([args.seed, run["iteration"]]).generate_state(1)[0] // 2)
            seed += rank * N  # environment n of them all has the seed seed + n
            raw, info = attempt(f"the reset of iteration {run['iteration']}", envs.reset, seed=seed)
            obs[0], lives = torch.from_numpy(raw), info["lives"]
            final[0], fresh, state = False, False, agent.initial_state(N)
            episode_return, episode_length = np.zeros(N), np.zeros(N, int)

        # --- rollout ---
        acted, returned, lengths = [], [], []  # of its rows; of the episodes that end in it
        # The outer autocast, though off, keeps the bfloat16 weights of the CNN's large last layer from row to
        # row; inference_mode instead of no_grad would convert them at each.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for t in range(T):
                if t in starts:
                    states[starts.index(t)] = state
                action, logprob, value, state = agent.act(obs[t], state)
                acted.append((action, logprob, value))
                if final[t].any():
                    state = agent.next_state(state, torch.from_numpy(final[t]).to(device))
                where = f"row {t} of iteration {run['iteration']}"
                raw, rewards[t], terminated[t], truncated[t], info = attempt(
                    where, envs.step, action.cpu().numpy()
                )
                # The copy is done when the next actions are, so arrived is free again when frames arrive.
                obs[t + 1].copy_(arrived.copy_(torch.from_numpy(raw)), non_blocking=True)
                final[t + 1] = terminated[t] | truncated[t]
                episode_return += rewards[t]
                episode_length += ~final[t]
                for n in np.flatnonzero(final[t + 1]):
                    returned.append(float(episode_return[n]))
                    lengths.append(int(episode_length[n]))
                    episode_return[n], episode_length[n] = 0.0, 0
                if args.terminal_on_life_loss:  # after final[t + 1] is known: the game goes on
                    terminated[t] |= info["lives"] < lives
                    lives = info["lives"]
            last_value = agent.get_value(obs[T], state)
            actions, logprobs, values = map(torch.stack, zip(*acted))  # (T, N)
            values = torch.cat([values, last_value[None]])  # (T + 1, N)
        update_start = time.perf_counter()

        # --- advantages ---
        b_rewards, b_terminated, b_truncated, b_final = (
            torch.from_numpy(x).to(device) for x in (rewards, terminated, truncated, final)
        )
        valid, done = ~b_final[:T], b_terminated | b_truncated
        if args.clip_rewards:
            b_rewards = b_rewards.sign()
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
            logprob, entropy, value = agent.evaluate_actions(obs[at], state_b, b_final[at], actions[at])
            if args.norm_adv == "minibatch":
                advantage = normalize(advantage, weight)
            policy_loss, approx_kl, clipfrac = ppo_loss(logprob, old_logprob, advantage, weight, clip_coef)
            v_loss = value_loss(value, old_value, return_, weight, vf_clip)
            mean_entropy = weighted_mean(entropy, weight)
            share = weight.sum() / all_sum(weight.sum()).clamp(min=1e-8)  # this process's, of the rows
            loss = policy_loss + args.vf_coef * v_loss
            if ent_coef:  # else its backward pass is time for nothing
                loss = loss - ent_coef * mean_entropy
            optimizer.zero_grad()
            (loss * share).backward()
            statistics = torch.stack([policy_loss, v_loss, mean_entropy, approx_kl, clipfrac]).detach()
            losses.append(sum_gradients(agent, statistics * share))
            if args.target_kl is not None and losses[-1][3] > 1.5 * args.target_kl:  # alike everywhere
                break
            nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
        means = torch.stack(losses).mean(0).tolist()
        if not (np.isfinite(means).all() and all(p.isfinite().all() for p in agent.parameters())):
            raise TrainingError(f"the loss or a weight is not finite in iteration {run['iteration']}")

        # --- log ---
        steps = int(all_sum(valid.sum()))
        everyone = gather((returned, lengths))
        returned, lengths = ([x for part in parts for x in part] for parts in zip(*everyone))
        if run["iteration"] > 0:
            run["timed_steps"] += steps
            run["rollout_seconds"] += update_start - iteration_start
            run["update_seconds"] += time.perf_counter() - update_start
        run |= {"iteration": run["iteration"] + 1, "global_step": run["global_step"] + steps}
        run["episodes"] += len(returned)
        recent.extend(returned)
        sps = run["timed_steps"] / max(run["rollout_seconds"] + run["update_seconds"], 1e-9)
        unexplained = float(mean_and_var(returns - values[:T], valid)[1] / mean_and_var(returns, valid)[1])
        names = "policy_loss value_loss entropy approx_kl clipfrac explained_variance".split()
        logs = {f"losses/{name}": x for name, x in zip(names, [*means, 1 - unexplained])}
        logs |= {"charts/learning_rate": learning_rate, "charts/SPS": sps}
        if returned:
            logs |= {"charts/episodic_return": np.mean(returned), "charts/episodic_length": np.mean(lengths)}
        passed = args.eval_every and run["global_step"] % args.eval_every < steps  # a multiple, just now
        if passed and rank == 0:
            evaluated = evaluate(agent, make_envs(args, N), args.eval_episodes or 10, args.seed)
            logs["charts/eval_return"] = np.mean(evaluated)
        for name, scalar in logs.items() if rank == 0 else ():
            writer.add_scalar(name, scalar, run["global_step"])
        bar.update(steps)
        bar.set_postfix({"return": np.mean(recent) if recent else float("nan"), "SPS": int(sps)})
        obs[0], final[0] = obs[T], final[T]

    # --- results ---
    bar.close()
    envs.close()
    if dist.is_initialized():
        dist.destroy_process_group()
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

def parse_args(argv: list[str]) -> Args:
    """Flags over the defaults, which are those of the run to resume or play, if there is one."""
    known = [flag for flag in argv if flag not in ("-h", "--help")]
    early, _ = tyro.cli(Args, args=known, return_unknown_args=True)
    if early.resume:
        run_dir = Path(early.resume).parent if early.resume.endswith(".pt") else Path(early.resume)
        saved = load(str(run_dir / "checkpoint.pt"))["args"]
        saved |= {"runs_dir": str(run_dir.parent), "run_name": run_dir.name}
    elif early.play:
        saved = load(early.play)["args"]
    else:
        saved = {}
    args = tyro.cli(Args, args=argv, default=Args(**saved), description=__doc__)
    if args.env_id != saved.get("env_id", args.env_id):
        raise ArgumentError(f"--env-id {args.env_id}: {early.resume or early.play} has {saved['env_id']}")
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
