"""Imitation: an expert's episodes in a file, and behaviour cloning of them before a script trains.

    python docs/recipes/after/imitation.py runs/EXPERT expert.npz 20  # records 20 episodes
    python docs/recipes/use.py ppo1_mpi imitation --expert expert.npz --env-id CartPole-v1

EXPERT is a run of any script, with its recipes. The file has obs (M, n), actions, rewards,
episode_starts (M, ...) and episode_returns, as stable-baselines has them. Cloning maximises the
likelihood of the expert's actions; the standard deviation of real-valued actions is fixed, so
cloning them is least squares. An agent with a memory learns from whole episodes, one without from
single steps; 30 % of either are held out.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver


def record(run_dir: str, file: str, episodes: int) -> None:
    script, args, envs, agent, _ = driver.open_run(run_dir)
    script.check(episodes > 0, f"{episodes} episodes: must be at least 1")
    file = file.removesuffix(".npz") + ".npz"
    columns: dict[str, list] = {"obs": [], "actions": [], "rewards": [], "episode_starts": []}
    returns = []
    for episode in range(episodes):
        obs, _ = envs.reset(seed=script.env_seed(args.seed, script.EVALUATION + episode))
        state = None
        done = False
        while not done:
            columns["obs"].append(obs[0].copy())
            columns["episode_starts"].append(state is None)
            action, state = agent.predict(obs, state)
            columns["actions"].append(action[0].copy())  # the environment may change it
            obs, reward, terminated, truncated, info = envs.step(action)
            columns["rewards"].append(reward[0])
            done = terminated[0] or truncated[0]
        returns.append(info["run_statistics"]["r"][0])
    np.savez_compressed(file, **columns, episode_returns=returns)
    print(f"{file}: {len(returns)} episodes, return {np.mean(returns):.1f}")


def remembers(agent) -> bool:
    """Does its memory carry a state from step to step?"""
    return agent.initial_state(1).numel() > 0 and not getattr(agent.args, "ablate_memory", False)


def sequences(agent, file: str):
    """An expert's obs (L, S, n), actions (L, S, ...) and final (L, S), which fills up short ones. A
    sequence is an episode, or a single step (L = 1) where the agent has no memory."""
    arrays = np.load(file)
    space = agent.action_space
    obs = torch.from_numpy(arrays["obs"])
    obs = obs if obs.dim() == 4 else obs.float()  # a game's frames are bytes
    actions = torch.from_numpy(arrays["actions"].reshape(len(obs), *space.shape))
    if hasattr(space, "low"):
        actions = actions.flatten(1).float()
    else:
        actions = (actions - torch.as_tensor(space.start)).long()
    if getattr(agent.args, "squash_output", False):
        actions = driver.recipe("squash").before_tanh(actions, space)
    starts = np.flatnonzero(arrays["episode_starts"])
    if not remembers(agent):
        starts = np.arange(len(obs))
    lengths = np.diff([*starts, len(obs)]).tolist()
    padded = [torch.nn.utils.rnn.pad_sequence(x.split(lengths)) for x in (obs, actions)]
    final = torch.arange(max(lengths))[:, None] >= torch.tensor(lengths)
    return *padded, final


def clone(script, agent, args) -> None:
    obs, actions, final = sequences(agent, args.expert)
    if hasattr(agent, "obs_stats"):
        agent.obs_stats.update(obs[~final])
    weights = [p for name, p in agent.named_parameters() if name != "log_std"]
    adam = torch.optim.Adam(weights, args.clone_learning_rate, eps=args.clone_adam_eps)

    def loss(rows):
        x, state, ends = obs[:, rows], agent.initial_state(len(rows)), final[:, rows]
        if script.kind == "trpo":
            policy = agent(agent.normalize(x), state, ends, ~ends)
            return -policy.log_prob(actions[:, rows][~ends]).mean()
        return -agent.evaluate_actions(x, state, ends, actions[:, rows])[0].mean()

    order = torch.randperm(final.shape[1])
    script.check(len(order) > 1, "two episodes or more are needed, since 30 % are held out")
    train, rest = order.tensor_split([int(0.7 * len(order))])
    size = 4 if remembers(agent) else 64  # episodes, or steps, of a minibatch
    for epoch in range(1, args.clone_epochs + 1):
        for rows in train[torch.randperm(len(train))].split(size):
            adam.zero_grad()
            loss(rows).backward()
            adam.step()
        if epoch % args.val_interval == 0 and driver.is_first(script):
            with torch.no_grad():
                losses = f"loss {loss(train):.3f}, on what is held out {loss(rest):.3f}"
            print(f"{args.expert}: epoch {epoch}, {losses}")


def use(script):
    @dataclass
    class Args(script.Args):
        expert: str | None = None  # a file of episodes to imitate before training
        clone_epochs: int = 10  # passes over them
        clone_learning_rate: float = 1e-4  # Adam's, for cloning
        clone_adam_eps: float = 1e-8  # its epsilon
        val_interval: int = 5  # epochs from one printed loss to the next

    class Clone(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            if args.resume or args.play or not args.expert:
                return
            try:
                clone(script, self, args)
            except Exception as error:  # a damaged file can raise anything
                raise script.ArgumentError(f"--expert {args.expert}: {error!r:.150}") from error

    script.Args = Args
    script.Agent = Clone


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        if len(sys.argv) != 4:
            raise ValueError("usage: imitation.py runs/EXPERT expert.npz EPISODES")
        record(sys.argv[1], sys.argv[2], int(sys.argv[3]))
