"""benchmarks/resets.py: every way to reset a state inside a sequence computes the same."""

import sys

import pytest
import torch
from conftest import ROOT, awkward_ends

sys.path.insert(0, str(ROOT / "benchmarks"))
import resets  # noqa: E402

EXACT = [(kind, way) for way in resets.WAYS for kind in way.kinds if way.exact]
WAYS = {way.name: way for way in resets.WAYS}
pytestmark = pytest.mark.filterwarnings("ignore")


def ends() -> dict[str, torch.Tensor]:
    """final (T, B) of all that is awkward, of no end at all, and of one in every step."""
    awkward = awkward_ends()[2][:-1]
    adjacent = torch.zeros(7, 3, dtype=torch.bool)
    adjacent[2:5, 0] = adjacent[0, 1] = adjacent[6, 2] = True
    return {
        "awkward": awkward,
        "adjacent": adjacent,
        "none": torch.zeros_like(adjacent),
        "all": torch.ones_like(adjacent),
    }


def compare(kind: str, way: resets.Way, final: torch.Tensor, dtype: torch.dtype):
    """The errors of h and of the gradients against the loop in float64."""
    double = resets.make_data(kind, final, hidden=6, features=5).to(torch.float64, "cpu")
    expected = resets.results(resets.loaded(WAYS["loop of cells"], kind, double), double)
    data = double.to(dtype, "cpu")
    return resets.errors(resets.results(resets.loaded(way, kind, data), data), expected)
