# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO: proximal policy optimisation for tasks that need memory.

    python rppo_lstm.py --env-id CartPole-v1 --mask-velocity  # train
    python rppo_lstm.py --play runs/RUN                       # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.

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
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_lstm"


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    mask_velocity: bool = False  # hide the velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 500_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    torch_threads: int = 1  # CPU threads; more for large networks

    num_envs: int = 8  # parallel environments (N)
    num_steps: int = 128  # time steps of a rollout (T)
    seq_len: int = 0  # steps that gradients flow back through, a sequence (L); 0: T
    num_minibatches: int = 4  # in an epoch, of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_reward: bool = True  # divide rewards by the standard deviation of returns

    encoder_size: int = 64  # units of the layer before the LSTM
    hidden_size: int = 128  # units of the LSTM (H)
    separate_critic: bool = False  # the critic has a memory of its own
    ablate_memory: bool = False  # keep no state from step to step, L = 1: a control

    learning_rate: float = 1e-3  # of Adam
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.2  # epsilon of the surrogate
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    target_kl: float = np.inf  # an update ends where the estimated KL exceeds 1.5 times this

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # deterministic episodes after training, or of --play
    resume: str | None = None  # run directory to go on with; other flags override its own
    play: str | None = None  # run directory whose agent to watch
    capture_video: bool = False  # with --play only: films into RUN/videos


PRESETS = {  # better defaults for a task: (env_id, mask_velocity)
    ("CartPole-v1", True): dict(total_timesteps=10**5, num_steps=256, update_epochs=10, gamma=0.995)
}
FIXED = "env_id", "mask_velocity", "encoder_size", "hidden_size", "separate_critic", "ablate_memory"
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
    """Encoder, LSTM, actor, critic. state (2, N, H): h and c; (4, N, H) with a separate critic."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        choices = num_choices(self.action_space)
        self.exists = np.arange(choices.max()) < choices[:, None]  # (K, A): k may have < A choices
        inputs = spaces.flatdim(envs.single_observation_space)
        self.encoder = nn.Sequential(linear(inputs, args.encoder_size), nn.Tanh())
        self.lstm = ResetLSTM(args.encoder_size, args.hidden_size)
        if args.separate_critic:
            self.critic_lstm = ResetLSTM(args.encoder_size, args.hidden_size)
        self.actor = linear(args.hidden_size, self.exists.size, std=0.01)
        self.critic = linear(args.hidden_size, 1, std=1.0)
        self.return_stats = RunningMeanStd(())

    def initial_state(self, num_envs: int) -> Tensor:
        rows = 4 if self.args.separate_critic else 2
        return self.actor.weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def log_probs(self, h: Tensor, legal: Tensor) -> Tensor:
        """The LSTM's h (..., H), legal choices (..., K, A) -> log-probabilities (..., K, A)."""
        logits = self.actor(h).unflatten(-1, self.exists.shape)
        return logits.masked_fill(~legal, -1e9).log_softmax(-1)

    def step(self, obs: Tensor, legal: Tensor, state: Tensor):
        """obs (N, n), legal (N, K, A) -> log-probabilities (N, K, A), value (N,), next state."""
        x = self.encoder(obs)
        next_state = self.lstm.step(x, state[:2])
        if self.args.separate_critic:
            next_state = torch.cat([next_state, self.critic_lstm.step(x, state[2:])])
        logp, value = self.log_probs(next_state[0], legal), self.critic(next_state[-2]).squeeze(-1)
        return logp, value, torch.zeros_like(state) if self.args.ablate_memory else next_state

    def evaluate_actions(self, obs, legal, state, final, actions):
        """Sequences: obs (L, B, n), legal (L, B, K, A), the state before them (2, B, H), final
        (L, B), actions (L, B, K) -> logprob, entropy, value (L, B), meaningless on final steps."""
        x = self.encoder(obs)
        h = critic_h = self.lstm(x, state[:2], final)
        if self.args.separate_critic:
            critic_h = self.critic_lstm(x, state[2:], final)
        logp = self.log_probs(h, legal)
        logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        entropy = -(logp.exp() * logp).sum((-2, -1))
        return logprob, entropy, self.critic(critic_h).squeeze(-1)

    @torch.inference_mode()
    def predict(self, obs, info: dict, state: Tensor | None, deterministic: bool = True):
        """obs (N, n), info of N environments, state, None at first -> actions, next state."""
        state = self.initial_state(len(obs)) if state is None else state
        tensor = partial(torch.as_tensor, device=state.device)
        legal = legal_choices(self.exists, info, np.zeros(len(obs), bool))
        logp, _, state = self.step(tensor(np.float32(obs)), tensor(legal), state)
        choices = logp.argmax(-1) if deterministic else sample(logp)
        return to_env(choices, self.action_space), state


def sample(logp: Tensor) -> Tensor:
    """Log-probabilities (..., K, A) -> choices (..., K). If E_a ~ Exp(1), p_a / E_a is the largest
    with probability p_a. Noise comes from the CPU's generator, whose state agent.pt holds."""
    return (logp.exp() / torch.empty(logp.shape).exponential_().to(logp.device)).argmax(-1)


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far, in float64; saved with the agent."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.mean: Tensor = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.var: Tensor = nn.Buffer(torch.ones(shape, dtype=torch.float64))
        self.count: Tensor = nn.Buffer(torch.zeros(shape, dtype=torch.float64))

    def update(self, rows: Tensor) -> None:
        """Adds rows (M, *shape) (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        n, rows = len(rows), rows.double()
        total, delta = self.count + n, rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0, correction=0) * n
        squares += delta**2 * self.count * n / total
        self.mean, self.var, self.count = self.mean + delta * n / total, squares / total, total


def discounted_sums(rewards, done, carried, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t-1} within an episode; rewards, done and G are (T, N). carried (N,) is
    gamma times the last G of the rollout before; it is updated for the next."""
    sums = np.zeros_like(rewards)
    for t in range(len(rewards)):
        sums[t] = rewards[t] + carried
        carried[:] = np.where(done[t], 0, gamma * sums[t])
    return sums


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


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    T, N = args.num_steps, args.num_envs
    L = 1 if args.ablate_memory else args.seq_len or T
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    run = Run(args, envs, agent, optimizer)
    # NumPy holds what environments return, torch what the agent computes.
    tensor = partial(torch.as_tensor, device=device)
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    legal = np.zeros((T + 1, N, *agent.exists.shape), bool)  # allowed choices
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((2, T, N), bool)
    logp = torch.zeros(T, N, *agent.exists.shape, device=device)
    actions = torch.zeros(T, N, len(agent.exists), dtype=torch.long, device=device)
    values = torch.zeros(T + 1, N, device=device)
    states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)  # at sequence starts

    obs[0], info = envs.reset(seed=args.seed + run.step)
    legal[0] = legal_choices(agent.exists, info, final[0])
    state, carried = agent.initial_state(N), np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        with torch.inference_mode():
            for t in range(T):
                if t % L == 0:
                    states[t // L] = state
                logp[t], values[t], state = agent.step(tensor(obs[t]), tensor(legal[t]), state)
                actions[t] = sample(logp[t])
                if final[t].any():
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
                legal[t + 1] = legal_choices(agent.exists, info, final[t + 1])
            values[T] = agent.step(tensor(obs[T]), tensor(legal[T]), state)[1]
        check_finite("obs", obs)
        check_finite("rewards", rewards)

        # Advantages
        valid, done = ~final[:T], terminated | truncated
        if args.norm_reward and valid.any():
            sums = discounted_sums(rewards, done, carried, args.gamma)
            agent.return_stats.update(tensor(sums[valid]))
            rewards /= np.sqrt(agent.return_stats.var.item() + 1e-8)
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        old_logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        targets = torch.stack([old_logprob, tensor(advantages), tensor(returns)], -1)
        rollout = tensor(obs[:T]), tensor(legal[:T]), tensor(final[:T]), actions, targets
        chunks = [x.unflatten(0, (T // L, L)).transpose(0, 1) for x in rollout]  # (L, T/L, N, ...)
        s_obs, s_legal, s_final, s_actions, s_targets = (x.flatten(1, 2) for x in chunks)
        s_states = states.transpose(0, 1).flatten(1, 2)  # (2, S, H); the others are (L, S, ...)
        S, losses = s_states.shape[1], []
        order = torch.cat([torch.randperm(S) for _ in range(args.update_epochs)])
        for batch in order.view(-1, S // args.num_minibatches):
            inputs = [x[:, batch] for x in (s_obs, s_legal, s_states, s_final, s_actions)]
            counts = ~s_final[:, batch]  # (L, B); below, (M,): the steps that count
            logprob, entropy, value = (x[counts] for x in agent.evaluate_actions(*inputs))
            old_logprob, advantage, return_ = s_targets[:, batch][counts].unbind(-1)
            if len(logprob) == 0:
                continue
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            policy_loss, kl = ppo_loss(logprob, old_logprob, advantage, args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            losses.append(torch.stack([policy_loss, value_loss, entropy.mean(), kl]).detach())
            if kl > 1.5 * args.target_kl:
                break
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

        run.log(int(valid.sum()), ("policy_loss", "value_loss", "entropy", "approx_kl"), losses)
        obs[0], legal[0], final[0] = obs[T], legal[T], final[T]

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
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    S = args.num_envs * args.num_steps // L
    check(S % M == 0, f"--num-minibatches {M}: must divide the {S} sequences of a rollout")
    check(not args.cuda or torch.cuda.is_available(), "--cuda: torch finds no GPU")


def check_finite(name: str, x) -> None:
    """FloatingPointError, with the place, if a number of x is not finite."""
    if bad := np.argwhere(~np.isfinite(x)).tolist():
        raise FloatingPointError(f"{name}{bad[0]} is {x[tuple(bad[0])]}")


def make_envs(args: Args, num_envs: int, render_mode: str | None = None):
    """num_envs environments as one, whose observations are vectors (num_envs, n)."""
    mode = "sync" if render_mode else "async" if args.async_envs else None  # None: make_vec chooses
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
    raise ArgumentError(f"--env-id: actions of {space} are not discrete; try rppo_continuous.py")


def legal_choices(exists, info: dict, final):
    """(N, K, A): what exists and info's "action_mask" allows, 1 or 0 for each choice of each
    component, where an environment sent one. Final steps need no legal choice."""
    legal = np.broadcast_to(exists, (len(final), *exists.shape)).copy()
    if "action_mask" in info:
        for n in np.flatnonzero(info.get("_action_mask", True) & ~final):
            legal[n, exists] = np.hstack(info["action_mask"][n]).reshape(exists.sum())
        if not legal.any(-1).all():
            raise ValueError(f"an action_mask leaves no choice: {info['action_mask']}")
    return legal


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K), counted from 0 -> as the environments take them."""
    array = actions.cpu().numpy().reshape(-1, *space.shape)
    return array.astype(space.dtype) + getattr(space, "start", 0)


class Run:
    """A run's progress, log and agent.pt, saved at the start, every minute and at the end."""

    latest: Path | None = None  # the directory to go on with

    def __init__(self, args: Args, envs, agent: Agent, optimizer):
        self.args, self.agent, self.optimizer = args, agent, optimizer
        self.returns, self.lengths = envs.return_queue, envs.length_queue  # of the last 100
        self.step, seconds = 0, 0.0
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time():.0f}"
        name = name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.resume or Path(args.runs_dir, name)).resolve()
        if args.resume:
            saved = load(self.dir, agent)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["rng"])
            self.step, seconds = saved["step"], saved["seconds"]
            self.returns.extend(saved["returns"])
            self.lengths.extend(saved["lengths"])
        if args.track and (args.resume or not self.dir.exists()):  # else refused
            try:  # before SummaryWriter, which it patches
                import wandb

                wandb.init(id=self.dir.name, name=self.dir.name, config=vars(args), resume="allow",
                           reinit="finish_previous", sync_tensorboard=True)  # fmt: skip
            except Exception as error:
                raise ArgumentError(f"--track: {error}") from error
        try:
            self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
            self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1)
        except OSError as error:
            raise ArgumentError(f"{error}; --resume goes on with a run") from error
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step")
        self.began, self.logged = time.time() - seconds, time.time()
        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow
        self.save()
        Run.latest = self.dir

    def log(self, steps: int, names: tuple[str, ...], losses: list[Tensor]) -> None:
        """Ends an iteration of that many steps; losses has those of each minibatch."""
        if not losses:  # only final steps
            return
        means = torch.stack(losses).mean(0)
        check_finite(f"after step {self.step}, {names}", means.numpy(force=True))
        seconds, self.logged = time.time() - self.logged, time.time()
        self.timed.append((steps, seconds))
        self.step += steps
        scalars = {f"losses/{name}": loss for name, loss in zip(names, means.tolist())}
        scalars["charts/SPS"] = steps / seconds
        if self.returns:
            scalars["charts/episodic_return"] = np.mean(self.returns)
            scalars["charts/episodic_length"] = np.mean(self.lengths)
            self.bar.set_postfix({"return": np.mean(self.returns)}, refresh=False)
        for name, scalar in scalars.items():
            self.writer.add_scalar(name, scalar, self.step)
        self.bar.update(min(steps, self.bar.total - self.bar.n))
        if self.logged - self.saved > 60:
            self.save()

    def save(self) -> None:
        """Writes agent.pt: a crash leaves the old one or the new one."""
        self.writer.flush()
        contents = {
            "script": SCRIPT, "args": vars(self.args), "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state(),
            "step": self.step, "seconds": time.time() - self.began,
            "returns": [*map(float, self.returns)], "lengths": [*map(int, self.lengths)],
        }  # fmt: skip
        with open(self.dir / "agent.tmp", "wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.dir / "agent.tmp", self.dir / "agent.pt")
        self.saved = time.time()

    def finish(self) -> None:
        """Saves the agent, and evaluates it."""
        self.save()
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
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False)
    run_dir, task = early.play or early.resume, (early.env_id, early.mask_velocity)
    defaults = load(run_dir)["args"] if run_dir else PRESETS.get(task, {})
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__.split("\n\nPPO")[0])
    for name in FIXED if run_dir else ():
        check(getattr(args, name) == defaults[name], f"--{name}: {run_dir} has {defaults[name]}")
    return args


def main() -> None:
    """Exit codes: 2, a bad argument; 1, an error; 130, Ctrl-C."""
    try:
        args = parse_args()
        play(args) if args.play else train(args)
    except (ArgumentError, gym.error.DependencyNotInstalled) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, Exception):
            traceback.print_exc()
        if Run.latest:
            print(f"\nto go on: python {sys.argv[0]} --resume {Run.latest}", file=sys.stderr)
        sys.exit(1 if isinstance(error, Exception) else 130)


if __name__ == "__main__":
    main()
