# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm",
#   "mpi4py", "mpich"]
# ///
"""PPO1: data-parallel PPO, one environment on each MPI rank.

    mpiexec -n 8 python ppo1_mpi.py --env-id CartPole-v1  # train on 8 ranks
    python ppo1_mpi.py --play runs/RUN                    # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.
PPO1: openai/baselines, ppo1/pposgd_simple.py. Each rank, a process, plays its own environment and
draws minibatches from its own rollout. An allreduce averages the ranks' gradients, and each makes
the same step of its own Adam: weights that are equal at the start stay equal, bit for bit.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own:

    t      obs                          action    final   afterwards
    4      the episode's last but one   played            truncated[4] or terminated[4] is set
    5      the episode's last           ignored   yes     the agent's state is set to zero
    6      the next episode's first     played

A final step counts in no loss. Its value, from the state that the agent has there, bootstraps a
truncated episode. Shapes: S sequences of L steps, B of them in a minibatch; F features, H hidden
units; observations of n numbers; K components of an action, A choices of each.
"""

import json
import os
import pickle
import sys
import time
import traceback
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "ppo1_mpi"


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    mask_velocity: bool = False  # hide the velocities: the task needs memory
    async_envs: bool = False  # a process for each environment, if a rank has several
    total_timesteps: int = 500_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    torch_threads: int = 1  # CPU threads; more for large networks

    num_envs: int = 1  # parallel environments (N) of each rank
    num_steps: int = 256  # time steps of a rollout (T)
    seq_len: int = 16  # steps that gradients flow back through, a sequence (L); 0: T
    num_minibatches: int = 4  # in an epoch, of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_obs: bool = True  # normalise observations by their running mean and variance

    encoder_size: int = 64  # units of both layers of each encoder
    memory: Literal["none", "lstm"] = "none"  # after the encoders; without it L is 1
    hidden_size: int = 128  # units of the LSTM (H)
    ablate_memory: bool = False  # keep no state from step to step, L = 1: a control

    learning_rate: float = 1e-3  # of Adam
    schedule: Literal["linear", "constant"] = "linear"  # learning_rate and clip_coef fall to 0
    clip_coef: float = 0.2  # epsilon of the surrogate
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss
    target_kl: float = np.inf  # an update ends where the estimated KL exceeds 1.5 times this

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # deterministic episodes after training, or of --play
    resume: str | None = None  # run directory to go on with; other flags override its own
    play: str | None = None  # run directory whose agent to watch
    capture_video: bool = False  # with --play only: films into RUN/videos


PRESETS: dict[tuple[str, bool], dict] = {  # better defaults for a task: (env_id, mask_velocity)
    ("CartPole-v1", False): dict(total_timesteps=25_000, norm_obs=False, update_epochs=10),
    ("CartPole-v1", True): dict(total_timesteps=300_000, memory="lstm", num_steps=4096, seq_len=32,
        num_minibatches=8, update_epochs=10, gamma=0.995),
}  # fmt: skip
FIXED = ("env_id", "mask_velocity", "encoder_size", "memory", "hidden_size", "ablate_memory",
         "norm_obs")  # fmt: skip
VELOCITIES = {"CartPole": [1, 3], "MountainCar": [1], "Pendulum": [2], "LunarLander": [2, 3, 5]}


class ResetLSTM(nn.Module):
    """An LSTM whose state is zero after every final step, and that replays rollouts in one call.

    Its definition is a loop: state = cell(x[t], state), then state = 0 if final[t]. A fused call
    cannot stop for that. But no loss reads the output of a final step, so on replay that step can
    *be* the reset. x gets one more feature, with fixed weights: 1 to the input and forget gates,
    else 0. It is 0, but on final steps x is (0, ..., 0, -1e4). Then i = f = sigmoid(U h + b - 1e4)
    = 0 exactly in floating point, so c = f c + i g = 0, h = o tanh(c) = 0, and no gradient passes.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.cell = nn.LSTMCell(input_size, hidden_size)
        for name, parameter in self.cell.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        closes = torch.tensor([[1.0], [1.0], [0.0], [0.0]])  # gates i, f, g, o
        self.closes = nn.Buffer(closes.repeat_interleave(hidden_size, 0), persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [-1e4]), persistent=False)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x (N, F), state (2, N, H), that is h and c -> the next state."""
        return torch.stack(self.cell(x, (state[0], state[1])))

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (2, B, H), final (L, B) -> h (L, B, H)."""
        x = nn.functional.pad(x, (0, 1))  # (L, B, F + 1)
        x = torch.where(final.unsqueeze(-1), self.reset, x)
        weight_ih, *others = self.cell.parameters()
        weights = [torch.cat([weight_ih, self.closes], 1), *others]  # the first is (4 H, F + 1)
        return torch.lstm(
            x, (state[:1], state[1:]), weights, has_biases=True, num_layers=1, dropout=0.0,
            train=self.training, bidirectional=False, batch_first=False,
        )[0]  # fmt: skip


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Orthogonal weights, zero biases ("37 implementation details of PPO", 2022)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy network and a value network, which share nothing. state (4, N, H) is h and c of the
    policy's LSTM, then of the value's; without memory it is (0, N, H)."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        self.box = isinstance(self.action_space, spaces.Box)
        choices = num_choices(self.action_space)
        self.shape = K, A = len(choices), int(max(choices))  # of an action's logits
        inputs = spaces.flatdim(envs.single_observation_space)
        E, H = args.encoder_size, args.hidden_size
        self.encoder = nn.Sequential(linear(inputs, E), nn.Tanh(), linear(E, E), nn.Tanh())
        self.critic_encoder = nn.Sequential(linear(inputs, E), nn.Tanh(), linear(E, E), nn.Tanh())
        features = H if args.memory == "lstm" else E
        self.actor = linear(features, K * A, std=0.01)  # logits, or the mean
        missing = np.arange(A) >= choices[:, None]  # (K, A): a component may have fewer choices
        self.actor.bias.data[missing.ravel()] = -1e9
        self.critic = nn.Sequential(linear(features, 1, std=1.0))
        self.critic_inputs = H if args.memory == "lstm" else inputs
        if args.memory == "lstm":
            self.lstm, self.critic_lstm = ResetLSTM(E, H), ResetLSTM(E, H)
        else:  # nothing waits for values: the critic reads all obs of a rollout at once
            self.critic_encoder, self.critic = nn.Sequential(), self.critic_encoder + self.critic
        if self.box:
            self.log_std = nn.Parameter(torch.zeros(K))
        sums = torch.tensor([[0.01], [0.0], [0.01]], dtype=torch.float64)  # as in baselines
        self.obs_sums: Tensor = nn.Buffer(sums.repeat(1, inputs))  # of 1, obs, obs**2: (3, n)

    def initial_state(self, num_envs: int) -> Tensor:
        rows = 4 if self.args.memory == "lstm" else 0
        return self.actor.weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (..., n), as the environments return them -> both networks' features (..., F)."""
        if self.args.norm_obs:
            mean, square = self.obs_sums[1:] / self.obs_sums[0]
            std = (square - mean**2).clamp(min=0.01).sqrt()
            obs = ((obs - mean) / std).clamp(-5, 5).to(obs.dtype)
        return self.encoder(obs), self.critic_encoder(obs)

    def sample_noise(self, *shape: int) -> Tensor:
        """Noise for `act`, from the CPU's generator, whose state agent.pt holds: (*shape, K) of
        standard deviation exp(log_std), or Gumbel's (*shape, K, A)."""
        if self.box:
            return torch.randn(*shape, self.shape[0]) * self.log_std.exp()
        return -torch.empty(*shape, *self.shape).exponential_().log()

    def act(self, h: Tensor, noise) -> Tensor:
        """The policy's h (N, F), noise of sample_noise -> actions (N, K), not clipped yet. Of
        all logits plus Gumbel noise, that of choice a is the largest with probability p_a."""
        x = self.actor(h)
        return x + noise if self.box else (x.unflatten(-1, self.shape) + noise).argmax(-1)

    def logprob_entropy(self, h: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's h (..., F), actions (..., K) -> log-probability, entropy (...)."""
        if self.box:
            normal = Normal(self.actor(h), self.log_std.exp(), validate_args=False)
            return normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
        logp = self.actor(h).unflatten(-1, self.shape).log_softmax(-1)
        logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        return logprob, -(logp.exp() * logp).sum((-2, -1))

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, n), state -> h (N, F) for the actor, another for the critic, next state."""
        h, critic_h = self.encode(obs)
        if self.args.memory == "lstm":
            steps = self.lstm.step(h, state[:2]), self.critic_lstm.step(critic_h, state[2:])
            h, critic_h, state = steps[0][0], steps[1][0], torch.cat(steps)
        return h, critic_h, torch.zeros_like(state) if self.args.ablate_memory else state

    def evaluate_actions(self, obs, state, final, actions):
        """Sequences: obs (L, B, n), the state before them (4, B, H), final
        (L, B), actions (L, B, K) -> logprob, entropy, value (L, B), meaningless on final steps."""
        h, critic_h = self.encode(obs)
        if self.args.memory == "lstm":
            h = self.lstm(h, state[:2], final)
            critic_h = self.critic_lstm(critic_h, state[2:], final)
        logprob, entropy = self.logprob_entropy(h, actions)
        return logprob, entropy, self.critic(critic_h).squeeze(-1)

    @torch.inference_mode()
    def predict(self, obs, info: dict, state: Tensor | None, deterministic: bool = True):
        """obs (N, n), info of N environments, state, None at first -> actions, next state."""
        state = self.initial_state(len(obs)) if state is None else state
        h, _, state = self.step(torch.as_tensor(np.float32(obs)), state)
        actions = self.act(h, 0 if deterministic else self.sample_noise(len(h)))
        return to_env(actions, self.action_space), state


def compute_gae(rewards, values, terminated, done, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16). values is (T + 1, N), the
    rest (T, N). A truncated episode is bootstrapped by V_{t+1}, the value of its final step.

        delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t
        A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}
    """
    deltas = rewards + gamma * np.where(terminated, 0, values[1:]) - values[:-1]
    advantages, following = np.zeros_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        following = deltas[t] + gamma * lam * np.where(done[t], 0, following)
        advantages[t] = following
    return advantages


def ppo_loss(logprob, old_logprob, advantage, clip_coef: float):
    """M steps -> the clipped surrogate (Schulman et al. 2017, eq. 7), negated, and an estimate of
    the KL divergence from the old policy, the mean of ratio - 1 - log ratio."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantage, clipped * advantage)
    return -surrogate.mean(), (ratio - 1 - log_ratio).mean().detach()


def flatten(agent: Agent):
    """All weights as one vector (P,), whose .grad is their gradient. The agent's parameters become
    pieces of it: one call averages, compares or changes them all (MpiAdam in baselines)."""
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    weights.grad = torch.zeros_like(weights)
    sizes = [p.numel() for p in agent.parameters()]
    for p, x, grad in zip(agent.parameters(), weights.split(sizes), weights.grad.split(sizes)):
        p.data, p.grad = x.view_as(p), grad.view_as(p)
    return weights


def average(x: Tensor, comm) -> None:
    """In place: x becomes its mean over the ranks, the same on each rank, bit for bit."""
    comm.Allreduce(x.numpy().copy(), x.numpy())
    x /= comm.size


def check_synced(weights: Tensor, comm) -> None:
    """Raises RuntimeError on a rank whose weights are not those of rank 0, bit for bit."""
    if weights.numpy().tobytes() != comm.bcast(weights.numpy().tobytes()):
        raise RuntimeError(f"the weights of rank {comm.rank} are no longer those of rank 0")


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    torch.set_num_threads(args.torch_threads)
    comm = world()
    seed = args.seed + 10_000 * comm.rank  # each rank draws other numbers
    torch.manual_seed(seed)
    T, N = args.num_steps, args.num_envs
    L = 1 if args.ablate_memory or args.memory == "none" else args.seq_len or T
    envs = make_envs(args, N)
    agent = Agent(envs, args)
    weights = flatten(agent)
    optimizer = torch.optim.Adam([weights], eps=1e-5, fused=True)
    run = Run(args, envs, agent, optimizer)
    comm.Bcast(weights.numpy())  # all begin with those of rank 0
    # NumPy holds what environments return, torch what the agent computes.
    tensor = torch.as_tensor
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((2, T, N), bool)
    h = torch.zeros(T, N, agent.actor.in_features)
    critic_h = torch.zeros(T + 1, N, agent.critic_inputs)
    actions = torch.zeros(T, N, agent.shape[0], dtype=None if agent.box else torch.long)
    states = torch.zeros(T // L, *agent.initial_state(N).shape)  # at sequence starts

    obs[0], info = envs.reset(seed=seed + run.step)
    state = agent.initial_state(N)
    while run.step < args.total_timesteps:
        # Rollout
        with torch.inference_mode():
            noise = agent.sample_noise(T, N)
            for t in range(T):
                check("action_mask" not in info, "--env-id: action masks are for rppo_lstm.py")
                if t % L == 0:
                    states[t // L] = state
                h[t], critic_h[t], state = agent.step(tensor(obs[t]), state)
                actions[t] = agent.act(h[t], noise[t])
                if final[t].any():
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
            critic_h[T] = agent.step(tensor(obs[T]), state)[1]
            values = agent.critic(critic_h).squeeze(-1)
            old_logprob = agent.logprob_entropy(h, actions)[0]
        check_finite("obs", obs)
        check_finite("rewards", rewards)

        # Advantages, normalised over the rank's own rollout
        valid, done = ~final[:T], terminated | truncated
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]
        advantages = (advantages - advantages[valid].mean()) / (advantages[valid].std() + 1e-8)

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.schedule == "linear" else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        targets = torch.stack([old_logprob, tensor(advantages), tensor(returns)], -1)
        rollout = tensor(obs[:T]), tensor(final[:T]), actions, targets
        chunks = [x.unflatten(0, (T // L, L)).transpose(0, 1) for x in rollout]  # (L, T/L, N, ...)
        s_obs, s_final, s_actions, s_targets = (x.flatten(1, 2) for x in chunks)
        s_states = states.transpose(0, 1).flatten(1, 2)  # (4, S, H); the others are (L, S, ...)
        S, losses = s_states.shape[1], []
        order = torch.cat([torch.randperm(S) for _ in range(args.update_epochs)])
        for batch in order.view(-1, S // args.num_minibatches):
            inputs = [x[:, batch] for x in (s_obs, s_states, s_final, s_actions)]
            counts = ~s_final[:, batch]  # (L, B); below, (M,): the steps that count
            logprob, entropy, value = (x[counts] for x in agent.evaluate_actions(*inputs))
            old_logprob, advantage, return_ = s_targets[:, batch][counts].unbind(-1)
            policy_loss, kl = ppo_loss(logprob, old_logprob, advantage, remaining * args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            losses.append(torch.stack([policy_loss, value_loss, entropy.mean(), kl]).detach())
            if len(logprob) == 0:  # this rank adds losses and gradients of 0
                losses[-1].zero_()
            average(losses[-1], comm)
            if losses[-1][-1] > 1.5 * args.target_kl:  # on every rank, so that none waits
                break
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
            weights.grad.zero_()
            loss.backward()
            average(weights.grad, comm)
            optimizer.step()
        check_synced(weights, comm)

        if args.norm_obs:  # not earlier: old_logprob is of the old statistics
            x = tensor(obs[:T][valid]).double()
            agent.obs_sums += comm.allreduce(torch.stack([torch.ones_like(x), x, x**2]).sum(1))
        run.log(int(valid.sum()), ("policy_loss", "value_loss", "entropy", "approx_kl"), losses)
        obs[0], final[0] = obs[T], final[T]

    envs.close()
    run.finish()
    return agent


# --- Not about learning: environments, files, command line ---
class ArgumentError(ValueError):
    """A flag, a file or an environment that cannot be used."""


def check(fine, message: str) -> None:
    if not fine:
        raise ArgumentError(message)


def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work."""
    for name, value in vars(args).items():
        if type(default := getattr(Args, name)) in (int, float):
            low = 0 if type(default) is float or name in ("seed", "seq_len", "eval_episodes") else 1
            high = 1 if name in ("gamma", "gae_lambda") else 10**12
            fine = low <= value <= high or value == default
            check(fine, f"--{name} {value}: must be from {low} to {high}")
            setattr(args, name, type(default)(value))  # 3e5 as an int
    L, M = 1 if args.ablate_memory else args.seq_len or args.num_steps, args.num_minibatches
    L = L if args.memory == "lstm" else 1
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    S = args.num_envs * args.num_steps // L
    check(S % M == 0, f"--num-minibatches {M}: must divide the {S} sequences of a rollout")


def check_finite(name: str, x) -> None:
    """FloatingPointError, with the place, if a number of x is not finite."""
    if bad := np.argwhere(~np.isfinite(x)).tolist():
        raise FloatingPointError(f"{name}{bad[0]} is {x[tuple(bad[0])]}")


def world():
    """The ranks that mpiexec started, or this process alone. Importing MPI starts it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or none of MPI's libraries
        raise ArgumentError(f"{error}; pip install mpi4py mpich") from error
    return MPI.COMM_WORLD


def make_envs(args: Args, num_envs: int, render_mode: str | None = None):
    """num_envs environments as one, whose observations are vectors (num_envs, n)."""
    mode = "async" if args.async_envs else None  # None: its own vector form, or sync
    mode = "sync" if render_mode or num_envs == 1 else mode  # for one, sync is the fastest
    kwargs: dict = {"render_mode": render_mode} if render_mode else {}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, **kwargs)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise ArgumentError(f"--env-id {args.env_id}: {error}") from error
    fine = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.NEXT_STEP
    check(fine, f"--env-id {args.env_id}: autoreset is not in NEXT_STEP mode")
    space = envs.single_observation_space
    if args.mask_velocity:
        name = args.env_id.split("-")[0].removesuffix("Continuous")
        check(name in VELOCITIES, f"--mask-velocity: {name} is not one of {', '.join(VELOCITIES)}")
        hidden = np.isin(np.arange(spaces.flatdim(space)), VELOCITIES[name])
        envs = wrappers.TransformObservation(envs, lambda obs: np.where(hidden, 0, obs))
    check(space.is_np_flattenable, f"--env-id {args.env_id}: {space} has no fixed size")
    if space.shape != (spaces.flatdim(space),):
        envs = wrappers.FlattenObservation(envs)
    return wrappers.RecordEpisodeStatistics(envs)


def num_choices(space):
    """How many choices each of the K components of an action has."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel()
    if isinstance(space, spaces.MultiBinary):
        return np.full(spaces.flatdim(space), 2)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return np.ones(spaces.flatdim(space), int)  # a number, and no choice
    raise ArgumentError(f"--env-id: actions of {space}: no script can choose them")


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K), choices counted from 0 -> as the environments take them, within bounds."""
    array = actions.cpu().numpy().reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        return array.clip(space.low, space.high).astype(space.dtype)
    return array.astype(space.dtype) + getattr(space, "start", 0)


class Run:
    """A run's progress, log and agent.pt, saved at the start, every minute and at the end."""

    latest: Path | None = None  # the directory to go on with

    def __init__(self, args: Args, envs, agent: Agent, optimizer):
        self.args, self.agent, self.optimizer = args, agent, optimizer
        self.comm, self.queues = world(), (envs.return_queue, envs.length_queue)  # of this rank
        self.returns, self.lengths = list[float](), list[float]()  # of all: the last 100
        self.step, seconds = 0, 0.0
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time():.0f}"
        name = name.replace("/", "-").replace(":", "-")
        self.dir = self.comm.bcast(Path(args.resume or Path(args.runs_dir, name)).resolve())
        if args.resume:
            saved = load(self.dir, agent)
            optimizer.load_state_dict(saved["optimizer"])
            if len(saved["rng"]) == self.comm.size:  # else it goes on, but not bit for bit
                torch.set_rng_state(saved["rng"][self.comm.rank])
            self.step, seconds = saved["step"], saved["seconds"]
            self.returns.extend(saved["returns"])
            self.lengths.extend(saved["lengths"])
        first = self.comm.rank == 0
        if args.track and first and (args.resume or not self.dir.exists()):  # else refused
            try:  # before SummaryWriter, which it patches
                import wandb

                wandb.init(id=self.dir.name, name=self.dir.name, config=vars(args), resume="allow",
                           reinit="finish_previous", sync_tensorboard=True)  # fmt: skip
            except Exception as error:
                raise ArgumentError(f"--track: {error}") from error
        try:
            if first:
                self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
                self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1)
        except OSError as error:
            raise ArgumentError(f"{error}; --resume goes on with a run") from error
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step",
                        disable=self.comm.rank > 0)  # fmt: skip
        self.began, self.logged = time.time() - seconds, time.time()
        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow
        self.save()
        Run.latest = self.dir

    def log(self, steps: int, names: tuple[str, ...], losses: list[Tensor]) -> None:
        """Ends an iteration of that many steps; losses has those of each minibatch."""
        means = torch.stack(losses).mean(0)
        check_finite(f"after step {self.step}, {names}", means.numpy(force=True))
        seconds, self.logged = time.time() - self.logged, time.time()
        steps = self.comm.allreduce(steps)
        for new, last in zip(self.queues, (self.returns, self.lengths)):
            last[:] = [*last, *np.hstack(self.comm.allgather([*new]))][-100:]
            new.clear()
        self.timed.append((steps, seconds))
        self.step += steps
        scalars = {f"losses/{name}": loss for name, loss in zip(names, means.tolist())}
        scalars["charts/SPS"] = steps / seconds
        if self.returns:
            scalars["charts/episodic_return"] = np.mean(self.returns)
            scalars["charts/episodic_length"] = np.mean(self.lengths)
            self.bar.set_postfix({"return": np.mean(self.returns)}, refresh=False)
        for name, scalar in scalars.items() if self.comm.rank == 0 else ():
            self.writer.add_scalar(name, scalar, self.step)
        self.bar.update(min(steps, self.bar.total - self.bar.n))
        if self.comm.bcast(self.logged - self.saved > 60):  # by the clock of rank 0
            self.save()

    def save(self) -> None:
        """Writes agent.pt: a crash leaves the old one or the new one."""
        self.saved, rng = time.time(), self.comm.gather(torch.get_rng_state())
        if self.comm.rank > 0:
            return
        self.writer.flush()
        contents = {
            "script": SCRIPT, "args": vars(self.args), "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(), "rng": rng,
            "step": self.step, "seconds": time.time() - self.began,
            "returns": [*map(float, self.returns)], "lengths": [*map(int, self.lengths)],
        }  # fmt: skip
        with open(self.dir / "agent.tmp", "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.dir / "agent.tmp", self.dir / "agent.pt")

    def finish(self) -> None:
        """Saves the agent, and evaluates it on rank 0."""
        self.save()
        if self.comm.rank > 0:
            return
        self.bar.close()
        self.writer.close()
        steps, seconds = np.sum(self.timed[1:] or [(self.step, self.logged - self.began)], 0)
        evaluation = [*tqdm(evaluate(self.agent, make_envs(self.args, 1), self.args), "evaluation")]
        result = dict(global_step=self.step, seconds=self.logged - self.began, sps=steps / seconds,
                      returns=[*map(float, self.returns)], evaluation=evaluation)  # fmt: skip
        (self.dir / "result.json").write_text(json.dumps(result))
        score = np.mean(evaluation or self.returns or [np.nan])
        print(f"{self.dir}: return {score:.1f}, {steps / seconds:.0f} steps a second")


def load(run_dir, agent: Agent | None = None) -> dict:
    """Reads a run's agent.pt, running no code in it, and gives its weights to the agent."""
    file = Path(run_dir, "agent.pt")
    try:
        with zipfile.ZipFile(file) as opened:
            check(opened.testzip() is None, "it is damaged")
        saved = torch.load(file, map_location="cpu", weights_only=True)
        check(saved["script"] == SCRIPT, f"{saved['script']}.py wrote it")
        for name, value in vars(Args(**saved["args"])).items():
            same = type(saved["args"][name]) is type(getattr(Args, name))
            check(same or getattr(Args, name) is None, f"{name} is {value!r}")
        if agent is not None:
            agent.load_state_dict(saved["agent"])
    except pickle.UnpicklingError as error:
        raise ArgumentError(f"{file} holds more than tensors and plain values") from error
    except Exception as error:  # a damaged file can raise anything
        raise ArgumentError(f"{file} cannot be used: {error!r}") from error
    return saved


def evaluate(agent: Agent, envs, args: Args):
    """Yields the returns of deterministic episodes in envs, one environment."""
    for episode in range(args.eval_episodes):
        (obs, info), state, done = envs.reset(seed=args.seed + episode), None, False
        while not done:
            action, state = agent.predict(obs, info, state)
            obs, _, terminated, truncated, info = envs.step(action)
            done = (terminated | truncated)[0]
        yield float(info["episode"]["r"][0])
    envs.close()


def play(args: Args) -> None:
    """Shows or films deterministic episodes."""
    mode = "rgb_array" if args.capture_video else "human"
    make_envs(args, 1).close()  # checks env_id
    modes = gym.make(args.env_id).metadata.get("render_modes", [])
    check(mode in modes, f"--play: {args.env_id} renders {modes}, not {mode}")
    display = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys() or sys.platform != "linux"
    check(args.capture_video or display, "--play: no display; --capture-video films the agent")
    envs = make_envs(args, 1, mode)
    agent = Agent(envs, args)
    load(args.play, agent)
    if args.capture_video:
        envs = wrappers.RecordVideo(envs, f"{args.play}/videos", episode_trigger=lambda n: True)
    for episodic_return in evaluate(agent, envs, args):
        print(f"return {episodic_return:.2f}")


def parse_args() -> Args:
    """Flags over defaults: those of the run to resume or play, or of PRESETS."""
    one = world().rank == 0  # prints
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False, console_outputs=one)
    run_dir, task = early.play or early.resume, (early.env_id, early.mask_velocity)
    defaults = load(run_dir)["args"] if run_dir else PRESETS.get(task, {})
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__.split("\n\nPPO")[0],
                    console_outputs=one)  # fmt: skip
    for name in FIXED if run_dir else ():
        check(getattr(args, name) == defaults[name], f"--{name}: {run_dir} has {defaults[name]}")
    return args


def main() -> None:
    """Exit codes: 2, a bad argument; 1, an error; 130, Ctrl-C."""
    rank, leave, python = 0, sys.exit, "python"
    try:
        if (comm := world()).size > 1:  # each exit code ends all ranks
            rank, leave, python = comm.rank, comm.Abort, f"mpiexec -n {comm.size} python"
        args = parse_args()
        if rank == 0 or not args.play:
            play(args) if args.play else train(args)
    except (ArgumentError, gym.error.DependencyNotInstalled) as error:
        time.sleep(3 * (rank > 0))  # where all fail alike, rank 0 says so and ends the others
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        time.sleep(leave is not sys.exit)  # Abort ends mpiexec, too, which may not have shown it
        leave(2)
    except (Exception, KeyboardInterrupt) as error:
        time.sleep(3 * (rank > 0))
        if isinstance(error, Exception):
            traceback.print_exc()
        if Run.latest:
            print(f"to go on: {python} {sys.argv[0]} --resume {Run.latest}", file=sys.stderr)
        time.sleep(leave is not sys.exit)
        leave(1 if isinstance(error, Exception) else 130)


if __name__ == "__main__":
    main()
