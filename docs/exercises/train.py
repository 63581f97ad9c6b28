"""rppo_lstm.py with one change: that of an exercise, the diff on its page.

    python docs/exercises/train.py gru --env-id CartPole-v1 --mask-velocity  # flags are the script's
    python docs/exercises/train.py gru --seeds 1:3 --env-id ...  # the script, and the change
    python docs/exercises/train.py all --seeds 1:3 --eval-episodes 20 --out FILE  # all of them

--out FILE adds rows to a CSV file (the pages show benchmarks/results/exercises.csv); what has a row
there is not trained again: delete it for that. With --seeds the runs themselves are not kept.
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
RESULTS = ROOT / "benchmarks/results/exercises.csv"
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


def compare(name: str, seed: int, out: Path | None, flags: list[str]) -> None:
    """Trains the script and the changed one; a line for each, and a row of out."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "rppo_lstm.py"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    for change in dict.fromkeys(["unchanged", name]):
        row = {"task": " ".join(flags), "change": change, "seed": str(seed)}
        if out and any(known.items() >= row.items() for known in read(out)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, change, *flags, "--seed", str(seed)]
            command += ["--runs-dir", folder, "--run-name", "run"]
            code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            if code:
                sys.exit(code)
            result = json.loads(Path(folder, "run/result.json").read_text())
        evaluation = result["evaluation"]
        row |= {"eval_mean": f"{np.mean(evaluation):.1f}", "episodes": str(len(evaluation))}
        row |= {"return_100": f"{np.mean(result['returns']):.1f}", "commit": commit}
        returns = f"return {row['eval_mean']}, of the last 100 in training {row['return_100']}"
        print(f"seed {seed}, {change}: {returns}, {result['sps']:.0f} steps a second", flush=True)
        if out:
            new = not out.exists()
            with open(out, "a", newline="") as file:
                writer = csv.DictWriter(file, row, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)


def seed_range(text: str) -> range:
    """first:last, or one seed."""
    first, _, last = text.partition(":")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seed")
    return seeds


def flags_of(name: str) -> list[str]:
    """Of the command on the page, those of the script."""
    return EXERCISES[name].read_text().split("--seeds 1:3 ")[1].split("\n")[0].split()


def table(name: str) -> str:
    """Markdown, for the page: the rows of exercises.csv, of the script and of the change."""
    rows = read(RESULTS)
    of_change = [row for row in rows if row["change"] == name]
    if not of_change:
        return f"Not measured yet: `python docs/exercises/train.py {name} --seeds 1:3`."
    task, episodes = of_change[-1]["task"], of_change[-1]["episodes"]
    rows = [row for row in rows if row["task"] == task]
    seeds = [row["seed"] for row in of_change if row["task"] == task]
    lines = [
        f"| return of {episodes} episodes, and of the last 100 in training | "
        + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---" * (len(seeds) + 1) + "|",
    ]  # fmt: skip
    for change in "unchanged", name:
        found = {row["seed"]: row for row in rows if row["change"] == change}
        cells = [
            "{eval_mean}, {return_100}".format(**found[s]) if s in found else "-" for s in seeds
        ]
        lines.append(f"| {' | '.join([change, *cells])} |")
    commits = dict.fromkeys(row["commit"] for row in rows if row["change"] in ("unchanged", name))
    return "\n".join([*lines, "", f"`{task}`, commit {', '.join(commits)}."])


def main() -> None:
    name, *flags = sys.argv[1:] or ["nothing"]
    if name.startswith("-"):
        name, flags = change_of([name, *flags]), [name, *flags]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", type=seed_range)
    parser.add_argument("--out", type=Path)
    options, flags = parser.parse_known_args(flags)
    if name not in {"unchanged", *EXERCISES, *(["all"] if options.seeds else [])}:
        print(f"error: {name} is not one of unchanged, {', '.join(EXERCISES)}", file=sys.stderr)
        sys.exit(2)
    if options.seeds:
        for seed in options.seeds:
            for x in EXERCISES if name == "all" else [name]:
                compare(x, seed, options.out, [*(flags_of(x) if name == "all" else []), *flags])
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = flags
        load(name, folder).main()


if __name__ == "__main__":
    main()
