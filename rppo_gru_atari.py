# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.9", "gymnasium[other]>=1.2", "ale-py", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO with a GRU on Atari games, in one process or several.

    python rppo_gru_atari.py --env-id ALE/Breakout-v5  # train
    torchrun --nproc-per-node 2 rppo_gru_atari.py      # train in two processes
    python rppo_gru_atari.py --play runs/RUN           # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.
Each process plays its share of the environments; losses are means over the steps of all of them.

A rollout is T time steps of N environments; its arrays are (T, N, ...). When an episode ends,
Gymnasium's vector environments return its last observation as a time step of its own:

    t      obs                          action    final   afterwards
    4      the episode's last but one   played            truncated[4] or terminated[4] is set
    5      the episode's last           ignored   yes     the agent's state is set to zero
    6      the next episode's first     played

A final step counts in no loss. Its value, from the state that the agent has there, bootstraps a
truncated episode. Shapes: S sequences of L steps, B of them in a minibatch; F features, H hidden
units; C frames in an observation; K = 1 component of an action, A choices.
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
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = "rppo_gru_atari"
RANK = int(os.environ.get("RANK", 0))  # the number of this process; torchrun sets all three
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number on this machine, and its GPU's
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are


@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"  # a game of ale_py
    frame_stack: int = 1  # the last so many frames are an observation (C)
    sticky_actions: float = 0.0  # probability of repeating an action (Machado et al. 2018: 0.25)
    terminal_on_life_loss: bool = False  # a lost life ends the return, though the game goes on
    clip_rewards: bool = True  # learn from the sign of rewards; the log has the game's score
    total_timesteps: int = 10_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run
    cuda: bool = False  # train on the GPU
    amp: bool = False  # the CNN computes in bfloat16; slow on CPUs without it
    torch_threads: int = 0  # CPU threads of a process; 0: torch's choice

    num_envs: int = 8  # parallel environments of all processes together
    num_steps: int = 128  # time steps of a rollout (T)
    seq_len: int = 0  # steps that gradients flow back through, a sequence (L); 0: T
    num_minibatches: int = 4  # in an epoch, of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation

    hidden_size: int = 128  # units of the GRU (H)
    separate_critic: bool = False  # the critic has a memory of its own
    ablate_memory: bool = False  # keep no state from step to step, L = 1: a control

    learning_rate: float = 2.5e-4  # of Adam
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.1  # epsilon of the surrogate
    ent_coef: float = 0.01  # weight of the entropy bonus
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


FIXED = "env_id", "frame_stack", "hidden_size", "separate_critic", "ablate_memory"


class ResetGRU(nn.Module):
    """A GRU whose state is zero after every final step, and that replays rollouts in one call.

    Its definition is a loop: state = cell(x[t], state), then state = 0 if final[t]. A fused call
    cannot stop for that. But no loss reads the output of a final step, so on replay that step can
    *be* the reset. x gets two more features. The first is 1; its weights are the input's biases.
    The second is 0, with fixed weights: 1 to the gates r and z, else 0. But on final steps x is
    (0, ..., 0, 0, -1e4). Then r = z = sigmoid(U h + b - 1e4) = 0 exactly in floating point, so
    n = tanh(0) = 0, h' = (1 - 0) n + 0 h = 0, and no gradient passes (GRU: arXiv:1406.1078).
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.cell = nn.GRUCell(input_size, hidden_size)
        for name, parameter in self.cell.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        closes = torch.tensor([[1.0], [1.0], [0.0]])  # r, z, n
        self.closes = nn.Buffer(closes.repeat_interleave(hidden_size, 0), persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [0.0, -1e4]), persistent=False)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """One step: x (N, F), state (1, N, H), that is h -> the next state."""
        return self.cell(x, state[0]).unsqueeze(0)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (1, B, H), final (L, B) -> h (L, B, H)."""
        x = nn.functional.pad(nn.functional.pad(x, (0, 1), value=1.0), (0, 1))  # (L, B, F + 2)
        x = torch.where(final.unsqueeze(-1), self.reset, x)
        W, U, b, c = self.cell.parameters()
        weights = [torch.cat([W, b[:, None], self.closes], 1), U, torch.zeros_like(b), c]
        return torch.gru(
            x, state, weights, has_biases=True, num_layers=1, dropout=0.0,
            train=self.training, bidirectional=False, batch_first=False,
        )[0]  # fmt: skip


def linear(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    """Orthogonal weights, zero biases ("37 implementation details of PPO", 2022)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class NatureCNN(nn.Module):
    """The CNN of Mnih et al. 2015: uint8 frames (..., C, 84, 84) -> features (..., 512)."""

    def __init__(self, channels: int, amp: bool):
        super().__init__()
        self.amp, relu = amp, nn.ReLU(inplace=True)
        self.cnn = nn.Sequential(
            nn.Conv2d(channels, 32, 8, 4), relu, nn.Conv2d(32, 64, 4, 2), relu,
            nn.Conv2d(64, 64, 3), relu, nn.Conv2d(64, 512, 7), relu, nn.Flatten(),
        )  # fmt: skip
        for name, parameter in self.cnn.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, 2**0.5)
        self.cnn.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> Tensor:
        frames = obs.flatten(0, -4) / 255
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            return self.cnn(frames).to(frames.dtype).unflatten(0, obs.shape[:-3])


class Agent(nn.Module):
    """CNN, GRU, actor, critic. state (1, N, H): h; (2, N, H) with a separate critic."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args, self.action_space = args, envs.single_action_space
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
        """obs (N, C, 84, 84) -> log-probabilities (N, K, A), value (N,), next state."""
        x = self.encoder(obs)
        next_state = self.gru.step(x, state[:1])
        if self.args.separate_critic:
            next_state = torch.cat([next_state, self.critic_gru.step(x, state[1:])])
        logp, value = self.log_probs(next_state[0]), self.critic(next_state[-1]).squeeze(-1)
        return logp, value, torch.zeros_like(state) if self.args.ablate_memory else next_state

    def evaluate_actions(self, obs, state, final, actions):
        """Sequences: obs (L, B, C, 84, 84), the state before them (1, B, H), final
        (L, B), actions (L, B, K) -> logprob, entropy, value (L, B), meaningless on final steps."""
        x = self.encoder(obs)
        h = critic_h = self.gru(x, state[:1], final)
        if self.args.separate_critic:
            critic_h = self.critic_gru(x, state[1:], final)
        logp = self.log_probs(h)
        logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        entropy = -(logp.exp() * logp).sum((-2, -1))
        return logprob, entropy, self.critic(critic_h).squeeze(-1)

    @torch.inference_mode()
    def predict(self, obs, info: dict, state: Tensor | None, deterministic: bool = True):
        """obs (N, C, 84, 84), info of N games, state, None at first -> actions, next state."""
        state = self.initial_state(len(obs)) if state is None else state
        logp, _, state = self.step(torch.as_tensor(obs, device=state.device), state)
        choices = logp.argmax(-1) if deterministic else sample(logp)
        return to_env(choices, self.action_space), state


def sample(logp: Tensor) -> Tensor:
    """Log-probabilities (..., K, A) -> choices (..., K). If E_a ~ Exp(1), p_a / E_a is the largest
    with probability p_a. Noise comes from the CPU's generator, whose state agent.pt holds."""
    return (logp.exp() / torch.empty(logp.shape).exponential_().to(logp.device)).argmax(-1)


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


def gather(x) -> list:
    """The x of every process, in the order of their ranks."""
    everyones = [x] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(everyones, x)
    return everyones


def all_sum(x: Tensor) -> Tensor:
    """Makes x its sum over all processes, the same to the bit in each."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def moments(x: Tensor) -> Tensor:
    """x (M,), M may differ between processes -> the sum of M, mean and variance over all."""
    M, first, second = all_sum(torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()]))
    return torch.stack([M, first / M, (second / M - (first / M) ** 2).clamp(min=0)])


def sum_gradients(agent: Agent) -> None:
    """Makes each gradient its sum over all processes, in one message."""
    gradients = [weight.grad for weight in agent.parameters() if weight.grad is not None]
    sums = all_sum(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, part in zip(gradients, sums.split([x.numel() for x in gradients])):
        gradient.copy_(part.view_as(gradient))


def train(args: Args) -> Agent:
    """Play T steps in N environments, estimate advantages, improve the agent; repeat."""
    check_args(args)
    if WORLD_SIZE > 1:
        dist.init_process_group()
    torch.set_num_threads(args.torch_threads or torch.get_num_threads())
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    T, N = args.num_steps, args.num_envs // WORLD_SIZE  # N environments of this process
    L = 1 if args.ablate_memory else args.seq_len or T
    device = torch.device(f"cuda:{LOCAL_RANK}" if args.cuda else "cpu")
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    torch.manual_seed(args.seed + 10_000 * (1 + RANK))  # equal weights, then own noise
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    run = Run(args, envs, agent, optimizer)
    # NumPy holds what environments return, torch what the agent computes.
    tensor = partial(torch.as_tensor, device=device)
    obs = np.zeros((T + 1, N, *envs.single_observation_space.shape), np.uint8)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated, truncated = np.zeros((2, T, N), bool)
    logp = torch.zeros(T, N, 1, agent.action_space.n, device=device)
    actions = torch.zeros(T, N, 1, dtype=torch.long, device=device)
    values = torch.zeros(T + 1, N, device=device)
    states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)  # at sequence starts

    obs[0], info = envs.reset(seed=args.seed + run.step + N * RANK)
    state, lives = agent.initial_state(N), info["lives"]
    while run.step < args.total_timesteps:
        # Rollout
        with torch.inference_mode():
            for t in range(T):
                if t % L == 0:
                    states[t // L] = state
                logp[t], values[t], state = agent.step(tensor(obs[t]), state)
                actions[t] = sample(logp[t])
                if final[t].any():
                    state = state.where(tensor(~final[t])[:, None], 0.0)
                action = to_env(actions[t], agent.action_space)
                obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
                final[t + 1] = terminated[t] | truncated[t]
                if args.terminal_on_life_loss:  # the game goes on: no final step
                    terminated[t] |= info["lives"] < lives
                    lives = info["lives"]
            values[T] = agent.step(tensor(obs[T]), state)[1]
        check_finite("rewards", rewards)

        # Advantages
        valid, done = ~final[:T], terminated | truncated
        rewards = np.sign(rewards) if args.clip_rewards else rewards
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        old_logprob = logp.gather(-1, actions.unsqueeze(-1)).sum((-2, -1))
        targets = torch.stack([old_logprob, tensor(advantages), tensor(returns)], -1)
        rollout = tensor(obs[:T]), tensor(final[:T]), actions, targets
        chunks = [x.unflatten(0, (T // L, L)).transpose(0, 1) for x in rollout]  # (L, T/L, N, ...)
        s_obs, s_final, s_actions, s_targets = (x.flatten(1, 2) for x in chunks)
        s_states = states.transpose(0, 1).flatten(1, 2)  # (1, S, H); the others are (L, S, ...)
        S, losses = s_states.shape[1], []
        order = torch.cat([torch.randperm(S) for _ in range(args.update_epochs)])
        for batch in order.view(-1, S // args.num_minibatches):
            inputs = [x[:, batch] for x in (s_obs, s_states, s_final, s_actions)]
            counts = ~s_final[:, batch]  # (L, B); below, (M,): the steps that count
            logprob, entropy, value = (x[counts] for x in agent.evaluate_actions(*inputs))
            old_logprob, advantage, return_ = s_targets[:, batch][counts].unbind(-1)
            count, mean, var = moments(advantage.double())  # of all processes
            if count == 0:
                continue
            advantage = (advantage - mean) / (var.sqrt() + 1e-8)
            policy_loss, kl = ppo_loss(logprob, old_logprob, advantage, args.clip_coef)
            value_loss = 0.5 * (value - return_).square().mean()
            losses.append(torch.stack([policy_loss, value_loss, entropy.mean(), kl]).detach())
            share = len(logprob) / count  # of this process in the means over all steps
            losses[-1] = all_sum(share * losses[-1].where(share > 0, 0.0))  # a mean of none is NaN
            if losses[-1][3] > 1.5 * args.target_kl:
                break
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
            optimizer.zero_grad()
            (share * loss).backward()
            sum_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

        run.log(int(valid.sum()), ("policy_loss", "value_loss", "entropy", "approx_kl"), losses)
        obs[0], final[0] = obs[T], final[T]

    envs.close()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    if RANK == 0:
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
            high = 1 if name in ("gamma", "gae_lambda", "sticky_actions") else 10**9  # int32 seeds
            fine = low <= value <= high or value == default
            check(fine, f"--{name} {value}: must be from {low} to {high}")
            setattr(args, name, type(default)(value))  # 3e5 as an int
    L, M = 1 if args.ablate_memory else args.seq_len or args.num_steps, args.num_minibatches
    check(args.num_steps % L == 0, f"--seq-len {L}: must divide --num-steps {args.num_steps}")
    check(args.num_envs % WORLD_SIZE == 0, f"--num-envs: {WORLD_SIZE} processes must divide it")
    S = args.num_envs // WORLD_SIZE * args.num_steps // L
    check(S % M == 0, f"--num-minibatches {M}: must divide the {S} sequences of a rollout")
    check(not args.cuda or LOCAL_RANK < torch.cuda.device_count(), "--cuda: torch finds no GPU")


def check_finite(name: str, x) -> None:
    """FloatingPointError, with the place, if a number of x is not finite."""
    if bad := np.argwhere(~np.isfinite(x)).tolist():
        raise FloatingPointError(f"{name}{bad[0]} is {x[tuple(bad[0])]}")


class FireReset(gym.Wrapper):
    """A game that knows FIRE begins with it, as ale_py's vector environment does."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.unwrapped.get_action_meanings()[1] == "FIRE":
            obs, _, _, _, info = self.env.step(1)
        return obs, info


def make_envs(args: Args, num_envs: int, render_mode: str | None = None):
    """num_envs games as one environment, whose observations are uint8 (num_envs, C, 84, 84)."""
    check(args.env_id.startswith("ALE/"), f"--env-id {args.env_id}: not a game like ALE/Pong-v5")
    make = partial(gym.make_vec, f"ale_py:{args.env_id}", num_envs,
                   repeat_action_probability=args.sticky_actions)  # fmt: skip
    try:
        if render_mode is None:  # ale_py's vector environment
            envs = make(stack_num=args.frame_stack, reward_clipping=False)
        else:  # its equal in Python, which can show games
            stack = partial(FrameStackObservation, stack_size=args.frame_stack, padding_type="zero")
            envs = make(vectorization_mode="sync", render_mode=render_mode, frameskip=1,
                        wrappers=[AtariPreprocessing, FireReset, stack])  # fmt: skip
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise ArgumentError(f"--env-id {args.env_id}: {error}") from error
    fine = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.NEXT_STEP
    check(fine, f"--env-id {args.env_id}: autoreset is not in NEXT_STEP mode")
    return wrappers.RecordEpisodeStatistics(envs)


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
        self.dir = gather(Path(args.resume or Path(args.runs_dir, name)).resolve())[0]
        if args.resume:
            saved = load(self.dir, agent)
            optimizer.load_state_dict(saved["optimizer"])
            check(len(saved["rng"]) == WORLD_SIZE, "--resume: start as many processes as before")
            torch.set_rng_state(saved["rng"][RANK])
            self.step, seconds = saved["step"], saved["seconds"]
            self.returns.extend(saved["returns"] if RANK == 0 else ())
            self.lengths.extend(saved["lengths"] if RANK == 0 else ())
        if args.track and RANK == 0 and (args.resume or not self.dir.exists()):  # else refused
            try:  # before SummaryWriter, which it patches
                import wandb

                wandb.init(id=self.dir.name, name=self.dir.name, config=vars(args), resume="allow",
                           reinit="finish_previous", sync_tensorboard=True)  # fmt: skip
            except Exception as error:
                raise ArgumentError(f"--track: {error}") from error
        try:
            if RANK == 0:
                self.dir.mkdir(parents=True, exist_ok=bool(args.resume))
                self.writer = SummaryWriter(str(self.dir), purge_step=self.step + 1)
        except OSError as error:
            raise ArgumentError(f"{error}; --resume goes on with a run") from error
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit="step", disable=RANK)
        self.began, self.logged = time.time() - seconds, time.time()
        self.timed: list[tuple[int, float]] = []  # steps, seconds of iterations; the first is slow
        self.rng = gather(torch.get_rng_state())
        if RANK == 0:
            self.save()
        Run.latest = self.dir

    def log(self, steps: int, names: tuple[str, ...], losses: list[Tensor]) -> None:
        """Ends an iteration of that many steps; losses has those of each minibatch."""
        if not losses:  # only final steps
            return
        means = torch.stack(losses).mean(0)
        check_finite(f"after step {self.step}, {names}", means.numpy(force=True))
        seconds, self.logged = time.time() - self.logged, time.time()
        steps = sum(gather(steps))
        self.timed.append((steps, seconds))
        self.step += steps
        self.rng = gather(torch.get_rng_state())
        for queue in self.returns, self.lengths:  # the first process has those of all
            others: list[float] = sum(gather([*queue])[1:], [])
            queue.extend(others) if RANK == 0 else queue.clear()
        if RANK > 0:
            return
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
            "optimizer": self.optimizer.state_dict(), "rng": self.rng,
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
    """Flags over defaults: those of the run to resume or play, if any."""
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False)
    run_dir = early.play or early.resume
    defaults = load(run_dir)["args"] if run_dir else {}
    args = tyro.cli(Args, default=Args(**defaults), description=__doc__.split("\n\nPPO")[0])
    for name in FIXED if run_dir else ():
        check(getattr(args, name) == defaults[name], f"--{name}: {run_dir} has {defaults[name]}")
    return args


def main() -> None:
    """Exit codes: 2, a bad argument; 1, an error; 130, Ctrl-C."""
    how = f"torchrun --nproc-per-node {WORLD_SIZE}" if WORLD_SIZE > 1 else "python"
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
            print(f"\nto go on: {how} {sys.argv[0]} --resume {Run.latest}", file=sys.stderr)
        sys.exit(1 if isinstance(error, Exception) else 130)


if __name__ == "__main__":
    main()
