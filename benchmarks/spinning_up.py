"""Prints the SPS of all ranks of a loop after Spinning Up's ppo.py, which no longer installs.

    mpiexec -n 2 python benchmarks/spinning_up.py 48000  # environment steps; speed.py runs it

4000 steps of CartPole an epoch, divided among the ranks; 80 passes over all of them for the policy,
with early stopping, and 80 for the value function; an allreduce for every parameter. The first
epoch does not count.
"""

import sys
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from mpi4py import MPI
from torch.distributions import Categorical

comm, gamma, lam = MPI.COMM_WORLD, 0.99, 0.97


def make_net(outputs: int, learning_rate: float):
    layers = nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    net = nn.Sequential(*layers)
    for p in net.parameters():
        comm.Bcast(p.data.numpy())
    return net, torch.optim.Adam(net.parameters(), learning_rate)


def descend(net, optimizer, loss) -> None:
    optimizer.zero_grad()
    loss.backward()
    for p in net.parameters() if comm.size > 1 else ():
        comm.Allreduce(MPI.IN_PLACE, p.grad.numpy())
        p.grad /= comm.size
    optimizer.step()


def mean_of_ranks(x: torch.Tensor) -> float:
    return comm.allreduce(x.mean().item()) / comm.size


def discounted(x, factor: float) -> np.ndarray:
    sums = np.zeros(len(x) + 1, np.float32)
    for i in reversed(range(len(x))):
        sums[i] = x[i] + factor * sums[i + 1]
    return sums[:-1]


def main() -> None:
    local = 4000 // comm.size
    epochs = max(2, int(sys.argv[1]) // 4000)
    torch.set_num_threads(1)
    torch.manual_seed(10_000 * comm.rank)
    pi, pi_optimizer = make_net(2, 3e-4)
    v, v_optimizer = make_net(1, 1e-3)
    env = gym.make("CartPole-v1")
    obs = env.reset(seed=10_000 * comm.rank)[0]
    for epoch in range(epochs):
        if epoch == 1:
            comm.Barrier()
            began = time.perf_counter()
        steps, advantages, returns = [], [], []
        start = 0  # of the episode
        for t in range(local):
            with torch.no_grad():
                x = torch.as_tensor(obs, dtype=torch.float32)
                policy = Categorical(logits=pi(x))
                action = policy.sample()
                logp, value = policy.log_prob(action), v(x).squeeze(-1)
            next_obs, reward, terminated, truncated, _ = env.step(action.numpy())
            steps.append((obs, action.numpy(), reward, value.numpy(), logp.numpy()))
            obs = next_obs
            if terminated or truncated or t == local - 1:
                last = 0.0 if terminated else v(torch.as_tensor(obs)).item()
                _, _, rewards, values, _ = zip(*steps[start:])
                rewards, values = np.append(rewards, last), np.append(values, last)
                deltas = rewards[:-1] + gamma * values[1:] - values[:-1]
                advantages.append(discounted(deltas, gamma * lam))
                returns.append(discounted(rewards, gamma)[:-1])
                obs, start = env.reset()[0], t + 1
        o, actions, _, _, old = (torch.as_tensor(np.array(x)) for x in zip(*steps))
        advantage, return_ = (torch.as_tensor(np.concatenate(x)) for x in (advantages, returns))
        advantage -= mean_of_ranks(advantage)
        advantage /= mean_of_ranks(advantage**2) ** 0.5
        for _ in range(80):
            logp = Categorical(logits=pi(o)).log_prob(actions)
            if mean_of_ranks(old - logp) > 1.5 * 0.01:
                break
            ratio = (logp - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            descend(pi, pi_optimizer, loss)
        for _ in range(80):
            descend(v, v_optimizer, ((v(o).squeeze(-1) - return_) ** 2).mean())
    comm.Barrier()
    if comm.rank == 0:
        print((epochs - 1) * local * comm.size / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
