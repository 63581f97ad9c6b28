"""What all tests share: the scripts as modules, awkward ends of episodes, scripts as processes."""

import importlib
import os
import sys
from pathlib import Path

import launch
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# A script joins the suite by its name here: the contracts that its functions allow run over it.
SCRIPTS = ["rppo_lstm"]

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
torch.set_num_threads(1)
sys.path.insert(0, str(ROOT))
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}


def having(*names: str) -> list[str]:
    """The scripts that define all of the names: what a contract about them runs over."""
    return [script for script in SCRIPTS if all(hasattr(MODULES[script], name) for name in names)]


@pytest.fixture
def start_script(tmp_path, tmp_path_factory):
    """Starts a script as a user does, in an empty folder; what still runs afterwards is killed."""
    logs, running = tmp_path_factory.mktemp("logs"), []

    def start(script: str, *flags, cwd: Path = tmp_path, env=None, limits=None) -> launch.Running:
        path, log = str(ROOT / f"{script}.py"), logs / str(len(running))
        running.append(launch.start(path, [*map(str, flags)], cwd, log, env, limits))
        return running[-1]

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            process.wait()


@pytest.fixture
def run_script(start_script):
    """Runs a script to its end, which must be with the exit code `check`; returns the process."""

    def run(script: str, *flags, check: int = 0, timeout: float = 240, **options) -> launch.Running:
        done = start_script(script, *flags, **options).wait(timeout)
        assert done.returncode == check, done.stdout + done.stderr
        return done

    return run


def awkward_ends(T: int = 24, N: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """terminated (T, N), truncated (T, N) and final (T + 1, N) of a rollout with every awkward end.

    Environment 0: no end at all. 1: the first step is final, and so is step T, the next rollout's
    first. 2: the last step is final. 3: both flags in one step. 4: episodes of one step, one after
    the other. 5: as 1, by termination. All but 0 end at once in step T // 2.
    final[t + 1] = terminated[t] | truncated[t], a final step ends nothing itself, and
    final[T] = final[0], so that the rollout can follow itself.
    """
    terminated, truncated = torch.zeros(2, T, N, dtype=torch.bool)
    final = torch.zeros(T + 1, N, dtype=torch.bool)
    final[0, 1] = final[0, 5] = True
    terminated[5, 1] = truncated[T - 1, 1] = True
    truncated[T - 2, 2] = True  # so that step T - 1 is final
    terminated[7, 3] = truncated[7, 3] = True
    terminated[1:9:2, 4] = True
    truncated[T // 2, 1:] = True
    terminated[T - 1, 5] = True
    for t in range(T):
        terminated[t] &= ~final[t]
        truncated[t] &= ~final[t]
        final[t + 1] = terminated[t] | truncated[t]
    assert torch.equal(final[T], final[0])
    return terminated, truncated, final
