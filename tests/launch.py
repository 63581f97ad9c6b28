"""Runs a script as `python script.py` does, in a process forked from one with torch imported."""

import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["gymnasium", "torch._dynamo", "torch.utils.tensorboard", "tyro"])


def shown(stderr: str) -> list[str]:
    """The lines of standard error, without the progress bars."""
    text = re.sub(r"[^\n\r]*(?:step|episode)/s[^\]\n]*\]", "", stderr).replace("\r", "\n")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def execute(script: str, flags: list[str], cwd: Path, log: Path, env: Mapping, limits: Mapping):
    """In the new process: standard output and error into files, then the script as __main__."""
    os.setsid()  # a group of its own, as a shell's job has
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    multiprocessing.set_start_method(None, force=True)  # the platform's
    os.chdir(cwd)
    os.environ.update(env)
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(script).parent), *filter(None, paths)]
    for number, suffix in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{log}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for what, most in limits.items():
        import resource

        resource.setrlimit(what, (most, most))
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


@dataclass
class Running:
    """A script that has been started; what it has written so far is in stdout and stderr."""

    process: multiprocessing.process.BaseProcess
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -9 after a kill."""
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        return Path(f"{self.log}.out").read_text()

    @property
    def stderr(self) -> str:
        return Path(f"{self.log}.err").read_text()

    @property
    def lines(self) -> list[str]:
        """What stderr shows beside the progress bar."""
        return shown(self.stderr)

    @property
    def children(self) -> list[int]:
        """The processes that it has started: environments."""
        file = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in file.read_text().split()]

    def wait(self, timeout: float = 240) -> "Running":
        self.process.join(timeout)
        assert self.returncode is not None, f"runs after {timeout} s: {self.stderr[-2000:]}"
        return self

    def wait_for(self, file: Path, timeout: float = 240) -> None:
        """Until a file is there; the script must not end before."""
        end = time.time() + timeout
        while not file.exists():
            assert self.returncode is None and time.time() < end, self.stderr[-2000:]
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)


def start(script: str, flags: list[str], cwd: Path, log: Path, env=None, limits=None) -> Running:
    """script is a path; limits are resource.setrlimit's."""
    arguments = script, flags, cwd, log, env or {}, limits or {}
    process = SERVER.Process(target=execute, args=arguments)
    process.start()
    return Running(process, log)
