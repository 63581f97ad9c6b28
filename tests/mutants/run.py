"""Tries mutants in a copy of the repository: python tests/mutants/run.py [--new] [SCRIPT ...]

Of all scripts, or of those named; with --new only those that have no row yet. Which test caught
which is written into benchmarks/results/mutants.csv. Exits with 1 if one survives.
"""

import argparse
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.csv"
SECONDS = 900  # a mutant may make a job of several processes hang


def failing(copy: Path, words: list[str]) -> str | None:
    """The name of the first test that fails in the copy, of those that pytest takes the words for;
    None if none does, or none is there."""
    options = ["-x", "-q", "-o", "addopts=", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    file = words[0].removeprefix("tests/")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words], cwd=copy, env=environment,
        timeout=SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    if -done.returncode in (signal.SIGABRT, signal.SIGSEGV):  # torch.lstm reads beyond a state
        return f"{file}: the process dies"
    none_there = done.returncode in (4, 5) and "::" in words[0]
    assert done.returncode in (0, 1) or none_there, done.stdout[-2000:]
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - |$)", done.stdout, re.M)
    return failed[1] if failed else None


def first_failure(copy: Path, file: str, script: str, known: str) -> str | None:
    """The test that caught the mutant before, if it still does, else the first of the file."""
    if known.startswith(f"{file}::") and (by := failing(copy, [f"tests/{known}"])):
        return by
    text = (copy / "tests" / file).read_text()
    own = "having(" not in text and "SCRIPTS" not in text and "RUNS" not in text
    return failing(copy, [f"tests/{file}"] if own else [f"tests/{file}", "-k", script])


def recorded() -> dict[tuple[str, str], str]:
    """By script and mutant, the test that caught it when it was last tried."""
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        return {(row[0], row[1]): row[2] for row in list(csv.reader(file))[1:]}


def main() -> int:
    names = sorted({mutant[0] for mutant in MUTANTS})
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("scripts", nargs="*", help=", ".join(names))
    parser.add_argument("--new", action="store_true", help="only those without a row")
    options = parser.parse_args()
    known = recorded()
    tried = [mutant for mutant in MUTANTS if mutant[0] in (options.scripts or names)]
    if options.new:
        tried = [mutant for mutant in tried if mutant[:2] not in known]
    there = {mutant[:2] for mutant in MUTANTS}
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repo")
        ignored = shutil.ignore_patterns(".git", "runs", "site", "results", "__pycache__", "old")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for script, what, text, bug, file in tried:
            path = copy / f"{script}.py"
            original = path.read_text()
            assert original.count(text) == 1, f"{script}: {what}: not there once: {text}"
            path.write_text(original.replace(text, bug))
            by = first_failure(copy, file, script, known.get((script, what), ""))
            path.write_text(original)
            print(f"{'caught  ' if by else 'SURVIVED'}  {script}: {what}: {by}", flush=True)
            survived += by is None
            known[script, what] = by or "SURVIVED"
            rows = [[*mutant, by] for mutant, by in sorted(known.items()) if mutant in there]
            with open(RESULTS, "w", newline="") as new:
                table = [["script", "mutant", "caught by"], *rows]
                csv.writer(new, lineterminator="\n").writerows(table)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
