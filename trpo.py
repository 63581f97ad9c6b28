# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Trust region policy optimisation, TRPO, feed-forward or with --memory lstm.

    python trpo.py --env-id HalfCheetah-v5  # train
    python trpo.py --play runs/RUN          # watch the agent

TRPO: Schulman et al. 2015, arXiv:1502.05477. GAE: Schulman et al. 2016, arXiv:1506.02438.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own. We call
that step final:

    t   obs                          action    final
    4   the episode's last but one   played            terminated[4] or truncated[4] is set
    5   the episode's last           ignored   yes     after it, the agent's state is set to zero
    6   the next episode's first     played

A final step counts in no loss: its action did nothing. But its value, computed with the state
that the agent has there, stands for the rewards that a time limit cut off.

Shapes: T time steps, N environments; B sequences of L steps; M steps that count; n numbers in an
observation, F features, H hidden units; K components of an action, A choices of each; P parameters.
"""

import json
import os
import random
import shlex
import sys
import time
import traceback
import warnings
import zipfile
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym  # pip install what line 3 lists
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
    mask_velocity: bool = False  # hide velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 1_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    torch_threads: int = 1  # CPU threads; 0: torch's choice

    num_envs: int = 1  # parallel environments (N)
    num_steps: int = 2048  # time steps of a rollout (T), one sequence for each environment
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE
    norm_obs: bool = True  # normalise observations by their running mean and variance
    norm_reward: bool = True  # divide rewards by the standard deviation of returns

    encoder_size: int = 64  # units of both layers of encoder and critic
    memory: Literal["none", "lstm"] = "none"  # between the policy's encoder and its actor
    hidden_size: int = 64  # units of the LSTM (H)
    log_std_init: float = 0.0  # initial log standard deviation of the noise in actions

    target_kl: float = 0.01  # delta, the largest mean KL divergence from the old policy
    cg_max_steps: int = 15  # steps of conjugate gradient
    cg_damping: float = 0.1  # added to the diagonal of the Fisher matrix
    sub_sampling_factor: int = 1  # k: every k-th step counts in the Fisher matrix
    line_search_shrinking_factor: float = 0.8  # factor for a step that the line search refuses
    line_search_max_iter: int = 10  # how many steps the line search tries
    learning_rate: float = 1e-3  # of the critic's Adam
    n_critic_updates: int = 10  # the critic's passes over a rollout
    batch_size: int = 128  # steps of its minibatches

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # episodes after training (0: none), or of --play (0: 10)
    deterministic: bool = True  # evaluate the most probable actions, not sampled ones
    resume: str | None = None  # directory of a run to continue; flags given here win
    play: str | None = None  # directory of a run whose agent to watch
    render: Literal["human", "video", "none"] = "human"  # --play: a window, RUN/videos, or returns


ZOO = dict(num_envs=2, num_steps=1024, cg_max_steps=25, n_critic_updates=20)  # rl-zoo3's
PRESETS: dict = {  # better defaults for a task: (env_id, mask_velocity)
    ("CartPole-v1", True): dict(memory="lstm", total_timesteps=100_000, num_envs=8, num_steps=128,
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
FIXED = (  # the agent's shape and what it sees: --resume and --play cannot change them
    "env_id", "mask_velocity", "encoder_size", "hidden_size", "memory", "norm_obs", "log_std_init",
)  # fmt: skip
# What is logged, of the policy's step and of the critic's passes
LOSSES = "kl", "improvement", "expected_improvement", "step_fraction", "entropy", "value_loss"
# What --mask-velocity hides of an observation
VELOCITIES = {"CartPole": [1, 3], "MountainCar": [1], "Pendulum": [2], "LunarLander": [2, 3, 5]}


class ResetLSTM(nn.Module):
    """An LSTM whose state is zero after every final step, and that replays a sequence in one call.

    Its definition is a loop over time: state = cell(x[t], state), then state = 0 if final[t]. One
    call of torch.lstm for all steps is much faster, but cannot stop to reset the state. It need
    not: no loss reads the output of a final step, so on replay we may give it an input that makes
    the step itself the reset.

    x gets one more feature, with constant weights: 1 to the input and forget gates, 0 to the
    others. It is 0 on ordinary steps. On a final step it is -1e4, and the rest of x is 0. Then,
    exactly in floating point, and with no gradient:

        i = f = sigmoid(U h + b - 1e4) = 0,    c' = f c + i g = 0,    h' = o tanh(c') = 0
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.cell = nn.LSTMCell(input_size, hidden_size)
        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)
        # Gates i, f, g, o. An open forget gate remembers (Gers et al. 2000).
        nn.init.ones_(self.cell.bias_ih[hidden_size : 2 * hidden_size])
        closes = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
        self.closes = nn.Buffer(closes.repeat_interleave(hidden_size, 0), persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [-1e4]), persistent=False)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x (N, F), state (2, N, H), that is h and c -> the next state."""
        return torch.stack(self.cell(x, (state[0], state[1])))

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (2, B, H), final (L, B) -> h (L, B, H)."""
        cell = self.cell
        L, B = x.shape[:2]
        check_shapes((L, B, cell.input_size), x=x)  # torch.lstm does not, and crashes
        check_shapes((2, B, cell.hidden_size), state=state)
        check_shapes((L, B), final=final)
        x = nn.functional.pad(x, (0, 1))  # (L, B, F + 1)
        x = torch.where(final.bool().unsqueeze(-1), self.reset, x)
        weight_ih = torch.cat([cell.weight_ih, self.closes], 1)  # (4 H, F + 1)
        h, _, _ = torch.lstm(  # what nn.LSTM calls
            x, (state[:1], state[1:]), [weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh],
            has_biases=True, num_layers=1, dropout=0.0, train=self.training, bidirectional=False,
            batch_first=False,
        )  # fmt: skip
        return h


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Orthogonal weights, zero biases (Huang et al. 2022, "37 implementation details")."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy and a critic, which share no parameter. state (2, N, H) is the LSTM's h and c."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        self.box = isinstance(self.action_space, spaces.Box)
        choices = num_choices(self.action_space)  # (K,)
        self.exists = np.arange(choices.max()) < choices[:, None]  # (K, A)
        inputs = spaces.flatdim(envs.single_observation_space)
        E = features = args.encoder_size
        critic_inputs = inputs
        self.encoder = nn.Sequential(linear(inputs, E), nn.Tanh(), linear(E, E), nn.Tanh())
        if args.memory == "lstm":
            features = args.hidden_size
            self.lstm = ResetLSTM(E, features)
            critic_inputs += features
        self.actor = linear(features, self.exists.size, std=0.01)  # logits, or the mean
        if self.box:
            self.log_std = nn.Parameter(torch.full(choices.shape, args.log_std_init))
        self.critic = nn.Sequential(
            linear(critic_inputs, E), nn.Tanh(), linear(E, E), nn.Tanh(), linear(E, 1, std=1.0)
        )
        self.return_stats = RunningMeanStd(())
        self.obs_stats = RunningMeanStd((inputs,))

    def initial_state(self, num_envs: int) -> Tensor:
        return self.actor.weight.new_zeros(2, num_envs, self.args.hidden_size)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (..., n), as the environments return them -> as the networks take them."""
        if not self.args.norm_obs:
            return obs
        std = (self.obs_stats.var + 1e-8).sqrt()
        return ((obs - self.obs_stats.mean) / std).clamp(-10, 10).to(obs.dtype)

    def log_probs(self, h: Tensor, legal: Tensor) -> Tensor:
        """h (..., H), legal choices (..., K, A) -> log-probabilities (..., K, A)."""
        logits = self.actor(h).unflatten(-1, self.exists.shape)
        return logits.masked_fill(~legal, -1e9).log_softmax(-1)  # not -inf: 0 * inf is NaN

    def policy(self, h: Tensor, legal: Tensor) -> Independent:
        """h (..., F), legal choices (..., K, A) -> the distribution of actions (..., K)."""
        if self.box:
            normal = Normal(self.actor(h), self.log_std.exp(), validate_args=False)
            return Independent(normal, 1)
        categorical = Categorical(logits=self.log_probs(h, legal), validate_args=False)
        return Independent(categorical, 1)

    def sample_noise(self, *shape: int) -> Tensor:
        """Noise (*shape, K) for Box actions. The CPU draws it: agent.pt holds its generator."""
        std = self.log_std.exp() if self.box else torch.zeros(len(self.exists))
        return torch.randn(*shape, len(std)).to(std.device) * std

    def act(self, h: Tensor, legal: Tensor, noise: Tensor) -> Tensor:
        """h (N, F), legal choices (N, K, A), noise (N, K) -> actions (N, K), not clipped yet."""
        if self.box:
            return self.actor(h) + noise
        return sample(self.log_probs(h, legal))

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, n), state -> h (N, F) for policy and critic, next state."""
        x = self.encoder(self.normalize(obs))
        if self.args.memory == "lstm":
            state = self.lstm.step(x, state)
            x = state[0]
        return x, state

    def forward(self, obs, legal, state, final, every: int = 1) -> Independent:
        """Sequences: normalised obs (L, B, n), legal (L, B, K, A), the state before them (2, B, H),
        final (L, B) -> the policy in M steps that count: an environment's every k-th (`every`)."""
        count = (~final).cumsum(0) - 1  # an environment's earlier steps that count
        chosen = ~final & (count % every == 0)
        if self.args.memory == "none":
            h = self.encoder(obs[chosen])
        else:
            h = self.lstm(self.encoder(obs), state, final)[chosen]
        return self.policy(h, legal[chosen])

    @torch.inference_mode()
    def predict(self, obs, info=None, state=None, final=None, deterministic: bool = True):
        """obs (N, n) and info of N environments, state (None at first), final (N,): which obs are
        an episode's last -> actions for the environments; state, zero after final steps."""
        obs, state, final = check_inputs(self, obs, state, final)
        tensor = partial(torch.as_tensor, device=state.device)
        legal = tensor(legal_choices(self.exists, info or {}, final))
        h, state = self.step(tensor(obs), state)
        mode = self.policy(h, legal).mode
        actions = mode if deterministic else self.act(h, legal, self.sample_noise(len(h)))
        state = state.where(tensor(~final)[:, None], 0.0)
        return to_env(actions, self.action_space), state


def sample(logp: Tensor) -> Tensor:
    """Log-probabilities (..., K, A) -> choices (..., K). If E_a ~ Exp(1), p_a / E_a is the largest
    with probability p_a: Categorical.sample without its overhead."""
    noise = torch.empty(logp.shape).exponential_().to(logp.device)
    return (logp.exp() / noise).argmax(-1)


def num_choices(space):
    """How many choices each of the K components of an action has; a real number has 1."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.n])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.ravel()
    if isinstance(space, spaces.MultiBinary):
        return np.full(spaces.flatdim(space), 2)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        warn_of_bounds(space)
        return np.ones(spaces.flatdim(space), int)
    raise ArgumentError(f"--env-id: actions of {space}: use MultiDiscrete, or a Box of floats")


def warn_of_bounds(space) -> None:
    """Warns of a Box of actions that is far from [-1, 1], where a new policy samples."""
    bounds = np.array([space.low, space.high], float)
    size = np.abs(bounds)
    far = (size > 10) & (size < 1e30)  # a larger bound is none
    narrow = bounds[1] - bounds[0] < 0.1
    if far.any() or narrow.any():
        warnings.warn(f"actions of {space}: far from [-1, 1]; use gymnasium.wrappers.RescaleAction")


def legal_choices(exists, info: dict, final):
    """The choices (N, K, A) that exist and that info's "action_mask" allows, where one was sent:
    1 or 0 for each choice of each component. Final steps need no legal choice."""
    legal = exists[None].repeat(len(final), axis=0)
    if "action_mask" in info and exists.shape[1] > 1:  # A > 1: choices
        sent = info.get("_action_mask", np.ones(len(final), bool))  # (N,): who sent a mask
        for i in np.flatnonzero(sent & ~final):
            mask = np.hstack(info["action_mask"][i])
            check_shapes(legal[i, exists].shape, action_mask=mask)
            legal[i, exists] = mask
        if not legal.any(-1).all():
            raise ValueError(f"an action_mask leaves no choice: {info['action_mask']}")
    return legal


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K), choices counted from 0 -> as the environments take them, within bounds."""
    array = actions.cpu().numpy().reshape(-1, *space.shape)
    if isinstance(space, spaces.Box):
        return finite("actions", array.clip(space.low, space.high)).astype(space.dtype)
    return array.astype(space.dtype) + getattr(space, "start", 0)


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far, in float64."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.mean: Tensor = nn.Buffer(torch.zeros(shape, dtype=torch.float64))
        self.var: Tensor = nn.Buffer(torch.ones(shape, dtype=torch.float64))
        self.count: Tensor = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def update(self, rows: Tensor) -> None:
        """Adds rows (M, *shape) (Chan et al. 1979, eq. 2.1)."""
        M = len(rows)
        check_shapes((M, *self.mean.shape), rows=rows)
        rows = rows.double()
        total = self.count + M
        delta = rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0, correction=0) * M
        squares += delta**2 * self.count * M / total  # about the common mean
        self.mean = self.mean + delta * M / total
        self.var = squares / total
        self.count = total


def discounted_sums(rewards, done, unfinished, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t-1} within an episode; rewards, done, G are (T, N). unfinished (N,) is
    gamma G of an episode that the last rollout left unfinished, else 0; changed in place."""
    check_shapes(rewards.shape, done=done)
    sums = 0.0 * rewards
    for t in range(len(rewards)):
        sums[t] = rewards[t] + unfinished
        unfinished[:] = np.where(done[t], 0, gamma * sums[t])
    return sums


def compute_gae(rewards, values, terminated, done, gamma: float, lam: float) -> np.ndarray:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16). values is (T + 1, N), the
    rest (T, N). A truncated episode is bootstrapped by V_{t+1}, the value of its final step.

        delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t
        A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}
    """
    check_shapes(rewards.shape, values=values[1:], terminated=terminated, done=done)
    deltas = rewards + gamma * np.where(terminated, 0, values[1:]) - values[:-1]
    advantages = np.zeros_like(deltas)
    following = np.zeros_like(deltas[0])  # A_{t+1}
    for t in reversed(range(len(deltas))):
        following = deltas[t] + gamma * lam * np.where(done[t], 0, following)
        advantages[t] = following
    return advantages


def surrogate(new: Independent, old: Independent, actions, advantage) -> Tensor:
    """The mean of pi(a|s) / pi_old(a|s) A over M steps (Schulman et al. 2015, eq. 14)."""
    check_shapes(new.batch_shape + new.event_shape, actions=actions)
    logprob = new.log_prob(actions)
    old_logprob = old.log_prob(actions)
    check_shapes(logprob.shape, old_logprob=old_logprob, advantage=advantage)
    ratio = (logprob - old_logprob).exp()
    return (ratio * advantage).mean()


def flat_gradient(y: Tensor, parameters, **options) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters, **options)])  # (P,)


def fisher_vector_product(kl_gradient: Tensor, parameters, damping: float, v: Tensor) -> Tensor:
    """(F + damping I) v. F (P, P), the Hessian of the KL, is not built: F v = grad(grad KL . v)."""
    check_shapes(kl_gradient.shape, v=v)
    return flat_gradient(kl_gradient @ v, parameters, retain_graph=True) + damping * v


def fisher_vector_difference(policy, old, parameters, damping: float, v: Tensor) -> Tensor:
    """The same by a central difference: an LSTM's fused call has no second derivative."""
    theta = nn.utils.parameters_to_vector(parameters).detach()
    check_shapes(theta.shape, v=v)
    # The formula errs by about distance^2, rounding by eps / distance: the sum is least near this.
    distance = torch.finfo(v.dtype).eps ** (1 / 3) / v.norm()
    gradients = []
    for point in (theta + distance * v, theta - distance * v):
        nn.utils.vector_to_parameters(point, parameters)
        gradients.append(flat_gradient(kl_divergence(old, policy()).mean(), parameters))
    nn.utils.vector_to_parameters(theta, parameters)
    return (gradients[0] - gradients[1]) / (2 * distance) + damping * v


def conjugate_gradient(product, b: Tensor, max_steps: int) -> Tensor:
    """x with A x = b, where product(v) is A v (Nocedal & Wright 2006, algorithm 5.2)."""
    x = torch.zeros_like(b)
    r = b  # b - A x
    p = b  # search direction
    for _ in range(max_steps):
        r_dot = r @ r
        Ap = product(p)
        curvature = p @ Ap
        if not (r_dot >= 1e-10 and 0 < curvature < np.inf):  # either may be NaN
            break
        alpha = r_dot / curvature
        x = x + alpha * p
        r = r - alpha * Ap
        p = r + r @ r / r_dot * p
    return x


@torch.no_grad()
def line_search(policy, old, parameters, args: Args, actions, advantage, step):
    """Tries step (P,), then shorter ones, until one passes -> KL, improvement, its fraction."""
    parameters = list(parameters)  # a generator would be empty the second time
    theta = nn.utils.parameters_to_vector(parameters)
    check_shapes(theta.shape, step=step)
    for i in range(args.line_search_max_iter):
        fraction = args.line_search_shrinking_factor**i
        nn.utils.vector_to_parameters(theta + fraction * step, parameters)
        new = policy()
        kl = kl_divergence(old, new).mean().item()
        improvement = (surrogate(new, old, actions, advantage) - advantage.mean()).item()
        if kl < args.target_kl and 0 < improvement < np.inf:  # comparisons with NaN are false
            return kl, improvement, fraction
    nn.utils.vector_to_parameters(theta, parameters)
    return 0.0, 0.0, 0.0


def trpo_step(agent: Agent, args: Args, rollout, actions, advantage):
    """Moves all but the critic. actions (M, K), advantage (M,) -> the first five of LOSSES."""
    parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
    policy = partial(agent, *rollout)  # in all M steps
    fisher_policy = partial(policy, every=args.sub_sampling_factor)  # in those that estimate F
    with torch.no_grad():
        old, old_fisher = policy(), fisher_policy()
    # 1. g: the gradient of the surrogate at the old policy
    gradient = flat_gradient(surrogate(policy(), old, actions, advantage), parameters)
    # 2. d = F^-1 g, by products F v alone (appendix C): the direction that gains most for its KL
    if args.memory == "none":
        kl = kl_divergence(old_fisher, fisher_policy()).mean()
        kl_gradient = flat_gradient(kl, parameters, create_graph=True)
        product = partial(fisher_vector_product, kl_gradient, parameters, args.cg_damping)
    else:
        product = partial(
            fisher_vector_difference, fisher_policy, old_fisher, parameters, args.cg_damping
        )
    direction = conjugate_gradient(product, gradient, args.cg_max_steps)
    # 3. The longest step along d in the trust region: step' F step / 2 = target_kl, F with damping
    curvature = direction @ product(direction)
    scale = (2 * args.target_kl / curvature).sqrt() if curvature > 0 else 0.0
    step = scale * direction
    # 4. That was a quadratic model. The true KL and surrogate decide how much of it is taken.
    kl, improvement, fraction = line_search(policy, old, parameters, args, actions, advantage, step)
    expected = fraction * (gradient @ step).item()
    return kl, improvement, expected, fraction, old.entropy().mean().item()


def fit_critic(critic: nn.Module, args: Args, optimizer, inputs, returns) -> float:
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
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    seed_everything(args.seed)
    T, N = args.num_steps, args.num_envs
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.critic.parameters(), eps=1e-5, fused=True)  # lr is set below
    run = Run(args, envs, agent, optimizer)
    optimizer.param_groups[0]["lr"] = args.learning_rate  # Run may have loaded another
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    legal = np.zeros((T + 1, N, *agent.exists.shape), bool)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    h = torch.zeros(T + 1, N, agent.actor.in_features, device=device)

    obs[0], info = envs.reset(seed=args.seed + run.step)  # a resumed run begins other episodes
    legal[0] = legal_choices(agent.exists, info, final[0])
    state = agent.initial_state(N)
    unfinished = np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        actions = []
        first_state = state.clone()  # autograd cannot save what inference mode made
        with torch.inference_mode():
            noise = agent.sample_noise(T, N)
            for t in range(T):
                h[t], state = agent.step(tensor(obs[t]), state)
                actions.append(agent.act(h[t], tensor(legal[t]), noise[t]))
                if final[t].any():  # the next episode begins with an empty memory
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
                legal[t + 1] = legal_choices(agent.exists, info, final[t + 1])
            # State stays as it is: the next rollout begins with this step.
            h[T], _ = agent.step(tensor(obs[T]), state)

        # Advantages
        valid = ~final[:T]  # the steps that count
        done = terminated | truncated
        if args.norm_reward and valid.any():
            sums = discounted_sums(rewards, done, unfinished, args.gamma)
            agent.return_stats.update(tensor(sums[valid]))
            rewards /= np.sqrt(agent.return_stats.var.item() + 1e-8)
        normalized = agent.normalize(tensor(obs))
        inputs = normalized if args.memory == "none" else torch.cat([normalized, h], -1)
        v = agent.critic(inputs).squeeze(-1).numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)

        # Update: the policy by one step in its trust region, the critic by Adam in minibatches
        losses = []
        if valid.any():
            mask = tensor(valid)
            rollout = normalized[:T], tensor(legal[:T]), first_state, ~mask
            taken = torch.stack(actions)[mask]  # (M, K)
            advantage = tensor(advantages[valid])
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            step_losses = trpo_step(agent, args, rollout, taken, advantage)
            returns = tensor(advantages + v[:T])[mask]
            squared_error = fit_critic(agent.critic, args, optimizer, inputs[:T][mask], returns)
            losses.append(torch.tensor([*step_losses, 0.5 * squared_error]))

        if args.norm_obs and valid.any():  # not earlier: the policy acted with the old statistics
            agent.obs_stats.update(tensor(obs[:T][valid]))
        run.log(int(valid.sum()), losses)
        # The next rollout begins where this one ended.
        obs[0] = obs[T]
        legal[0] = legal[T]
        final[0] = final[T]

    run.finish()
    envs.close()
    return agent


# --- The lesson ends here. Below: environments, files, command line; one text in all scripts ---
class ArgumentError(ValueError):
    """A flag, a file or an environment that cannot be used."""


def check(condition, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def check_shapes(shape: tuple[int, ...], **arrays) -> None:
    """ValueError for the first array of another shape, which might broadcast silently."""
    for name, array in arrays.items():
        found = tuple(getattr(array, "shape", [type(array).__name__]))
        if found != tuple(shape):
            raise ValueError(f"{name} is {found}, and must have the shape {tuple(shape)}")


def check_inputs(agent: Agent, obs, state, final):
    """The inputs of predict, completed; ValueError for other shapes."""
    if getattr(obs, "shape", ())[1:] != agent.obs_stats.mean.shape:
        raise ValueError(f"obs must be (N, {len(agent.obs_stats.mean)}): take obs[None] for one"
                         " environment, and gymnasium.spaces.flatten for a Dict")  # fmt: skip
    state = agent.initial_state(len(obs)) if state is None else state
    final = np.zeros(len(obs), bool) if final is None else np.asarray(final, bool)
    check_shapes(agent.initial_state(len(obs)).shape, state=state)
    check_shapes(obs.shape[:1], final=final)
    return np.float32(obs), state, final


def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work."""
    check_flags(args)
    check(args.memory in ("none", "lstm"), f"--memory {args.memory}: must be none or lstm")
    factor = args.line_search_shrinking_factor
    check(factor <= 1, f"--line-search-shrinking-factor {factor}: must be from 0 to 1")
    check(not args.cuda or torch.cuda.is_available(), "--cuda: torch finds no GPU")


def check_flags(args: Args) -> None:
    """Raises ArgumentError for the first flag of a wrong type or range. Makes 3e5 an int."""
    ranges = {
        "seed": (0, 1e9), "eval_episodes": (0, 1e9), "torch_threads": (0, 999), "seq_len": (0, 1e9),
        "gamma": (0, 1), "gae_lambda": (0, 1), "log_std_init": (-20, 20), "sticky_actions": (0, 1),
    }  # fmt: skip
    for field in fields(args):
        value, default = getattr(args, field.name), getattr(Args, field.name)
        flag = f"--{field.name.replace('_', '-')} {value!r}"
        if field.type in (int, float):
            usual = min(default, 1 if field.type is int else 0), max(default, 10**12)
            low, high = ranges.get(field.name, usual)
            fits = isinstance(value, (int, float, np.number)) and low <= value <= high
            check(fits and field.type(value) == value, f"{flag}: must be from {low:g} to {high:g}")
            setattr(args, field.name, field.type(value))
        elif value is not None or default is not None:
            kind = (bool, np.bool_) if field.type is bool else (str, Path)
            check(isinstance(value, kind) and value != "", f"{flag}: must be a {kind[0].__name__}")
            setattr(args, field.name, kind[0](value))


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # some environments draw from it
    random.seed(seed)


def finite(name: str, x):
    """Returns x. FloatingPointError, with the place, for a number that is not finite in float32."""
    if not np.abs(x).max() < 2**24:  # true for NaN, too
        if bad := np.argwhere(~(np.abs(x) <= np.finfo(np.float32).max)).tolist():
            raise FloatingPointError(f"{name}{bad[0]} is {x[tuple(bad[0])]}")
        warnings.warn(f"{name} above 2**24 lose digits in float32: scale them")
    return x


def make_envs(args: Args, num_envs: int, render_mode: str | None = None):
    """num_envs environments as one, whose observations are vectors (num_envs, n)."""
    mode = "async" if args.async_envs else None  # None: make_vec chooses
    options: dict = {"render_mode": render_mode} if render_mode else {}
    mode = "sync" if render_mode else mode
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, **options)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not (gym.__path__[0] in last or "importlib" in last or isinstance(error, ImportError)):
            raise  # an error in the environment itself
        hint = 'yours: my_module:MyEnv-v0; packages: pip install ".[atari,box2d,minigrid,mujoco]"'
        raise ArgumentError(f"--env-id {args.env_id}: {error} ({hint})") from error
    next_step = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.NEXT_STEP
    check(next_step, f"--env-id {args.env_id}: autoreset is not in NEXT_STEP mode")
    space = envs.single_observation_space
    try:
        n = spaces.flatdim(space)
    except (NotImplementedError, ValueError) as error:
        raise ArgumentError(f"--env-id {args.env_id}: {space} has no fixed size") from error
    if args.mask_velocity:
        name = args.env_id.split("-")[0].removesuffix("Continuous")
        check(name in VELOCITIES, f"--mask-velocity: {name} is not one of {', '.join(VELOCITIES)}")
        hidden = np.isin(np.arange(n), VELOCITIES[name])
        envs = wrappers.TransformObservation(envs, lambda obs: np.where(hidden, 0, obs))
    if space.shape != (n,):
        envs = wrappers.FlattenObservation(envs)
    envs = wrappers.TransformObservation(envs, partial(finite, "obs"))
    envs = wrappers.TransformReward(envs, partial(finite, "rewards"))
    return wrappers.RecordEpisodeStatistics(envs, stats_key="run_statistics")


class Run:
    """A run's progress, log and agent.pt, saved at the start, every minute and at the end."""

    latest: Path | None = None  # the directory of the run to continue
    versions = (f"Python {sys.version.split()[0]}, torch {torch.__version__},"
                f" gymnasium {gym.__version__}, numpy {np.__version__}")  # fmt: skip

    def __init__(self, args: Args, envs, agent: Agent, optimizer):
        self.args = args
        self.agent = agent
        self.optimizer = optimizer
        self.returns, self.lengths = envs.return_queue, envs.length_queue  # of the last 100
        self.step, seconds = 0, 0.0
        inner = envs.unwrapped
        first = inner.envs[0] if isinstance(inner, gym.vector.SyncVectorEnv) else gym.Env()
        space = inner.single_observation_space
        if "uint8" in str(space) and spaces.flatdim(space) > 1000:
            warnings.warn("pixels become a long vector; docs/recipes/images.py has a CNN for them")
        if "action_mask" in str(space) or first.has_wrapper_attr("action_masks"):
            warnings.warn('action masks are read from info["action_mask"] only')
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time():.6f}"
        name = name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.resume or Path(args.runs_dir, name)).resolve()
        if args.resume:
            saved = load(self.dir, agent)
            optimizer.load_state_dict(saved["optimizer"])
            self.step, seconds = saved["step"], saved["seconds"]
            seed_everything(args.seed + self.step)
            torch.set_rng_state(saved["rng"])
            self.returns.extend(saved["returns"])
            self.lengths.extend(saved["lengths"])
        try:
            if args.track and (args.resume or not self.dir.exists()):  # else mkdir below refuses
                import wandb  # before SummaryWriter, which it patches

                wandb.init(id=self.dir.name, name=self.dir.name, config=vars(args), resume="allow",
                           reinit="finish_previous", sync_tensorboard=True)  # fmt: skip
            self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
            self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1)
        except Exception as error:
            hint = "--resume continues a run" if isinstance(error, OSError) else "for --track"
            raise ArgumentError(f"{error} ({hint})") from error
        self.began = time.time() - seconds
        self.logged = time.time()
        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow
        Run.latest = self.dir
        self.save()
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step")

    def log(self, steps: int, losses: list[Tensor]) -> None:
        """Ends an iteration of that many steps; losses: rows of LOSSES, to be averaged."""
        if not losses:  # only final steps
            return
        means = torch.stack(losses).mean(0).numpy(force=True)
        finite(f"after step {self.step}, {LOSSES}", means)
        seconds = time.time() - self.logged
        self.logged = time.time()
        self.timed.append((steps, seconds))
        self.step += steps
        scalars = {f"losses/{name}": loss for name, loss in zip(LOSSES, means)}
        scalars["charts/learning_rate"] = self.optimizer.param_groups[0]["lr"]
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
            "script": SCRIPT, "args": asdict(self.args), "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state(),
            "step": self.step, "seconds": time.time() - self.began, "versions": self.versions,
            "returns": [float(x) for x in self.returns], "lengths": [int(x) for x in self.lengths],
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
        timed = self.timed[1:] or [(self.step, self.logged - self.began)]  # or the only one
        sps = sum(steps for steps, _ in timed) / sum(time for _, time in timed)
        evaluation = []
        if self.args.eval_episodes > 0:
            envs = make_envs(self.args, self.args.eval_episodes)
            evaluation = evaluate(self.agent, envs, self.args.seed, self.args.deterministic)
        result = {
            "global_step": self.step, "seconds": self.logged - self.began, "sps": sps,
            "returns": [float(x) for x in self.returns], "evaluation": evaluation,
        }  # fmt: skip
        (self.dir / "result.json").write_text(json.dumps(result))
        score = np.mean(evaluation or self.returns or [np.nan])
        try:
            print(f"{self.dir}: return {score:.5g}, {sps:.0f} steps a second", flush=True)
        except (OSError, ValueError):  # a closed pipe, a full disk, another encoding
            sys.stdout = open(os.devnull, "w")


def load(run_dir, agent: Agent | None = None) -> dict:
    """Reads a run's agent.pt, running no code in it, and gives its weights to the agent."""
    file = Path(run_dir, "agent.pt")
    check(os.path.isfile(file), f"{run_dir} is not the directory of a run: it has no agent.pt")
    try:
        with zipfile.ZipFile(file) as opened:
            check(opened.testzip() is None, "it is damaged")
        saved = torch.load(file, map_location="cpu", weights_only=True)
        check(saved["script"] == SCRIPT, f"{saved['script']} wrote it, not {SCRIPT}")
        check_flags(Args(**saved["args"]))
        if agent is not None:
            agent.load_state_dict(saved["agent"])
    except Exception as error:  # a damaged file can raise anything
        raise ArgumentError(f"{file} cannot be used: {error!r:.150}") from error
    if saved["versions"] != Run.versions:
        warnings.warn(f"{file} was written by {saved['versions']}, and read by {Run.versions}")
    return saved


def evaluate(agent: Agent, envs, seed: int, deterministic: bool = True) -> list[float]:
    """The returns of N episodes, the first of each of the N environments."""
    obs, info = envs.reset(seed=seed)
    state = final = None
    returns = np.full(envs.num_envs, np.nan)
    with tqdm(total=envs.num_envs, desc="evaluation", unit="episode") as bar:
        while np.isnan(returns).any():
            action, state = agent.predict(obs, info, state, final, deterministic)
            obs, _, terminated, truncated, info = envs.step(action)
            final = terminated | truncated
            ended = final & np.isnan(returns)
            if ended.any():
                returns[ended] = info["run_statistics"]["r"][ended]
                bar.update(ended.sum())
    envs.close()
    return returns.tolist()


def play(args: Args) -> None:
    """Plays episodes in a window, into videos, or without a picture, and prints their returns."""
    check_flags(args)
    seed_everything(args.seed)
    mode = {"human": "human", "video": "rgb_array", "none": None}[args.render]
    display = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    check(mode != "human" or display, "--play: there is no display; try --render video, or none")
    together = 1 if mode else args.eval_episodes or 10  # episodes played side by side
    for episode in range(0, args.eval_episodes or 10, together):
        envs = make_envs(args, together, mode)
        agent = Agent(envs, args)
        load(args.play, agent)
        if args.render == "video":
            check("rgb_array" in str(envs.metadata), f"--render: {args.env_id} has no {mode}")
            envs = wrappers.RecordVideo(envs, f"{args.play}/videos", name_prefix=f"{episode}")
        for episodic_return in evaluate(agent, envs, args.seed + episode, args.deterministic):
            print(f"return {episodic_return:.5g}", flush=True)


def parse_args() -> Args:
    """Flags over defaults: those of the run to resume or play, or of PRESETS."""
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False)
    run_dir = early.play or early.resume
    defaults: dict = PRESETS.get((early.env_id, early.mask_velocity), {})
    if run_dir:
        defaults = vars(Args(**load(run_dir)["args"]))
    about = "\n\n".join((__doc__ or "").split("\n\n")[:2])  # python -OO has no docstring
    args = tyro.cli(Args, default=Args(**defaults), description=about)
    if run_dir:
        for name in FIXED:
            same = getattr(args, name) == defaults[name]
            check(same, f"--{name.replace('_', '-')}: {run_dir} has {defaults[name]}")
    return args


def main() -> None:
    """Exit codes: 2, a bad argument; 1, an error; 130, Ctrl-C."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # None where it is closed, as in a service
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        args = parse_args()
        start = play if args.play else train
        start(args)
    except (ArgumentError, gym.error.DependencyNotInstalled) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except BaseException as error:
        if isinstance(error, SystemExit) and not Run.latest:  # of tyro, which has said why
            raise
        if isinstance(error, BrokenPipeError) and not Run.latest:  # nobody reads --help, --play
            sys.stdout = open(os.devnull, "w")
        elif not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        if Run.latest and Path(Run.latest, "agent.pt").exists():
            command = shlex.join(["python", sys.argv[0], "--resume", str(Run.latest)])
            print(f"\nto continue: {command}", file=sys.stderr)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main()
