"""What can be read from the memories of agents: before, during and after training, and without one.

    python benchmarks/memory_look.py benchmarks/results/memory-look.csv runs/memory-look

The runs stay in the second folder; one that is complete there is not trained again. It takes a few
minutes on one core.

Trains masked CartPole with three seeds, with memory and with --ablate-memory, and POPGym's
RepeatPreviousEasy with one. Networks of one seed are compared on the same episodes, those of the
trained agent: what docs/recipes/look_inside.py reads from h is then a property of the network
alone. docs/tools/drawings.py draws the result, and docs/concepts/look-inside.md shows it.

Columns: task, agent, seed, steps it was trained for, what was read, at (steps back, or the time
step of a held-out episode), value (R^2, the share of right guesses, a velocity, or a return).
"""

import csv
import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs/recipes")]
import look_inside  # noqa: E402
import use as driver  # noqa: E402

RESULTS = ROOT / "benchmarks/results/memory-look.csv"
COLUMNS = "task", "agent", "seed", "steps", "what", "at", "value"
SEEDS = 1, 2, 3  # of masked CartPole
EVERY = 10_000  # steps from one checkpoint to the next
CARTPOLE = {  # written out, so that presets may change
    "env_id": "CartPole-v1", "mask_velocity": True, "total_timesteps": 100_000, "num_steps": 256,
    "update_epochs": 10, "gamma": 0.995,
}  # fmt: skip
REPEAT = {"env_id": "popgym:popgym-RepeatPreviousEasy-v0", "total_timesteps": 500_000}
REPEAT_CONTROL = 100_000  # steps: without a memory there is little to learn
SHOWN = 150  # steps of a held-out episode that go into the file
RIDGES = {"R^2": 0.01, "R^2, weak traces too": 1e-6}


def train(folder: str, name: str, every: int, **flags) -> Path:
    """The directory of a run that has a checkpoint after every so many steps."""
    run_dir = Path(folder, name)
    if (run_dir / "result.json").exists():
        return run_dir
    shutil.rmtree(run_dir, ignore_errors=True)  # one that was interrupted
    script = driver.fresh("rppo_lstm", "callbacks")
    script.train(script.Args(
        runs_dir=folder, run_name=name, checkpoint_every=every, csv=True, quiet=True, **flags
    ))  # fmt: skip
    return run_dir


def untrained(run_dir):
    """The agent with which a run began."""
    script, args, envs, *_ = driver.open_run(run_dir)
    script.seed_everything(args.seed)  # as train does
    return script.Agent(envs, args).eval()


def checkpoints(run_dir) -> dict:
    """The agents of a run by the steps that they had been trained for, the first and the last included."""
    agents = {0: untrained(run_dir)}
    for steps in sorted(int(path.name) for path in Path(run_dir, "checkpoints").iterdir()):
        agents[steps] = driver.open_run(Path(run_dir, "checkpoints", str(steps)))[3]
    last = driver.open_run(run_dir)
    agents[last[-1]["step"]] = last[3]
    return agents


def returns(run_dir) -> dict[int, float]:
    """The mean return of the last 100 episodes at each step of the log."""
    with open(Path(run_dir, "progress.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["charts/episodic_return"]]
    return {int(row["step"]): float(row["charts/episodic_return"]) for row in rows}


def cartpole(folder: str, seed: int, every: int = EVERY, **changes) -> list[tuple]:
    """Rows of masked CartPole: R^2 of both velocities, read from each network on the same episodes."""
    flags = {**CARTPOLE, **changes, "seed": seed}
    run_dir = train(folder, f"lstm {seed}", every, **flags)
    control = train(folder, f"control {seed}", 0, **flags, ablate_memory=True)
    script, args, _, agent, saved = driver.open_run(run_dir)
    obs, actions, steps = look_inside.play(script, args, agent)
    hidden = look_inside.velocities(script, args, actions)
    networks = [("lstm", n, network) for n, network in checkpoints(run_dir).items()]
    networks.append(("memoryless", saved["step"], driver.open_run(control)[3]))
    shown = np.flatnonzero(steps[:SHOWN, -1]) if seed == SEEDS[0] else []
    rows = []
    for velocity, y in hidden.items():
        for t in shown:
            rows.append(("cartpole", "true", seed, "", velocity, t, f"{y[t, -1, 0]:.4f}"))
    for name, n, network in networks:
        h = look_inside.remember(network, obs)
        for velocity, y in hidden.items():
            for what, ridge in RIDGES.items():
                _, r2 = look_inside.decode(h, y, steps, ridge=ridge)
                rows.append(("cartpole", name, seed, n, f"{what}, {velocity}", "", f"{r2:.4f}"))
            guess, _ = look_inside.decode(h, y, steps)
            if n == saved["step"]:  # both trained agents
                for t in shown:
                    row = "cartpole", name, seed, n, f"{velocity}, read", t
                    rows.append((*row, f"{guess[t, -1, 0]:.4f}"))
    for name, folder_of in ("lstm", run_dir), ("memoryless", control):
        for n, mean in returns(folder_of).items():
            rows.append(("cartpole", name, seed, n, "return", "", f"{mean:.1f}"))
    return rows


def repeat(
    folder: str, seed: int = 1, control_steps: int = REPEAT_CONTROL, **changes
) -> list[tuple]:
    """Rows of RepeatPreviousEasy: how well the suit that was shown k steps before can be read."""
    flags = {**REPEAT, **changes, "seed": seed}
    run_dir = train(folder, f"repeat {seed}", 0, **flags)
    without = {"ablate_memory": True, "total_timesteps": control_steps}
    control = train(folder, f"repeat control {seed}", 0, **{**flags, **without})
    script, args, _, agent, saved = driver.open_run(run_dir)
    obs, _, steps = look_inside.play(script, args, agent)
    held_out = steps & (np.arange(steps.shape[1]) >= steps.shape[1] // 2)
    networks = [
        ("lstm", 0, untrained(run_dir)),
        ("lstm", saved["step"], agent),
        ("memoryless", control_steps, driver.open_run(control)[3]),
    ]
    rows = []
    for name, trained_for, network in networks:
        h = look_inside.remember(network, obs)
        for k in range(look_inside.BACK):
            guess, r2 = look_inside.decode(h, obs, steps, k)
            right = guess.argmax(-1) == obs[: len(obs) - k].argmax(-1)
            share = right[held_out[k:]].mean()
            rows.append(("repeat", name, seed, trained_for, "R^2", k, f"{r2:.4f}"))
            rows.append(("repeat", name, seed, trained_for, "share right", k, f"{share:.4f}"))
    return rows


def main(out: str, folder: str) -> None:
    rows = [row for seed in SEEDS for row in cartpole(folder, seed)]
    rows += repeat(folder)
    with open(out, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python benchmarks/memory_look.py OUT.csv RUNS")
    main(*sys.argv[1:])
