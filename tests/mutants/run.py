"""Tries every mutant in a copy of the repository: python tests/mutants/run.py [SCRIPT ...]. Exits 1 if one survives.

Which test caught which is written into benchmarks/results/mutants.csv.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.csv"
SECONDS = 900  # a mutant may make a job of several processes hang


def first_failure(copy: Path, file: str, script: str) -> str | None:
    """The name of the first test of a file that fails in the copy, None if none does."""
    options = ["-x", "-q", "-o", "addopts=", "-m", "not slow", "-p", "no:cacheprovider"]
    text = (copy / "tests" / file).read_text()
    own = "having(" not in text and "SCRIPTS" not in text and "RUNS" not in text
    selection = [] if own else ["-k", script]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"tests/{file}", *selection], cwd=copy,
        env=environment, timeout=SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), f"pytest ended with {done.returncode}: {done.stdout[-2000:]}"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return failed[1] if failed else None


def main() -> int:
    tried = [mutant for mutant in MUTANTS if len(sys.argv) < 2 or mutant[0] in sys.argv[1:]]
    rows, survived = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repo")
        ignored = shutil.ignore_patterns(".git", "runs", "site", "results", "__pycache__", "old")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for script, what, text, bug, file in tried:
            path = copy / f"{script}.py"
            original = path.read_text()
            assert original.count(text) == 1, f"{script}: {what}: not there once: {text}"
            path.write_text(original.replace(text, bug))
            by = first_failure(copy, file, script)
            path.write_text(original)
            print(f"{'caught  ' if by else 'SURVIVED'}  {script}: {what}: {by}", flush=True)
            survived += by is None
            rows.append([script, what, by or "SURVIVED"])
    kept = []
    if RESULTS.exists():
        with open(RESULTS, newline="") as old:
            again = {"script", *(row[0] for row in rows)}
            kept = [row for row in csv.reader(old) if row and row[0] not in again]
    with open(RESULTS, "w", newline="") as new:
        table = [["script", "mutant", "caught by"], *sorted(kept + rows)]
        csv.writer(new, lineterminator="\n").writerows(table)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
