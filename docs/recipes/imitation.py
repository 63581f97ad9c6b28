"""Imitation: behaviour cloning of an expert's episodes, before a script trains.

    python docs/recipes/record.py runs/EXPERT expert.npz 20  # writes the file
    python docs/recipes/imitation.py ppo1_mpi --expert expert.npz --env-id CartPole-v1
    python docs/recipes/imitation.py rppo_lstm --expert expert.npz --env-id CartPole-v1

Cloning maximises the likelihood of the expert's actions. The standard deviation of real-valued
actions is fixed, so cloning them is least squares. An agent with a memory learns from whole
episodes, one without from single steps; 30 % of either are held out.
"""

from dataclasses import dataclass

import numpy as np
import torch
import use as driver
from squash import before_tanh


def remembers(agent) -> bool:
    """Does it carry a state from step to step?"""
    return bool(driver.memories(agent)) and not getattr(agent.args, "ablate_memory", False)


def sequences(agent, file: str):
    """An expert's obs (L, S, n), actions (L, S, K) and final (L, S), which fills up short ones. A
    sequence is an episode, or a single step (L = 1) where the agent has no memory."""
    arrays = np.load(file)
    space = agent.action_space
    obs = torch.from_numpy(arrays["obs"]).float()
    actions = torch.from_numpy(arrays["actions"] - getattr(space, "start", 0)).reshape(len(obs), -1)
    if getattr(agent.args, "squash_output", False):
        actions = before_tanh(actions, space)
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
        state = agent.initial_state(len(rows))
        inputs = [obs[:, rows], state, final[:, rows]]
        if hasattr(agent, "exists"):
            shape = *inputs[0].shape[:2], *agent.exists.shape
            inputs.insert(1, torch.from_numpy(agent.exists).expand(shape))
        if script.__name__ == "trpo":
            inputs[0] = agent.normalize(inputs[0])
            return -agent(*inputs).log_prob(actions[:, rows][~final[:, rows]]).mean()
        return -agent.evaluate_actions(*inputs, actions[:, rows])[0].mean()

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
    driver.main("imitation", "ppo1_mpi")
