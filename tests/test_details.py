"""benchmarks/details.py: each mistake is one, where it says, and the page shows what was measured."""

import re
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
