"""What the ranks of tests/test_mpi.py do: updates on made-up rollouts, statistics, a rank out of step."""

import numpy as np
import torch
from gymnasium import spaces

import ppo1_mpi as module

ACTIONS = {False: spaces.Discrete(3), True: spaces.Box(-1, 1, (2,), np.float32)}
CASES = [("none", False), ("none", True), ("lstm", False), ("lstm", True)]


def build(memory="none", action_space=ACTIONS[False], observation_space=spaces.Box(-1, 1, (3,), np.float32)):  # noqa: B008
    torch.manual_seed(3)
    args = module.Args(encoder_sizes=(8,), hidden_size=6, memory=memory)
    agent = module.Agent(observation_space, action_space, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return agent


def make_rollout(rank, memory, box, dtype):
    """12 rows, or sequences of 3 rows, of made-up data: what a rank's minibatch gives to the loss."""
    generator = torch.Generator().manual_seed(rank)
    L, B, K = (3, 4, 2) if memory == "lstm" else (1, 12, 2)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    action = draw(L, B, K) if box else torch.randint(3, (L, B, 1), generator=generator)
    state = draw(4, B, 6) if memory == "lstm" else torch.zeros(0, B, 6, dtype=dtype)
    final = torch.rand(L, B, generator=generator) < 0.2
    final[:, 0] = False
    return [draw(L, B, 3)], state, final, action, draw(L, B) - 2, draw(L, B), draw(L, B)


def loss_of(agent, obs, state, final, action, old_logprob, advantages, returns):
    logprob, entropy, value = agent.evaluate_actions(obs, state, final, action)
    weight = (~final).to(value.dtype)
    policy_loss = module.ppo_loss(logprob, old_logprob, advantages, weight, 0.2)[0]
    value_loss = module.weighted_mean((value - returns) ** 2, weight)
    return policy_loss + value_loss - 0.01 * module.weighted_mean(entropy, weight)


def ranks_update(comm, memory, box, dtype, updates=10):
    """As train does it: this rank's gradient, averaged; the same Adam on each rank -> first mean gradient, weights."""
    agent = build(memory, ACTIONS[box]).to(dtype)
    flat, local = module.flatten_parameters(agent)
    mean = torch.zeros_like(local)
    flat.grad = mean[: len(flat)]
    optimizer = torch.optim.Adam([flat], lr=1e-3, eps=1e-5, fused=True)
    first = None
    for update in range(updates):
        local.zero_()
        loss_of(agent, *make_rollout(100 * update + comm.rank, memory, box, dtype)).backward()
        module.average(comm, local, mean)
        first = mean[: len(flat)].clone() if first is None else first
        optimizer.step()
    module.check_synced(comm, flat)
    return first, flat


def union_update(ranks, memory, box, dtype, updates=10):
    """Plain autograd and Adam on the mean of the ranks' losses, in one process."""
    agent = build(memory, ACTIONS[box]).to(dtype)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    first = None
    for update in range(updates):
        optimizer.zero_grad()
        losses = [loss_of(agent, *make_rollout(100 * update + r, memory, box, dtype)) for r in range(ranks)]
        (sum(losses) / ranks).backward()
        first = torch.cat([p.grad.flatten() for p in agent.parameters()]) if first is None else first
        optimizer.step()
    return first, torch.cat([p.detach().flatten() for p in agent.parameters()])


def out_of_step(comm):
    """What check_synced says where a weight of rank 1 has another sign of zero; a NaN is equal to itself."""
    flat = torch.tensor([1.0, float("nan"), 0.0])
    module.check_synced(comm, flat)
    flat[2] = -0.0 if comm.rank == 1 else 0.0
    try:
        module.check_synced(comm, flat)
    except module.TrainingError as error:
        return str(error)


def statistics(comm):
    """Batches of another size on each rank; and the average of a vector."""
    generator = np.random.default_rng(comm.rank)
    stats, rows = module.MpiRunningMeanStd((3,)), []
    for n in 5, 1 + comm.rank, 70:
        rows.append(torch.from_numpy(generator.normal(50, 3, (n, 3)) * [1, 1e-3, 10]))
        stats.update(rows[-1], comm)
    local = torch.from_numpy(generator.normal(size=1000))
    average = torch.zeros_like(local)
    module.average(comm, local, average)
    return {"rows": torch.cat(rows), "local": local, "average": average, **stats.state_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = module.communicator()
    assert world.size == 3
    results = {"out of step": out_of_step(world)}
    for count in 1, 2, 3:
        comm = world.Split(int(world.rank < count), world.rank)  # the first so many ranks, and the others
        results[f"statistics {count}"] = statistics(comm)
        for memory, box in CASES:
            for dtype in torch.float32, torch.float64:
                results[f"{count} {memory} {box} {dtype}"] = ranks_update(comm, memory, box, dtype)
    torch.save(results, f"rank{world.rank}.pt")
