"""Fixtures that build the same weights, rollouts and batches for every script. A new script joins by one line here."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import launch
import numpy as np
import pytest
import torch
from gymnasium import spaces

ROOT = Path(__file__).resolve().parent.parent.parent
# A script joins the suite by its name here: the tests that its functions allow then run over it.
SCRIPTS = ["rppo_continuous", "rppo_gru_atari", "ppo1_mpi", "trpo"]
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
torch.set_num_threads(1)


def load_script(name: str) -> ModuleType:
    """Imports a script from its file, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


MODULES = {name: load_script(name) for name in SCRIPTS}


def having(*names: str) -> list[str]:
    """The scripts that define all of the given names: what a contract about them is parametrised over."""
    return [script for script, module in MODULES.items() if all(hasattr(module, name) for name in names)]


@pytest.fixture
def start_script(tmp_path, tmp_path_factory):
    """Starts a script as a user does, in an empty folder; what still runs when the test ends is killed."""
    logs, running = tmp_path_factory.mktemp("logs"), []

    def start(script: str, *flags, cwd: Path = tmp_path, env=None, limits=None) -> launch.Running:
        log = logs / str(len(running))
        running.append(launch.start(str(ROOT / f"{script}.py"), [*map(str, flags)], cwd, log, env, limits))
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


def act(agent, obs, state):
    """agent.act with the log-probability, which rppo_continuous.py computes once a rollout."""
    action, logprob, value, state = agent.act(obs, state)
    if isinstance(logprob, tuple):
        logprob = MODULES["rppo_continuous"].gaussian_log_prob(action, *logprob, agent.args.squash_output)
    return action, logprob, value, state


def awkward_ends(T: int = 24, N: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """terminated (T, N), truncated (T, N) and final (T + 1, N) of a rollout with every awkward row.

    Environment 0: no end at all. 1: the first row is final, and so is row T, the next rollout's first. 2: the last row
    is final. 3: both flags in one row. 4: episodes of one step, one after the other. 5: as 1, by termination. All but 0
    end at once in row T // 2. final[t + 1] = terminated[t] | truncated[t], a final row ends nothing itself, and
    final[T] = final[0], so that the rollout can follow itself.
    """
    terminated, truncated = torch.zeros(2, T, N, dtype=torch.bool)
    final = torch.zeros(T + 1, N, dtype=torch.bool)
    final[0, 1] = final[0, 5] = True
    terminated[5, 1] = truncated[T - 1, 1] = True
    truncated[T - 2, 2] = True  # so that row T - 1 is final
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


OBSERVATION_SPACES = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "float64 matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "discrete": spaces.Discrete(5, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(4),
    "image HWC": spaces.Box(0, 255, (40, 44, 3), np.uint8),
    "image CHW": spaces.Box(0, 255, (1, 36, 36), np.uint8),
    "small bytes": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "dict": spaces.Dict(
        image=spaces.Box(0, 255, (36, 36, 3), np.uint8), place=spaces.Discrete(3), speed=spaces.Box(-1, 1, (2,))
    ),
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Dict(a=spaces.Box(-1, 1, (1,)), b=spaces.Discrete(2)))),
}
DISCRETE_ACTIONS = {
    "discrete": spaces.Discrete(3),
    "discrete from -1": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "multibinary": spaces.MultiBinary(3),
}
CONTINUOUS_ACTIONS = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "one": spaces.Box(-2, 2, (1,), np.float32),
    "matrix, float64": spaces.Box(np.array([[-1, 0], [2, -3]]), np.array([[1, 5], [4, -2]]), (2, 2), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float32),
}
