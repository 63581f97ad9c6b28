"""docs/coming-from.md: every flag, recipe and page that it names exists, and its counts are true."""

import ast
import inspect
import re
import shlex
import sys
from dataclasses import fields

import pytest
from conftest import ROOT, SCRIPTS
from recipe_tools import FOLDER, driver
from test_recipes import LETTERS, TOOLS, WHERE

PAGE = (ROOT / "docs/coming-from.md").read_text()
ROWS = [line.strip().strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in row] for row in ROWS if row[0].strip() != "there"]


def known_flags():
    """Flags of every script with all recipes that it can have, and of evolve.py."""
    known = {"--help"}
    for name in SCRIPTS:
        letter = next(x for x, script in LETTERS.items() if script == name)
        for recipe in WHERE:
            if letter in WHERE[recipe]:
                known |= {field.name for field in fields(driver.fresh(name, recipe).Args)}
    tree = ast.parse((FOLDER / "evolve.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return known | {word for word in words if isinstance(word, str)}


def test_every_flag_exists():
    known = known_flags()
    said = {flag for _, here in ROWS for flag in re.findall(r"--([a-z][a-z0-9-]+)", here)}
    unknown = {flag for flag in said if flag.replace("-", "_") not in known}
    unknown = {x for x in unknown if x.removeprefix("no-").replace("-", "_") not in known}
    assert len(said) > 60 and not unknown


def test_every_recipe_exists_and_is_not_a_word():
    said = {name for _, here in ROWS for name in re.findall(r"recipe `(\w+)`", here)}
    assert said <= {*WHERE, *TOOLS} and len(said) >= 20
    assert {*WHERE, *TOOLS} - said <= {"use", "image_frames", "long_memory", "previous_action",
                                       "export_onnx", "sb3_weights", "look_inside"}  # fmt: skip


def test_every_page_and_file_exists():
    for target in re.findall(r"\]\((\S+?)\)", PAGE):
        assert (ROOT / "docs" / target.split("#")[0]).exists(), target
    here = " ".join(here for _, here in ROWS)
    for name in re.findall(r"(?<![\w/])((?:benchmarks/)?\w+\.py)\b", here):
        places = ROOT / name, FOLDER / name
        assert any(path.exists() for path in places), name
    numbers = {int(n) for n in re.findall(r"exercise (\d+)", PAGE)}
    existing = {int(path.name[:2]) for path in (ROOT / "docs/exercises").glob("[0-9]*.md")}
    assert numbers and numbers <= existing


def test_the_counts_are_true():
    different = sum("**different**" in here for _, here in ROWS)
    assert f"Of {len(ROWS)} capabilities" in PAGE and f"{len(ROWS) - different} work here" in PAGE
    assert len(ROWS) == 249 and len(ROWS) - different >= 225
    for section in PAGE.split("\n## ")[1:]:
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        theirs = sum("**different**" in row for row in rows)
        assert f"{len(rows)} capabilities, {len(rows) - theirs} of them work" in section


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "**different**" in row[1]], ids=lambda r: r[0][:30]
)
def test_what_is_different_has_a_reason(row):
    assert len(row[1].partition("**different**: ")[2]) > 15


def test_the_command_with_sb3_contribs_defaults_has_them(monkeypatch):
    """Of RecurrentPPO's signature, on the environment of the command, which has a preset here."""
    contrib = pytest.importorskip("sb3_contrib")
    block = next(x for x in re.findall(r"```bash\n(.*?)```", PAGE, re.S) if "networks.py" in x)
    words = shlex.split(block.replace("\\\n", " "))[2:]
    script = driver.fresh(words[0], "networks")
    monkeypatch.setattr(sys, "argv", words)
    args = script.parse_args()
    theirs = inspect.signature(contrib.RecurrentPPO).parameters
    names = {
        "num_steps": "n_steps", "update_epochs": "n_epochs", "learning_rate": "learning_rate",
        "gamma": "gamma", "gae_lambda": "gae_lambda", "clip_coef": "clip_range",
        "ent_coef": "ent_coef", "vf_coef": "vf_coef", "max_grad_norm": "max_grad_norm",
    }  # fmt: skip
    ours = {name: getattr(args, name) for name in names}
    assert ours == {name: theirs[there].default for name, there in names.items()}
    assert args.num_envs * args.num_steps / args.num_minibatches == theirs["batch_size"].default
