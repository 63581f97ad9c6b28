# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Trust region policy optimisation, TRPO, feed-forward or with --memory lstm.

    python trpo.py --env-id HalfCheetah-v5  # train
    python trpo.py --play runs/RUN          # watch the agent

TRPO: Schulman et al. 2015, arXiv:1502.05477. GAE: Schulman et al. 2016, arXiv:1506.02438. Defaults
are sb3-contrib's, but observations and rewards are normalised, and KL is a sum over components.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own:

    t      obs                          action    final   afterwards
    4      the episode's last but one   played            truncated[4] or terminated[4] is set
    5      the episode's last           ignored   yes     the agent's state is set to zero
    6      the next episode's first     played

A final step counts in no loss. Its value, from the state that the agent has there, bootstraps a
truncated episode. Shapes: sequences of L steps, B of them; observations of n numbers, F features, H
hidden units; K components of an action, A choices of each; M steps that count; P parameters.
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
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "trpo"


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    mask_velocity: bool = False  # hide the velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 1_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    torch_threads: int = 1  # CPU threads; more for large networks

    num_envs: int = 1  # parallel environments (N)
    num_steps: int = 2048  # time steps of a rollout (T)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_obs: bool = True  # normalise observations by their running mean and variance
    norm_reward: bool = True  # divide rewards by the standard deviation of returns

    encoder_size: int = 64  # units of both layers of encoder and critic
    memory: Literal["none", "lstm"] = "none"  # between the policy's encoder and its actor
    hidden_size: int = 64  # units of the LSTM (H)
    log_std_init: float = 0.0  # initial log standard deviation of the noise in actions

    target_kl: float = 0.01  # delta, the largest mean KL divergence from the old policy
    cg_max_steps: int = 15  # steps of conjugate gradient
    cg_damping: float = 0.1  # added to the diagonal of the Fisher matrix
    sub_sampling_factor: int = 1  # every k-th step counts in the Fisher matrix
    line_search_shrinking_factor: float = 0.8  # of a step that the line search refuses
    line_search_max_iter: int = 10  # steps that it tries
    learning_rate: float = 1e-3  # of the critic's Adam
    n_critic_updates: int = 10  # the critic's passes over a rollout
    batch_size: int = 128  # steps of its minibatches

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # deterministic episodes after training, or of --play
    resume: str | None = None  # run directory to go on with; other flags override its own
    play: str | None = None  # run directory whose agent to watch
    capture_video: bool = False  # with --play only: films into RUN/videos


ZOO: dict = dict(num_envs=2, num_steps=1024, cg_max_steps=25, n_critic_updates=20)  # rl-zoo3's
PRESETS: dict[tuple, dict] = {  # better defaults for a task: (env_id, mask_velocity)
    ("CartPole-v1", True): dict(memory="lstm", total_timesteps=100_000, num_envs=8, num_steps=256,
        n_critic_updates=20, batch_size=256, cg_damping=0.01),
    ("Pendulum-v1", False): dict(num_envs=2, num_steps=1024, gamma=0.9, n_critic_updates=15),
    ("MountainCarContinuous-v0", False): dict(log_std_init=1.0),
    ("LunarLander-v3", False): dict(ZOO, gae_lambda=0.98, norm_obs=False, norm_reward=False),
    ("LunarLanderContinuous-v3", False): dict(ZOO, num_envs=4, target_kl=0.04, cg_damping=0.2,
        gae_lambda=0.98),
    ("HalfCheetah-v5", False): dict(ZOO, target_kl=0.24, cg_damping=0.6),
    ("Swimmer-v5", False): dict(ZOO, target_kl=0.02, cg_damping=0.2, gamma=0.9999, gae_lambda=0.99),
    ("Hopper-v5", False): dict(ZOO, target_kl=0.03, cg_damping=0.3),
    ("Walker2d-v5", False): dict(ZOO, target_kl=0.06, cg_damping=0.6),
}  # fmt: skip
FIXED = "env_id", "mask_velocity", "encoder_size", "hidden_size", "memory", "norm_obs"
LOSSES = "kl", "improvement", "expected_improvement", "step_fraction", "entropy", "value_loss"
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
    """A policy, and a critic, which share no parameter. state (2, N, H) is the LSTM's h and c."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
        self.box = isinstance(self.action_space, spaces.Box)
        choices = num_choices(self.action_space)
        self.shape = K, A = len(choices), int(max(choices))  # of an action's logits
        inputs = spaces.flatdim(envs.single_observation_space)
        E, H = args.encoder_size, args.hidden_size if args.memory == "lstm" else 0
        self.encoder = nn.Sequential(linear(inputs, E), nn.Tanh(), linear(E, E), nn.Tanh())
        if args.memory == "lstm":
            self.lstm = ResetLSTM(E, H)
        self.actor = linear(H or E, K * A, std=0.01)  # logits, or the mean
        missing = np.arange(A) >= choices[:, None]  # (K, A): a component may have fewer choices
        self.actor.bias.data[missing.ravel()] = -1e9
        if self.box:
            self.log_std = nn.Parameter(torch.full((K,), args.log_std_init))
        self.policy_parameters = [*self.parameters()]  # all but the critic's
        self.critic = nn.Sequential(linear(inputs + H, E), nn.Tanh(), linear(E, E), nn.Tanh())
        self.critic.append(linear(E, 1, std=1.0))
        self.return_stats = RunningMeanStd(())
        self.obs_stats = RunningMeanStd((inputs,))

    def initial_state(self, num_envs: int) -> Tensor:
        return self.actor.weight.new_zeros(2, num_envs, self.args.hidden_size)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (..., n), as the environments return them -> as the networks take them."""
        if self.args.norm_obs:
            centred = obs - self.obs_stats.mean
            obs = (centred / (self.obs_stats.var + 1e-8).sqrt()).clamp(-10, 10).to(obs.dtype)
        return obs

    def policy(self, h: Tensor) -> Independent:
        """The policy's h (..., H) -> the distribution of actions (..., K), which `act` samples."""
        if self.box:
            normal = Normal(self.actor(h), self.log_std.exp(), validate_args=False)
            return Independent(normal, 1, validate_args=False)
        logits = self.actor(h).unflatten(-1, self.shape)
        categorical = Categorical(logits=logits, validate_args=False)
        return Independent(categorical, 1, validate_args=False)

    def sample_noise(self, *shape: int) -> Tensor:
        """Noise for `act`, from the CPU's generator, whose state agent.pt holds: (*shape, K) of
        standard deviation exp(log_std), or Gumbel's (*shape, K, A)."""
        if self.box:
            return torch.randn(*shape, self.shape[0]).to(self.log_std.device) * self.log_std.exp()
        return -torch.empty(*shape, *self.shape).exponential_().log().to(self.actor.weight.device)

    def act(self, h: Tensor, noise) -> Tensor:
        """The policy's h (N, H), noise of sample_noise -> actions (N, K), not clipped yet. Of
        all logits plus Gumbel noise, that of choice a is the largest with probability p_a."""
        x = self.actor(h)
        return x + noise if self.box else (x.unflatten(-1, self.shape) + noise).argmax(-1)

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, n), state -> h (N, H) for the policy, next state."""
        x = self.encoder(self.normalize(obs))
        if self.args.memory == "none":
            return x, state
        state = self.lstm.step(x, state)
        return state[0], state

    def forward(self, obs, state, final, every: int = 1) -> Independent:
        """Sequences: normalised obs (L, B, n), the state before them (2, B, H), final (L, B) -> the
        policy in every k-th of the M steps that count."""
        if self.args.memory == "none":
            return self.policy(self.encoder(obs[~final][::every]))
        return self.policy(self.lstm(self.encoder(obs), state, final)[~final][::every])

    @torch.inference_mode()
    def predict(self, obs, info: dict, state: Tensor | None, deterministic: bool = True):
        """obs (N, n), info of N environments, state, None at first -> actions, next state."""
        state = self.initial_state(len(obs)) if state is None else state
        h, state = self.step(torch.as_tensor(np.float32(obs), device=state.device), state)
        actions = self.act(h, 0 if deterministic else self.sample_noise(len(h)))
        return to_env(actions, self.action_space), state


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


def surrogate(new: Independent, old: Independent, actions: Tensor, advantages: Tensor) -> Tensor:
    """The mean of pi(a|s) / pi_old(a|s) A over M steps (Schulman et al. 2015, eq. 14)."""
    ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
    return (ratio * advantages).mean()


def flat_gradient(y: Tensor, parameters: list[nn.Parameter], **options) -> Tensor:
    """dy / d parameters as one vector (P,)."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters, **options)])


def fisher_vector_product(kl_gradient: Tensor, parameters, damping: float, v: Tensor) -> Tensor:
    """(F + damping I) v, without F (P, P). The Fisher matrix F is the Hessian of the mean KL at the
    old policy (appendix C), and H v is the gradient of (gradient . v)."""
    return flat_gradient(kl_gradient @ v, parameters, retain_graph=True) + damping * v


def fisher_vector_difference(agent: Agent, old, rollout, damping: float, v: Tensor) -> Tensor:
    """The same for an LSTM, whose fused call has no second derivative: a central difference of the
    mean KL's gradient. At its distance truncation and rounding errors are of the same order."""
    parameters, gradients = agent.policy_parameters, []
    theta = nn.utils.parameters_to_vector(parameters).detach()
    distance = torch.finfo(v.dtype).eps ** (1 / 3) / v.norm()
    for there in theta + distance * v, theta - distance * v:
        nn.utils.vector_to_parameters(there, parameters)
        gradients.append(flat_gradient(kl_divergence(old, agent(*rollout)).mean(), parameters))
    nn.utils.vector_to_parameters(theta, parameters)
    return (gradients[0] - gradients[1]) / (2 * distance) + damping * v


def conjugate_gradient(product, b: Tensor, max_steps: int) -> Tensor:
    """x with A x = b, where product(v) is A v, until |b - A x|^2 < 1e-10 (Nocedal & Wright 2006,
    algorithm 5.2), or until A shows a curvature that is not positive and finite."""
    x, residual, direction = torch.zeros_like(b), b, b
    for _ in range(max_steps):
        norm, image = residual @ residual, product(direction)
        curvature = direction @ image
        if not (norm >= 1e-10 and 0 < curvature < np.inf):  # either may be NaN
            break
        x = x + norm / curvature * direction
        residual = residual - norm / curvature * image
        direction = residual + residual @ residual / norm * direction
    return x


@torch.no_grad()
def line_search(agent: Agent, args: Args, old, rollout, actions, advantages, step: Tensor):
    """Moves the policy by the first of the fractions 1, factor, factor^2, ... of step (P,) that
    improves the surrogate at a mean KL below its target, if any -> KL, improvement, fraction."""
    parameters = agent.policy_parameters
    theta = nn.utils.parameters_to_vector(parameters)
    for i in range(args.line_search_max_iter):
        fraction = args.line_search_shrinking_factor**i
        nn.utils.vector_to_parameters(theta + fraction * step, parameters)
        new = agent(*rollout)
        kl = kl_divergence(old, new).mean().item()
        improvement = (surrogate(new, old, actions, advantages) - advantages.mean()).item()
        if kl < args.target_kl and 0 < improvement < np.inf:  # comparisons with NaN are false
            return kl, improvement, fraction
    nn.utils.vector_to_parameters(theta, parameters)
    return 0.0, 0.0, 0.0


def trpo_step(agent: Agent, args: Args, rollout, actions: Tensor, advantages: Tensor) -> list:
    """Moves the policy along F^-1 g, where g is the surrogate's gradient, as far as the trust
    region step' F step / 2 = target_kl and then the line search allow (appendix C). rollout is what
    Agent.forward takes; actions (M, K), advantages (M,) -> figures of LOSSES."""
    parameters, few = agent.policy_parameters, (*rollout, args.sub_sampling_factor)
    with torch.no_grad():
        old, old_few = agent(*rollout), agent(*few)
    gradient = flat_gradient(surrogate(agent(*rollout), old, actions, advantages), parameters)
    if args.memory == "none":
        kl = kl_divergence(old_few, agent(*few)).mean()
        kl_gradient = flat_gradient(kl, parameters, create_graph=True)
        product = partial(fisher_vector_product, kl_gradient, parameters, args.cg_damping)
    else:
        product = partial(fisher_vector_difference, agent, old_few, few, args.cg_damping)
    direction = conjugate_gradient(product, gradient, args.cg_max_steps)
    curvature = direction @ product(direction)
    scale = (2 * args.target_kl / curvature).sqrt() if curvature > 0 else 0.0
    step = scale * direction
    kl, improvement, fraction = line_search(agent, args, old, rollout, actions, advantages, step)
    expected = fraction * (gradient @ step).item()
    return [kl, improvement, expected, fraction, old.entropy().mean().item()]


def fit_critic(critic: nn.Module, args: Args, optimizer, inputs: Tensor, returns: Tensor) -> float:
    """Passes of Adam over the critic's inputs and returns (M, ...) -> mean squared error."""
    losses = []
    for _ in range(args.n_critic_updates):
        for batch in torch.randperm(len(inputs)).to(inputs.device).split(args.batch_size):
            loss = nn.functional.mse_loss(critic(inputs[batch]).squeeze(-1), returns[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    T, N = args.num_steps, args.num_envs
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.critic.parameters(), eps=1e-5, fused=True)
    run = Run(args, envs, agent, optimizer)
    # NumPy holds what environments return, torch what the agent computes.
    tensor = partial(torch.as_tensor, device=device)
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((2, T, N), bool)
    h = torch.zeros(T + 1, N, agent.actor.in_features, device=device)

    obs[0], info = envs.reset(seed=args.seed + run.step)
    state, carried = agent.initial_state(N), np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        first_state = state.clone()
        with torch.inference_mode():
            noise, actions = agent.sample_noise(T, N), []
            for t in range(T):
                check("action_mask" not in info, "--env-id: action masks are for rppo_lstm.py")
                h[t], state = agent.step(tensor(obs[t]), state)
                actions.append(agent.act(h[t], noise[t]))
                if final[t].any():
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
            h[T], _ = agent.step(tensor(obs[T]), state)
        check_finite("obs", obs)
        check_finite("rewards", rewards)

        # Advantages
        valid, done = ~final[:T], terminated | truncated
        if args.norm_reward and valid.any():
            sums = discounted_sums(rewards, done, carried, args.gamma)
            agent.return_stats.update(tensor(sums[valid]))
            rewards /= np.sqrt(agent.return_stats.var.item() + 1e-8)
        normalized = agent.normalize(tensor(obs))
        inputs = torch.cat([normalized, h], -1) if args.memory == "lstm" else normalized
        v = agent.critic(inputs).squeeze(-1).numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update: the policy by one step in its trust region, the critic by Adam in minibatches
        losses = []
        if valid.any():
            optimizer.param_groups[0]["lr"] = args.learning_rate
            rollout = normalized[:T], first_state, tensor(final[:T])
            counts, advantage, targets = map(tensor, (valid, advantages[valid], returns[valid]))
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            logs = trpo_step(agent, args, rollout, torch.stack(actions)[counts], advantage)
            value_loss = fit_critic(agent.critic, args, optimizer, inputs[:T][counts], targets)
            losses.append(torch.tensor([*logs, value_loss]))

        if args.norm_obs and valid.any():  # not earlier: h is of the old statistics' policy
            agent.obs_stats.update(tensor(obs[:T][valid]))
        run.log(int(valid.sum()), LOSSES, losses)
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
            low = 0 if type(default) is float or name in ("seed", "eval_episodes") else 1
            low = -20 if name == "log_std_init" else low
            high = 1 if name in ("gamma", "gae_lambda", "line_search_shrinking_factor") else 10**12
            fine = low <= value <= high or value == default
            check(fine, f"--{name} {value}: must be from {low} to {high}")
            setattr(args, name, type(default)(value))  # 3e5 as an int
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
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__.split("\n\nTRPO:")[0])
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
