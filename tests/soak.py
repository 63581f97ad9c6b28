"""Hours of bad luck: python tests/soak.py --minutes 120 [--seed 1] [--scripts trpo ...]

Starts short runs of the scripts, one after the other, and does to each what happens to runs: kill
-9, Ctrl-C, a stop and a continuation, a full disk, closed or full streams, a renamed folder, a
damaged file. After each blow the run is continued. What must hold is checked at once, and logged:

    hang        a process that does not end within --patience seconds
    lost        an agent.pt that was good before the blow and cannot be loaded after it
    traceback   one that is neither an injected fault nor an answer to it

Ends with exit code 1 if there is any of them. The same seed draws the same blows.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 600
FLAGS = {
    "rppo_lstm": "--env-id CartPole-v1 --mask-velocity --num-envs 2 --num-steps 32 --hidden-size 8 --num-minibatches 1",
    "rppo_continuous": "--env-id Pendulum-v1 --num-envs 2 --num-steps 32 --hidden-size 8 --num-minibatches 1",
    "rppo_gru_atari": "--env-id ALE/Pong-v5 --num-envs 2 --num-steps 16 --hidden-size 8 --num-minibatches 1 --torch-threads 1",
    "trpo": "--env-id CartPole-v1 --num-envs 2 --num-steps 32 --encoder-size 8",
    "ppo1_mpi": "--env-id CartPole-v1 --num-steps 64 --encoder-size 8",
}
LOAD = (
    "import sys; sys.path.insert(0, sys.argv[1]); import {0}; print({0}.load(sys.argv[2])['step'])"
)


class Soak:
    """A folder with runs, and what has happened in it."""

    def __init__(self, folder: Path, options):
        self.folder = folder
        self.options = options
        self.random = random.Random(options.seed)
        self.counts: Counter = Counter()
        self.faults: list[str] = []

    def log(self, *words) -> None:
        print(f"{time.time() - self.options.began:7.0f} s", *words, flush=True)

    def fault(self, kind: str, script: str, blow: str, detail: str) -> None:
        self.faults.append(f"{kind}: {script}, {blow}: {detail}")
        self.log("FAULT", self.faults[-1])

    def start(self, script: str, flags: str, streams: str = "", limit: int | None = None):
        """Starts a script in a group of its own; its standard error goes to the file err."""

        def prepare():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a soak in the background ignores it
            if limit is not None:  # a full disk: no file may grow beyond so many bytes
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = f"exec {sys.executable} {ROOT}/{script}.py {flags} {streams or '2>err'}"
        return subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=prepare, start_new_session=True,
        )  # fmt: skip

    def end(self, process, script: str, blow: str) -> int | None:
        """Waits for the end; a process that does not end is a fault."""
        try:
            return process.wait(self.options.patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.fault("hang", script, blow, f"after {self.options.patience} s")
            return None

    def good(self, script: str, run: str) -> bool:
        """Whether the run's agent.pt can be loaded."""
        command = [sys.executable, "-c", LOAD.format(script), str(ROOT), run]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        return done.returncode == 0

    def tracebacks(self, script: str, blow: str, allowed: tuple[str, ...] = ()) -> None:
        file = self.folder / "err"
        text = file.read_text(errors="replace") if file.exists() else ""
        if "Traceback" in text and not any(word in text for word in allowed):
            self.fault("traceback", script, blow, text[-600:])

    def strike(self, script: str, blow: str, run: str) -> None:
        """One run, one blow, and its continuation."""
        flags = f"{FLAGS[script]} --eval-episodes 0 --runs-dir . --run-name {run}"
        endless = f"{flags} --total-timesteps 100000000"
        short = f"{flags} --total-timesteps {STEPS}"
        path = self.folder / run
        if blow in ("kill", "interrupt", "stop", "rename"):
            process = self.start(script, endless)
            deadline = time.time() + self.options.patience
            while not (path / "agent.pt").exists() and time.time() < deadline:
                time.sleep(0.05)
            time.sleep(self.random.uniform(0, 3))
            if blow == "stop":
                os.killpg(process.pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(0, 2))
                os.killpg(process.pid, signal.SIGCONT)
                time.sleep(1)
            if blow == "rename":
                path.rename(self.folder / f"{run}-renamed")
                run = f"{run}-renamed"
            number = signal.SIGINT if blow == "interrupt" else signal.SIGKILL
            os.killpg(process.pid, number)
            code = self.end(process, script, blow)
            if blow == "interrupt" and code not in (130, None):
                self.fault("code", script, blow, f"{code}, not 130")
            self.tracebacks(script, blow)
        elif blow == "disk":
            limit = self.random.randrange(1000, 60_000)
            code = self.end(self.start(script, short, limit=limit), script, blow)
            self.tracebacks(script, blow, ("File too large", "iostream error", "unexpected pos"))
            if not (path / "agent.pt").exists():
                return  # the disk was full before the first save: nothing to lose
        elif blow == "stream":
            streams = self.random.choice(["2>&-", "2>err >&-", "2>err >/dev/full", "2>err | true"])
            code = self.end(self.start(script, short, streams), script, blow)
            if code not in (0, None):
                self.fault("code", script, f"{blow} {streams}", str(code))
            self.tracebacks(script, blow)
        elif blow == "damage":
            self.end(self.start(script, short), script, blow)
            file = path / "agent.pt"
            good = file.read_bytes()
            place = self.random.randrange(len(good))
            bad = good[:place] if self.random.random() < 0.5 else bytearray(good)
            if isinstance(bad, bytearray):
                bad[place] ^= 1 << self.random.randrange(8)
            file.write_bytes(bad)
            code = self.end(self.start(script, f"--resume {run}"), script, blow)
            if code not in (0, 2, None):
                self.fault("code", script, blow, f"{code}, not 2")
            self.tracebacks(script, blow)
            file.write_bytes(good)
        if not self.good(script, run):
            self.fault("lost", script, blow, run)
            return
        longer = f"--resume {run} --total-timesteps {2 * STEPS}"
        code = self.end(self.start(script, longer), script, f"{blow}, resumed")
        self.tracebacks(script, f"{blow}, resumed")
        if code not in (0, None):
            self.fault("code", script, f"{blow}, resumed", str(code))

    def soak(self) -> None:
        blows = ["kill", "interrupt", "stop", "rename", "disk", "stream", "damage"]
        number = 0
        while time.time() - self.options.began < 60 * self.options.minutes:
            script = self.options.scripts[number % len(self.options.scripts)]
            blow = self.random.choice(blows)
            number += 1
            self.log(f"{number}: {script}, {blow}")
            self.strike(script, blow, f"run{number}")
            self.counts[blow] += 1
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120, help="seconds until a hang")
    parser.add_argument("--scripts", nargs="+", default=list(FLAGS), choices=list(FLAGS))
    options = parser.parse_args()
    options.began = time.time()
    folder = Path(tempfile.mkdtemp())
    soak = Soak(folder / "soak", options)
    soak.folder.mkdir()
    try:
        soak.soak()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{sum(soak.counts.values())} blows ({dict(soak.counts)}), {len(soak.faults)} faults")
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
