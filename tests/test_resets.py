"""benchmarks/resets.py: every way to reset a state inside a sequence computes the same."""

import argparse
import sys

import pytest
import torch
from conftest import ROOT, awkward_ends

sys.path.insert(0, str(ROOT / "benchmarks"))
import resets  # noqa: E402

EXACT = []
for way in resets.WAYS:
    marks = [pytest.mark.slow] if "scan" in way.name else []  # traced anew for every shape
    if way.exact:
        EXACT += [pytest.param(kind, way, marks=marks) for kind in way.kinds]
WAYS = {way.name: way for way in resets.WAYS}
pytestmark = pytest.mark.filterwarnings("ignore")


def ends() -> dict[str, torch.Tensor]:
    """final (T, B) of all that is awkward, adjacent final steps, and no end at all."""
    awkward = awkward_ends()[2][:-1]
    adjacent = torch.zeros(7, 3, dtype=torch.bool)
    adjacent[2:5, 0] = True
    adjacent[0, 1] = True
    adjacent[6, 2] = True
    return {
        "awkward": awkward,
        "adjacent": adjacent,
        "none": torch.zeros_like(adjacent),
    }


def compare(kind: str, way: resets.Way, final: torch.Tensor, dtype: torch.dtype):
    """The errors of h and of the gradients against the loop in float64."""
    double = resets.make_data(kind, final, hidden=6, features=5).to(torch.float64, "cpu")
    expected = resets.results(resets.loaded(WAYS["loop of cells"], kind, double), double)
    data = double.to(dtype, "cpu")
    return resets.errors(resets.results(resets.loaded(way, kind, data), data), expected)


def available(way: resets.Way) -> resets.Way:
    """The way, or the test is skipped because a package of a peer is not installed."""
    if reason := resets.missing(way, "cpu"):
        pytest.skip(f"{way.name} {reason}")
    if way.make is resets.TorchRLCompiled:
        pytest.skip("compiles for half a minute")
    return way


@pytest.mark.parametrize("kind, way", EXACT, ids=lambda x: getattr(x, "name", x))
def test_every_way_agrees_with_the_loop(kind, way):
    """In float64 to 1e-12 for all ends: outputs, gradients of features and of all weights."""
    for name, final in ends().items():
        worst = max(compare(kind, available(way), final, torch.float64))
        assert worst <= 1e-12, (name, worst)


@pytest.mark.parametrize("kind, way", EXACT, ids=lambda x: getattr(x, "name", x))
def test_rounding_in_float32(kind, way):
    """What is timed has the error of its number format, whichever kernel runs."""
    error_h, error_gradients = compare(kind, available(way), ends()["awkward"], torch.float32)
    assert 0 < error_h <= 2e-6 and 0 < error_gradients <= 5e-6


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_without_resets_it_is_another_function(kind):
    """The errors are seen: a way that ignores resets is exact only where there are none."""
    error = {name: compare(kind, WAYS["no resets"], f, torch.float64) for name, f in ends().items()}
    assert max(error["none"]) <= 1e-12
    assert min(error["awkward"]) > 0.1


def test_our_memory_does_not_depend_on_resets():
    """Padding's does: with one whole sequence and short episodes it holds many times the rows."""
    whole = torch.zeros(32, 4, dtype=torch.bool)
    often = whole.clone()
    often[::2, 1:] = True
    for name, least, most in (("ours", 1.0, 1.0), ("padded", 5.0, 20.0)):
        used = []
        for final in (whole, often):
            data = resets.make_data("lstm", final, hidden=16).to(torch.float32, "cpu")
            module = resets.loaded(WAYS[name], "lstm", data)
            used.append(resets.peak_memory(module, data))
        assert least <= used[1] / used[0] <= most


def test_reset_rates_and_starts():
    final = resets.random_final(64, 0.1)
    assert final.shape == (128, 64) and final.sum() == 820
    assert not resets.random_final(8, 0.0).any()
    assert resets.random_final(8, 0.0001).sum() == 1
    one = resets.random_final(8, 0.001).nonzero()
    assert len(one) == 2 and 16 < one[0, 0] < 112
    start = resets.starts(final)
    assert not start[0].any() and torch.equal(start[1:], final[:-1])


def test_episodes():
    """(T, B) = (4, 2) has lengths 1, 3, 4; the first of each sequence has the sequence's state."""
    final = torch.tensor([[1, 0], [0, 0], [0, 0], [0, 1]]).bool()
    state = torch.tensor([[[5.0], [6.0]]])
    lengths, initial = resets.episodes(final, state)
    assert lengths.tolist() == [1, 3, 4]
    assert initial.flatten().tolist() == [5, 0, 6]


def test_a_dry_run_measures_all_ways(monkeypatch, capsys):
    """Two reset rates of every way, none of them wrong; one line for each that is left out."""
    ways = [way for way in resets.WAYS if "scan" not in way.name]
    monkeypatch.setattr(resets, "WAYS", ways)
    monkeypatch.setattr(sys, "argv", ["resets.py", "--dry"])
    resets.main()
    lines = capsys.readouterr().out.splitlines()
    left_out = [way for way in ways if resets.missing(way, "cpu")]
    assert all(line.startswith("left out: ") for line in lines[: len(left_out)])
    measured = 2 * sum(len(way.kinds) for way in ways if way not in left_out)
    assert len(lines) == len(left_out) + measured
    assert all(float(line.split()[-1]) <= 1e-12 for line in lines if " ours  " in line)


def test_what_the_csv_has_is_not_measured_again(monkeypatch, tmp_path, capsys):
    """A second call finds all its rows; a way that is new gets one for each rate."""
    ways = [WAYS["ours"], WAYS["padded"]]
    small = {"cells": ["gru"], "batches": [2], "hidden": [4], "rates": [0.0, 0.2], "rounds": 1}
    small |= {"steps": 6, "features": 3, "device": "cpu", "results": tmp_path}
    new = [WAYS["segments"]]
    for also, rows, said in (([], 4, "float64"), ([], 4, "has its rows"), (new, 6, "float64")):
        resets.measure(argparse.Namespace(ways=ways + also, **small))
        table = resets.read(tmp_path / "resets.csv")
        assert len(table) == len({(row["rate"], row["way"]) for row in table}) == rows
        assert said in capsys.readouterr().out
    assert resets.failures(table) == []
    wrong = dict(table[0], error_grad64="1.0e-03")
    assert resets.failures([wrong]) == ["gru, ours, rate 0.0: 0.001"]


def test_labels_of_the_chart_do_not_overlap():
    assert resets.spread([3.0, 1.0, 1.1, 1.15], 0.25) == pytest.approx([3.0, 1.0, 1.25, 1.5])
