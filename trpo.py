# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Trust region policy optimisation, TRPO, feed-forward or with --memory lstm.

    python trpo.py --env-id CartPole-v1 --mask-velocity  # train
    python trpo.py --env-id HalfCheetah-v5               # train; needs gymnasium[mujoco]
    python trpo.py --play runs/RUN                       # watch the agent

TRPO: Schulman et al. 2015, arXiv:1502.05477. GAE: Schulman et al. 2016, arXiv:1506.02438.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own (autoreset
mode NEXT_STEP). We call that step final:

    t   obs[t]                       action[t]   final[t]
    4   the episode's last but one   played      no         terminated[4] or truncated[4] is set
    5   the episode's last           ignored     yes        then the memory is set to zero
    6   the next episode's first     played      no

A final step counts in no loss: its action did nothing. But its value, computed with the memory
that the agent has there, stands for the rewards that a time limit cut off.

Shapes: T time steps, N environments; M steps that count; n numbers in an observation, F features
(after an LSTM, its H hidden units); A discrete actions, or K components of a real-valued one; P
parameters. The LSTM reads B = N sequences of L = T steps.
"""

import json
import os
import random
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
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
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT, VERSION = "trpo", "0.2.0"


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    env_kwargs: str = "{}"  # the environment's own arguments, in JSON
    mask_velocity: bool = False  # hide velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 1_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run; two seeds share no episode
    cuda: bool = False  # train on the GPU
    torch_threads: int = 1  # CPU threads; 0: torch's choice

    num_envs: int = 1  # parallel environments (N)
    num_steps: int = 2048  # time steps of a rollout (T), one sequence for each environment
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE
    norm_obs: bool = True  # normalise observations by their running mean and variance
    norm_reward: bool = True  # divide rewards by the standard deviation of returns

    encoder_size: int = 64  # units of both layers of encoder and critic (F)
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

    preset: bool = True  # begin with the values that PRESETS has for the task, if any
    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # episodes after training (0: none), or of --play (0: 10)
    deterministic: bool = True  # evaluate the most probable actions, not sampled ones
    resume: str | None = None  # directory of a run to continue; flags given here win
    play: str | None = None  # directory of a run whose agent to watch
    render: Literal["human", "video", "none"] = "human"  # --play: a window, RUN/videos, or returns


ZOO = dict(num_envs=2, num_steps=1024, cg_max_steps=25, n_critic_updates=20)
PRESETS: dict = {  # values for a task, (env_id, mask_velocity), in place of the defaults above
    ("CartPole-v1", True): dict(memory="lstm", total_timesteps=100_000, num_envs=8, num_steps=128,
        n_critic_updates=20, batch_size=256, cg_damping=0.01),
    # Those below are rl-zoo3's, but target_kl and cg_damping are multiplied by the K components of
    # an action: sb3-contrib takes a mean over them, where the KL divergence is their sum.
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
# What is logged of the policy's step (approx_kl is exact here), and of the critic's passes
METRICS = (
    "approx_kl", "improvement", "expected_improvement", "step_fraction", "entropy", "value_loss",
)  # fmt: skip


class ResetLSTM(nn.Module):
    """An LSTM whose state is zero after every final step, and that replays a sequence in one call.

    Its definition is a loop over time: state = cell(x[t], state), then state = 0 if final[t]. One
    call of torch.lstm for all steps is much faster, but can't stop to reset the state. It needn't:
    no loss reads the output of a final step, so on replay we get to choose that step's input, and
    choose one that makes the step itself the reset.

    x gets one more feature, with constant weights: 1 to the input and forget gates, 0 to the
    others. It is 0 on ordinary steps. On a final step it is -1e4, and the rest of x is 0. Then,
    exactly in floating point, and with no gradient:

        i = sigmoid(U_i h + b_i - 1e4) = 0,  f = sigmoid(U_f h + b_f - 1e4) = 0
        c' = f c + i g = 0,                  h' = o tanh(c') = 0
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
        # The weights of the extra feature, (4 H, 1), and the input of a final step, (F + 1,)
        gates = torch.tensor([[1.0], [1.0], [0.0], [0.0]]).repeat_interleave(hidden_size, 0)
        self.gates = nn.Buffer(gates, persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [-1e4]), persistent=False)

    def initial_state(self, num_envs: int) -> Tensor:
        """Zeros: h and c, (2, N, H). Of another memory (rows, N, ...)."""
        return self.reset.new_zeros(2, num_envs, self.cell.hidden_size)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step, which doesn't reset: x (N, F), state (2, N, H) -> h (N, H), the next state."""
        h, c = self.cell(x, (state[0], state[1]))
        return h, torch.stack([h, c])

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (2, B, H), final (L, B) -> h (L, B, H)."""
        cell = self.cell
        L, B = x.shape[:2]
        # torch.lstm checks nothing, and can crash the process.
        assert x.shape == (L, B, cell.input_size), f"x is {tuple(x.shape)}"
        assert final.shape == (L, B), f"final is {tuple(final.shape)}"
        assert state.shape == (2, B, cell.hidden_size), f"state is {tuple(state.shape)}"
        x = nn.functional.pad(x, (0, 1))  # (L, B, F + 1)
        x = torch.where(final.unsqueeze(-1), self.reset, x)
        weight_ih = torch.cat([cell.weight_ih, self.gates], 1)  # (4 H, F + 1)
        h, _, _ = torch.lstm(  # what nn.LSTM calls
            x, (state[:1], state[1:]), [weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh],
            has_biases=True, num_layers=1, dropout=0.0, train=self.training, bidirectional=False,
            batch_first=False,
        )  # fmt: skip
        return h


def reset_state(state: Tensor, final) -> Tensor:
    """state (rows, N, ...) -> the same, but zero in those of the N environments that are final."""
    if not final.any():
        return state
    state = state.clone()
    state[:, torch.as_tensor(final, device=state.device)] = 0.0
    return state


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Orthogonal weights, zero biases (Huang et al. 2022, "37 implementation details")."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, width: int) -> nn.Sequential:
    """Two layers of that width."""
    return nn.Sequential(linear(inputs, width), nn.Tanh(), linear(width, width), nn.Tanh())


class Agent(nn.Module):
    """A policy and a critic, which share no parameter."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        self.box = isinstance(self.action_space, spaces.Box)
        check_actions(self.action_space)
        inputs = spaces.flatdim(envs.single_observation_space)
        outputs = spaces.flatdim(self.action_space)  # A, or K
        width = features = args.encoder_size
        self.encoder = mlp(inputs, width)
        critic_inputs = inputs
        if args.memory == "lstm":
            features = args.hidden_size
            self.lstm = ResetLSTM(width, features)
            # The critic reads the policy's h as data: it has no memory of its own, and trains none.
            critic_inputs += features
        self.actor = linear(features, outputs, std=0.01)  # logits (..., A), or means (..., K)
        if self.box:
            self.log_std = nn.Parameter(torch.full((outputs,), args.log_std_init))
        self.critic = nn.Sequential(*mlp(critic_inputs, width), linear(width, 1, std=1.0))
        self.return_stats = RunningMeanStd(())
        self.obs_stats = RunningMeanStd((inputs,))

    def initial_state(self, num_envs: int) -> Tensor:
        if self.args.memory == "none":
            return torch.zeros(0, num_envs)
        return self.lstm.initial_state(num_envs)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (..., n), as the environments return them -> as the networks take them."""
        if not self.args.norm_obs:
            return obs
        std = (self.obs_stats.var + 1e-8).sqrt()
        return ((obs - self.obs_stats.mean) / std).clamp(-10, 10).to(obs.dtype)

    def policy(self, h: Tensor) -> Distribution:
        """h (..., F) -> the distribution of actions: (...) if discrete, else (..., K)."""
        out = self.actor(h)
        if self.box:
            return Independent(Normal(out, self.log_std.exp(), validate_args=False), 1)
        return Categorical(logits=out, validate_args=False)

    def sample_noise(self, *shape: int) -> Tensor:
        """What makes actions random: normal noise (*shape, K), or Gumbel's (*shape, A). The CPU
        draws it: agent.pt holds its generator."""
        noise = torch.empty(*shape, self.actor.out_features)
        if self.box:
            return noise.normal_().to(self.log_std.device) * self.log_std.exp()
        return -noise.exponential_().log().to(self.actor.weight.device)

    def act(self, h: Tensor, noise: Tensor) -> Tensor:
        """h (N, F), noise of sample_noise -> sampled actions, (N,) or (N, K), not clipped yet.
        Of logits plus Gumbel noise, that of action a is the largest with probability p_a."""
        noisy = self.actor(h) + noise
        return noisy if self.box else noisy.argmax(-1)

    def step(self, obs: Tensor, lstm_state: Tensor):
        """obs (N, n) -> h (N, F) for policy and critic, the next state."""
        h = self.encoder(self.normalize(obs))
        if self.args.memory == "lstm":
            h, lstm_state = self.lstm.step(h, lstm_state)
        return h, lstm_state

    def forward(self, obs, lstm_state, final, chosen) -> Distribution:
        """Sequences: normalised obs (L, B, n), the state before them (2, B, H), final (L, B),
        chosen (L, B) -> the policy in the M chosen steps."""
        if self.args.memory == "none":
            return self.policy(self.encoder(obs[chosen]))
        return self.policy(self.lstm(self.encoder(obs), lstm_state, final)[chosen])

    @torch.inference_mode()
    def predict(self, obs, lstm_state=None, final=None, deterministic: bool = True):
        """obs (N, n) of N environments, lstm_state (None at first), final (N,): which obs are an
        episode's last -> actions for the environments; the next state, zero after final steps."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor.weight.device)
        lstm_state = self.initial_state(len(obs)) if lstm_state is None else lstm_state
        h, lstm_state = self.step(obs, lstm_state)
        actions = self.policy(h).mode if deterministic else self.act(h, self.sample_noise(len(h)))
        if final is not None:
            lstm_state = reset_state(lstm_state, final)
        return to_env(actions, self.action_space), lstm_state


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
        if M == 0:
            return
        rows = rows.double()
        total = self.count + M
        delta = rows.mean(0) - self.mean
        squares = self.var * self.count + rows.var(0, correction=0) * M
        squares += delta**2 * self.count * M / total  # about the common mean
        self.mean = self.mean + delta * M / total
        self.var = squares / total
        self.count = total


def discounted_sums(rewards, done, unfinished, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t-1} within an episode; rewards, done, G are (T, N). VecNormalize calls
    it the return. It looks back, so it is known at once, and varies about as much as the return
    that the critic learns. unfinished (N,), changed in place: gamma G of the episodes that the last
    rollout left unfinished, else 0."""
    sums = np.zeros_like(rewards)
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
    deltas = rewards + gamma * np.where(terminated, 0, values[1:]) - values[:-1]
    advantages = np.zeros_like(deltas)
    next_advantage = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        next_advantage = deltas[t] + gamma * lam * np.where(done[t], 0, next_advantage)
        advantages[t] = next_advantage
    return advantages


def explained_variance(value, return_) -> float:
    """(M,), (M,) -> the share of the returns' variance that the critic foresaw; 1 is the best."""
    return float(1 - (return_ - value).var() / (return_.var() + 1e-8))


def normalize_advantage(advantage: Tensor) -> Tensor:
    """Advantages (M,) of a rollout -> with mean 0 and standard deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)


def surrogate(new: Distribution, old: Distribution, actions, advantage) -> Tensor:
    """The mean of pi(a|s) / pi_old(a|s) A over M steps (Schulman et al. 2015, eq. 14)."""
    ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
    return (ratio * advantage).mean()


def kl_and_improvement(new: Distribution, old: Distribution, actions, advantage):
    """Over M steps: how far the new policy is from the old one, and how much better."""
    kl = kl_divergence(old, new).mean()
    improvement = surrogate(new, old, actions, advantage) - advantage.mean()
    return kl.item(), improvement.item()


def flat_gradient(y: Tensor, parameters, **options) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, parameters, **options)])  # (P,)


def fisher_vector_product(kl_gradient: Tensor, parameters, damping: float, v: Tensor) -> Tensor:
    """(F + damping I) v. F, here the Fisher matrix (P, P), is the KL's Hessian. It isn't built:
    F v = grad(grad KL . v)."""
    return flat_gradient(kl_gradient @ v, parameters, retain_graph=True) + damping * v


def fisher_vector_difference(policy, old, parameters, damping: float, v: Tensor) -> Tensor:
    """The same by a central difference: torch's second derivative through an LSTM is 4 to 90 times
    slower on a CPU, and cuDNN has none."""
    theta = nn.utils.parameters_to_vector(parameters).detach()
    # The formula errs by about distance^2, rounding by eps / distance: the sum is least near this.
    distance = torch.finfo(v.dtype).eps ** (1 / 3) / v.norm()
    gradients = []
    for point in (theta + distance * v, theta - distance * v):
        nn.utils.vector_to_parameters(point, parameters)
        gradients.append(flat_gradient(kl_divergence(old, policy()).mean(), parameters))
    nn.utils.vector_to_parameters(theta, parameters)
    return (gradients[0] - gradients[1]) / (2 * distance) + damping * v


def conjugate_gradient(fvp, b: Tensor, max_steps: int) -> Tensor:
    """x with A x = b, where fvp(v) is A v (Nocedal & Wright 2006, algorithm 5.2)."""
    x = torch.zeros_like(b)
    r = b  # b - A x
    p = b  # search direction
    for _ in range(max_steps):
        r_dot = r @ r
        Ap = fvp(p)
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
    theta = nn.utils.parameters_to_vector(parameters)
    for i in range(args.line_search_max_iter):
        fraction = args.line_search_shrinking_factor**i
        nn.utils.vector_to_parameters(theta + fraction * step, parameters)
        kl, improvement = kl_and_improvement(policy(), old, actions, advantage)
        if kl < args.target_kl and 0 < improvement < np.inf:  # comparisons with NaN are false
            return kl, improvement, fraction
    nn.utils.vector_to_parameters(theta, parameters)
    return 0.0, 0.0, 0.0


def sub_sample(valid: Tensor, k: int) -> Tensor:
    """valid (T, N) -> every k-th of each environment's steps that count. They estimate F."""
    return valid & ((valid.cumsum(0) - 1) % k == 0)


def trpo_step(agent: Agent, args: Args, rollout: dict, actions, advantage):
    """Moves all but the critic. actions (M,) or (M, K), advantage (M,) -> five METRICS."""
    parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
    valid = ~rollout["final"]
    policy = partial(agent, **rollout, chosen=valid)  # in all M steps
    fisher_policy = partial(agent, **rollout, chosen=sub_sample(valid, args.sub_sampling_factor))
    with torch.no_grad():
        old, old_fisher = policy(), fisher_policy()
    # 1. g: the gradient of the surrogate at the old policy
    gradient = flat_gradient(surrogate(policy(), old, actions, advantage), parameters)
    # 2. d = F^-1 g, by products F v alone (appendix C): the direction that gains most for its KL
    if args.memory == "none":
        kl = kl_divergence(old_fisher, fisher_policy()).mean()
        kl_gradient = flat_gradient(kl, parameters, create_graph=True)
        fvp = partial(fisher_vector_product, kl_gradient, parameters, args.cg_damping)
    else:
        fvp = partial(
            fisher_vector_difference, fisher_policy, old_fisher, parameters, args.cg_damping
        )
    direction = conjugate_gradient(fvp, gradient, args.cg_max_steps)
    # 3. The longest step along d in the trust region: step' F step / 2 = target_kl, F with damping
    curvature = direction @ fvp(direction)
    scale = (2 * args.target_kl / curvature).sqrt() if curvature > 0 else 0.0  # no step
    step = scale * direction
    # 4. That was a quadratic model. The true KL and surrogate decide how much of it is taken.
    kl, improvement, fraction = line_search(policy, old, parameters, args, actions, advantage, step)
    expected = fraction * (gradient @ step).item()
    return kl, improvement, expected, fraction, old.entropy().mean().item()


def fit_critic(critic: nn.Module, args: Args, optimizer, inputs, returns) -> float:
    """Passes of Adam over the critic's inputs and returns (M, ...) -> the mean squared error."""
    losses = []
    for _ in range(args.n_critic_updates):
        for batch in torch.randperm(len(inputs)).to(inputs.device).split(args.batch_size):
            loss = nn.functional.mse_loss(critic(inputs[batch]).squeeze(-1), returns[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def count_steps(valid) -> int:
    return int(valid.sum())


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    T, N = args.num_steps, args.num_envs
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    seed_everything(args.seed)
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.critic.parameters(), eps=1e-5, fused=True)
    run = Run(args, envs, agent, optimizer)  # with --resume it loads all that the run had saved
    optimizer.param_groups[0]["lr"] = args.learning_rate
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)

    obs[0], info = envs.reset(seed=env_seed(args.seed, run.step))  # resumed: other episodes
    check("action_mask" not in info, "action masks need the recipe action_masks")
    lstm_state = agent.initial_state(N)
    unfinished = np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        actions, hs = [], []
        first_state = lstm_state.clone()  # autograd can't save what inference mode made
        with torch.inference_mode():
            noise = agent.sample_noise(T, N)
        for t in range(T):
            with torch.inference_mode():
                h, lstm_state = agent.step(tensor(obs[t]), lstm_state)
                hs.append(h)
                actions.append(agent.act(h, noise[t]))
                lstm_state = reset_state(lstm_state, final[t])  # the next episode begins empty
            action = to_env(actions[t], agent.action_space)
            obs[t + 1], rewards[t], terminated[t], truncated[t], _ = envs.step(action)
            final[t + 1] = terminated[t] | truncated[t]
        with torch.inference_mode():  # lstm_state stays: the next rollout begins with this step
            h, _ = agent.step(tensor(obs[T]), lstm_state)
        hs.append(h)
        check_finite("obs", obs)
        check_finite("rewards", rewards)

        # Advantages
        valid = ~final[:T]  # the steps that count
        done = terminated | truncated
        rewards[~valid] = 0.0
        if args.norm_reward:
            sums = discounted_sums(rewards, done, unfinished, args.gamma)
            agent.return_stats.update(tensor(sums[valid]))
            rewards /= np.sqrt(agent.return_stats.var.item() + 1e-8)
        inputs = normalized = agent.normalize(tensor(obs))
        if args.memory == "lstm":
            inputs = torch.cat([normalized, torch.stack(hs)], -1)  # (T + 1, N, n + H)
        v = agent.critic(inputs).squeeze(-1).numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update: the policy by one step in its trust region, the critic by Adam in minibatches
        metrics = []
        if valid.any():
            mask = tensor(valid)
            rollout = dict(obs=normalized[:T], lstm_state=first_state, final=~mask)
            taken = torch.stack(actions)[mask]  # (M,) or (M, K)
            advantage = normalize_advantage(tensor(advantages)[mask])  # (M,), and so on
            critic_inputs = inputs[:T][mask]
            return_ = tensor(returns)[mask]
            row = trpo_step(agent, args, rollout, taken, advantage)
            value_loss = fit_critic(agent.critic, args, optimizer, critic_inputs, return_)
            metrics.append(torch.tensor([*row, value_loss]))  # as in METRICS

        if args.norm_obs:  # not earlier: the policy acted with the old statistics, at first none
            agent.obs_stats.update(tensor(obs[:T][valid]))
        run.step += count_steps(valid)
        if metrics:  # else every step was final
            run.log(metrics, explained_variance(v[:T][valid], returns[valid]))
        # The next rollout begins where this one ended.
        obs[0] = obs[T]
        final[0] = final[T]

    run.finish()
    envs.close()
    return agent


# --- The lesson ends here. Below: environments, files, command line ---
class ArgumentError(ValueError):
    """A flag, a file or an environment that the user can mend: main prints one line."""


def check(condition, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def check_args(args: Args) -> None:
    """ArgumentError for the first number that can't work."""
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value!r}"
        if isinstance(getattr(Args, name), (int, float)):  # YAML makes a string of 1e-3
            check(not isinstance(value, str), f"{flag}: is a string, and must be a number")
        if name.startswith("num_") or name.endswith(("_size", "_timesteps", "_updates", "_factor")):
            check(value is None or value > 0, f"{flag}: must be positive")
        if name.endswith(("_rate", "_kl", "_damping", "gamma", "lambda", "seed")):
            check(value is None or value >= 0, f"{flag}: must not be negative, nor NaN")
    check(max(args.gamma, args.gae_lambda) <= 1, "--gamma, --gae-lambda: must not be above 1")
    check(not args.cuda or torch.cuda.is_available(), "--cuda: torch finds no GPU")
    factor = args.line_search_shrinking_factor
    check(factor <= 1, f"--line-search-shrinking-factor {factor}: must not be above 1")


def check_finite(name: str, x: np.ndarray) -> None:
    """FloatingPointError, with the place of the first, for numbers that are NaN or infinite."""
    for place in np.argwhere(~np.isfinite(x))[:1]:
        raise FloatingPointError(f"{name}{place.tolist()} is {x[tuple(place)]}")


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # some environments draw from it
    random.seed(seed)


EVALUATION = 2**40  # in a step's place: no run has so many steps


def env_seed(*key: int) -> int:
    """The environments' seed, hashed from a key, (seed, step). Gymnasium adds i for the i-th:
    from seeds 1 and 2 themselves two runs would share most of their episodes."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] % 2**30)


def check_actions(space) -> None:
    """ArgumentError, which says what to use instead, for actions that this script doesn't have."""
    real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    known = real or isinstance(space, spaces.Discrete)
    check(known, f"--env-id: actions of {space}: use the recipe multi_discrete")


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N,), counted from 0, or (N, K), clipped to the bounds -> as the environments take
    them."""
    array = actions.numpy(force=True)
    if isinstance(space, spaces.Box):
        return array.reshape(-1, *space.shape).clip(space.low, space.high).astype(space.dtype)
    return array + space.start


class Plain(gym.vector.VectorWrapper):
    """Some vector environments return flags as numbers, or one info dictionary for all steps."""

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        return obs, rewards, np.bool_(terminated), np.bool_(truncated), dict(info)


# What --mask-velocity hides of an observation
VELOCITIES = {"CartPole": [1, 3], "MountainCar": [1], "Pendulum": [2], "LunarLander": [2, 3, 5]}


def make_envs(args: Args, num_envs: int, render_mode: str | None = None):
    """num_envs environments as one, whose observations are vectors (num_envs, n)."""
    mode = "async" if args.async_envs else None  # None: make_vec chooses
    mode = "sync" if render_mode else mode
    try:
        options = json.loads(args.env_kwargs)
        if render_mode:
            options["render_mode"] = render_mode
        envs = gym.make_vec(args.env_id, num_envs, mode, **options)
    except (gym.error.Error, ImportError, json.JSONDecodeError) as error:
        flags = f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}"
        raise ArgumentError(f"{flags}: {error}") from error
    next_step = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.NEXT_STEP
    check(next_step, f"--env-id {args.env_id}: its autoreset mode is not NEXT_STEP")
    check(envs.num_envs == num_envs, f"--env-id {args.env_id}: makes {envs.num_envs} environments")
    n = spaces.flatdim(envs.single_observation_space)
    if args.mask_velocity:
        name = args.env_id.split("-")[0].removesuffix("Continuous")
        check(name in VELOCITIES, f"--mask-velocity: {name} is not one of {[*VELOCITIES]}")
        hidden = np.isin(np.arange(n), VELOCITIES[name])
        envs = wrappers.TransformObservation(envs, lambda obs: np.where(hidden, 0, obs))
    if envs.single_observation_space.shape != (n,):
        envs = wrappers.FlattenObservation(envs)
    return wrappers.RecordEpisodeStatistics(Plain(envs), stats_key="run_statistics")


class Run:
    """A run's progress, log and agent.pt, saved at the start, every minute and at the end."""

    latest: Path | None = None  # the directory of the run to continue

    def __init__(self, args: Args, envs, agent: Agent, optimizer):
        self.args = args
        self.agent = agent
        self.optimizer = optimizer
        self.returns, self.lengths = envs.return_queue, envs.length_queue  # of the last 100
        self.step = 0
        self.wandb_id = None
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time():.6f}"
        name = name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.resume or Path(args.runs_dir, name)).resolve()
        exists = (self.dir / "agent.pt").exists()
        check(args.resume or not exists, f"--run-name: {self.dir} exists; --resume continues it")
        if args.resume:
            self.restore(load(self.dir, agent))
        if args.track:
            import wandb  # before SummaryWriter, which it patches

            tracked = wandb.init(
                id=self.wandb_id, name=self.dir.name, config=vars(args), resume="allow",
                reinit="finish_previous", sync_tensorboard=True,
            )  # fmt: skip
            self.wandb_id = tracked.id
        self.dir.mkdir(parents=True, exist_ok=True)
        self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1)
        self.began, self.first_step = time.perf_counter(), self.step
        Run.latest = self.dir
        self.save()
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step")

    def restore(self, saved: dict) -> None:
        """Goes on from what agent.pt held; load has given the agent its weights."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        ended = self.step >= self.args.total_timesteps and (self.dir / "result.json").exists()
        check(not ended, f"--total-timesteps: nothing to do, the run has {self.step} steps")
        seed_everything(env_seed(self.args.seed, self.step))
        torch.set_rng_state(saved["rng"])
        self.wandb_id = saved["wandb_id"]
        self.returns.extend(saved["returns"])
        self.lengths.extend(saved["lengths"])

    def log(self, metrics: list[Tensor], explained_variance: float) -> None:
        """Ends an iteration. metrics: for each minibatch a row as in METRICS, to be averaged."""
        means = torch.stack(metrics).mean(0).numpy(force=True)
        check_finite(f"after step {self.step}, {METRICS}", means)
        scalars = {f"losses/{name}": mean for name, mean in zip(METRICS, means)}
        scalars["losses/explained_variance"] = explained_variance
        scalars["charts/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        scalars["charts/SPS"] = self.speed()
        if self.returns:
            scalars["charts/episodic_return"] = np.mean(self.returns)
            scalars["charts/episodic_length"] = np.mean(self.lengths)
            self.bar.set_postfix({"return": np.mean(self.returns)}, refresh=False)
        for name, scalar in scalars.items():
            self.writer.add_scalar(name, scalar, self.step)
        self.bar.update(min(self.step, self.bar.total) - self.bar.n)
        if time.perf_counter() - self.saved > 60:
            self.save()

    def speed(self) -> float:
        """Environment steps a second."""
        return (self.step - self.first_step) / (time.perf_counter() - self.began)

    def contents(self) -> dict:
        """What agent.pt holds. The flags that belong to one command are not the run's."""
        args = replace(self.args, resume=None, play=None, render="human")
        return {
            "script": SCRIPT, "version": VERSION, "file": str(Path(__file__).resolve()),
            "args": asdict(args), "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state(),
            "step": self.step, "wandb_id": self.wandb_id,
            "returns": [float(x) for x in self.returns], "lengths": [int(x) for x in self.lengths],
        }  # fmt: skip

    def save(self) -> None:
        """Writes agent.pt: a crash leaves the old one or the new one."""
        self.writer.flush()
        torch.save(self.contents(), self.dir / "agent.tmp")
        os.replace(self.dir / "agent.tmp", self.dir / "agent.pt")
        self.saved = time.perf_counter()

    def finish(self) -> None:
        """Saves the agent, evaluates it, and writes result.json."""
        self.save()
        self.bar.close()
        sps = self.speed()
        returns = [float(x) for x in self.returns]
        if self.args.eval_episodes > 0:
            envs = make_envs(self.args, self.args.eval_episodes)
            seed = env_seed(self.args.seed, EVALUATION)
            returns = evaluate(self.agent, envs, seed, self.args.deterministic)
            self.writer.add_scalar("charts/evaluation", np.mean(returns), self.step)
        self.writer.close()
        result = {
            "args": self.contents()["args"], "global_step": self.step,
            "sps": sps, "returns": returns,
        }  # fmt: skip
        (self.dir / "result.json").write_text(json.dumps(result))
        print(f"{self.dir}: return {np.mean(returns or np.nan):.5g}, {sps:.0f} steps a second")


def load(run_dir, agent: Agent | None = None) -> dict:
    """Reads a run's agent.pt, running no code in it, and gives its weights to the agent."""
    try:
        saved = torch.load(Path(run_dir, "agent.pt"), map_location="cpu", weights_only=True)
        made_by = saved["script"]
        check(made_by == SCRIPT, f"{made_by} wrote it, not {SCRIPT} (recipes: docs/recipes/use.py)")
        if agent is not None:
            agent.load_state_dict(saved["agent"])
    except Exception as error:  # a damaged file can raise anything
        why = " ".join(str(error).split())[:200]
        raise ArgumentError(f"{run_dir}/agent.pt can't be used: {why}") from error
    return saved


def evaluate(agent: Agent, envs, seed: int, deterministic: bool = True) -> list[float]:
    """The returns of N episodes, the first of each of the N environments."""
    obs, _ = envs.reset(seed=seed)
    agent_state = final = None
    returns = np.full(envs.num_envs, np.nan)
    while np.isnan(returns).any():
        action, agent_state = agent.predict(obs, agent_state, final, deterministic)
        obs, _, terminated, truncated, info = envs.step(action)
        final = terminated | truncated
        ended = final & np.isnan(returns)
        if ended.any():
            returns[ended] = info["run_statistics"]["r"][ended]
    envs.close()
    return returns.tolist()


def play(args: Args) -> None:
    """Plays episodes in a window, into videos, or without a picture, and prints their returns."""
    seed_everything(args.seed)
    mode = {"human": "human", "video": "rgb_array", "none": None}[args.render]
    for episode in range(args.eval_episodes or 10):
        envs = make_envs(args, 1, mode)
        agent = Agent(envs, args)
        load(args.play, agent)
        if args.render == "video":
            envs = wrappers.RecordVideo(envs, f"{args.play}/videos", name_prefix=f"{episode}")
        seed = env_seed(args.seed, EVALUATION + episode)
        print("return", *evaluate(agent, envs, seed, args.deterministic), flush=True)


def preset(env_id: str, mask_velocity: bool = False, **flags) -> Args:
    """The Args that the command line has for a task: its preset, then flags."""
    values = PRESETS.get((env_id, mask_velocity), {})
    return Args(env_id=env_id, mask_velocity=mask_velocity, **{**values, **flags})


def parse_args() -> Args:
    """The flags; those that aren't given are the run's to resume or play, or a preset's."""
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False)
    run_dir = early.play or early.resume
    defaults = Args(**load(run_dir)["args"]) if run_dir else Args()
    task = early.env_id, early.mask_velocity
    if early.preset and not run_dir and task in PRESETS:
        print(f"preset, where no flag says otherwise: {PRESETS[task]}")
        defaults = preset(*task)
    return tyro.cli(Args, default=defaults, description=__doc__)


def main() -> None:
    """Exit codes: 2, what the user can mend; 1, an error; 130, Ctrl-C."""
    try:
        args = parse_args()
        start = play if args.play else train
        start(args)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            traceback.print_exc()
        if Run.latest:
            command = shlex.join(["python", sys.argv[0], "--resume", str(Run.latest)])
            print(f"\nto continue: {command}", file=sys.stderr)
        sys.exit(130 if interrupted else 1)


if __name__ == "__main__":
    main()
