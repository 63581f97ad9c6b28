"""What README and the pages print works: every command's flags are there, every program runs."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs/recipes")]
SCRIPTS = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.glob("docs/**/*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}


def commands(page: str) -> list[str]:
    """The lines of fenced bash blocks, and what begins like a command in backquotes."""
    blocks = re.findall(r"(?ms)^ *```(?:bash|sh)\b[^\n]*\n(.*?)^ *```", page)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    rest = re.sub(r"(?ms)^ *```.*?^ *```", "", page)
    lines += [x for x in re.findall(r"`((?:python|mpiexec|torchrun) [^`]+)`", rest) if ".py" in x]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return [command for line in lines for command in re.split(r" && | & | \| ", line) if command]


def parsed(script, flags: list[str]) -> None:
    """The script takes these flags; those of a run that isn't here are left out."""
    for name in ("--play", "--resume"):
        if name in flags:
            i = flags.index(name)
            del flags[i : i + 2]
    old = sys.argv
    sys.argv = [script.__file__, *flags]
    try:
        script.parse_args()
    finally:
        sys.argv = old


def tried(command: str) -> None:
    """AssertionError, or what the program raises, for a command that can't work."""
    words = shlex.split(command)
    while words and ("=" in words[0] or words[0] in ("nice", "time", "nohup")):
        words.pop(0)
    program = next((word for word in words if word.endswith(".py")), None)
    if program is None or words[0] not in ("python", "mpiexec", "torchrun", "uv"):
        return
    flags = words[words.index(program) + 1 :]
    if "<" in command or "..." in command or "$" in command or "{}" in command or "%" in flags:
        return  # for the reader to fill in
    if program.endswith("use.py"):
        import use

        name, names = "rppo_lstm", []
        if flags and (flags[0] in SCRIPTS or flags[0].endswith(".py")):
            name = flags.pop(0)
        if flags and not flags[0].startswith("-"):
            names = flags.pop(0).split(",")
        if name == "mine.py" or any(x.startswith("my_") for x in names):
            return  # the reader's own
        parsed(use.fresh(name, *names), flags)
    elif program.removesuffix(".py") in SCRIPTS:
        parsed(importlib.import_module(program.removesuffix(".py")), flags)
    elif not (program.startswith(("my_", "mine")) or f'title="{program}"' in EVERYTHING):
        assert (ROOT / program).exists(), program


EVERYTHING = "".join(path.read_text() for path in PAGES.values())


@pytest.mark.parametrize("name", [name for name in PAGES if commands(PAGES[name].read_text())])
def test_the_commands_of(name, capsys):
    for command in commands(PAGES[name].read_text()):
        try:
            tried(command)
        except (Exception, SystemExit) as error:
            said = capsys.readouterr()
            raise AssertionError(f"{command}\n{error!r}\n{said.out}{said.err}") from error


def test_extras_that_pages_install_exist():
    metadata = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"pip install [^`\n]*\.\[([a-z0-9,]+)\]", EVERYTHING)
    assert extras
    for extra in {name for names in extras for name in names.split(",")}:
        assert re.search(rf"^{extra} = \[", metadata, re.M), extra


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of(name):
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", PAGES[name].read_text()):
        assert (ROOT / target).exists(), target


def programs(page: str) -> dict[str, str]:
    """The page's files: what its python blocks with a title hold."""
    found = re.findall(r'(?ms)^```python title="([^"]+\.py)"\n(.*?)^```', PAGES[page].read_text())
    return dict(found)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's folder, with runs/RUN, an agent for masked CartPole that has hardly trained."""
    import rppo_lstm

    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = dict(num_steps=8, num_minibatches=2, update_epochs=1, hidden_size=8, eval_episodes=1)
    args = rppo_lstm.Args(total_timesteps=64, mask_velocity=True, run_name="RUN", **flags)
    rppo_lstm.train(args)
    return tmp_path


def run(text: str, folder: Path, name: str) -> dict:
    """Runs a program as a module of its own; returns its names."""
    (folder / name).write_text(text)
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), folder / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return vars(module)


def test_use_trained_agents_as_the_page_says(folder, capsys):
    """One environment, with the velocities hidden as in training; and many at once."""
    found = programs("docs/use.md")
    assert {"act.py", "act_many.py"} <= {*found}
    for name in ("act.py", "act_many.py"):
        run(found[name], folder, name)
    assert re.search(r"\d", capsys.readouterr().out)


def test_a_sweep_is_drawn(folder, capsys):
    """Of two runs, their mean return and their curves."""
    pytest.importorskip("matplotlib")
    import use

    script = use.fresh("rppo_lstm", "scalars")
    small = dict(num_steps=8, hidden_size=8, total_timesteps=128, eval_episodes=1, csv=True)
    for seed in 1, 2:
        name = f"seed{seed}"
        script.train(script.Args(runs_dir="runs/sweep", run_name=name, seed=seed, **small))
    results = [json.loads(path.read_text()) for path in Path("runs/sweep").glob("*/result.json")]
    mean = np.mean([result["returns"] for result in results])
    capsys.readouterr()
    found = programs("docs/sweep.md")
    run(found["plot_sweep.py"], folder, "plot_sweep.py")
    assert f"0.002: {mean:.1f} [" in capsys.readouterr().out
    curves = run(found["plot_curves.py"], folder, "plot_curves.py")["run"]
    assert len(curves["step"]) > 1 and np.isfinite(curves["chartsepisodic_return"][-1])
    assert Path("sweep.svg").stat().st_size > 1000 < Path("curves.svg").stat().st_size


def test_environments_of_the_page_train(folder):
    import use

    import rppo_lstm

    for name, text in programs("docs/environment.md").items():
        run(text, folder, name)
    small = dict(num_steps=16, hidden_size=8, total_timesteps=64, eval_episodes=1)
    rppo_lstm.train(rppo_lstm.Args(env_id="my_module:Recall-v0", **small))
    masked = use.fresh("rppo_lstm", "action_masks")
    masked.train(masked.Args(env_id="my_masks:Corridor-v0", **small))
