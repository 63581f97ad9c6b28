"""What all tests share: scripts as modules and as processes, awkward ends, toy environments."""

import copy
import importlib
import os
import sys
from pathlib import Path

import gymnasium as gym
import launch
import numpy as np
import pytest
import torch
from gymnasium import spaces
from watching import watch  # noqa: F401, a fixture

ROOT = Path(__file__).resolve().parent.parent
# A script joins the suite by its name here: the contracts that its functions allow run over it.
SCRIPTS = ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"]

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
torch.set_num_threads(1)
sys.path.insert(0, str(ROOT))
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}


def pytest_addoption(parser):
    parser.addoption("--dry", action="store_true", help="tests of a GPU (-m cuda) run on the CPU")
    parser.addoption(
        "--missing",
        action="store_true",
        help="only the tests that the last session skipped for want of a package",
    )


def pytest_terminal_summary(terminalreporter, config):
    """Remembers which tests, or whole files, were skipped because a package is not there."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not config.getoption("missing") and hasattr(config, "cache"):  # -p no:cacheprovider
        names = [report.nodeid for report in skipped if "could not import" in str(report.longrepr)]
        config.cache.set("missing", names)


def pytest_collection_modifyitems(config, items):
    if config.getoption("missing"):
        names = config.cache.get("missing", [])
        items[:] = [
            item for item in items if item.nodeid in names or item.nodeid.split("::")[0] in names
        ]


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


class Toy(gym.Env):
    """Random observations and rewards. Episodes have `length` steps or, if it is 0, end at random.

    masks: "always" sends an action_mask at every step, "step" never at a reset, "sometimes" at half
    of the steps. A mask allows one choice of each component at least, but none at an episode's
    last step. An illegal action is an error.
    """

    def __init__(self, length=0, reward=None, masks="", **given_spaces):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(3)
        for name, space in copy.deepcopy(given_spaces).items():
            setattr(self, name, space)
        self.length, self.reward, self.masks = length, reward, masks

    def info(self, sends: bool, ended: bool) -> dict:
        self.legal = None
        if not sends or self.masks == "sometimes" and self.np_random.random() < 0.5:
            return {}
        single = isinstance(self.action_space, spaces.Discrete)
        choices = [self.action_space.n] if single else self.action_space.nvec
        self.legal = [self.np_random.random(n) < 0.4 for n in choices]
        for mask in self.legal:
            mask[self.np_random.integers(len(mask))] = True
            mask[:] &= not ended
        masks = tuple(mask.astype(np.int8) for mask in self.legal)
        return {"action_mask": masks[0] if single else masks}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        sends = self.masks in ("always", "sometimes")
        return self.observation_space.sample(), self.info(sends, False)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.legal is not None:
            chosen = np.atleast_1d(action - getattr(self.action_space, "start", 0))
            assert all(mask[c] for mask, c in zip(self.legal, chosen)), f"{action} is illegal"
        self.steps += 1
        terminated, truncated = self.np_random.random(2) < (0.0 if self.length else 0.2)
        truncated |= self.steps == self.length
        reward = self.np_random.normal() if self.reward is None else self.reward
        info = self.info(bool(self.masks), terminated or truncated)
        return self.observation_space.sample(), reward, bool(terminated), bool(truncated), info


def toy(**kwargs) -> str:
    """The id of a newly registered Toy."""
    env_id = f"Toy{sum(name.startswith('Toy') for name in gym.registry)}-v0"
    gym.register(env_id, Toy, kwargs=kwargs, disable_env_checker=True)
    return env_id


# The scripts whose only actions are choices. trpo and ppo1_mpi have Box actions, too, and tests of their own.
CATEGORICAL = [s for s in having("Agent", "num_choices") if not hasattr(MODULES[s].Agent, "act")]


def toy_for(script: str) -> str:
    """A Toy with actions that the script has."""
    box = (
        {} if hasattr(MODULES[script], "num_choices") else {"action_space": spaces.Box(-1, 1, (2,))}
    )
    return toy(**box)


@pytest.fixture
def short_games(monkeypatch):
    """Makes every Atari game from here on end after so many emulator frames, four a step."""
    make_vec = gym.make_vec

    def shorten(frames: int) -> None:
        def make(env_id, *inputs, **options):
            if env_id.startswith("ale_py:"):
                options["max_num_frames_per_episode"] = frames
            return make_vec(env_id, *inputs, **options)

        monkeypatch.setattr(gym, "make_vec", make)

    return shorten
