"""Options and fixtures of the suite; what they are made of is in support.py."""

from pathlib import Path

import gymnasium as gym
import pytest
import support
from support import MODULES, ROOT, SCRIPTS, awkward_ends  # noqa: F401, for the tests


def pytest_addoption(parser):
    parser.addoption("--dry", action="store_true", help="tests of a GPU (-m cuda) run on the CPU")
    parser.addoption("--memory", default="", help="my_module:MyMemory, for test_recurrence.py")
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


@pytest.fixture
def record(tmp_path):
    """support.record, into this test's folder."""
    return lambda script, **options: support.record(script, tmp_path, **options)


@pytest.fixture
def start_script(tmp_path, tmp_path_factory):
    """Starts a script as a user does, in an empty folder; what still runs afterwards is killed."""
    logs, running = tmp_path_factory.mktemp("logs"), []

    def start(script: str, *flags, cwd: Path = tmp_path, env=None, limits=None) -> support.Running:
        path, log = str(ROOT / f"{script}.py"), logs / str(len(running))
        running.append(support.start(path, [*map(str, flags)], cwd, log, env, limits))
        return running[-1]

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            process.wait()


@pytest.fixture
def run_script(start_script):
    """Runs a script to its end, which must be with the exit code `check`; returns the process."""

    def run(
        script: str, *flags, check: int = 0, timeout: float = 240, **options
    ) -> support.Running:
        done = start_script(script, *flags, **options).wait(timeout)
        assert done.returncode == check, done.stdout + done.stderr
        return done

    return run


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
