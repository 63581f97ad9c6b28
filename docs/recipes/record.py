"""Recording an agent's episodes in a file, as an expert for the recipe imitation.

    python docs/recipes/record.py runs/EXPERT expert.npz 20
    python docs/recipes/imitation.py ppo1_mpi --expert expert.npz --env-id CartPole-v1

EXPERT is a run of any script, with its recipes; 20 is the number of episodes. The file has obs
(M, n), actions, rewards, episode_starts (M, ...) and episode_returns, as stable-baselines has them.
"""

import sys

import numpy as np
import use as driver


def record(run_dir: str, file: str, episodes: int) -> None:
    script, args, envs, agent, _ = driver.open_run(run_dir)
    script.check(episodes > 0, f"{episodes} episodes: must be at least 1")
    file = file.removesuffix(".npz") + ".npz"
    columns: dict[str, list] = {"obs": [], "actions": [], "rewards": [], "episode_starts": []}
    returns = []
    for episode in range(episodes):
        obs, info = envs.reset(seed=args.seed + episode)
        state = None
        done = False
        while not done:
            columns["obs"].append(obs[0].copy())
            columns["episode_starts"].append(state is None)
            action, state = agent.predict(obs, info, state)
            obs, reward, terminated, truncated, info = envs.step(action)
            columns["actions"].append(action[0])
            columns["rewards"].append(reward[0])
            done = terminated[0] or truncated[0]
        returns.append(info["run_statistics"]["r"][0])
    np.savez_compressed(file, **columns, episode_returns=returns)
    print(f"{file}: {len(returns)} episodes, return {np.mean(returns):.1f}")


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        if len(sys.argv) != 4:
            raise ValueError("usage: record.py runs/EXPERT expert.npz EPISODES")
        record(sys.argv[1], sys.argv[2], int(sys.argv[3]))
