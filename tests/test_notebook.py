"""The notebook runs from top to bottom and finds what its text says. docs/notebook.md shows it with
its outputs: pip install nbconvert && jupyter nbconvert --execute --to markdown docs/notebook.ipynb
"""

import re

import pytest
from support import ROOT


def said(cell) -> str:
    """What a cell that was run printed and showed, as text."""
    shown = [output.get("text", "") + str(output.get("data", "")) for output in cell["outputs"]]
    return "".join(shown)


def numbers(after: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(rf"{after}(-?\d[\d.e+-]*)", text)]


def test_it_runs_and_finds_what_it_says(monkeypatch):
    """Velocities with memory only, a control that is worse, and a ratio that betrays the bug."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    nbformat.validate(book)
    place = {"metadata": {"path": str(ROOT / "docs")}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=place).execute()
    shown = [said(cell) for cell in book["cells"] if cell["cell_type"] == "code"]
    memory, control = [numbers(r": R\^2 ", text) for text in shown if "R^2" in text]
    assert len(memory) == len(control) == 2 and min(memory) > 0.6 and max(control) < 0.3
    [_, [memory, broken, control]] = [
        numbers("return at the end: ", text) for text in shown if "at the end" in text
    ]
    assert memory > 2 * control and broken > control
    lines = [x for text in shown for x in text.splitlines() if x.startswith("log ratios")]
    kept, lost = (numbers(" ", line.split(":")[1]) for line in lines)
    assert len(kept) == len(lost) == 3 and max(kept) < 3e-6
    assert lost[0] > 1e-5 and min(lost[1:]) > 0.01
    assert "data:image/gif;base64," in shown[-1]
