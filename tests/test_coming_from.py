"""docs/coming-from.csv: its scripts, recipes and flags exist, and the page shows its rows."""

import csv
import inspect
import json
import re
import shutil
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs/recipes"))
import use  # noqa: E402

with open(ROOT / "docs/coming-from.csv", newline="") as file:
    ROWS = list(csv.DictReader(file))
PAGE = (ROOT / "docs/coming-from.md").read_text()
FILES = {path.stem: path for path in (ROOT / "docs/recipes").rglob("*.py")}


@cache
def known_flags(script: str, recipes: tuple[str, ...]) -> set[str]:
    """Of a script with those of the recipes that change scripts; and what the programs take."""
    sources = {name: FILES[name].read_text() for name in recipes}
    changing = [name for name in recipes if re.search(r"^def use\(", sources[name], re.M)]
    words = re.findall(r'"--([a-z-]+)"|options\.([a-z_]+)', "".join(sources.values()))
    flags = {f"--{(one or other).replace('_', '-')}" for one, other in words}
    for field in fields(use.fresh(script, *changing).Args):
        name = field.name.replace("_", "-")
        flags |= {f"--{name}", f"--no-{name}"}
    return flags


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['system']}, {row['there'][:40]}")
def test_what_a_row_names_exists(row):
    recipes = tuple(row["recipes"].split())
    assert {*recipes} <= {*FILES}
    for script in row["scripts"].split():
        assert {*re.findall(r"--[a-z][a-z-]*", row["here"])} <= known_flags(script, recipes)


def test_the_page_shows_the_rows_that_differ():
    marks = {"works": "", "different": "**different**: "}
    shown = {line for line in PAGE.splitlines() if line.startswith("| ")} - {"| there | here |"}
    expected = {
        f"| {row['there']} | {marks[row['status']]}{row['here']} |"
        for row in ROWS
        if row["page"] == "yes"
    }
    assert shown == expected
    assert all(row["page"] == "yes" for row in ROWS if row["status"] != "works")


def test_recipes_md_has_every_recipe_in_the_table_of_its_folder():
    page = (ROOT / "docs/recipes.md").read_text()
    tables = re.findall(r"(?ms)^\| (\w+)[^|]* \| \|\n(.*?)\n\n", page)
    named = {kind: {*re.findall(r"`(\w+)`", rows)} for kind, rows in tables}
    there: dict[str, set[str]] = {}
    for name, path in FILES.items():
        there.setdefault(path.parent.name, set()).add(name)
    del there["recipes"]  # use.py
    assert named == there


def test_the_command_with_sb3_contribs_defaults_has_them(monkeypatch):
    """Those of RecurrentPPO's signature; its value loss has no factor 1/2."""
    contrib = pytest.importorskip("sb3_contrib")
    command = re.search(r"use\.py (rppo_lstm networks .*?)\n```", PAGE, re.S)
    words = command[1].replace("\\\n", " ").split()
    monkeypatch.setattr(sys, "argv", words[1:])
    args = use.fresh("rppo_lstm", "networks").parse_args()
    names = {
        "n_steps": args.num_steps, "n_epochs": args.update_epochs, "gamma": args.gamma,
        "learning_rate": args.learning_rate, "gae_lambda": args.gae_lambda,
        "clip_range": args.clip_coef, "ent_coef": args.ent_coef, "vf_coef": args.vf_coef / 2,
        "max_grad_norm": args.max_grad_norm,
        "batch_size": args.num_envs * args.num_steps // args.num_minibatches,
    }  # fmt: skip
    theirs = inspect.signature(contrib.RecurrentPPO).parameters
    assert names == {name: theirs[name].default for name in names}


# --- Rows that no other test tries -----------------------------------------------------------------


class Counts(gym.Env):
    """Episodes of `length` steps, which pay `reward` each."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, length=4, reward=1.0, render_mode=None):
        self.length, self.reward = length, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), self.reward, False, self.t == self.length, {}


def trained(tmp_path, **flags):
    script = use.fresh("rppo_lstm", "callbacks")
    args = script.Args(
        **{"num_steps": 16, "hidden_size": 8, "eval_episodes": 1, "runs_dir": str(tmp_path),
           "run_name": "run", "total_timesteps": 100, "quiet": True, **flags}
    )  # fmt: skip
    script.train(args)
    return script, args


def test_an_environment_object_has_arguments_of_its_own(tmp_path):
    """And the agent is evaluated in another environment."""
    gym.register("Mine-v0", lambda **kwargs: Counts(**kwargs))
    kwargs = '{"length": 6, "reward": 2.0}'
    script, args = trained(tmp_path, env_id="Mine-v0", env_kwargs=kwargs)
    assert json.loads((tmp_path / "run/result.json").read_text())["returns"] == [12]
    args = script.Args(**script.load(tmp_path / "run")["args"])
    args.env_kwargs = '{"length": 9}'
    envs = script.make_envs(args, 2)
    agent = script.Agent(envs, args)
    script.load(tmp_path / "run", agent)
    assert script.evaluate(agent, envs, 1) == [9, 9]


def test_a_yaml_file_has_the_flags(tmp_path):
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "my.yaml"
    file.write_text("env_id: CartPole-v1\nlearning_rate: 1.0e-3\nnum_envs: 4\nnorm_obs: true\n")
    script, args = trained(tmp_path, **yaml.safe_load(open(file)))
    saved = script.load(tmp_path / "run")["args"]
    assert (saved["learning_rate"], saved["num_envs"], saved["norm_obs"]) == (1e-3, 4, True)


def test_a_checkpoint_goes_on_from_another_place(tmp_path):
    script, args = trained(tmp_path, checkpoint_every=50)
    kept = sorted((tmp_path / "run/checkpoints").iterdir())[0]
    shutil.copytree(kept, tmp_path / "elsewhere")
    before = script.load(tmp_path / "elsewhere")["step"]
    args.resume = str(tmp_path / "elsewhere")
    args.total_timesteps = before + 1
    script.train(args)
    assert script.load(tmp_path / "elsewhere")["step"] > before
    assert script.load(kept)["step"] == before
