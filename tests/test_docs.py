"""Every command on every page runs, and pages and README say what the repository says.

Commands are those of fenced bash blocks, of README.md and of the pages as they are built, and those
in backquotes. They run as written, in an empty folder with the scripts in it, but for a shorter
training. FLAGS makes it short; a command that cannot run here is in ELSEWHERE, with the reason.
"""

import html
import inspect
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from html.parser import HTMLParser
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from conftest import MODULES, ROOT

pytest.importorskip("matplotlib")
pytest.importorskip("pygments")
sys.path[:0] = [str(ROOT / "docs/tools"), str(ROOT / "benchmarks")]
import fill  # noqa: E402
import learning  # noqa: E402
import plot  # noqa: E402
import reading  # noqa: E402
import scripts  # noqa: E402
import throughput  # noqa: E402

import build  # noqa: E402

PPO = "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --seq-len 0 --hidden-size 8 --total-timesteps"
ATARI = (
    "--num-envs 2 --num-steps 4 --num-minibatches 1 --update-epochs 1 --torch-threads 1 "
    "--total-timesteps"
)
FLAGS = {  # a short training, and a longer one for --resume
    "rppo_lstm": (f"{PPO} 32", f"{PPO} 64"),
    "rppo_continuous": (f"{PPO} 32 --sde-sample-freq -1", f"{PPO} 64"),
    "rppo_gru_atari": (f"{ATARI} 8", f"{ATARI} 16"),
    "trpo": (
        "--num-envs 2 --num-steps 32 --n-critic-updates 1 --total-timesteps 64",
        "--total-timesteps 128",
    ),
    "ppo1_mpi": ("--num-steps 32 --seq-len 16 --total-timesteps 64", "--total-timesteps 256"),
}
ELSEWHERE = {  # what a command has, and why it does not run here
    "docs/recipes/": "tests/test_recipes*.py run each recipe",
    "docs/exercises/": "tests/test_exercises.py runs each exercise",
    "tests/mutants/": "minutes of it; it runs the tests",
    "benchmarks/reward_scale.py": "minutes of it; it trains",
    "benchmarks/memory_look.py": "minutes of it; it trains",
    "benchmarks/resets.py": "an hour of it. tests/test_resets.py runs it, tiny",
    "benchmarks/details.py": "hours of it; it trains. tests/test_details.py runs it, tiny",
    "docs/tools/drawings.py": "tests/test_drawings.py draws",
    "HOST:": "needs two machines",
    "-hosts a,b": "needs two machines",
    "--serve": "never ends; test_the_site_builds builds the same pages",
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """README.md, and every page as docs/tools/build.py fills it in."""
    out = tmp_path_factory.mktemp("build")
    build.render(out)
    found = {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*.md")}
    return found | {"README.md": (ROOT / "README.md").read_text()}


def commands_of(page: str) -> list[str]:
    """Of fenced bash blocks, each line; of the text, what begins like a command; without comments."""
    blocks = re.findall(r"(?ms)^ *```(?:bash|sh)\n(.*?)^ *```", page)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page)
    inline = re.findall(r"`((?:python|mpiexec|torchrun|pip) [^`]+)`", text)
    lines += [command for command in inline if ".py" in command or "install" in command]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return [command for line in lines for command in line.split(" && ") if command]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pages) -> Path:
    """What a reader's folder has: the scripts, the modules that pages tell them to write, and a run
    of each script in runs/NAME."""
    path = tmp_path_factory.mktemp("reader")
    for name in ["docs", "benchmarks", "pyproject.toml", "constraints.txt"]:
        (path / name).symlink_to(ROOT / name)
    for script in MODULES:
        shutil.copy(ROOT / f"{script}.py", path)
    for name, module in re.findall(
        r'(?ms)^```python title="(my_\w+\.py)"\n(.*?)^```', "\n".join(pages.values())
    ):
        (path / name).write_text(module)
    assert (path / "my_module.py").exists()
    return path


class Reader:
    """Runs commands as a reader does; scripts in this process, where torch is loaded already."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))  # as for a script in it
        monkeypatch.setenv("DISPLAY", ":0")  # for --play; SDL_VIDEODRIVER is dummy

    def run(self, command: str) -> None:
        words = shlex.split(command)
        while "=" in words[0]:
            self.monkeypatch.setenv(*words.pop(0).split("=", 1))
        program = next((w for w in words if w.endswith(".py") and Path(w).name == w), "")
        script = "rppo_lstm" if program == "mine.py" else program.removesuffix(".py")
        if words[0] == "pip":
            check_pip(words[1:])
        elif words[0] == "pytest":
            assert words == ["pytest"]  # this
        elif words[0] in ("cp", "diff"):
            assert subprocess.run(words, stdout=subprocess.DEVNULL).returncode == (
                words[0] == "diff"
            )
        elif "benchmarks/learning.py" in words:
            assert {*names_of(words)} <= {*learning.TASKS}
        elif "benchmarks/throughput.py" in words:
            assert {*names_of(words)} <= {section for section, *_ in throughput.SYSTEMS}
        else:
            assert script in FLAGS, "a command that no rule covers"
            self.train(script, [*words[: words.index(program)]], words[words.index(program) + 1 :])

    def train(self, script: str, launcher: list[str], flags: list[str]) -> None:
        short, longer = FLAGS[script]
        films = "video" in flags
        of_run = {"--play", "--resume"} & {*flags}
        before = {*Path("runs").glob("*")}
        if of_run:  # of a run that an earlier command has left
            run_dir = next(path for path in before if path.name.startswith(script))
            flags = [re.sub(r"runs/RUN(/best)?", str(run_dir), flag) for flag in flags]
            flags += longer.split() if "--resume" in flags else []
        else:
            own = "own-" if "my_module" in " ".join(flags) else ""  # which --play cannot show
            flags += [*short.split(), "--run-name", f"{own}{script}-{len(before)}"]
        flags += ["--eval-episodes", "1"]
        if launcher == ["python"] and script != "ppo1_mpi":
            self.monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
            MODULES[script].main()
        else:
            count = {"8": "2", "--nproc-per-node=8": "--nproc-per-node=2"}
            launcher = [count.get(word, word) for word in launcher]
            launcher = [sys.executable if word == "python" else word for word in launcher]
            if script == "rppo_gru_atari":  # a whole game would take half a minute
                flags += ["--eval-episodes", "0"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*launcher, f"{script}.py", *flags], check=True, env=environment)
        new = {*Path("runs").glob("*")} - before
        if not of_run:
            assert len(new) == 1 and (new.pop() / "result.json").exists()
        if films:
            assert [*Path(run_dir, "videos").glob("*.mp4")]


def names_of(words: list[str]) -> list[str]:
    """What stands between the program and its first flag."""
    return list(takewhile(lambda word: not word.startswith("-"), words[2:]))


def check_pip(words: list[str]) -> None:
    """Extras and constraints exist, packages are among the extras' requirements."""
    metadata = (ROOT / "pyproject.toml").read_text()
    assert words[0] == "install"
    for word in words[1:]:
        if word.startswith("-"):
            assert word == "-c"
        elif word.startswith(".["):
            for extra in word[2:-1].split(","):
                assert re.search(rf"^{extra} = \[", metadata, re.M), extra
        else:
            assert word == "." or (ROOT / word).exists() or f'"{word}>=' in metadata, word


def test_every_command_runs(pages, folder, monkeypatch, capfd, short_games):
    short_games(400)
    unique = {command: page for page, text in pages.items() for command in commands_of(text)}
    assert len(unique) > 30  # else they are no longer found
    skipped = set()
    for command, page in sorted(unique.items(), key=lambda x: "runs/RUN" in x[0]):
        if reason := next((part for part in ELSEWHERE if part in command), None):
            skipped.add(reason)
            continue
        with monkeypatch.context() as patch:
            try:
                Reader(folder, patch).run(command)
            except (Exception, SystemExit) as error:
                said = capfd.readouterr()
                raise AssertionError(f"{page}: {command}\n{said.out}{said.err}") from error
    assert skipped == {*ELSEWHERE}, "a reason that no command has"


@pytest.mark.parametrize("kind", ["recipes", "exercises"])
def test_what_runs_elsewhere_does(kind):
    """Each recipe and exercise is named in a test of its kind."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob(f"test_{kind}*.py"))
    stems = {
        path.stem
        for path in (ROOT / "docs" / kind).glob("*.py" if kind == "recipes" else "[0-9]*.md")
    }
    assert stems and all(re.sub(r"^\d+_", "", stem) in tests for stem in stems)


PROGRAM = r'(?ms)^```python(?: title="act.py")?\n((?:import|from) .*?)^```'  # begins with an import


def programs(page: str, run_dir) -> list[str]:
    return [x.replace("runs/RUN", str(run_dir)) for x in re.findall(PROGRAM, page)]


@pytest.fixture
def acting(folder, monkeypatch):
    """In the reader's folder, with the scripts in it to import."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


def test_python_on_the_pages_runs(pages, folder, monkeypatch, acting):
    """The programs act for a whole episode or for their number of steps."""
    with monkeypatch.context() as patch:
        Reader(folder, patch).run("python rppo_lstm.py --env-id CartPole-v1")
    run_dir = next(Path("runs").glob("rppo_lstm-*"))
    found = programs("\n".join(pages.values()), run_dir)
    assert len(found) == 3
    one, many, without = ({} for _ in found)
    for program, names in zip(found, (one, many, without)):
        exec(program, names)
    assert one["done"] and one["episodic_return"] > 7
    assert many["action"].shape == many["reward"].shape == (4,)
    assert without["action"].shape == (1,) and without["state"].shape == (2, 1, 8)


def test_a_job_that_is_ended_and_started_again_finishes_its_run(folder):
    """With SIGTERM, as `kill` and clusters do."""
    page = (ROOT / "docs/questions.md").read_text()
    [job] = re.findall(r'(?ms)^```sh title="job.sh"\n(.*?)^```', page)
    job = job.replace("--run-name job", f"--run-name job {PPO} 10000000")
    job = job.replace("--resume runs/job", "--resume runs/job --total-timesteps 64")
    job = job.replace("python", sys.executable)
    started = subprocess.Popen(["bash", "-c", job], cwd=folder, start_new_session=True)
    saved = folder / "runs/job/agent.pt"
    while not saved.exists():
        assert started.poll() is None
        time.sleep(0.01)
    os.killpg(started.pid, signal.SIGTERM)
    assert started.wait(20) == -signal.SIGTERM and not (folder / "runs/job/result.json").exists()
    done = subprocess.run(
        ["bash", "-c", job], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "runs/job: return" in done.stdout
    assert json.loads((folder / "runs/job/result.json").read_text())["global_step"] >= 64


def test_the_wrapper_on_the_questions_page_moves_the_mask(tmp_path):
    """An environment for sb3-contrib: its method's mask restricts the actions, and no run warns."""
    page = (ROOT / "docs/questions.md").read_text()
    [program] = re.findall(r'(?ms)^```python title="masked.py"\n(.*?)^```', page)
    names: dict = {}
    exec(program, names)
    gym = names["gym"]

    class Switch(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

        def action_masks(self):
            return [self.t % 2, 1 - self.t % 2]

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return self.observation_space.sample(), {}

        def step(self, action):
            assert self.action_masks()[action], "an illegal action"
            self.t += 1
            return self.observation_space.sample(), 1.0, False, self.t == 9, {}

    gym.register("Switch-v0", lambda: names["Masked"](Switch()))
    script = MODULES["rppo_lstm"]
    args = script.Args(env_id="Switch-v0", hidden_size=8, encoder_size=8)
    agent = script.Agent(script.make_envs(args, 1), args)
    returns = script.evaluate(agent, script.make_envs(args, 3), 1, deterministic=False)
    assert returns == [9.0, 9.0, 9.0]
    args.num_steps, args.total_timesteps, args.runs_dir = 16, 60, str(tmp_path)
    with warnings.catch_warnings(record=True) as raised:
        script.train(args)
    assert raised == []


def test_the_wrapper_on_the_questions_page_seeds_each_process():
    """With --async-envs environments that draw from np.random differ, and a run is repeated."""
    page = (ROOT / "docs/questions.md").read_text()
    [program] = re.findall(r'(?ms)^```python title="seeded.py"\n(.*?)^```', page)
    names: dict = {}
    exec(program, names)
    gym = names["gym"]

    class Noisy(gym.Env):
        def __init__(self):
            self.observation_space = gym.spaces.Box(0, 1, (3,))
            self.action_space = gym.spaces.Discrete(10**9)

        def observe(self):
            x = self.action_space.sample() / 10**9
            return np.float32([np.random.rand(), random.random(), x])

        def reset(self, *, seed=None, options=None):
            return self.observe(), {}

        def step(self, action):
            return self.observe(), 1.0, False, False, {}

    def observations(seed):
        script.seed_everything(seed)
        envs = script.make_envs(args, 3)
        first, _ = envs.reset(seed=seed)
        second = envs.step(np.zeros(3, int))[0]
        envs.close()
        return np.stack([first, second])

    script = MODULES["rppo_lstm"]
    gym.register("Plain-v0", Noisy, disable_env_checker=True)
    gym.register("Noisy-v0", lambda: names["Seeded"](Noisy()), disable_env_checker=True)
    args = script.Args(env_id="Noisy-v0", async_envs=True)
    once = observations(1)
    np.testing.assert_array_equal(observations(1), once)
    assert len({*once.ravel().tolist()}) == once.size
    assert not np.isin(observations(11), once).any()
    args.env_id = "Plain-v0"  # without the wrapper: the same, and numbers that nobody can repeat
    once = observations(1)
    assert (np.ptp(once[..., 0], axis=1) == 0).all()
    assert not np.isin(observations(1)[..., 1:], once).any()


CLUE = """
import gymnasium as gym
import numpy as np


class Clue(gym.Env):
    spaces = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2, 2)), "b": gym.spaces.Discrete(3)})
    observation_space, action_space = spaces, gym.spaces.MultiDiscrete([2, 3])

    def observe(self):
        mask = np.array([1, 1, 1, 1, self.t % 2])
        obs = {"a": self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), "b": self.t % 3}
        return obs, {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        assert action[1] < 2 or self.t % 2  # a legal choice
        reward = float(action[0] + 10 * action[1]) * (self.t + 1)
        self.t += 1
        obs, info = self.observe()
        return obs, reward, self.t == 12, False, info


gym.register("Clue-v0", Clue)
"""


def test_the_program_for_one_environment_takes_dicts_and_masks(pages, folder, monkeypatch, acting):
    """In a plain gym.make environment it plays what the same agent plays in make_envs'."""
    (folder / "clue.py").write_text(CLUE)
    script = MODULES["rppo_lstm"]
    with monkeypatch.context() as patch:
        Reader(folder, patch).run("python rppo_lstm.py --env-id clue:Clue-v0")
    run_dir = max(Path("runs").glob("rppo_lstm-*"), key=os.path.getmtime)
    program = programs(pages["docs/use.md"], run_dir)[0]
    assert "gym.make" in program
    names: dict = {}
    exec(program, names)
    envs = script.make_envs(names["args"], 1)
    (obs, info), state, total, final = envs.reset(seed=1), None, 0.0, np.zeros(1, bool)
    while not final[0]:
        action, state = names["agent"].predict(obs, info, state, final)
        obs, reward, terminated, truncated, info = envs.step(action)
        total += reward[0]
        final = terminated | truncated
    assert names["episodic_return"] == total


def test_readme_has_the_figures_of_the_results():
    """python benchmarks/plot.py readme writes both."""
    shown = re.search(plot.MARKERS, (ROOT / "README.md").read_text(), re.S)
    table = shown[0].removeprefix(shown[1]).removesuffix(shown[2]).strip()
    assert table == plot.figures()


def test_sentences_have_the_figures_of_the_results():
    readme = (ROOT / "README.md").read_text()
    mutants = learning.read(plot.RESULTS / "mutants.csv")
    assert f"{len(mutants)} deliberate bugs" in readme and all(x["caught by"] for x in mutants)
    times = {
        peer["system"]: f"{float(own['median']) / float(peer['median']):.1f}"
        for script, work, own, peer in plot.compared()
        if (script, work) == plot.README_SPEEDS[0]
    }
    results = (ROOT / "docs/results.md").read_text()
    assert f"{times['sb3-contrib']} times as fast as sb3-contrib" in " ".join(readme.split())
    assert f"{times['sb3-contrib']} times as fast as sb3-contrib" in " ".join(results.split())
    assert f"{times['skrl']} times as fast as skrl" in " ".join(results.split())


def test_the_curves_that_the_start_page_names_are_logged():
    page = (ROOT / "docs/index.md").read_text()
    named = {*re.findall(r"`losses/(\w+)`", page)}
    recipe = re.findall(r'"losses/(\w+)"', (ROOT / "docs/recipes/diagnostics.py").read_text())
    logged = {name for module in MODULES.values() for name in module.LOSSES}
    assert named and named <= logged | {*recipe}
    charts = {*re.findall(r"`charts/(\w+)`", page)}
    log = inspect.getsource(MODULES["rppo_lstm"].Run.log)
    assert charts == {*re.findall(r'"charts/(\w+)"', log)}


@pytest.mark.parametrize("name", ["readme-light", "readme-dark", *plot.CHARTS])
def test_a_chart_shows_the_results(name):
    """It was drawn from the rows that are in the results today: python benchmarks/plot.py readme."""
    task, methods, _ = plot.CHARTS.get(name, ("cartpole-masked", ["lstm", "ablated"], False))
    digest = plot.digest([(task, method) for method in methods])
    assert f"of results {digest}" in (ROOT / f"docs/img/{name}.svg").read_text()


def test_no_two_programs_have_one_name():
    """conftest.py, say, is one file; a page of docs/reading has the name of its script."""
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    names = [Path(name).name for name in files.stdout.split()]
    assert sorted(names) == sorted({*names})


class Text(HTMLParser):
    """The text of a page without its code, and the number of its h1."""

    def __init__(self, page: str):
        super().__init__()
        self.inside: list[str] = []
        self.words, self.titles = "", 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "style", "code", "pre"):
            self.inside.append(tag)
        self.titles += tag == "h1"

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.words += data


def test_the_site_builds(tmp_path):
    """Strictly: no link or anchor leads nowhere, and nothing comes from the network."""
    pytest.importorskip("zensical")
    (tmp_path / "build").mkdir()
    build.build(tmp_path / "build", tmp_path / "site")
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link|source)[^>]*(?:src|href)=\"?(https?:[^\" >]+)", page.read_text()
        )
        assert loaded == [], page
        if page.name == "404.html":
            continue
        text = Text(page.read_text())
        assert text.titles == 1, page  # a line that begins with # makes another
        assert "](" not in text.words and "{{" not in text.words, page  # a link that is none
    whole = (tmp_path / "site/reading/rppo_lstm/index.html").read_text()
    for number in range(1, len(scripts.text("rppo_lstm")) + 1):
        blank = not scripts.text("rppo_lstm")[number - 1].strip()
        assert blank or f'id="L{number}"' in whole


@pytest.mark.parametrize(
    "markdown, error",
    [
        ("{{ source rppo_lstm.compute_gaee }}", "rppo_lstm.py has no compute_gaee"),
        ("{{ source rppo.train }}", "there is no rppo.py"),
        ("{{ file docs/none.diff }}", "there is no docs/none.diff"),
        ("{{ results cartpol }}", "has no task cartpol"),
        ("{{ throughput w9 }}", "has no section w9"),
        ("{{ exercise none }}", "has no none"),
        ("{{ sauce rppo_lstm.train }}", "there is no {{ sauce }}"),
    ],
)
def test_a_name_that_does_not_exist_ends_the_build(markdown, error):
    with pytest.raises(scripts.BuildError, match=re.escape(error)):
        fill.fill(markdown)


@pytest.mark.parametrize(
    "change, error",
    [
        (("## compute_gae", "## compute_gea"), "has no block compute_gea"),
        (("## compute_gae\n", "### compute_gae\n"), "has no note compute_gae"),
        (("## `# Advantages`", "## `# Advantagez`"), "0 lines with `# Advantagez`"),
        (("## `# Advantages`", '## `"""`'), 'lines with `"""`'),
        (("## sample\n", "## linear\n"), "twice: linear"),
        (("## load\n", "## sample\n"), "twice: sample"),
        (("## docstring\n", ""), "no note docstring"),
    ],
)
def test_notes_that_drift_end_the_build(tmp_path, monkeypatch, change, error):
    shutil.copytree(ROOT / "docs/reading", tmp_path / "docs/reading")
    shutil.copy(ROOT / "rppo_lstm.py", tmp_path)
    page = tmp_path / "docs/reading/rppo_lstm.md"
    assert page.read_text().count(change[0]) >= 1
    page.write_text(page.read_text().replace(*change, 1))
    monkeypatch.setattr(reading, "ROOT", tmp_path)
    with pytest.raises(scripts.BuildError, match=re.escape(error)):
        reading.page("rppo_lstm")


@pytest.mark.parametrize("script", [name for name, parent in scripts.PARENTS.items() if parent])
def test_the_differences_are_all_shown(script):
    """Rows of a diff, put together, are the block and the parent's, and no lines are lost."""
    parent = scripts.PARENTS[script]
    for name, block in scripts.blocks(script).items():
        rows = reading.difference(script, name, name)
        numbers = [row.number for row in rows if row.kind != "del"]
        assert numbers == [*range(block.first, block.last + 1)]
        for row in rows:
            lines = scripts.text(parent if row.kind == "del" else script)
            plain = re.sub(r"<[^>]*>", "", row.code)
            assert html.unescape(plain) == lines[row.number - 1]


def test_equations():
    shown = fill.equations("delta_t = r_t + gamma V_{t+1} - V_t <= x^2")
    assert (
        "δ<sub><i>t</i></sub> = <i>r</i><sub><i>t</i></sub> + γ <i>V</i><sub><i>t</i>+1</sub> − "
        in shown
    )
    assert "≤ <i>x</i><sup>2</sup>" in shown
