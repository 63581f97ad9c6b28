"""rppo_lstm.py with one change: that of an exercise, the diff on its page.

    python docs/exercises/run.py gru --env-id CartPole-v1 --mask-velocity  # flags are the script's
    python docs/exercises/run.py gru --seeds 1:3 --env-id ...  # a table: the script, and the change

A run remembers its change: --resume and --play need no name.
"""

import argparse
import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXERCISES = {page.stem.split("_", 1)[1]: page for page in sorted(HERE.glob("[0-9]*.md"))}


def changed(name: str) -> str:
    """The text of rppo_lstm.py after the diff on the page. What a hunk removes or keeps must be in
    the script exactly once, as whole lines. A run's files say which change made them."""
    text = (ROOT / "rppo_lstm.py").read_text()
    if name == "unchanged":
        return text
    diff = EXERCISES[name].read_text().split("```diff\n")[1].split("```")[0]
    for hunk in diff.split("@@")[2::2]:  # @@ where @@, and then the lines
        lines = hunk.split("\n")[1:-1]
        old, new = ("".join(x[1:] + "\n" for x in lines if x[:1] in kept) for kept in (" -", " +"))
        if text.count("\n" + old) != 1:
            raise ValueError(f"{name}: in rppo_lstm.py {text.count(old)} times:\n{old}")
        text = text.replace("\n" + old, "\n" + new)
    return text.replace('SCRIPT = "rppo_lstm"', f'SCRIPT = "rppo_lstm_{name}"')


def load(name: str, folder: str):
    """The changed script as a module, whose file is in the folder."""
    file = Path(folder, f"rppo_lstm_{name}.py")
    file.write_text(changed(name))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def change_of(flags: list[str]) -> str:
    """The change of the run that the flags resume or play."""
    import torch

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume", "--play", dest="run_dir", default="")
    run_dir = parser.parse_known_args(flags)[0].run_dir
    try:
        script = torch.load(Path(run_dir, "agent.pt"), weights_only=True)["script"]
    except Exception:  # the script says what is wrong
        return "unchanged"
    return script.removeprefix("rppo_lstm").removeprefix("_") or "unchanged"


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def compare(name: str, seeds: str, out: Path | None, flags: list[str]) -> None:
    """Trains the script and the changed one with each seed; a line for each, and a row of out,
    where what has a row already is not trained again."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "rppo_lstm.py"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    first, last = map(int, seeds.split(":"))
    for seed in range(first, last + 1):
        for change in dict.fromkeys(["unchanged", name]):
            row = {"task": " ".join(flags), "change": change, "seed": str(seed)}
            if out and any(known.items() >= row.items() for known in read(out)):
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, change, *flags, "--seed", str(seed)]
                command += ["--runs-dir", folder, "--run-name", "run"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                result = json.loads(Path(folder, "run/result.json").read_text())
            evaluation = result["evaluation"]
            row |= {"eval_mean": f"{np.mean(evaluation):.1f}", "episodes": str(len(evaluation))}
            row |= {"return_100": f"{np.mean(result['returns']):.1f}", "commit": commit}
            print(f"seed {seed}, {change}: return {row['eval_mean']}, {result['sps']:.0f} steps a second")
            if out:
                new = not out.exists()
                with open(out, "a", newline="") as file:
                    writer = csv.DictWriter(file, row, lineterminator="\n")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)


def table(name: str) -> str:
    """Markdown, for the page: the rows of results.csv, of the script and of the change."""
    rows = read(HERE / "results.csv")
    of_change = [row for row in rows if row["change"] == name]
    if not of_change:
        return f"Not measured yet: `python docs/exercises/run.py {name} --seeds 1:3`."
    last = of_change[-1]
    seeds = [row["seed"] for row in of_change if row["commit"] == last["commit"]]
    lines = [
        f"| return of {last['episodes']} episodes, and of the last 100 in training | " + " | ".join(f"seed {s}" for s in seeds) + " |",
        "|---" * (len(seeds) + 1) + "|",
    ]
    for change in "unchanged", name:
        found = {
            row["seed"]: f"{row['eval_mean']}, {row['return_100']}" for row in rows
            if (row["change"], row["task"], row["commit"]) == (change, last["task"], last["commit"])
        }  # fmt: skip
        lines.append(" | ".join([f"| {change}", *(found.get(seed, "-") for seed in seeds)]) + " |")
    return "\n".join([*lines, "", f"`{last['task']}`, commit {last['commit']}."])


def main() -> None:
    name, *flags = sys.argv[1:] or ["--help"]
    if name.startswith("-"):
        name, flags = change_of([name, *flags]), [name, *flags]
    if name not in {"unchanged", *EXERCISES}:
        sys.exit(f"error: {name} is not one of unchanged, {', '.join(EXERCISES)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds")
    parser.add_argument("--out", type=Path)
    options, flags = parser.parse_known_args(flags)
    if options.seeds:
        return compare(name, options.seeds, options.out, flags)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = flags
        load(name, folder).main()


if __name__ == "__main__":
    main()
