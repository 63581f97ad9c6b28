"""Options and fixtures of the suite; what they are made of is in support.py."""

import pytest
import support


def pytest_addoption(parser):
    parser.addoption("--dry", action="store_true", help="tests of a GPU (-m cuda) run on the CPU")
    parser.addoption(
        "--memory", help="my_module:MyMemory, a class for test_recurrence.py to compare"
    )
    parser.addoption(
        "--missing",
        action="store_true",
        help="only the tests that the last session skipped for want of a package",
    )


def pytest_configure(config):
    support.given_memory = config.getoption("memory")


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
