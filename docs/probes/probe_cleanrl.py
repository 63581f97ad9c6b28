"""A loop after CleanRL's ppo_atari_lstm.py (commit 004f8a0), with vectors in place of frames.

    python docs/probes/probe_cleanrl.py SAME_STEP  # autoreset as in the Gym that it was written for
    python docs/probes/probe_cleanrl.py NEXT_STEP  # the default of Gymnasium 1.0 and later

Its state, its done flags, its GAE and its minibatches are CleanRL's, line by line.
"""

import sys

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probes import ALL, check
from torch.distributions import Categorical

N, T, H = 64, 16, 32
GAMMA, LAMBDA, EPOCHS, MINIBATCHES = 0.99, 0.95, 4, 4


class Agent(nn.Module):
    def __init__(self, n: int, A: int):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(n, H), nn.Tanh())
        self.lstm = nn.LSTM(H, H)
        for name, parameter in self.lstm.named_parameters():
            (nn.init.zeros_ if "bias" in name else nn.init.orthogonal_)(parameter)
        self.actor, self.critic = nn.Linear(H, A), nn.Linear(H, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x).reshape((-1, lstm_state[0].shape[1], H))
        new_hidden = []
        for h, d in zip(hidden, done.reshape((-1, lstm_state[0].shape[1]))):
            keep = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h[None], (keep * lstm_state[0], keep * lstm_state[1]))
            new_hidden.append(h)
        return torch.cat(new_hidden).flatten(0, 1), lstm_state

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        policy = Categorical(logits=self.actor(hidden))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy, self.critic(hidden).flatten(), lstm_state


def trainer(mode: AutoresetMode):
    def train(env_id, steps, seed):
        torch.manual_seed(seed)
        envs = SyncVectorEnv([lambda: gym.make(env_id)] * N, autoreset_mode=mode)
        agent = Agent(envs.single_observation_space.shape[0], 3)
        optimizer = torch.optim.Adam(agent.parameters(), lr=4e-3, eps=1e-5)
        zero = torch.zeros(1, N, H)
        next_obs = torch.tensor(envs.reset(seed=seed)[0])
        next_done, next_state, scale = torch.zeros(N), (zero, zero), 1.0
        updates = steps // (N * T)
        for update in range(updates):
            optimizer.param_groups[0]["lr"] = 4e-3 * (1 - update / updates)
            initial_state, rows = next_state, []
            for _ in range(T):
                obs, done = next_obs, next_done
                with torch.no_grad():
                    action, logprob, _, value, next_state = agent.get_action_and_value(
                        obs, next_state, done
                    )
                next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
                next_obs, reward = torch.tensor(next_obs), torch.tensor(reward).float()
                next_done = torch.tensor(np.logical_or(terminated, truncated)).float()
                rows.append((obs, done, action, logprob, value, reward))
            obs, dones, actions, logprobs, values, rewards = map(torch.stack, zip(*rows))
            scale = max(scale, rewards.abs().max().item())  # in place of Atari's clipped rewards
            rewards = rewards / scale
            with torch.no_grad():
                next_value = agent.get_action_and_value(next_obs, next_state, next_done)[3]
            advantages, last = torch.zeros(T, N), torch.zeros(N)
            for t in reversed(range(T)):
                nextnonterminal = 1.0 - (next_done if t == T - 1 else dones[t + 1])
                nextvalues = next_value if t == T - 1 else values[t + 1]
                delta = rewards[t] + GAMMA * nextvalues * nextnonterminal - values[t]
                advantages[t] = last = delta + GAMMA * LAMBDA * nextnonterminal * last
            returns = advantages + values
            for _ in range(EPOCHS):
                for batch in torch.randperm(N).view(MINIBATCHES, -1):
                    mb = [y[:, batch].flatten(0, 1) for y in (obs, dones, actions)]
                    state = tuple(part[:, batch] for part in initial_state)
                    _, newlogprob, policy, newvalue, _ = agent.get_action_and_value(
                        mb[0], state, mb[1], mb[2]
                    )
                    advantage = advantages[:, batch].flatten()
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    ratio = (newlogprob - logprobs[:, batch].flatten()).exp()
                    clipped = ratio.clamp(0.8, 1.2)
                    loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
                    loss += 0.25 * (newvalue - returns[:, batch].flatten()).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
        state = done = ended = None

        def act(obs, final):
            nonlocal state, ended
            zero = torch.zeros(1, len(obs), H)
            flags = np.zeros(len(obs), bool) if final is None else final
            # done is what this agent was trained with: its flag comes with the final observation,
            # or, in SAME_STEP, with the next episode's first one.
            done = flags if mode == AutoresetMode.NEXT_STEP else ended
            done = torch.zeros(len(obs)) if done is None else torch.tensor(done).float()
            ended = flags
            with torch.no_grad():
                _, _, policy, _, state = agent.get_action_and_value(
                    torch.tensor(obs), state or (zero, zero), done
                )
            return policy.probs.argmax(-1).numpy()

        return act

    return train


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    mode, *seed = sys.argv[1:] or ["SAME_STEP"]
    check(trainer(AutoresetMode[mode]), ALL, int(seed[0]) if seed else 1)
