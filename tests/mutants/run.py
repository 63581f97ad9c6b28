"""Tries every mutant in a copy of the repository: python tests/mutants/run.py [SCRIPT]. Exits 1 if one survives."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    wanted = [m for m in MUTANTS if len(sys.argv) < 2 or m[0] == sys.argv[1]]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repo")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "site", "docs", "benchmarks"))
        for script, what, text, bug, file, expression in wanted:
            path = copy / f"{script}.py"
            original = path.read_text()
            assert original.count(text) >= 1, f"{script}: {what}: the text is not there: {text}"
            path.write_text(original.replace(text, bug))
            own = Path(file).stem.removeprefix("test_") in script  # all of that file's tests are of this script
            command = [sys.executable, "-m", "pytest", "-m", "", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", f"tests/{file}", "-k",
                       expression if own else f"({expression}) and {script}"]  # fmt: skip
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
            path.write_text(original)
            caught = done.returncode == 1
            survived += [] if caught else [what]
            print(f"{'caught  ' if caught else 'SURVIVED'}  {script}: {what}", flush=True)
    print(f"{len(wanted) - len(survived)} of {len(wanted)} mutants caught")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
