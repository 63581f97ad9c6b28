"""The notebook runs from top to bottom in less than three minutes of a core, and finds what its text
says."""

import json
import re
import resource

import pytest
from conftest import ROOT
from test_english import PATTERNS

BOOK = ROOT / "docs/notebook.ipynb"
CELLS = json.loads(BOOK.read_text())["cells"]


def said(cell) -> str:
    """What a cell that was run printed and showed, as text."""
    parts = [output.get("text", "") for output in cell["outputs"]]
    parts += [str(output.get("data", "")) for output in cell["outputs"]]
    return "".join(parts)


def test_it_is_committed_without_outputs():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert BOOK.stat().st_size < 20_000


def test_it_is_plain_english_and_every_cell_of_code_has_a_text_before_it():
    text = "".join(line for x in CELLS if x["cell_type"] == "markdown" for line in x["source"])
    words = " ".join(re.sub(r"`[^`\n]+`", "", text).split())
    assert [p for p in PATTERNS if re.search(p, words, re.I)] == []
    assert len(words.split()) > 400
    kinds = [cell["cell_type"] for cell in CELLS]
    assert kinds[0] == "markdown" and kinds.count("markdown") >= kinds.count("code") - 1


def processor_seconds() -> float:
    """Of this process's children that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def test_it_runs_and_finds_what_it_says(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(BOOK, as_version=4)
    nbformat.validate(book)
    place = {"metadata": {"path": str(BOOK.parent)}}
    before = processor_seconds()
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=place).execute()
    assert processor_seconds() - before < 180  # so that other processes do not count
    check([said(cell) for cell in book["cells"] if cell["cell_type"] == "code"])


def numbers(after: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(rf"{after}(-?\d[\d.e+-]*)", text)]


def check(shown: list[str]) -> None:
    """What the text promises: velocities with memory only, a lower return with the broken reset, a
    ratio that betrays it, and pictures."""
    looks = [numbers(r": R\^2 ", text) for text in shown if "R^2" in text]
    assert [len(found) for found in looks] == [2, 2]
    assert min(looks[0]) > 0.7 and max(looks[1]) < 0.3
    curves = [numbers("return at the end: ", text) for text in shown if "at the end" in text]
    assert [len(found) for found in curves] == [2, 3] and curves[0] == curves[1][::2]
    memory, broken, control = curves[1]
    assert memory > 2 * control and memory > 0.9 * broken and broken > control
    lines = [line for text in shown for line in text.splitlines() if "log ratios" in line]
    kept, lost = (numbers(" ", line.split("log ratios")[1].split(":")[1]) for line in lines)
    assert len(kept) == len(lost) == 3 and max(kept) < 3e-6
    assert lost[0] > 1e-5 and min(lost[1:]) > 0.01
    assert sum(text.count("image/png") for text in shown) == 4  # of curves and of memories
    assert "data:image/gif;base64," in shown[-1]
