# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[classic-control]>=1.2", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO for continuous actions: a Gaussian policy, and gSDE.

    python rppo_continuous.py --env-id Pendulum-v1 --mask-velocity  # train
    python rppo_continuous.py --play runs/RUN                       # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.
gSDE, generalised state-dependent exploration: Raffin et al. 2021, arXiv:2005.05719. Its noise is a
function of the LSTM's output, and stays the same function for many steps.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own (autoreset
mode NEXT_STEP). We call that step final:

    t   obs[t]                       action[t]   final[t]
    4   the episode's last but one   played      no         terminated[4] or truncated[4] is set
    5   the episode's last           ignored     yes        then the memory is set to zero
    6   the next episode's first     played      no

A final step counts in no loss: its action did nothing. But its value, computed with the memory
that the agent has there, stands for the rewards that a time limit cut off.

Shapes: T time steps, N environments; S sequences of L steps, B of them in a minibatch; M steps that
count; n numbers in an observation, F features, H hidden units; K components of an action.
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
from torch.distributions import Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT, VERSION = "rppo_continuous", "0.2.0"


@dataclass
class Args:
    env_id: str = "Pendulum-v1"  # Gymnasium's id; my_module:MyEnv-v0 imports my_module
    env_kwargs: str = "{}"  # the environment's own arguments, in JSON
    mask_velocity: bool = False  # hide velocities: the task needs memory
    async_envs: bool = False  # a process for each environment
    total_timesteps: int = 500_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run; two seeds share no episode
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

    encoder_size: int = 64  # units of the layer before the LSTM (F)
    hidden_size: int = 128  # units of the LSTM (H)
    ablate_memory: bool = False  # a control: no state between steps, L = 1
    log_std_init: float = 0.0  # initial log standard deviation of the noise; gSDE: of its matrix
    use_sde: bool = False  # gSDE: the noise in an action is a matrix times the LSTM's output
    sde_sample_freq: int = -1  # steps between new noise matrices; -1: one for each rollout

    learning_rate: float = 1e-3  # Adam's, at first
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.2  # epsilon of the surrogate
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, 0.5 (V - R)^2; Stable-Baselines3: (V - R)^2
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    target_kl: float | None = None  # an update ends when the estimated KL exceeds 1.5 times this

    preset: bool = True  # begin with the values that PRESETS has for the task, if any
    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # episodes after training (0: none), or of --play (0: 10)
    deterministic: bool = True  # evaluate the most probable actions, not sampled ones
    resume: str | None = None  # directory of a run to continue; flags given here win
    play: str | None = None  # directory of a run whose agent to watch
    render: Literal["human", "video", "none"] = "human"  # --play: a window, RUN/videos, or returns


PRESETS: dict = {  # values for a task, (env_id, mask_velocity), in place of the defaults above
    ("Pendulum-v1", True): dict(
        total_timesteps=100_000, num_envs=16, num_minibatches=16, update_epochs=10, gamma=0.95,
        hidden_size=256, learning_rate=5e-4, use_sde=True, sde_sample_freq=4, log_std_init=-1.0,
    ),
    # rl-zoo3's (whose vf_coef is 0.19, of (V - R)^2), but a shorter T, and 3e-4 for 7.77e-5
    ("MountainCarContinuous-v0", True): dict(
        total_timesteps=300_000, num_steps=512, seq_len=128, num_minibatches=8, update_epochs=10,
        gamma=0.9999, gae_lambda=0.9, hidden_size=32, learning_rate=3e-4, clip_coef=0.1,
        ent_coef=0.00429, vf_coef=0.38, max_grad_norm=5.0, use_sde=True, sde_sample_freq=8,
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
# What is logged of each minibatch
METRICS = "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm"


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


class Agent(nn.Module):
    """Encoder and LSTM, then actor and critic, which both read the LSTM's output h."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        check_actions(self.action_space)
        inputs = spaces.flatdim(envs.single_observation_space)
        self.encoder = nn.Sequential(linear(inputs, args.encoder_size), nn.Tanh())
        self.lstm = ResetLSTM(args.encoder_size, args.hidden_size)
        components = spaces.flatdim(self.action_space)
        self.actor = linear(args.hidden_size, components, std=0.01)  # the mean of an action
        self.critic = linear(args.hidden_size, 1, std=1.0)
        shape = (args.hidden_size, components) if args.use_sde else (components,)
        self.log_std = nn.Parameter(torch.full(shape, args.log_std_init))
        self.return_stats = RunningMeanStd(())
        self.obs_stats = RunningMeanStd((inputs,))

    def initial_state(self, num_envs: int) -> Tensor:
        return self.lstm.initial_state(num_envs)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (..., n), as the environments return them -> as the networks take them."""
        if not self.args.norm_obs:
            return obs
        std = (self.obs_stats.var + 1e-8).sqrt()
        return ((obs - self.obs_stats.mean) / std).clamp(-10, 10).to(obs.dtype)

    def policy(self, h: Tensor) -> Independent:
        """The LSTM's output (..., H) -> the distribution of actions (..., K) that `act` samples."""
        std = self.log_std.exp()
        if self.args.use_sde:
            # Of h @ noise. Detached, so that the policy can't move h only to move the noise, as in
            # Stable-Baselines3 (learn_features=False)
            std = (h.detach() ** 2 @ std**2 + 1e-6).sqrt()
        return Independent(Normal(self.actor(h), std, validate_args=False), 1, validate_args=False)

    def sample_noise(self, num_envs: int) -> Tensor:
        """Noise of standard deviation exp(log_std): (N, K), or gSDE's matrices (N, H, K). The CPU
        draws it: agent.pt holds its generator."""
        noise = torch.randn(num_envs, *self.log_std.shape)
        return noise.to(self.log_std.device) * self.log_std.exp()

    def act(self, h: Tensor, noise: Tensor) -> Tensor:
        """The LSTM's output (N, H), noise of sample_noise -> actions (N, K), not clipped yet."""
        if self.args.use_sde:
            return self.actor(h) + (h[:, None] @ noise)[:, 0]  # (N, 1, H) @ (N, H, K)
        return self.actor(h) + noise

    def step(self, obs: Tensor, lstm_state: Tensor):
        """obs (N, n) -> h (N, H) for the policy, value (N,), the next state."""
        h, lstm_state = self.lstm.step(self.encoder(self.normalize(obs)), lstm_state)
        if self.args.ablate_memory:
            lstm_state = torch.zeros_like(lstm_state)
        return h, self.critic(h).squeeze(-1), lstm_state

    def evaluate_actions(self, obs, lstm_state, final, actions):
        """Sequences: obs (L, B, n), the state before them (2, B, H), final (L, B),
        actions (L, B, K) -> logprob, entropy, value (M,) of the steps that count."""
        h = self.lstm(self.encoder(self.normalize(obs)), lstm_state, final)  # (L, B, H)
        policy = self.policy(h)
        value = self.critic(h).squeeze(-1)
        valid = ~final
        return policy.log_prob(actions)[valid], policy.entropy()[valid], value[valid]

    @torch.inference_mode()
    def predict(self, obs, lstm_state=None, final=None, deterministic: bool = True):
        """obs (N, n) of N environments, lstm_state (None at first), final (N,): which obs are an
        episode's last -> actions for the environments; the next state, zero after final steps."""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor.weight.device)
        lstm_state = self.initial_state(len(obs)) if lstm_state is None else lstm_state
        h, _, lstm_state = self.step(obs, lstm_state)
        # Sampled actions have new noise at each step, even with gSDE.
        actions = self.actor(h) if deterministic else self.act(h, self.sample_noise(len(h)))
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
    """Advantages (M,) of a minibatch -> with mean 0 and standard deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)


def ppo_loss(logprob, old_logprob, advantage, clip_coef: float):
    """M steps -> the clipped surrogate (Schulman et al. 2017, eq. 7), negated; an estimate of the
    KL divergence from the old policy, E[ratio - 1 - log ratio], which is never negative (Schulman
    2020, "Approximating KL divergence"); the fraction of ratios outside the clip range."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.min(ratio * advantage, clipped * advantage)
    kl = (ratio - 1 - log_ratio).mean()
    return -surrogate.mean(), kl, (ratio != clipped).float().mean()


def too_far(kl: Tensor, target_kl: float | None) -> bool:
    """Has the policy moved so far that the update must end? As in Stable-Baselines3."""
    return target_kl is not None and bool(kl > 1.5 * target_kl)


def to_sequences(x: Tensor, L: int) -> Tensor:
    """Cuts a rollout (T, N, ...) into sequences of L steps: (L, S, ...), with S = N T / L."""
    x = x.unflatten(0, (-1, L))  # (T / L, L, N, ...)
    return x.transpose(0, 1).flatten(1, 2)


def minibatches(final: Tensor, args: Args):
    """final (L, S) -> yields the indices (B,) of each minibatch's sequences, but of none in which
    every step is final."""
    for _ in range(args.update_epochs):
        shuffled = torch.randperm(final.shape[1]).to(final.device)
        for batch in shuffled.view(args.num_minibatches, -1):
            if not final[:, batch].all():
                yield batch


def count_steps(valid) -> int:
    return int(valid.sum())


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    T, N = args.num_steps, args.num_envs
    L = 1 if args.ablate_memory else args.seq_len or T
    check_sequences(args, L)
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    seed_everything(args.seed)
    device = torch.device("cuda" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr is set below
    run = Run(args, envs, agent, optimizer)  # with --resume it loads all that the run had saved
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, spaces.flatdim(envs.single_observation_space)), np.float32)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    actions = torch.zeros(T, N, agent.actor.out_features, device=device)  # not clipped
    values = torch.zeros(T + 1, N, device=device)
    lstm_states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)
    noise_steps = 1  # steps between new noise
    if args.use_sde:
        noise_steps = T if args.sde_sample_freq == -1 else args.sde_sample_freq

    obs[0], _ = envs.reset(seed=env_seed(args.seed, run.step))  # resumed: other episodes
    lstm_state = agent.initial_state(N)
    unfinished = np.zeros(N, np.float32)
    while run.step < args.total_timesteps:
        # Rollout
        hs = []  # the LSTM's outputs
        for t in range(T):
            if t % L == 0:  # where replay will begin a sequence
                lstm_states[t // L] = lstm_state
            with torch.inference_mode():
                if t % noise_steps == 0:
                    noise = agent.sample_noise(N)
                h, values[t], lstm_state = agent.step(tensor(obs[t]), lstm_state)
                hs.append(h)
                actions[t] = agent.act(h, noise)
                lstm_state = reset_state(lstm_state, final[t])  # the next episode begins empty
            action = to_env(actions[t], agent.action_space)
            obs[t + 1], rewards[t], terminated[t], truncated[t], _ = envs.step(action)
            final[t + 1] = terminated[t] | truncated[t]
        with torch.inference_mode():  # lstm_state stays: the next rollout begins with this step
            _, values[T], _ = agent.step(tensor(obs[T]), lstm_state)
            old_logprobs = agent.policy(torch.stack(hs)).log_prob(actions)  # all at once: faster
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
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        s_obs = to_sequences(tensor(obs[:T]), L)  # s_: in sequences, (L, S, n) and so on
        s_final = to_sequences(tensor(final[:T]), L)
        s_actions = to_sequences(actions, L)
        s_old_logprob = to_sequences(old_logprobs, L)
        s_advantage = to_sequences(tensor(advantages), L)
        s_return = to_sequences(tensor(returns), L)
        s_state = lstm_states.transpose(0, 1).flatten(1, 2)  # (2, S, H), before each sequence
        metrics = []
        for batch in minibatches(s_final, args):
            batch_valid = ~s_final[:, batch]  # (L, B): the M steps that count
            logprob, batch_entropy, value = agent.evaluate_actions(
                s_obs[:, batch], s_state[:, batch], s_final[:, batch], s_actions[:, batch]
            )
            old_logprob = s_old_logprob[:, batch][batch_valid]  # (M,), and so on
            advantage = s_advantage[:, batch][batch_valid]
            return_ = s_return[:, batch][batch_valid]

            advantage = normalize_advantage(advantage)
            policy_loss, kl, clipfrac = ppo_loss(logprob, old_logprob, advantage, args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            mean_entropy = batch_entropy.mean()
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * mean_entropy
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            row = [policy_loss, value_loss, mean_entropy, kl, clipfrac, grad_norm]  # as in METRICS
            metrics.append(torch.stack(row).detach())
            if too_far(kl, args.target_kl):  # ends the whole update, before this step
                break
            optimizer.step()

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
        if name.startswith("num_") or name.endswith(("_size", "_epochs", "_timesteps")):
            check(value is None or value > 0, f"{flag}: must be positive")
        if name.endswith(("_rate", "_coef", "_norm", "_kl", "_len", "gamma", "lambda", "seed")):
            check(value is None or value >= 0, f"{flag}: must not be negative, nor NaN")
    check(max(args.gamma, args.gae_lambda) <= 1, "--gamma, --gae-lambda: must not be above 1")
    check(not args.cuda or torch.cuda.is_available(), "--cuda: torch finds no GPU")
    freq = args.sde_sample_freq
    check(freq == -1 or freq > 0, f"--sde-sample-freq {freq}: must be -1 or positive")


def check_sequences(args: Args, L: int) -> None:
    """ArgumentError unless sequences of L steps fill the minibatches."""
    S = args.num_envs * args.num_steps // L
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    check(S % args.num_minibatches == 0, f"--num-minibatches: must divide the {S} sequences")
    single = S * L == args.num_minibatches  # whose advantage, minus the mean, is 0
    check(not single, "--num-minibatches: minibatches of one step can't move the policy")


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
    check(real, f"--env-id: actions of {space} aren't real numbers: use rppo_lstm.py")


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K) -> clipped to the bounds, as the environments take them."""
    array = actions.numpy(force=True).reshape(-1, *space.shape)
    return array.clip(space.low, space.high).astype(space.dtype)


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
