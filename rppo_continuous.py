# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO for continuous actions: a Gaussian policy, and gSDE.

    python rppo_continuous.py --env-id Pendulum-v1 --mask-velocity  # train
    python rppo_continuous.py --play runs/RUN  # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.
gSDE, generalised state-dependent exploration: Raffin et al. 2021, arXiv:2005.05719. Its noise is a
function of the LSTM's output, and the same function for many steps.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own. We call
that step final:

    t   obs                          action    final
    4   the episode's last but one   played            terminated[4] or truncated[4] is set
    5   the episode's last           ignored   yes     after it, the agent's state is set to zero
    6   the next episode's first     played

A final step counts in no loss: its action did nothing. But its value, computed with the state
that the agent has there, stands for the rewards that a time limit cut off.

Letters in shapes: T time steps, N environments; S sequences of L steps, B of them in a minibatch;
M steps that count; n numbers in an observation, F features, H hidden units; K components of an
action.
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
from torch.distributions import Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_continuous"


@dataclass
class Args:
    env_id: str = "Pendulum-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    mask_velocity: bool = False  # hide velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 500_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    torch_threads: int = 1  # CPU threads; 0: torch's choice

    num_envs: int = 8  # parallel environments (N)
    num_steps: int = 128  # time steps of a rollout (T)
    seq_len: int = 0  # length of a sequence (L), through which gradients flow; 0: T
    num_minibatches: int = 4  # minibatches in an epoch, each of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE
    norm_obs: bool = True  # normalise observations by their running mean and variance
    norm_reward: bool = True  # divide rewards by the standard deviation of returns

    encoder_size: int = 64  # units of the layer before the LSTM
    hidden_size: int = 128  # units of the LSTM (H)
    separate_critic: bool = False  # the critic has a memory of its own
    ablate_memory: bool = False  # a control: no state between steps, L = 1
    log_std_init: float = 0.0  # initial log standard deviation of the noise in actions
    use_sde: bool = False  # gSDE: the noise in an action is a matrix times the LSTM's output
    sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for each rollout

    learning_rate: float = 1e-3  # Adam's, at first
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.2  # epsilon of the surrogate
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    target_kl: float = np.inf  # an update ends when the estimated KL exceeds 1.5 times this

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # episodes after training (0: none), or of --play (0: 10)
    deterministic: bool = True  # evaluate the most probable actions, not sampled ones
    resume: str | None = None  # directory of a run to continue; flags given here win
    play: str | None = None  # directory of a run whose agent to watch
    render: Literal["human", "video", "none"] = "human"  # --play: a window, RUN/videos, or returns


PRESETS = {  # better defaults for a task: (env_id, mask_velocity)
    ("Pendulum-v1", True): dict(
        total_timesteps=100_000, num_envs=16, num_minibatches=16, update_epochs=10, gamma=0.95,
        hidden_size=256, learning_rate=5e-4, use_sde=True, sde_sample_freq=4, log_std_init=-1.0,
    ),
    ("MountainCarContinuous-v0", True): dict(  # after rl-baselines3-zoo
        total_timesteps=300_000, num_steps=512, seq_len=128, num_minibatches=8, update_epochs=10,
        gamma=0.9999, gae_lambda=0.9, hidden_size=32, learning_rate=3e-4, clip_coef=0.1,
        ent_coef=0.00429, vf_coef=0.19, max_grad_norm=5.0, use_sde=True, sde_sample_freq=8,
    ),
    ("LunarLanderContinuous-v3", True): dict(
        total_timesteps=1_000_000, num_envs=16, num_steps=256, seq_len=128, num_minibatches=8,
        gamma=0.999, gae_lambda=0.98, use_sde=True, sde_sample_freq=16, log_std_init=-2.0,
    ),
    ("HalfCheetah-v5", False): dict(
        total_timesteps=1_000_000, seq_len=16, num_minibatches=8, update_epochs=8, gamma=0.98,
        gae_lambda=0.92, hidden_size=64, learning_rate=5e-4, log_std_init=-1.5,
    ),
}  # fmt: skip
FIXED = (  # the agent's shape and what it sees: --resume and --play cannot change them
    "env_id", "mask_velocity", "encoder_size", "hidden_size", "separate_critic", "ablate_memory",
    "norm_obs", "use_sde", "log_std_init",
)  # fmt: skip
LOSSES = "policy_loss", "value_loss", "entropy", "approx_kl"  # what is logged
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
    """Encoder and LSTM, then actor and critic. state is (2, N, H): the LSTM's h and c. A separate
    critic has an LSTM of its own, and state is (4, N, H)."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        check_actions(self.action_space)
        components = spaces.flatdim(self.action_space)
        inputs = spaces.flatdim(envs.single_observation_space)
        self.encoder = nn.Sequential(linear(inputs, args.encoder_size), nn.Tanh())
        self.lstm = ResetLSTM(args.encoder_size, args.hidden_size)
        if args.separate_critic:
            self.critic_lstm = ResetLSTM(args.encoder_size, args.hidden_size)
        self.actor = linear(args.hidden_size, components, std=0.01)  # the mean
        self.critic = linear(args.hidden_size, 1, std=1.0)
        shape = (args.hidden_size, components) if args.use_sde else (components,)
        self.log_std = nn.Parameter(torch.full(shape, args.log_std_init))
        self.return_stats = RunningMeanStd(())
        self.obs_stats = RunningMeanStd((inputs,))

    def initial_state(self, num_envs: int) -> Tensor:
        rows = 4 if self.args.separate_critic else 2
        return self.actor.weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (..., n), as the environments return them -> as the networks take them."""
        if not self.args.norm_obs:
            return obs
        std = (self.obs_stats.var + 1e-8).sqrt()
        return ((obs - self.obs_stats.mean) / std).clamp(-10, 10).to(obs.dtype)

    def policy(self, h: Tensor) -> Independent:
        """The LSTM's h (..., H) -> the distribution of actions (..., K) that `act` samples."""
        std = self.log_std.exp()
        if self.args.use_sde:
            # Of h @ noise; detached, so that the policy cannot move h only to move the noise
            std = (h.detach() ** 2 @ std**2 + 1e-6).sqrt()
        return Independent(Normal(self.actor(h), std, validate_args=False), 1, validate_args=False)

    def sample_noise(self, num_envs: int) -> Tensor:
        """Noise of standard deviation exp(log_std): (N, K), or gSDE's matrices (N, H, K). It comes
        from the CPU's generator, whose state agent.pt holds."""
        noise = torch.randn(num_envs, *self.log_std.shape)
        return noise.to(self.log_std.device) * self.log_std.exp()

    def act(self, h: Tensor, noise: Tensor) -> Tensor:
        """The LSTM's h (N, H), noise of sample_noise -> actions (N, K), not clipped yet."""
        if self.args.use_sde:
            return self.actor(h) + (h[:, None] @ noise)[:, 0]  # (N, 1, H) @ (N, H, K)
        return self.actor(h) + noise

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, n), state -> h (N, H) for the policy, value (N,), state."""
        x = self.encoder(self.normalize(obs))
        next_state = self.lstm.step(x, state[:2])
        if self.args.separate_critic:
            next_state = torch.cat([next_state, self.critic_lstm.step(x, state[2:])])
        h = next_state[0]
        value = self.critic(next_state[-2]).squeeze(-1)  # the critic's h, or the shared one
        if self.args.ablate_memory:
            next_state = torch.zeros_like(next_state)
        return h, value, next_state

    def evaluate_actions(self, obs, state, final, actions):
        """Sequences: obs (L, B, n), the state before them (2 or 4, B, H), final (L, B),
        actions (L, B, K) -> logprob, entropy, value (M,) of the steps that count."""
        x = self.encoder(self.normalize(obs))
        h = self.lstm(x, state[:2], final)
        critic_h = self.critic_lstm(x, state[2:], final) if self.args.separate_critic else h
        value = self.critic(critic_h).squeeze(-1)
        policy = self.policy(h)
        logprob = policy.log_prob(actions)
        entropy = policy.entropy()
        valid = ~final
        return logprob[valid], entropy[valid], value[valid]

    @torch.inference_mode()
    def predict(self, obs, info=None, state=None, final=None, deterministic: bool = True):
        """obs (N, n) and info of N environments, state (None at first), final (N,): which obs are
        an episode's last -> actions for the environments; state, zero after final steps."""
        obs, state, final = check_inputs(self, obs, state, final)
        tensor = partial(torch.as_tensor, device=state.device)
        h, _, state = self.step(tensor(obs), state)
        # Sampled actions have new noise at each step, even with gSDE.
        actions = self.actor(h) if deterministic else self.act(h, self.sample_noise(len(h)))
        state = state.where(tensor(~final)[:, None], 0.0)
        return to_env(actions, self.action_space), state


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


def check_actions(space) -> None:
    """Raises ArgumentError unless actions are real numbers."""
    discrete = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    check(not discrete, f"--env-id: actions of {space} are discrete; try rppo_lstm.py")
    real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    check(real, f"--env-id: actions of {space}: use MultiDiscrete for integers, else a float Box")
    warn_of_bounds(space)


def warn_of_bounds(space) -> None:
    """Warns of a Box of actions that is far from [-1, 1], where a new policy samples."""
    bounds = np.array([space.low, space.high], float)
    size = np.abs(bounds)
    far = (size > 10) & (size < 1e30)  # a larger bound is none
    narrow = bounds[1] - bounds[0] < 0.1
    if far.any() or narrow.any():
        warnings.warn(f"actions of {space}: far from [-1, 1]; use gymnasium.wrappers.RescaleAction")


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K) -> clipped to the bounds, as the environments take them."""
    array = actions.cpu().numpy().reshape(-1, *space.shape)
    array = finite("actions", array.clip(space.low, space.high))
    return array.astype(space.dtype)


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


def ppo_loss(logprob, old_logprob, advantage, clip_coef: float):
    """M steps -> the clipped surrogate (Schulman et al. 2017, eq. 7), negated, and an estimate of
    the KL divergence from the old policy, E[ratio - 1 - log ratio], which is never negative
    (Schulman 2020, "Approximating KL divergence")."""
    check_shapes(logprob.shape, old_logprob=old_logprob, advantage=advantage)
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantage, clipped * advantage)
    return -surrogate.mean(), (ratio - 1 - log_ratio).mean().detach()


def to_sequences(x: Tensor, L: int) -> Tensor:
    """Cuts a rollout (T, N, ...) into sequences of L steps: (L, S, ...), with S = N T / L."""
    x = x.unflatten(0, (-1, L))  # (T / L, L, N, ...)
    return x.transpose(0, 1).flatten(1, 2)


def minibatches(S: int, args: Args, device):
    """Yields the indices (B,) of each minibatch's sequences."""
    for _ in range(args.update_epochs):
        yield from torch.randperm(S).view(args.num_minibatches, -1).to(device)


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    seed_everything(args.seed)
    T, N = args.num_steps, args.num_envs
    L = args.seq_len or T
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr is set below
    run = Run(args, envs, agent, optimizer)
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    h = torch.zeros(T, N, args.hidden_size, device=device)  # the LSTM's output
    actions = torch.zeros(T, N, agent.actor.out_features, device=device)  # not clipped
    values = torch.zeros(T + 1, N, device=device)
    states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)
    every = args.sde_sample_freq if args.use_sde else 1  # steps between new noise
    every = T if every < 1 else every

    obs[0], info = envs.reset(seed=args.seed + run.step)  # a resumed run begins other episodes
    state = agent.initial_state(N)
    unfinished = np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        with torch.inference_mode():
            for t in range(T):
                if t % L == 0:  # where replay will begin a sequence
                    states[t // L] = state
                if t % every == 0:
                    noise = agent.sample_noise(N)
                h[t], values[t], state = agent.step(tensor(obs[t]), state)
                actions[t] = agent.act(h[t], noise)
                if final[t].any():  # the next episode begins with an empty memory
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
            # State stays as it is: the next rollout begins with this step.
            _, values[T], _ = agent.step(tensor(obs[T]), state)
            logprobs = agent.policy(h).log_prob(actions)

        # Advantages
        valid = ~final[:T]  # the steps that count
        done = terminated | truncated
        if args.norm_reward and valid.any():
            sums = discounted_sums(rewards, done, unfinished, args.gamma)
            agent.return_stats.update(tensor(sums[valid]))
            rewards /= np.sqrt(agent.return_stats.var.item() + 1e-8)
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        s_obs = to_sequences(tensor(obs[:T]), L)  # (L, S, n), and so on
        s_final = to_sequences(tensor(final[:T]), L)
        s_actions = to_sequences(actions, L)
        s_logprob = to_sequences(logprobs, L)  # of the policy that acted
        s_advantage = to_sequences(tensor(advantages), L)
        s_return = to_sequences(tensor(returns), L)
        s_state = states.transpose(0, 1).flatten(1, 2)  # (rows, S, H), before each sequence
        losses = []
        for batch in minibatches(s_state.shape[1], args, device):
            batch_valid = ~s_final[:, batch]  # (L, B): the M steps that count
            if not batch_valid.any():
                continue
            logprob, entropy, value = agent.evaluate_actions(
                s_obs[:, batch], s_state[:, batch], s_final[:, batch], s_actions[:, batch]
            )  # fmt: skip
            old_logprob = s_logprob[:, batch][batch_valid]  # (M,), and so on
            advantage = s_advantage[:, batch][batch_valid]
            return_ = s_return[:, batch][batch_valid]

            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            policy_loss, kl = ppo_loss(logprob, old_logprob, advantage, args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            entropy = entropy.mean()
            losses.append(torch.stack([policy_loss, value_loss, entropy, kl]).detach())
            if kl > 1.5 * args.target_kl:  # as in stable-baselines3
                break
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

        if args.norm_obs and valid.any():  # not earlier: the policy acted with the old statistics
            agent.obs_stats.update(tensor(obs[:T][valid]))
        run.log(int(valid.sum()), losses)
        # The next rollout begins where this one ended.
        obs[0] = obs[T]
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


def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work. Without memory L is 1."""
    check_flags(args)
    check(args.sde_sample_freq != 0, "--sde-sample-freq 0: must be -1, or from 1")
    args.seq_len = 1 if args.ablate_memory else args.seq_len
    L = args.seq_len or args.num_steps
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    S = args.num_envs * args.num_steps // L
    check(S % args.num_minibatches == 0, f"--num-minibatches: must divide the {S} sequences")
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
