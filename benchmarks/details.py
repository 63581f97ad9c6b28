"""What each detail of recurrent PPO is worth: rppo_lstm.py with one of them wrong, trained.

    python benchmarks/details.py                # all that results/details.csv lacks, 5 seeds
    python benchmarks/details.py "no reset" --seeds 1:2

A mistake is a change of the script's text, or that of an exercise, or flags. Each is compared with
the script as it is, with the same other flags, on two tasks: CartPole without velocities, where an
episode may end by its time limit, and POPGym's RepeatPreviousEasy, whose rewards ask for what was
seen three steps before. The runs are short, so that agents still differ at the end. The final agent
plays 100 deterministic episodes. docs/details.md shows the results. A run that has a row is not
trained again: delete the row for that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from learning import RESULTS, ROOT, append, commit, read

sys.path.insert(0, str(ROOT / "docs/exercises"))
import train as exercises  # noqa: E402

TASKS = {
    "cartpole-masked": "--env-id CartPole-v1 --mask-velocity --total-timesteps 50000 "
    "--learning-rate 1e-3",
    "repeat-previous": "--env-id popgym:popgym-RepeatPreviousEasy-v0 --total-timesteps 100000",
}
FIELDS = "task detail seed eval_mean episodes return_100 commit".split()


class Mistake(NamedTuple):
    """Flags, with which the script is compared; changes of its text (old, new), or an exercise's;
    further flags, which are the mistake."""

    flags: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    exercise: str = "unchanged"
    wrong: str = ""


RESET_ON_REPLAY = "        x = torch.where(final.bool().unsqueeze(-1), self.reset, x)\n"
ROLLOUT = "        # Rollout\n"
STORED = "s_state = states.transpose(0, 1).flatten(1, 2)"
FINAL_VALUE = "agent.step(tensor(obs[t]), tensor(legal[t]), state)\n                actions"
ZEROED = "state.where(tensor(~final[t])[:, None], 0.0)"
CUT = """    x = x.unflatten(0, (-1, L))  # (T / L, L, N, ...)
    return x.transpose(0, 1).flatten(1, 2)
"""
UPDATE = "        # Update, in minibatches of whole sequences\n"
STATISTICS = "            agent.obs_stats.update(tensor(obs[:T][valid]))\n"
ORTHOGONAL = """        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
"""

MISTAKES = {
    "nothing": Mistake(),
    "nothing, sequences of 16": Mistake("--seq-len 16"),
    "nothing, observations normalised": Mistake("--norm-obs"),
    "final steps trained on": Mistake(exercise="final_steps"),
    "no reset": Mistake(exercise="carry_state"),
    "no reset on replay": Mistake(changes=((RESET_ON_REPLAY, ""),)),
    "state lost between rollouts": Mistake(
        changes=((ROLLOUT, f"{ROLLOUT}        state = agent.initial_state(N)\n"),)
    ),
    "replay from a zero state": Mistake("--seq-len 16", ((STORED, f"{STORED} * 0"),)),
    "truncation as termination": Mistake(exercise="no_bootstrap"),
    "final value after the reset": Mistake(
        changes=((FINAL_VALUE, FINAL_VALUE.replace("state)\n", f"{ZEROED})\n")),)
    ),
    "steps shuffled": Mistake(exercise="single_steps"),
    "axes mixed up": Mistake(
        changes=((CUT, "    return x.reshape(-1, L, *x.shape[2:]).transpose(0, 1)\n"),)
    ),
    "forget gate half open": Mistake(changes=(("nn.init.ones_(", "nn.init.zeros_("),)),
    "torch's initial weights": Mistake(changes=((ORTHOGONAL, ""),)),
    "rewards not divided": Mistake(wrong="--no-norm-reward"),
    "statistics updated too early": Mistake(
        "--norm-obs",
        ((STATISTICS, "            pass\n"), (UPDATE, STATISTICS[4:] + UPDATE)),
    ),
    "evaluation without state": Mistake(
        changes=(("agent.predict(obs, info, state,", "agent.predict(obs, info, None,"),)
    ),
    "states recomputed": Mistake("--seq-len 16", exercise="recompute"),
    "a critic with its own LSTM": Mistake(wrong="--separate-critic"),
}


def reference(name: str) -> str:
    """What a mistake is compared with: no mistake, with the same flags."""
    same = MISTAKES[name].flags
    return next(x for x in MISTAKES if x.startswith("nothing") and MISTAKES[x].flags == same)


def text(name: str) -> str:
    """The script with the mistake. ValueError if what it changes is not there exactly once."""
    script = exercises.changed(MISTAKES[name].exercise)
    for old, new in MISTAKES[name].changes:
        if script.count(old) != 1:
            raise ValueError(f"{name}: in rppo_lstm.py {script.count(old)} times:\n{old}")
        script = script.replace(old, new)
    return script


def run(name: str, task: str, seed: int) -> dict:
    """Trains and evaluates; a row of details.csv."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "script.py")
        file.write_text(text(name))
        command = [sys.executable, str(file), *TASKS[task].split(), "--seed", str(seed)]
        command += [*MISTAKES[name].flags.split(), *MISTAKES[name].wrong.split()]
        command += ["--eval-episodes", "100", "--runs-dir", folder, "--run-name", "run"]
        subprocess.run(command, check=True, capture_output=True)
        result = json.loads(Path(folder, "run/result.json").read_text())
    row = {"task": task, "detail": name, "seed": str(seed), "commit": commit()}
    row |= {"eval_mean": f"{np.mean(result['evaluation']):.4g}", "episodes": "100"}
    return row | {"return_100": f"{np.mean(result['returns']):.4g}"}


def scores(name: str, task: str, results: Path = RESULTS) -> np.ndarray:
    """The seeds' returns."""
    key = {"task": task, "detail": name}
    found = [row for row in read(results / "details.csv") if key.items() <= row.items()]
    return np.array([float(row["eval_mean"]) for row in found])


def table(names: list[str], results: Path = RESULTS) -> str:
    """Markdown: the script as it is, and with each of these mistakes; returns on both tasks."""
    import plot

    lines = ["| | CartPole | RepeatPrevious |", "|---|---|---|"]
    for name in dict.fromkeys([*map(reference, names), *names]):  # each once
        measured = [scores(name, task, results) for task in TASKS]
        cells = [f"{plot.shown(x)} ({len(x)})" if len(x) else "not measured" for x in measured]
        label = name.replace("nothing", "as it is", 1)
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="MISTAKE", help=", ".join(MISTAKES))
    parser.add_argument("--seeds", type=exercises.seed_range, default=range(1, 6))
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    options = parser.parse_args()
    for name in options.names:
        if name not in MISTAKES:
            parser.error(f"no mistake {name!r}; there are {', '.join(MISTAKES)}")
    path = options.results / "details.csv"
    for seed in options.seeds:
        for name in options.names or MISTAKES:
            for task in TASKS:
                key = {"task": task, "detail": name, "seed": str(seed)}
                if any(key.items() <= row.items() for row in read(path)):
                    continue
                row = run(name, task, seed)
                append(path, FIELDS, [row])
                print(f"{task}, {name}, seed {seed}: {row['eval_mean']}", flush=True)


if __name__ == "__main__":
    main()
