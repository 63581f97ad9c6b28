# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[other]>=1.2", "ale-py", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO with a GRU on Atari games, in one process or several.

    python rppo_gru_atari.py --env-id ALE/Breakout-v5  # train
    torchrun --nproc-per-node 2 rppo_gru_atari.py      # train in two processes
    python rppo_gru_atari.py --play runs/RUN           # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own. We call
that step final:

    t   obs                          action    final
    4   the episode's last but one   played            terminated[4] or truncated[4] is set
    5   the episode's last           ignored   yes     after it, the agent's state is set to zero
    6   the next episode's first     played

A final step counts in no loss: its action did nothing. But its value, computed with the state
that the agent has there, stands for the rewards that a time limit cut off.

Each process plays its share of the environments. Losses are means over the steps of all of them,
so all processes make the same updates, and their weights stay equal.

Letters in shapes: T time steps, N environments of this process; S sequences of L steps, B of them
in a minibatch; M steps that count; C frames in an observation, F features, H hidden units; K = 1
component of an action, A choices.
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
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_gru_atari"
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)  # how many processes; torchrun sets all three
RANK = LOCAL_RANK = 0
if WORLD_SIZE > 1:  # else they are left over from something else
    RANK = int(os.environ.get("RANK") or 0)  # the number of this process
    LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0)  # its number on its machine; its GPU's, too


@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"  # a game of ale_py
    frame_stack: int = 1  # how many of the latest frames are an observation (C)
    sticky_actions: float = 0.0  # probability of repeating an action (Machado et al. 2018: 0.25)
    terminal_on_life_loss: bool = False  # a lost life ends the return, not the game
    clip_rewards: bool = True  # learn from the sign of rewards; the log has the game's score
    total_timesteps: int = 10_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    amp: bool = False  # the CNN computes in bfloat16; slow on CPUs that lack it
    torch_threads: int = 0  # CPU threads of a process; 0: torch's choice

    num_envs: int = 8  # parallel environments of all processes together
    num_steps: int = 128  # time steps of a rollout (T)
    seq_len: int = 0  # length of a sequence (L), through which gradients flow; 0: T
    num_minibatches: int = 4  # minibatches in an epoch, each of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE

    hidden_size: int = 128  # units of the GRU (H)
    separate_critic: bool = False  # the critic has a memory of its own
    ablate_memory: bool = False  # a control: no state between steps, L = 1

    learning_rate: float = 2.5e-4  # Adam's, at first
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.1  # epsilon of the surrogate
    ent_coef: float = 0.01  # weight of the entropy bonus
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


FIXED = (  # the agent's shape and what it sees: --resume and --play cannot change them
    "env_id", "frame_stack", "hidden_size", "separate_critic", "ablate_memory",
)  # fmt: skip
LOSSES = "policy_loss", "value_loss", "entropy", "approx_kl"  # what is logged
EVAL_FRAMES = 18_000  # where an evaluation cuts a game: five minutes (Mnih et al. 2015)


class ResetGRU(nn.Module):
    """A GRU whose state is zero after every final step, and that replays a sequence in one call.

    Its definition is a loop over time: state = cell(x[t], state), then state = 0 if final[t]. One
    call of torch.gru for all steps is faster, but cannot stop to reset the state. It need not: no
    loss reads the output of a final step, so on replay we may give it an input that makes the
    step itself the reset.

    x gets two more features. The first is 1, and its weights are the input's biases. The second is
    0; its weights are constant, 1 to the gates r and z, 0 to the candidate n. On a final step the
    second is -1e4 and all others are 0, so that the biases are gone, too. Then, exactly in
    floating point, and with no gradient (GRU: Cho et al. 2014, arXiv:1406.1078; c: biases of h):

        r = z = sigmoid(U h + c - 1e4) = 0,  n = tanh(r (U h + c)) = 0,  h' = (1 - z) n + z h = 0

    On a CPU torch does not fuse a GRU, but loops; its LSTM is several times faster there.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.cell = nn.GRUCell(input_size, hidden_size)
        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)
        closes = torch.tensor([[1.0], [1.0], [0.0]])  # r, z, n
        self.closes = nn.Buffer(closes.repeat_interleave(hidden_size, 0), persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [0.0, -1e4]), persistent=False)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x (N, F), state (1, N, H), that is h -> the next state."""
        return self.cell(x, state[0]).unsqueeze(0)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (1, B, H), final (L, B) -> h (L, B, H)."""
        cell = self.cell
        L, B = x.shape[:2]
        check_shapes((L, B, cell.input_size), x=x)  # torch.gru would broadcast one sequence
        check_shapes((1, B, cell.hidden_size), state=state)
        check_shapes((L, B), final=final)
        x = nn.functional.pad(x, (0, 1), value=1.0)  # the first feature: the input's biases
        x = nn.functional.pad(x, (0, 1))  # the second, which closes r and z: (L, B, F + 2)
        x = torch.where(final.bool().unsqueeze(-1), self.reset, x)
        weight_ih = torch.cat([cell.weight_ih, cell.bias_ih[:, None], self.closes], 1)
        bias_ih = torch.zeros_like(cell.bias_ih)
        h, _ = torch.gru(  # what nn.GRU calls
            x, state, [weight_ih, cell.weight_hh, bias_ih, cell.bias_hh],
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


class NatureCNN(nn.Module):
    """The CNN of Mnih et al. 2015: uint8 frames (..., C, 84, 84) -> features (..., 512)."""

    def __init__(self, channels: int, amp: bool):
        super().__init__()
        self.amp = amp
        self.cnn = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(inplace=True),
        )
        for name, parameter in self.cnn.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter, 2**0.5)
        self.cnn.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> Tensor:
        frames = obs.flatten(0, -4) / 255
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            x = self.cnn(frames)
        return x.to(frames.dtype).unflatten(0, obs.shape[:-3])


class Agent(nn.Module):
    """CNN and GRU, then actor and critic. state is (1, N, H): the GRU's h. A separate critic has a
    GRU of its own, and state is (2, N, H)."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        self.encoder = NatureCNN(args.frame_stack, args.amp)
        self.gru = ResetGRU(512, args.hidden_size)
        if args.separate_critic:
            self.critic_gru = ResetGRU(512, args.hidden_size)
        self.actor = linear(args.hidden_size, self.action_space.n, std=0.01)
        self.critic = linear(args.hidden_size, 1, std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        rows = 2 if self.args.separate_critic else 1
        return self.actor.weight.new_zeros(rows, num_envs, self.args.hidden_size)

    def log_probs(self, h: Tensor) -> Tensor:
        """The GRU's h (..., H) -> log-probabilities (..., K, A)."""
        return self.actor(h).unsqueeze(-2).log_softmax(-1)

    def step(self, obs: Tensor, state: Tensor):
        """obs (N, C, 84, 84), state -> log-probabilities (N, K, A), value (N,), state."""
        x = self.encoder(obs)
        next_state = self.gru.step(x, state[:1])
        if self.args.separate_critic:
            next_state = torch.cat([next_state, self.critic_gru.step(x, state[1:])])
        logp = self.log_probs(next_state[0])
        value = self.critic(next_state[-1]).squeeze(-1)  # the critic's h, or the shared one
        if self.args.ablate_memory:
            next_state = torch.zeros_like(next_state)
        return logp, value, next_state

    def evaluate_actions(self, obs, state, final, actions):
        """Sequences: obs (L, B, C, 84, 84), the state before them (1 or 2, B, H),
        final (L, B), actions (L, B, K) -> logprob, entropy, value (M,) of the steps that count."""
        x = self.encoder(obs)
        h = self.gru(x, state[:1], final)
        critic_h = self.critic_gru(x, state[1:], final) if self.args.separate_critic else h
        value = self.critic(critic_h).squeeze(-1)
        logp = self.log_probs(h)
        logprob = log_prob(logp, actions)
        entropy = -(logp.exp() * logp).sum((-2, -1))
        valid = ~final
        return logprob[valid], entropy[valid], value[valid]

    @torch.inference_mode()
    def predict(self, obs, info=None, state=None, final=None, deterministic: bool = True):
        """obs (N, C, 84, 84) and info of N games, state (None at first), final (N,): which obs
        are a game's last -> actions for the environments; state, zero after final steps."""
        obs, state, final = check_inputs(self, obs, state, final)
        tensor = partial(torch.as_tensor, device=state.device)
        logp, _, state = self.step(tensor(obs), state)
        choices = logp.argmax(-1) if deterministic else sample(logp)
        state = state.where(tensor(~final)[:, None], 0.0)
        return to_env(choices, self.action_space), state


def sample(logp: Tensor) -> Tensor:
    """Log-probabilities (..., K, A) -> choices (..., K). If E_a ~ Exp(1), p_a / E_a is the largest
    with probability p_a: Categorical.sample without its overhead."""
    noise = torch.empty(logp.shape).exponential_().to(logp.device)
    return (logp.exp() / noise).argmax(-1)


def log_prob(logp: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities (..., K, A), actions (..., K) -> the sum over independent components."""
    return logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1).sum(-1)


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N, K), counted from 0 -> as the environments take them."""
    array = actions.cpu().numpy().reshape(-1, *space.shape)
    return array.astype(space.dtype) + getattr(space, "start", 0)


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


def gather(x) -> list:
    """The x of every process, in the order of their ranks."""
    everyones = [x] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(everyones, x)
    return everyones


def all_sum(x: Tensor) -> Tensor:
    """In place: x becomes its sum over all processes, the same in each, bit for bit."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def moments(x: Tensor):
    """x (M,), where M may differ by process -> the sum of M, mean and standard deviation of all."""
    count, first, second = all_sum(torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()]))
    mean = first / count
    var = second / count - mean**2
    return count, mean, var.clamp(min=0).sqrt()  # rounding can make it negative


def sum_gradients(agent: Agent) -> None:
    """Makes each gradient its sum over all processes, in one message."""
    gradients = [weight.grad for weight in agent.parameters() if weight.grad is not None]
    sums = all_sum(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = sums.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts):
        gradient.copy_(part.view_as(gradient))


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    torch.backends.cudnn.deterministic = True
    seed_everything(args.seed)
    T, N = args.num_steps, args.num_envs // WORLD_SIZE  # N environments of this process
    L = args.seq_len or T
    device = torch.device(f"cuda:{LOCAL_RANK}" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    seed_everything(args.seed + 10_000 * (1 + RANK))  # equal weights, then noise of its own
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr is set below
    if WORLD_SIZE > 1:  # after Adam, whose imports would hold the group's threads to the very end
        dist.init_process_group()
        for weight in agent.parameters():  # all begin with those of rank 0
            first = weight.data.contiguous() if RANK == 0 else weight.new_zeros(weight.shape)
            weight.data.copy_(all_sum(first))
    run = Run(args, envs, agent, optimizer)
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, *envs.single_observation_space.shape), np.uint8)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    logp = torch.zeros(T, N, 1, agent.action_space.n, device=device)  # of all choices
    actions = torch.zeros(T, N, 1, dtype=torch.long, device=device)
    values = torch.zeros(T + 1, N, device=device)
    states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)

    # A resumed run begins other episodes, and each process its own. ale_py's seeds are int32.
    obs[0], info = envs.reset(seed=(args.seed + run.step + N * RANK) % 2**30)
    lives = info["lives"]
    state = agent.initial_state(N)
    while run.step < args.total_timesteps:
        # Rollout
        with torch.inference_mode():
            for t in range(T):
                if t % L == 0:  # where replay will begin a sequence
                    states[t // L] = state
                logp[t], values[t], state = agent.step(tensor(obs[t]), state)
                actions[t] = sample(logp[t])
                if final[t].any():  # the next episode begins with an empty memory
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
                if args.terminal_on_life_loss:  # the game goes on: no final step
                    terminated[t] |= info["lives"] < lives
                    lives = info["lives"]
            # State stays as it is: the next rollout begins with this step.
            _, values[T], _ = agent.step(tensor(obs[T]), state)

        # Advantages
        valid = ~final[:T]  # the steps that count
        done = terminated | truncated
        if args.clip_rewards:
            rewards = np.sign(rewards)
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        s_obs = to_sequences(tensor(obs[:T]), L)  # (L, S, C, 84, 84), and so on
        s_final = to_sequences(tensor(final[:T]), L)
        s_actions = to_sequences(actions, L)
        s_logprob = to_sequences(log_prob(logp, actions), L)  # of the policy that acted
        s_advantage = to_sequences(tensor(advantages), L)
        s_return = to_sequences(tensor(returns), L)
        s_state = states.transpose(0, 1).flatten(1, 2)  # (rows, S, H), before each sequence
        losses = []
        for batch in minibatches(s_state.shape[1], args, device):
            batch_valid = ~s_final[:, batch]  # (L, B): the M steps that count
            logprob, entropy, value = agent.evaluate_actions(
                s_obs[:, batch], s_state[:, batch], s_final[:, batch], s_actions[:, batch]
            )
            old_logprob = s_logprob[:, batch][batch_valid]  # (M,), and so on
            advantage = s_advantage[:, batch][batch_valid]
            return_ = s_return[:, batch][batch_valid]

            count, mean, std = moments(advantage.double())  # of all processes
            if count == 0:
                continue
            advantage = (advantage - mean) / (std + 1e-8)
            policy_loss, kl = ppo_loss(logprob, old_logprob, advantage, args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            entropy = entropy.mean()
            means = torch.stack([policy_loss, value_loss, entropy, kl]).detach()
            share = len(logprob) / count  # of this process in the means over all steps
            if len(logprob) == 0:  # a mean of none is NaN
                means = torch.zeros_like(means)
            means = all_sum(share * means)
            losses.append(means)
            if means[LOSSES.index("approx_kl")] > 1.5 * args.target_kl:  # in every process
                break
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
            optimizer.zero_grad()
            (share * loss).backward()
            sum_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

        run.log(int(valid.sum()), losses)
        # The next rollout begins where this one ended.
        obs[0] = obs[T]
        final[0] = final[T]

    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    if RANK == 0:
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
    obs = np.asarray(obs)
    if obs.shape[1:] != (agent.args.frame_stack, 84, 84) or obs.dtype != np.uint8:
        raise ValueError("obs must be uint8 (N, C, 84, 84): take obs[None] for one game")
    zeros = agent.initial_state(len(obs))
    state = zeros if state is None else state
    final = np.zeros(len(obs), bool) if final is None else np.asarray(final, bool)
    check_shapes(zeros.shape, state=state)
    check_shapes(obs.shape[:1], final=final)
    return obs, state, final


def check_args(args: Args) -> None:
    """Raises ArgumentError for the first flag that cannot work. Without memory L is 1."""
    check_flags(args)
    args.seq_len = 1 if args.ablate_memory else args.seq_len
    L = args.seq_len or args.num_steps
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    check(args.num_envs % WORLD_SIZE == 0, f"--num-envs: {WORLD_SIZE} processes must divide it")
    S = args.num_envs // WORLD_SIZE * args.num_steps // L
    check(S % args.num_minibatches == 0, f"--num-minibatches: must divide the {S} sequences")
    check(not args.cuda or LOCAL_RANK < torch.cuda.device_count(), "--cuda: too few GPUs")
    mkldnn = torch.backends.mkldnn.is_available()
    has_bfloat16 = args.cuda or (mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if args.amp and not has_bfloat16:
        warnings.warn("--amp: this CPU has no bfloat16, and computes faster without")


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


class FireReset(gym.Wrapper):
    """A game with an action FIRE begins with it, as in ale_py's vector environment."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.unwrapped.get_action_meanings()[1] == "FIRE":
            obs, _, _, _, info = self.env.step(1)
        return obs, info


def make_envs(args: Args, num_envs: int, render_mode: str | None = None, max_frames: int = 108_000):
    """num_envs games as one environment, whose observations are uint8 (num_envs, C, 84, 84). A
    game is truncated after max_frames, four a step; ale_py's own limit is half an hour."""
    check(args.env_id.startswith("ALE/"), f"--env-id {args.env_id}: not a game like ALE/Pong-v5")
    make = partial(gym.make_vec, f"ale_py:{args.env_id}", num_envs,
                   repeat_action_probability=args.sticky_actions,
                   max_num_frames_per_episode=max_frames)  # fmt: skip
    try:
        if render_mode is None:  # ale_py's vector environment
            envs = make(stack_num=args.frame_stack, reward_clipping=False)
        else:  # the same preprocessing in Python, which can render
            stack = partial(FrameStackObservation, stack_size=args.frame_stack, padding_type="zero")
            envs = make(vectorization_mode="sync", render_mode=render_mode, frameskip=1,
                        wrappers=[AtariPreprocessing, FireReset, stack])  # fmt: skip
    except (gym.error.Error, ImportError, ValueError) as error:
        raise ArgumentError(f'--env-id {args.env_id}: {error} (pip install ".[atari]")') from error
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
        name = args.run_name or f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time():.6f}"
        name = name.replace("/", "-").replace(":", "-")
        self.dir = gather(Path(args.resume or Path(args.runs_dir, name)).resolve())[0]
        if args.resume:
            saved = load(self.dir, agent)
            optimizer.load_state_dict(saved["optimizer"])
            self.step, seconds = saved["step"], saved["seconds"]
            seed_everything(args.seed + 10_000 * (1 + RANK) + self.step)
            if len(saved["rng"]) == WORLD_SIZE:  # else it continues, not bit for bit
                torch.set_rng_state(saved["rng"][RANK])
            if RANK == 0:
                self.returns.extend(saved["returns"])
                self.lengths.extend(saved["lengths"])
        self.began = time.time() - seconds
        self.logged = time.time()
        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow
        self.rng = gather(torch.get_rng_state())
        Run.latest = self.dir
        if RANK > 0:  # the first process writes
            return
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
        self.save()
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step")

    def log(self, steps: int, losses: list[Tensor]) -> None:
        """Ends an iteration of that many steps; losses has the LOSSES of each minibatch."""
        if not losses:  # only final steps
            return
        means = torch.stack(losses).mean(0).numpy(force=True)
        finite(f"after step {self.step}, {LOSSES}", means)
        seconds = time.time() - self.logged
        self.logged = time.time()
        steps = sum(gather(steps))
        self.timed.append((steps, seconds))
        self.step += steps
        self.rng = gather(torch.get_rng_state())
        for queue in (self.returns, self.lengths):  # the first process has those of all
            everyones = gather(list(queue))
            queue.clear()
            if RANK == 0:
                queue.extend(np.concatenate(everyones))
        if RANK > 0:
            return
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
            "optimizer": self.optimizer.state_dict(), "rng": self.rng,
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
        seconds = self.logged - self.began
        timed = self.timed[1:] or [(self.step, seconds)]  # or the only one
        sps = sum(steps for steps, _ in timed) / sum(time for _, time in timed)
        evaluation = []
        if self.args.eval_episodes > 0:
            envs = make_envs(self.args, self.args.eval_episodes, None, EVAL_FRAMES)
            evaluation = evaluate(self.agent, envs, self.args.seed, self.args.deterministic)
        result = {
            "global_step": self.step, "seconds": seconds, "sps": sps,
            "returns": [float(x) for x in self.returns], "evaluation": evaluation,
        }  # fmt: skip
        (self.dir / "result.json").write_text(json.dumps(result))
        score = np.mean(evaluation or self.returns or [np.nan])
        try:
            print(f"{self.dir}: return {score:.5g}, {sps:.0f} steps a second", flush=True)
        except (OSError, ValueError):  # nobody reads it, a full disk, another encoding
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
    check(WORLD_SIZE == 1, "--play: start one process")
    display = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    check(mode != "human" or display, "--play: there is no display; try --render video, or none")
    together = 1 if mode else args.eval_episodes or 10  # episodes played side by side
    for episode in range(0, args.eval_episodes or 10, together):
        envs = make_envs(args, together, mode, EVAL_FRAMES)
        agent = Agent(envs, args)
        load(args.play, agent)
        if args.render == "video":
            envs = wrappers.RecordVideo(envs, f"{args.play}/videos", name_prefix=f"{episode}")
        for episodic_return in evaluate(agent, envs, args.seed + episode, args.deterministic):
            print(f"return {episodic_return:.5g}", flush=True)


def parse_args() -> Args:
    """Flags over defaults: those of the run to resume or play, if any."""
    started = {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and RANK < WORLD_SIZE
    check(WORLD_SIZE == 1 or started, f"WORLD_SIZE is {WORLD_SIZE}: start with torchrun")
    cli = partial(tyro.cli, Args, console_outputs=RANK == 0)
    early, _ = cli(return_unknown_args=True, add_help=False)
    run_dir = early.play or early.resume
    defaults = vars(Args(**load(run_dir)["args"])) if run_dir else {}
    about = "\n\n".join((__doc__ or "").split("\n\n")[:2])  # python -OO has no docstring
    args = cli(default=Args(**defaults), description=about)
    if run_dir:
        for name in FIXED:
            same = getattr(args, name) == defaults[name]
            check(same, f"--{name.replace('_', '-')}: {run_dir} has {defaults[name]}")
    return args


def main() -> None:
    """Exit codes: 2, a bad argument; 1, an error; 130, Ctrl-C."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # None where it is closed, as in a service
    warnings.formatwarning = lambda message, *_: "" if RANK > 0 else f"warning: {message}\n"
    try:
        args = parse_args()
        start = play if args.play else train
        start(args)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if RANK > 0 and not interrupted:
            time.sleep(8)  # where all fail alike, the first one says so; torchrun ends the others
        if isinstance(error, SystemExit) and not Run.latest:  # of tyro, which has said why
            raise
        if isinstance(error, (ArgumentError, gym.error.DependencyNotInstalled)):
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            sys.exit(2)
        if isinstance(error, BrokenPipeError) and not Run.latest:  # nobody reads --help, --play
            sys.stdout = open(os.devnull, "w")
        elif not interrupted:
            traceback.print_exc()
        can_continue = Run.latest and Path(Run.latest, "agent.pt").exists()
        if can_continue and (RANK == 0 or not interrupted):
            again = f"torchrun --nproc-per-node {WORLD_SIZE}" if WORLD_SIZE > 1 else "python"
            command = shlex.join([*again.split(), sys.argv[0], "--resume", str(Run.latest)])
            print(f"\nto continue: {command}", file=sys.stderr)
        sys.exit(130 if interrupted else 1)


if __name__ == "__main__":
    main()
