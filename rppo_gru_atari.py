# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.9", "gymnasium[other]>=1.2", "ale-py", "tyro", "tensorboard", "tqdm"]
# ///
"""Recurrent PPO with a GRU on Atari games.

    python rppo_gru_atari.py --env-id ALE/Breakout-v5  # train
    python rppo_gru_atari.py --play runs/RUN           # watch the agent

PPO: Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2016, arXiv:1506.02438.

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
count; C frames in an observation, F features, H hidden units; A actions.
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
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from gymnasium.wrappers import vector as wrappers
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT, VERSION = "rppo_gru_atari", "0.2.0"


@dataclass
class Args:
    env_id: str = "ALE/Pong-v5"  # a game of ale_py
    env_kwargs: str = "{}"  # the environment's own arguments, in JSON
    frame_stack: int = 1  # how many of the latest frames are an observation (C)
    sticky_actions: float = 0.0  # probability of repeating an action; 0 as CleanRL, ALE's is 0.25
    terminal_on_life_loss: bool = False  # a lost life ends the return, not the game
    clip_rewards: bool = True  # learn from the sign of rewards; the log shows the game's score
    total_timesteps: int = 10_000_000  # environment steps to train for
    seed: int = 1  # the same seed gives the same run; two seeds share no episode
    cuda: bool = False  # train on the GPU
    amp: bool = False  # the CNN computes in bfloat16; slow on CPUs that lack it
    torch_threads: int = 0  # CPU threads; 0: torch's choice

    num_envs: int = 8  # parallel environments (N)
    num_steps: int = 128  # time steps of a rollout (T)
    seq_len: int = 0  # length of a sequence (L), through which gradients flow; 0: T
    num_minibatches: int = 4  # minibatches in an epoch, each of whole sequences
    update_epochs: int = 4  # passes over a rollout
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of GAE

    hidden_size: int = 128  # units of the GRU (H)
    ablate_memory: bool = False  # a control: no state between steps, L = 1

    learning_rate: float = 2.5e-4  # Adam's, at first
    anneal_lr: bool = True  # the learning rate falls linearly to 0
    clip_coef: float = 0.1  # epsilon of the surrogate
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, 0.5 (V - R)^2; Stable-Baselines3: (V - R)^2
    max_grad_norm: float = 0.5  # gradients are clipped to this norm
    target_kl: float | None = None  # an update ends when the estimated KL exceeds 1.5 times this

    runs_dir: str = "runs"  # directory of new runs
    run_name: str | None = None  # name of a new run; None: env_id__script__seed__time
    track: bool = False  # log to Weights & Biases
    eval_episodes: int = 10  # episodes after training (0: none), or of --play (0: 10)
    deterministic: bool = True  # evaluate the most probable actions, not sampled ones
    resume: str | None = None  # directory of a run to continue; flags given here win
    play: str | None = None  # directory of a run whose agent to watch
    render: Literal["human", "video", "none"] = "human"  # --play: a window, RUN/videos, or returns


# What is logged of each minibatch
METRICS = "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm"


class ResetGRU(nn.Module):
    """A GRU whose state is zero after every final step, and that replays a sequence in one call.

    Its definition is a loop over time: state = cell(x[t], state), then state = 0 if final[t]. One
    call of torch.gru for all steps is faster, but can't stop to reset the state. It needn't: no
    loss reads the output of a final step, so on replay we get to choose that step's input, and
    choose one that makes the step itself the reset.

    x gets two more features. The first is 1, and its weights are the input's biases. The second is
    0; its weights are constant, 1 to the gates r and z, 0 to the candidate n. On a final step the
    second is -1e4 and all others are 0, so that the biases are gone, too. Then, exactly in
    floating point, and with no gradient (torch's variant of the GRU of Cho et al. 2014,
    arXiv:1406.1078; c: the biases of h):

        r = sigmoid(U_r h + c_r - 1e4) = 0,  z = sigmoid(U_z h + c_z - 1e4) = 0
        n = tanh(r (U_n h + c_n)) = 0,       h' = (1 - z) n + z h = 0

    On a CPU torch doesn't fuse a GRU, but loops; its LSTM is several times faster there.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.cell = nn.GRUCell(input_size, hidden_size)
        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)
        # The weights of the second feature, gates r, z, n, and the input of a final step
        gates = torch.tensor([[1.0], [1.0], [0.0]]).repeat_interleave(hidden_size, 0)
        self.gates = nn.Buffer(gates, persistent=False)
        self.reset = nn.Buffer(torch.tensor([0.0] * input_size + [0.0, -1e4]), persistent=False)

    def initial_state(self, num_envs: int) -> Tensor:
        """Zeros: h, (1, N, H). Of another memory (rows, N, ...)."""
        return self.reset.new_zeros(1, num_envs, self.cell.hidden_size)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step, which doesn't reset: x (N, F), state (1, N, H) -> h (N, H), the next state."""
        h = self.cell(x, state[0])
        return h, h.unsqueeze(0)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """Sequences: x (L, B, F), the state before them (1, B, H), final (L, B) -> h (L, B, H)."""
        cell = self.cell
        L, B = x.shape[:2]
        # torch.gru would broadcast one sequence to many.
        assert x.shape == (L, B, cell.input_size), f"x is {tuple(x.shape)}"
        assert final.shape == (L, B), f"final is {tuple(final.shape)}"
        assert state.shape == (1, B, cell.hidden_size), f"state is {tuple(state.shape)}"
        x = nn.functional.pad(x, (0, 1), value=1.0)  # the first feature: the input's biases
        x = nn.functional.pad(x, (0, 1))  # the second, which shuts r and z: (L, B, F + 2)
        x = torch.where(final.unsqueeze(-1), self.reset, x)
        weight_ih = torch.cat([cell.weight_ih, cell.bias_ih[:, None], self.gates], 1)
        bias_ih = torch.zeros_like(cell.bias_ih)
        h, _ = torch.gru(  # what nn.GRU calls
            x, state, [weight_ih, cell.weight_hh, bias_ih, cell.bias_hh],
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
    """CNN and GRU, then actor and critic, which both read the GRU's output h."""

    def __init__(self, envs, args: Args):
        super().__init__()
        self.args = args
        self.action_space = envs.single_action_space
        self.encoder = NatureCNN(args.frame_stack, args.amp)
        self.gru = ResetGRU(512, args.hidden_size)
        self.actor = linear(args.hidden_size, int(self.action_space.n), std=0.01)
        self.critic = linear(args.hidden_size, 1, std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        return self.gru.initial_state(num_envs)

    def step(self, obs: Tensor, gru_state: Tensor):
        """obs (N, C, 84, 84) -> log-probabilities of all actions (N, A), value (N,), the next
        state."""
        h, gru_state = self.gru.step(self.encoder(obs), gru_state)
        if self.args.ablate_memory:
            gru_state = torch.zeros_like(gru_state)
        return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1), gru_state

    def evaluate_actions(self, obs, gru_state, final, actions):
        """Sequences: obs (L, B, C, 84, 84), the state before them (1, B, H), final (L, B),
        actions (L, B) -> logprob, entropy, value (M,) of the steps that count."""
        h = self.gru(self.encoder(obs), gru_state, final)  # (L, B, H)
        log_pi = self.actor(h).log_softmax(-1)
        value = self.critic(h).squeeze(-1)
        valid = ~final
        return select(log_pi, actions)[valid], entropy(log_pi)[valid], value[valid]

    @torch.inference_mode()
    def predict(self, obs, gru_state=None, final=None, deterministic: bool = True):
        """obs (N, C, 84, 84) of N games, gru_state (None at first), final (N,): which obs are a
        game's last -> actions for the environments; the next state, zero after final steps."""
        obs = torch.as_tensor(obs, device=self.actor.weight.device)
        gru_state = self.initial_state(len(obs)) if gru_state is None else gru_state
        log_pi, _, gru_state = self.step(obs, gru_state)
        actions = log_pi.argmax(-1) if deterministic else sample(log_pi)
        if final is not None:
            gru_state = reset_state(gru_state, final)
        return to_env(actions, self.action_space), gru_state


def sample(log_pi: Tensor) -> Tensor:
    """Log-probabilities (..., A) -> actions (...), by an exponential race: if E_a ~ Exp(1),
    p_a / E_a is the largest with probability p_a. Four times as fast as Categorical.sample."""
    noise = torch.empty(log_pi.shape).exponential_()  # on the CPU: agent.pt holds its generator
    return (log_pi.exp() / noise.to(log_pi.device)).argmax(-1)


def select(log_pi: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities of all actions (..., A), actions (...) -> those of the actions (...)."""
    return log_pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(log_pi: Tensor) -> Tensor:
    """Log-probabilities (..., A) -> the entropy (...) of the policy."""
    return -(log_pi.exp() * log_pi).sum(-1)


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
    torch.backends.cudnn.deterministic = True
    envs = make_envs(args, N)
    agent = Agent(envs, args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr is set below
    run = Run(args, envs, agent, optimizer)  # with --resume it loads all that the run had saved
    tensor = partial(torch.as_tensor, device=device)
    # NumPy holds what environments return, torch what the agent computes.
    obs = np.zeros((T + 1, N, *envs.single_observation_space.shape), np.uint8)
    final = np.zeros((T + 1, N), bool)  # obs[t] is the last of its episode
    rewards = np.zeros((T, N), np.float32)
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    actions = torch.zeros(T, N, *agent.action_space.shape, dtype=torch.long, device=device)
    values = torch.zeros(T + 1, N, device=device)
    gru_states = torch.zeros(T // L, *agent.initial_state(N).shape, device=device)

    obs[0], info = envs.reset(seed=env_seed(args.seed, run.step))  # resumed: other episodes
    lives = info["lives"]
    gru_state = agent.initial_state(N)
    while run.step < args.total_timesteps:
        # Rollout
        log_pis = []
        for t in range(T):
            if t % L == 0:  # where replay will begin a sequence
                gru_states[t // L] = gru_state
            with torch.inference_mode():
                log_pi, values[t], gru_state = agent.step(tensor(obs[t]), gru_state)
                log_pis.append(log_pi)
                actions[t] = sample(log_pi)
                gru_state = reset_state(gru_state, final[t])  # the next episode begins empty
            action = to_env(actions[t], agent.action_space)
            obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(action)
            final[t + 1] = terminated[t] | truncated[t]
            if args.terminal_on_life_loss:  # the game goes on: no final step
                terminated[t] |= info["lives"] < lives
                lives = info["lives"]
        with torch.inference_mode():  # gru_state stays: the next rollout begins with this step
            _, values[T], _ = agent.step(tensor(obs[T]), gru_state)
            old_logprobs = select(torch.stack(log_pis), actions)  # all T at once: faster
        check_finite("rewards", rewards)

        # Advantages
        valid = ~final[:T]  # the steps that count
        done = terminated | truncated
        rewards[~valid] = 0.0
        if args.clip_rewards:
            rewards = np.sign(rewards)
        v = values.numpy(force=True)
        advantages = compute_gae(rewards, v, terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + v[:T]

        # Update, in minibatches of whole sequences
        remaining = 1 - run.step / args.total_timesteps if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        s_obs = to_sequences(tensor(obs[:T]), L)  # s_: in sequences, (L, S, C, 84, 84) and so on
        s_final = to_sequences(tensor(final[:T]), L)
        s_actions = to_sequences(actions, L)
        s_old_logprob = to_sequences(old_logprobs, L)
        s_advantage = to_sequences(tensor(advantages), L)
        s_return = to_sequences(tensor(returns), L)
        s_state = gru_states.transpose(0, 1).flatten(1, 2)  # (1, S, H), before each sequence
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


def to_env(actions: Tensor, space) -> np.ndarray:
    """Actions (N,), counted from 0 -> as the environments take them."""
    return actions.numpy(force=True) + space.start


EVAL_FRAMES = 18_000  # where an evaluation cuts a game: five minutes (Mnih et al. 2015)


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
    try:
        options = json.loads(args.env_kwargs)
        options["repeat_action_probability"] = args.sticky_actions
        options["max_num_frames_per_episode"] = max_frames
        make = partial(gym.make_vec, f"ale_py:{args.env_id}", num_envs, **options)
        if render_mode is None:  # ale_py's vector environment
            envs = make(stack_num=args.frame_stack, reward_clipping=False)
        else:  # the same preprocessing in Python, which can render
            stack = partial(FrameStackObservation, stack_size=args.frame_stack, padding_type="zero")
            envs = make(vectorization_mode="sync", render_mode=render_mode, frameskip=1,
                        wrappers=[AtariPreprocessing, FireReset, stack])  # fmt: skip
    except (gym.error.Error, ImportError, ValueError) as error:
        flags = f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}"
        raise ArgumentError(f"{flags}: {error}") from error
    return wrappers.RecordEpisodeStatistics(envs, stats_key="run_statistics")


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
            envs = make_envs(self.args, self.args.eval_episodes, None, EVAL_FRAMES)
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
        envs = make_envs(args, 1, mode, EVAL_FRAMES)
        agent = Agent(envs, args)
        load(args.play, agent)
        if args.render == "video":
            envs = wrappers.RecordVideo(envs, f"{args.play}/videos", name_prefix=f"{episode}")
        seed = env_seed(args.seed, EVALUATION + episode)
        print("return", *evaluate(agent, envs, seed, args.deterministic), flush=True)


def parse_args() -> Args:
    """The flags; with --resume or --play those that are not given are the run's."""
    early, _ = tyro.cli(Args, return_unknown_args=True, add_help=False)
    run_dir = early.play or early.resume
    defaults = Args(**load(run_dir)["args"]) if run_dir else Args()
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
