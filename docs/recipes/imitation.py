"""Imitation: recording an expert's episodes, and behaviour cloning before ppo1_mpi.py trains.

    python docs/recipes/imitation.py record runs/EXPERT expert.npz --eval-episodes 20
    python docs/recipes/imitation.py expert.npz --env-id CartPole-v1  # and flags of ppo1_mpi.py

EXPERT is a run of ppo1_mpi.py. The file has obs (M, n), actions, rewards, episode_starts (M, ...),
episode_returns. Cloning: 10 passes over 70 % of the steps; 25,000 steps later 500, once 498.
"""

import sys
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent / "../.."))
import ppo1_mpi


def record(file: str, args) -> None:
    envs, rows, returns = ppo1_mpi.make_envs(args, 1), [], []
    agent = ppo1_mpi.Agent(envs, args)
    ppo1_mpi.load(args.play, agent)
    for episode in range(args.eval_episodes):
        obs, info = envs.reset(seed=args.seed + episode)
        state, done = None, False
        while not done:
            before, start = obs[0].copy(), state is None
            action, state = agent.predict(obs, info, state)
            obs, reward, terminated, truncated, info = envs.step(action)
            rows.append((before, action[0], reward[0], start))
            done = terminated[0] or truncated[0]
        returns.append(info["episode"]["r"][0])
    columns = zip(("obs", "actions", "rewards", "episode_starts"), zip(*rows))
    np.savez_compressed(file, **dict(columns), episode_returns=returns)
    print(f"{file}: {len(returns)} episodes, return {np.mean(returns):.1f}")


def clone(agent, file: str) -> None:
    arrays, first = np.load(file), getattr(agent.action_space, "start", 0)
    obs, actions = (torch.from_numpy(arrays[name]) for name in ("obs", "actions"))
    agent.obs_sums += torch.stack([obs.double() ** power for power in range(3)]).sum(1)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-4)

    def loss(rows):
        h, *_ = agent.step(obs[rows].float(), agent.initial_state(len(rows)))
        y = actions[rows].reshape(len(rows), -1) - first
        return ((agent.actor(h) - y) ** 2 if agent.box else -agent.logprob_entropy(h, y)[0]).mean()

    train, rest = torch.randperm(len(obs)).tensor_split([int(0.7 * len(obs))])
    for _ in range(10):
        for rows in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
    print(f"{file}: loss {loss(train):.3f}, of steps held back {loss(rest):.3f}")


def use(file: str) -> None:
    class Clone(ppo1_mpi.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            ppo1_mpi.check(args.memory == "none", "--memory lstm: clones have no memory")
            try:
                clone(self, file)
            except (OSError, EOFError, KeyError, ValueError, RuntimeError, BadZipFile) as error:
                raise ppo1_mpi.ArgumentError(f"{file} cannot be imitated: {error}") from error

    ppo1_mpi.Agent = Clone


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"] and len(sys.argv) > 3:
        ppo1_mpi.play = lambda args, file=sys.argv[3]: record(file, args)
        sys.argv[1:4] = ["--play", sys.argv[2]]
    elif not sys.argv[1:2] or not sys.argv[1].startswith("-"):  # such as --resume
        use(" ".join(sys.argv[1:2]))
        sys.argv[:2] = [" ".join(sys.argv[:2])]  # the command that goes on after Ctrl-C
    ppo1_mpi.main()
