"""benchmarks/details.py: each mistake is one, where it says, and the page shows what was measured."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/tools")]
import details  # noqa: E402

PAGE = (ROOT / "docs/details.md").read_text()


@pytest.mark.parametrize("name", details.MISTAKES)
def test_each_mistake_changes_the_script_or_its_flags(name):
    script = (ROOT / "rppo_lstm.py").read_text()
    compile(details.text(name), name, "exec")
    mistake = details.MISTAKES[name]
    differs = details.text(name) != script or bool(mistake.wrong)
    assert differs == (not name.startswith("nothing"))
    assert details.MISTAKES[details.reference(name)].flags == mistake.flags


def test_a_text_that_is_not_there_is_an_error(monkeypatch):
    wrong = details.Mistake(changes=(("no such line", ""),))
    monkeypatch.setitem(details.MISTAKES, "wrong", wrong)
    with pytest.raises(ValueError, match="in rppo_lstm.py 0 times"):
        details.text("wrong")


def test_the_table_has_the_means_of_the_file(tmp_path):
    pytest.importorskip("matplotlib")
    rows = ["task,detail,seed,eval_mean,episodes,return_100,commit"]
    for seed, score in enumerate([500, 400, 300, 200, 100]):
        rows.append(f"cartpole-masked,no reset,{seed},{score},100,1,abc")
    (tmp_path / "details.csv").write_text("\n".join(rows))
    np.testing.assert_array_equal(
        details.scores("no reset", "cartpole-masked", tmp_path), [500, 400, 300, 200, 100]
    )
    table = details.table(["no reset"], tmp_path).split("\n")
    assert table[2] == "| as it is | not measured | not measured |"
    assert re.match(r"\| no reset \| 300.0 \[.*\] \(5\) \| not measured \|", table[3])
    everything = details.table(list(details.MISTAKES)).split("\n")[2:]
    assert len(everything) == len({*everything}) == len(details.MISTAKES)


def test_the_page_has_every_mistake_once_and_tests_that_exist():
    named = [
        x.strip() for found in re.findall(r"\{\{ detail (.+?) \}\}", PAGE) for x in found.split(";")
    ]
    assert sorted(named) == sorted(x for x in details.MISTAKES if not x.startswith("nothing"))
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    held = re.findall(r"`(test_\w+)`", PAGE)
    assert len(held) >= 15
    for name in held:
        assert f"def {name}(" in tests, name


def held() -> dict[str, list[str]]:
    """For each mistake that changes the script, the tests that its section of the page names."""
    found = {}
    for section in PAGE.split("\n### ")[1:]:
        for names in re.findall(r"\{\{ detail (.+?) \}\}", section):
            for name in names.split("; "):
                if details.text(name) != details.text("nothing"):
                    found[name] = re.findall(r"`(test_\w+)`", section)
    return {name: tests for name, tests in found.items() if tests}


def test_nearly_every_mistake_has_a_test_that_is_named():
    assert len(held()) >= 13


@pytest.mark.slow
@pytest.mark.parametrize("name", held())
def test_the_tests_that_the_page_names_fail_on_the_mistake(name, tmp_path):
    copy = tmp_path / "repo"
    ignored = shutil.ignore_patterns(".git", ".whl", "runs", "site", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / "rppo_lstm.py").write_text(details.text(name))
    kinds = "mathematics", "recurrence", "rollout", "agent", "evaluation"
    files = [f"tests/test_{kind}.py" for kind in kinds]
    options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    for test in held()[name]:
        command = [sys.executable, "-m", "pytest", *options, *files, "-k", f"{test} and rppo_lstm"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert done.returncode == 1 and "FAILED" in done.stdout, (test, done.stdout[-2000:])


def test_a_run_writes_a_row(tmp_path, monkeypatch):
    task = "--env-id CartPole-v1 --mask-velocity --total-timesteps 256 --num-steps 128 --num-envs 2"
    monkeypatch.setattr(details, "TASKS", {"tiny": f"{task} --num-minibatches 2"})
    monkeypatch.setattr(
        sys, "argv", ["details.py", "no reset", "--seeds", "1", "--results", str(tmp_path)]
    )
    details.main()
    details.main()  # what has a row is not trained again
    header, row, *more = (tmp_path / "details.csv").read_text().strip().split("\n")
    assert row.startswith("tiny,no reset,1,") and not more
    assert 5 < float(row.split(",")[3]) < 500
