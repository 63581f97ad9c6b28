"""The drawings of docs/img are what docs/tools/drawings.py draws, and fit their frames."""

import csv
import re
import sys
from xml.etree import ElementTree

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "docs/tools"), str(ROOT / "benchmarks")]
import drawings  # noqa: E402
import reward_scale  # noqa: E402


@pytest.mark.parametrize("draw", drawings.DRAWINGS, ids=lambda draw: draw.__name__)
def test_a_drawing_is_the_committed_file_and_fits(draw):
    drawing = draw()
    assert (drawings.IMAGES / f"{drawing.name}.svg").read_text() == drawing.svg()
    root = ElementTree.fromstring(drawing.svg())
    tag = "{http://www.w3.org/2000/svg}"
    assert (
        root.find(f"{tag}title").text
        and "prefers-color-scheme:dark" in root.find(f"{tag}style").text
    )
    for text in root.iter(f"{tag}text"):
        size, x, y = float(text.get("font-size", 12)), float(text.get("x")), float(text.get("y"))
        # As wide as a wide font is.
        width = len(text.text) * size * (0.57 if text.get("font-weight") is None else 0.64)
        left = (
            x
            if text.get("text-anchor") == "start"
            else x - width
            if text.get("text-anchor") == "end"
            else x - width / 2
        )
        assert size >= 8.5 and 0 <= left and left + width <= drawings.WIDTH + 6, text.text
        assert size < y < drawing.height, text.text
    for box in root.iter(f"{tag}rect"):
        x, y, width, height = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x and x + width <= drawings.WIDTH and 0 <= y and y + height <= drawing.height


def test_both_palettes_are_readable():
    """WCAG's contrast of at least 4.5 between words and what they stand on."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(one, other):
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for colours, page in (drawings.LIGHT, "#ffffff"), (drawings.DARK, "#1e2129"):
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours.values())
        for words in "ink", "soft":
            assert contrast(colours[words], page) >= 4.5
        for kind in drawings.KINDS:
            assert contrast(colours["ink"], colours[kind]) >= 4.5
        assert contrast(colours["orange-line"], page) >= 3.5


def test_the_page_on_reward_scale_says_what_was_measured():
    page = (ROOT / "docs/concepts/reward-scale.md").read_text()
    with open(drawings.RESULTS / "reward-scale.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for divided, name in ("True", "rewards divided"), ("False", "raw rewards"):
        found = {row["seed"]: row["return_100"] for row in rows if row["norm_reward"] == divided}
        assert f"| {name} | {found['1']} | {found['2']} | {found['3']} |" in page
    sums = dict.fromkeys(("True", "False"), 0.0)
    for row in rows:
        if int(row["iteration"]) <= 30:
            sums[row["norm_reward"]] += float(row["policy"])
        # Both together were clipped to 0.5.
        assert float(row["value"]) <= 0.5 + float(row["policy"])
    assert 55 < sums["True"] / sums["False"] < 65  # "a sixtieth"


def test_reward_scale_measures_both_gradients(tmp_path):
    """They are those of the whole loss, in two parts, and without dividing the value's is larger."""
    found = [reward_scale.norms(divided, 1, str(tmp_path), steps=1500) for divided in (True, False)]
    for iterations in found:
        assert len(iterations) == 2 and {len(x) for x in iterations} == {40}
        for policy, value, factor in iterations[0]:
            assert policy > 0 < value and factor <= 1.0
            assert abs(value - policy) * factor <= 0.5001  # both together, and the heads: 0.5
    first, second = (sum(value for _, value, _ in x[0]) for x in found)
    assert second > 5 * first
    policies = [x[0][0][0] for x in found]  # before any step, advantages are normalised
    assert abs(policies[0] - policies[1]) <= 0.2 * policies[0]
