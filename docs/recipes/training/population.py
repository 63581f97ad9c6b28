"""Several runs at once, which differ in their seeds: how much of a return is luck?

    python docs/recipes/training/population.py 5 rppo_lstm --env-id CartPole-v1 --mask-velocity
    python docs/recipes/training/population.py 5 trpo networks --layers-before 32

The first word is the number of runs; what follows is a script, recipes and flags, as for use.py.
Seeds are 1, 2, 3 and so on, and as many runs train at a time as this process may use cores. A run
that fails, or is killed, is repeated once; if it fails again, its error is printed. Runs are in
RUNS_DIR/population. The recipe evolve trains its generations with this one.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver


def cores() -> int:
    """How many this process may use: Slurm or taskset can allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def why(stderr: str) -> str:
    """The last line that says something; of what tyro refuses, the first within its frame; or none."""
    lines = [line.strip("│╭╮╰╯─ ") for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("to continue:")]
    if "╭" in stderr:
        lines = lines[:2]
    return lines[-1].removeprefix("error: ") if lines else ""


def train(folder: Path, words: list[str]) -> str | None:
    """One run, in this folder; words are use.py's -> None, or why it failed."""
    command = [sys.executable, str(driver.HERE / "use.py"), *words]
    command += ["--runs-dir", str(folder.parent), "--run-name", folder.name]
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
        if done.returncode == 0:
            return None
        if done.returncode == 2:  # a flag that can't be used
            break
    return why(done.stderr) or f"exit code {done.returncode}"


def score(folder: Path) -> float:
    """The mean return of a run's evaluation; -inf where there is none."""
    file = folder / "result.json"
    returns = json.loads(file.read_text())["returns"] if file.exists() else []
    return float(np.mean(returns)) if returns else -np.inf


def train_all(runs: dict[Path, list[str]], processes: int | None = None) -> list[float]:
    """Trains the runs of these folders with these words -> scores. ValueError if none has one."""
    if driver.flag("eval-episodes") == "0":
        raise ValueError("--eval-episodes 0: no return to choose by")
    with ThreadPoolExecutor(processes or cores()) as pool:
        reasons = list(pool.map(train, runs.keys(), runs.values()))
    scores = [score(folder) for folder in runs]
    if max(scores) == -np.inf:
        raise ValueError(f"no run has a return: {reasons[0]}")
    for folder, reason in zip(runs, reasons):
        if reason:
            print(f"{folder} failed: {reason}", file=sys.stderr)
    return scores


def main(number: str = "", *words: str) -> None:
    if not number.isdecimal() or int(number) < 1 or not words:
        raise ValueError("usage: population.py NUMBER SCRIPT [RECIPES] [FLAGS]")
    folder = Path(driver.flag("runs-dir") or "runs", "population").resolve()
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another --runs-dir")
    seeds = range(1, int(number) + 1)
    runs = {folder / str(seed): [*words, "--seed", str(seed)] for seed in seeds}
    for run, mean in zip(runs, train_all(runs)):
        print(f"{run}: return {mean:.5g}")


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        main(*sys.argv[1:])
