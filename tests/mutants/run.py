"""Tries every mutant in a copy of the repository: python tests/mutants/run.py [SCRIPT ...]. Exits 1 if one survives.

Each is tried by the tests that mutants.py names for it, in a process forked from this one. What caught which is written into
benchmarks/results/mutants.json, for the scripts that were tried.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SECONDS = 240  # a mutant may make a job of several processes hang, whose tests have time limits of their own


class FirstFailure:
    """A plugin of pytest's that writes down which test failed first."""

    def __init__(self, file):
        self.file = file

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid.removeprefix("tests/"))


def first_failure(copy: Path, file: str, expression: str) -> str | None:
    """The name of the test in the copy that fails first, None if none does."""
    note = copy / "first_failure"
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.chdir(copy)
        for number in 1, 2:
            os.dup2(os.open("/dev/null", os.O_WRONLY), number)
        sys.path.insert(0, str(copy / "tests"))
        flags = ["-m", "", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", f"tests/{file}", "-k", expression]
        os._exit(pytest.main(flags, plugins=[FirstFailure(note)]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), f"pytest ended with {code}: no test of {file} is called {expression}, or the time is up"
    return note.read_text() if code else None


def main() -> int:
    for module in "torch._dynamo", "torch.utils.tensorboard", "gymnasium", "hypothesis", "tyro", "tqdm":
        importlib.import_module(module)
    sys.dont_write_bytecode = True  # two versions of a file within one second would be taken for one
    scripts = sys.argv[1:] or sorted({script for script, *_ in MUTANTS})
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repo")
        ignored = shutil.ignore_patterns(".git", "runs", "site", "docs", "benchmarks", "__pycache__", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for script in scripts:
            caught = {}
            path = copy / f"{script}.py"
            original = path.read_text()
            for _, what, text, bug, file, expression in (m for m in MUTANTS if m[0] == script):
                assert text in original, f"{script}: {what}: the text is not there: {text}"
                path.write_text(original.replace(text, bug))
                # A test file of one script only has no parameter of that name.
                own = Path(file).stem.removeprefix("test_") in (*script.split("_"), "variants")
                caught[what] = first_failure(copy, file, expression if own else f"({expression}) and {script}")
                print(f"{'caught  ' if caught[what] else 'SURVIVED'}  {script}: {what}: {caught[what]}", flush=True)
            path.write_text(original)
            number = sum(map(bool, caught.values()))
            print(f"{script}: {number} of {len(caught)} mutants caught", flush=True)
            survived += len(caught) - number
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results[script] = {"tried": len(caught), "caught": number, "by": caught}
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
