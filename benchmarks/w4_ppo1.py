"""W4: training speed of ppo1_mpi.py a rank, beside a loop written after Spinning Up's PPO, in turn, in one run;
and a minibatch's time split into compute and allreduce, with what an allreduce costs by its size.

    python benchmarks/w4_ppo1.py                # needs the extra `mpi`; several minutes, on two free cores
    python benchmarks/w4_ppo1.py --sections speed --repeats 3

Sections. `speed`: CartPole-v1, ppo1_mpi.py with its defaults on 1 and on 2 ranks (weak scaling: each rank has its own
256 rows), and the reference, which has Spinning Up's work (4000 steps an epoch divided among the ranks, 80 + 80
full-batch passes, early stopping, an allreduce a parameter) and is not its code: that asks for versions of gym and
torch which no longer install. `split`: the minibatch of 64 rows on 1, 2, 4 and 8 ranks; more ranks than cores take
turns, so there the time in allreduce is mostly that of waiting for the others. `bytes`: one allreduce of 2 ranks
by size, and the latency and bandwidth that a line through the times has.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


@dataclass
class Options:
    repeats: int = 3  # of each system, in turn
    sections: tuple[str, ...] = ("speed", "split", "bytes")  # which of them
    steps: int = 12_000  # environment steps of a rank in a repeat
    out: str | None = None  # file for the figures (JSON)
    role: str = ""  # what a rank that this script starts itself has to do


def mpiexec(ranks: int, *words) -> str:
    done = subprocess.run([MPIEXEC, "-n", str(ranks), sys.executable, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def ours(ranks: int, steps: int) -> float:
    """SPS of all ranks together."""
    with tempfile.TemporaryDirectory() as folder:
        mpiexec(ranks, ROOT / "ppo1_mpi.py", "--env-id", "CartPole-v1", "--preset", "none", "--total-timesteps", ranks * steps,
                "--checkpoint-every", 10**6, "--runs-dir", folder, "--run-name", "w4")  # fmt: skip
        return json.loads(Path(folder, "w4", "result.json").read_text())["sps"]


def reference(steps: int, local: int = 4000) -> None:
    """A loop after Spinning Up's ppo.py: prints the SPS of all ranks without the first epoch."""
    import gymnasium as gym
    from mpi4py import MPI
    from torch.distributions import Categorical

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    torch.manual_seed(10_000 * comm.rank)
    local, env, gamma, lam = local // comm.size, gym.make("CartPole-v1"), 0.99, 0.97

    def mlp(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    pi, v = mlp(2), mlp(1)
    for p in [*pi.parameters(), *v.parameters()]:
        comm.Bcast(p.data.numpy())
    pi_optimizer, v_optimizer = torch.optim.Adam(pi.parameters(), 3e-4), torch.optim.Adam(v.parameters(), 1e-3)

    def average_gradients(module: nn.Module) -> None:
        for p in module.parameters() if comm.size > 1 else ():
            total = p.grad.numpy().copy()
            comm.Allreduce(p.grad.numpy(), total)
            p.grad.numpy()[:] = total / comm.size

    obs, epochs = env.reset(seed=10_000 * comm.rank)[0], max(2, 1 + steps // local)
    for epoch in range(epochs):
        if epoch == 1:
            comm.Barrier()
            started = time.perf_counter()
        rows, paths, start = [], [], 0
        for t in range(local):
            with torch.no_grad():
                x = torch.as_tensor(obs, dtype=torch.float32)
                policy = Categorical(logits=pi(x))
                a = policy.sample()
                logp, value = policy.log_prob(a), v(x).squeeze(-1)
            new, reward, terminated, truncated, _ = env.step(a.numpy())
            rows.append((obs, a.numpy(), reward, value.numpy(), logp.numpy()))
            obs = new
            if terminated or truncated or t == local - 1:
                last = 0.0 if terminated else v(torch.as_tensor(obs, dtype=torch.float32)).item()
                paths.append((slice(start, t + 1), last))
                obs, start = env.reset()[0], t + 1
        data = [np.array(x, np.float32) for x in zip(*rows)]
        advantages, returns = np.zeros(local, np.float32), np.zeros(local, np.float32)
        for path, last in paths:
            rewards, values = np.append(data[2][path], last), np.append(data[3][path], last)
            deltas, a_t, r_t = rewards[:-1] + gamma * values[1:] - values[:-1], 0.0, last
            for i in reversed(range(len(deltas))):
                a_t, r_t = deltas[i] + gamma * lam * a_t, rewards[i] + gamma * r_t
                advantages[path.start + i], returns[path.start + i] = a_t, r_t
        total = comm.allreduce(np.array([advantages.sum(), (advantages**2).sum()]))
        mean = total[0] / (local * comm.size)
        advantages = (advantages - mean) / np.sqrt(total[1] / (local * comm.size) - mean**2)
        o, action, adv, ret, old = (torch.from_numpy(x) for x in (data[0], data[1], advantages, returns, data[4]))
        for _ in range(80):
            pi_optimizer.zero_grad()
            logp = Categorical(logits=pi(o)).log_prob(action)
            ratio = (logp - old).exp()
            loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            if comm.allreduce((old - logp).mean().item()) / comm.size > 1.5 * 0.01:
                break
            loss.backward()
            average_gradients(pi)
            pi_optimizer.step()
        for _ in range(80):
            v_optimizer.zero_grad()
            ((v(o).squeeze(-1) - ret) ** 2).mean().backward()
            average_gradients(v)
            v_optimizer.step()
    comm.Barrier()
    if comm.rank == 0:
        print((epochs - 1) * local * comm.size / (time.perf_counter() - started))


def split(minibatches: int = 400) -> None:
    """One rank's share of minibatches of 64 rows: prints ms of compute, of allreduce, and of both."""
    import gymnasium as gym

    import ppo1_mpi as module

    comm = module.communicator()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    env = gym.make("CartPole-v1")
    agent = module.Agent(env.observation_space, env.action_space, module.Args())
    flat, local = module.flatten_parameters(agent)
    mean = torch.zeros_like(local)
    flat.grad = mean[: len(flat)]
    optimizer = torch.optim.Adam([flat], lr=1e-3, eps=1e-5, fused=True)
    obs, action, state = [torch.randn(1, 64, 4)], torch.randint(2, (1, 64, 1)), agent.initial_state(64)
    final, weight, returns = torch.zeros(1, 64, dtype=torch.bool), torch.ones(1, 64), torch.randn(1, 64)
    with torch.no_grad():
        old = agent.evaluate_actions(obs, state, final, action)[0]
    compute, reduce = [], []
    for _ in range(minibatches):
        started = time.perf_counter()
        logprob, entropy, value = agent.evaluate_actions(obs, state, final, action)
        loss = module.ppo_loss(logprob, old, returns, weight, 0.2)[0]
        loss = loss + module.weighted_mean((value - returns) ** 2, weight)
        local.zero_()
        (loss - 0.01 * module.weighted_mean(entropy, weight)).backward()
        done = time.perf_counter()
        module.average(comm, local, mean)
        reduced = time.perf_counter()
        optimizer.step()
        compute.append(done - started + time.perf_counter() - reduced)
        reduce.append(reduced - done)
    gathered = comm.allgather((statistics.median(compute), statistics.median(reduce), sum(compute) + sum(reduce)))
    if comm.rank == 0:
        medians = [1e3 * statistics.mean(x[i] for x in gathered) for i in (0, 1)]
        print(json.dumps({"compute_ms": medians[0], "allreduce_ms": medians[1],
                          "mean_minibatch_ms": 1e3 * gathered[0][2] / minibatches, "bytes": 4 * len(local)}))  # fmt: skip


def sizes(repeats: int = 300) -> None:
    """Prints the microseconds of one allreduce by its bytes: medians."""
    import ppo1_mpi as module

    comm, figures = module.communicator(), {}
    for count in 2, 256, 2_048, 9_160, 65_536, 262_144, 1_048_576:
        local, total, times = np.ones(count, np.float32), np.ones(count, np.float32), []
        for _ in range(repeats if count < 10**5 else 60):
            comm.Barrier()
            started = time.perf_counter()
            comm.Allreduce(local, total)
            times.append(time.perf_counter() - started)
        figures[4 * count] = 1e6 * statistics.median(times)
    if comm.rank == 0:
        print(json.dumps(figures))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.role:
        {"reference": lambda: reference(options.steps), "split": split, "bytes": sizes}[options.role]()
        return
    from learning import machine

    def again(ranks: int, role: str) -> str:
        return mpiexec(ranks, __file__, "--role", role, "--steps", options.steps)

    figures: dict = {"machine": machine(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if "speed" in options.sections:
        runs: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for ranks in 1, 2:
                runs.setdefault(f"ours, {ranks} ranks", []).append(ours(ranks, options.steps))
                runs.setdefault(f"reference, {ranks} ranks", []).append(float(again(ranks, "reference")))
        medians = {name: statistics.median(x) for name, x in runs.items()}
        figures["speed"] = {"median_sps": medians, "runs": runs}
        for name, sps in medians.items():
            print(f"{name:20} {sps:8,.0f} SPS   {[round(x) for x in runs[name]]}")
        for ranks in 1, 2:
            print(f"{medians[f'ours, {ranks} ranks'] / medians[f'reference, {ranks} ranks']:.2f} x the reference on {ranks}")
        print(f"weak scaling 2 ranks / 1 rank: {medians['ours, 2 ranks'] / medians['ours, 1 ranks']:.2f}")
    if "split" in options.sections:
        figures["split"] = {ranks: json.loads(again(ranks, "split")) for ranks in (1, 2, 4, 8)}
        for ranks, x in figures["split"].items():
            print(f"{ranks} ranks: compute {x['compute_ms']:.3f} ms, allreduce {x['allreduce_ms']:.3f} ms of {x['bytes']} bytes")
    if "bytes" in options.sections:
        figures["bytes"] = {int(size): us for size, us in json.loads(again(2, "bytes")).items()}
        slope, latency = np.polyfit(list(figures["bytes"]), list(figures["bytes"].values()), 1)
        print("allreduce of 2 ranks, us by bytes:", {size: round(us, 1) for size, us in figures["bytes"].items()})
        print(f"a line through them: {latency:.1f} us + bytes / {1e-3 / slope:.2f} GB/s")
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
