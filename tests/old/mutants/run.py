"""Tries every mutant in a copy of the repository: python tests/mutants/run.py [SCRIPT ...]. Exits 1 if one survives.

Each is tried by the tests that mutants.py names for it, in a process forked from this one. Which test caught which is written
into benchmarks/results/mutants.json.
"""

import fcntl
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

ROOT = Path(__file__).resolve().parent.parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SECONDS = 900  # a mutant may make a job of several processes hang, whose tests have time limits of their own


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
    tried = [mutant for mutant in MUTANTS if len(sys.argv) < 2 or mutant[0] in sys.argv[1:]]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "repo")
        ignored = shutil.ignore_patterns(".git", "runs", "site", "docs", "benchmarks", "__pycache__", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for script, what, text, bug, file, expression in tried:
            path = copy / f"{script}.py"
            original = path.read_text()
            assert text in original, f"{script}: {what}: the text is not there: {text}"
            path.write_text(original.replace(text, bug))
            # A test file of one script only has no parameter of that name.
            own = Path(file).stem.removeprefix("test_") in (*script.split("_"), "variants")
            by = first_failure(copy, file, expression if own else f"({expression}) and {script}")
            path.write_text(original)
            print(f"{'caught  ' if by else 'SURVIVED'}  {script}: {what}: {by}", flush=True)
            survived += by is None
            with open(RESULTS, "a+") as results:  # which runs of other scripts may write, too
                fcntl.flock(results, fcntl.LOCK_EX)
                results.seek(0)
                caught_by = json.loads(results.read() or "{}")
                caught_by.setdefault(script, {})[what] = by
                results.truncate(0)
                results.write(json.dumps(caught_by, indent=1, sort_keys=True) + "\n")
    print(f"{len(tried) - survived} of {len(tried)} mutants caught")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
