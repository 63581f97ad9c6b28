"""The recipes of docs/recipes: their text, the driver, where each applies. What they promise is in
test_recipes_environments, _networks, _exchange, _runs and _pairs."""

import ast
import json
import subprocess
import sys

import launch
import pytest
from conftest import ROOT, SCRIPTS
from recipe_tools import FOLDER, driver, needs, run

FILES = sorted(FOLDER.glob("*.py"))
LONGEST = 90  # lines below the docstring
LONGER = {"use": 218, "look_inside": 123}  # the driver, which all import; a study, which draws
# Which scripts a recipe is for: L rppo_lstm, C rppo_continuous, G rppo_gru_atari, T trpo, P ppo1_mpi
LETTERS = dict(zip("LCGTP", SCRIPTS))
WHERE = {
    "poc_memory": "LTP", "minigrid_memory": "LTP", "memory_gym_tasks": "LCTP",
    "ppo1_mujoco": "LCTP", "ppo1_atari": "LTP", "image_frames": "LCTP", "images": "LCTP",
    "previous_action": "LCTP", "frame_stack": "LCTP", "long_memory": "LCTP", "feedforward": "LCG",
    "networks": "LCGTP", "critics": "LCG", "activations": "LCGTP", "stacked_lstm": "LCGTP",
    "sde": "CT", "squash": "CT",
    "warm_start": "LCGTP", "imitation": "LCGTP", "schedules": "LCGTP", "keep_best": "LCGTP",
    "scalars": "LCGTP", "callbacks": "LCGTP", "diagnostics": "LCGTP", "adam": "LCGTP", "eval_limit": "LCGTP",
}  # fmt: skip
TOOLS = (  # programs of their own
    "use", "use_agent", "distributions", "export_onnx", "sb3_weights", "population", "genes",
    "evolve", "record", "look_inside",
)  # fmt: skip


def test_every_recipe_is_known():
    assert {path.stem for path in FILES} == {*WHERE, *TOOLS} and {*WHERE} == {*driver.RECIPES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_plain_and_says_how_to_run_it(path):
    text = path.read_text()
    tree = ast.parse(text)
    body = len(text.splitlines()) - tree.body[0].end_lineno
    assert body <= LONGER.get(path.stem, LONGEST)
    assert max(map(len, text.splitlines())) <= 100
    words = ast.get_docstring(tree)
    assert f"python docs/recipes/{path.name}" in words or "recipes/use.py" in words
    for node in ast.walk(tree):  # no golf, as in the scripts
        loop = isinstance(node, (ast.For, ast.comprehension)) and node.iter
        assert not isinstance(loop or getattr(node, "value", None) if loop else None, ast.IfExp)
        assert not (isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp))
        if isinstance(node, ast.Assign):
            chained = len(node.targets) > 1 and isinstance(node.targets[0], ast.Attribute)
            many = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
            assert not chained and not (many and len(node.value.elts) > 3), node.lineno


@pytest.mark.parametrize("recipe", WHERE)
@pytest.mark.parametrize("letter", LETTERS)
def test_where_a_recipe_applies(recipe, letter):
    """It gives the script's names back changed, and its flags; elsewhere it says so in one line."""
    name = LETTERS[letter]
    plain = driver.fresh(name)
    if letter not in WHERE[recipe]:
        with pytest.raises(ValueError, match=f"^{recipe}: ") as refused:
            driver.fresh(name, recipe)
        assert "\n" not in str(refused.value)
        return
    script = driver.fresh(name, recipe)
    assert script.SCRIPT == f"{name}+{recipe}" and plain.SCRIPT == name
    assert (
        issubclass(script.Args, object) and vars(plain.Args()).keys() <= vars(script.Args()).keys()
    )
    assert {*plain.FIXED} <= {*script.FIXED} <= vars(script.Args()).keys()


def test_the_driver_trains_resumes_and_plays(run_script, tmp_path):
    """A run knows its recipes; NAME.py is the driver with one recipe."""
    small = (
        "--num-envs 4 --num-steps 16 --num-minibatches 2 --hidden-size 8 --eval-episodes 1".split()
    )
    flags = (
        "--layers-after 8 --clip-coef-schedule linear --total-timesteps 100 --run-name a".split()
    )
    use = "docs/recipes/use"
    done = run_script(use, "rppo_lstm", "schedules,networks", *small, *flags)
    run_dir = tmp_path / "runs/a"
    script, args, *_, saved = driver.open_run(run_dir)
    assert saved["script"] == "rppo_lstm+networks+schedules" and args.layers_after == "8"
    run_script(use, "--resume", "runs/a", "--total-timesteps", 200)
    assert script.load(run_dir)["step"] >= 190
    played = run_script("docs/recipes/networks", "--play=runs/a", "--render", "none")
    evaluation = json.loads((run_dir / "result.json").read_text())["evaluation"]
    assert played.stdout.split() == ["return", f"{evaluation[0]:.5g}"]
    for words, says in {
        ("--resume", "runs/a", "--layers-after", "9"): "--layers-after: runs/a has 8",
        ("rppo_lstm", "--resume", "runs/a"): None,
        (
            "rppo_lstm",
            "callbacks",
            "--play",
            "runs/a",
        ): "wrote it, not rppo_lstm+networks+schedules+",
        ("rppo_lstm", "sde"): "error: sde: works only with rppo_continuous and trpo",
        ("rppo_lstm", "none"): "error: no recipe 'none'; there are poc_memory",
        ("--play", "runs/none"): "runs/none is not the directory of a run",
        (): "error: the first argument must be one of rppo_lstm",
    }.items():
        if says:
            refused = run_script(use, *words, check=2)
            assert len(refused.lines) == 1 and says in refused.stderr, refused.stderr
    plain = run_script("rppo_lstm", "--play", "runs/a", "--render", "none", check=2)
    assert "rppo_lstm+networks+schedules wrote it, not rppo_lstm" in plain.stderr
    assert done.returncode == 0


def test_a_run_that_failed_says_how_to_continue(run_script, tmp_path):
    flags = "--env-id envs:BoxFaulty-v0 --num-steps 8 --num-minibatches 2 --run-name b".split()
    env = {"PYTHONPATH": str(ROOT / "tests"), "FAULT": "reset"}
    recipe = "docs/recipes/previous_action", "rppo_continuous"
    failed = run_script(*recipe, *flags, check=1, env=env)
    assert failed.lines[-1].endswith(f"previous_action.py --resume {tmp_path}/runs/b")


def test_flags_are_in_the_help(run_script):
    said = run_script("docs/recipes/use", "rppo_lstm", "networks,callbacks", "--help").stdout
    for flag in "--layers-before", "--critic", "--stop-at-return", "--hidden-size":
        assert flag in said
    assert "units of the encoder's layers" in " ".join(said.replace("│", " ").split())


def test_a_recipe_of_ones_own(tmp_path, monkeypatch):
    """As the page shows it: a subclass of Run that is called after every iteration."""
    needs("ppo1_mpi")
    page = (ROOT / "docs/recipes.md").read_text()
    block = page.split('```python title="my_recipe.py"\n')[1].split("```")[0]
    (tmp_path / "my_recipe.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = driver.fresh("rppo_lstm", "my_recipe")
    _, run_dir = run(script, tmp_path, total_timesteps=400, patience=1)
    assert script.load(run_dir)["step"] <= 400
    sys.modules.pop("my_recipe")


def test_a_program_with_recipes(tmp_path, monkeypatch):
    """As the page shows it: a copy of the script, the script itself as it was."""
    page = (ROOT / "docs/recipes.md").read_text()
    block = page.split('```python title="my_program.py"\n')[1].split("```")[0]
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block, names)
    assert names["script"].SCRIPT == "rppo_lstm+networks+schedules"
    widths = [x.out_features for x in names["agent"].actor if hasattr(x, "out_features")]
    assert widths == [64, 64, 2] and not hasattr(driver.fresh("rppo_lstm").Args, "layers_after")
    [run_dir] = (tmp_path / "runs").iterdir()
    assert names["script"].load(run_dir)["step"] >= 1900


@pytest.mark.parametrize(
    "words, said",
    [
        ("genes.py", "the first argument must be one of rppo_lstm, "),
        ("evolve.py nope", "the first argument must be one of rppo_lstm, "),
        ("look_inside.py", "give the directory of a run"),
        ("use_agent.py nope", "nope is not the directory of a run"),
        ("population.py x rppo_lstm", "usage: population.py NUMBER SCRIPT"),
        ("record.py nope", "usage: record.py runs/EXPERT"),
    ],
)
def test_programs_answer_wrong_words_in_one_line(words, said, tmp_path):
    program, *others = words.split()
    done = launch.start(str(FOLDER / program), others, tmp_path, tmp_path / "log").wait()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


def test_one_rank_says_what_the_driver_refuses(tmp_path):
    needs("ppo1_mpi")
    command = ["mpiexec", "-n", "3", sys.executable, str(FOLDER / "use.py"), "nope"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
