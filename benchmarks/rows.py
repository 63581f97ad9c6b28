"""What the measuring programs and the report share: tasks.toml, scripts, CSV rows, the commit, the machine."""

import csv
import fcntl
import importlib
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs/exercises"))
import train as exercises  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
EPISODES = 100  # of a final agent, deterministic ones and as many sampled ones
LEARNING = """task method script flags seed steps eval_mean eval_std eval_episodes sampled_mean
    return_100 wall_seconds global_step date commit torch gymnasium machine error""".split()
CURVES = "task method seed steps returns".split()  # the last two: numbers with spaces
SPEED = "date commit machine section work system steps sps median min max note".split()


@dataclass
class Task:
    """Of tasks.toml. methods: the command of each; published: a return and its source, if any."""

    title: str
    steps: int
    methods: dict[str, str]
    published: list | None = None


def read_tasks() -> tuple[dict[str, Task], dict[str, dict], dict[str, str]]:
    """By name: the tasks, the settings of peers, and changes of rppo_lstm.py, the exercises' among them."""
    data = tomllib.loads((ROOT / "benchmarks/tasks.toml").read_text())
    changes, peers, groups = (data.pop(name) for name in ("changes", "peers", "groups"))
    peers = {name: {**peers.get(x.pop("like", ""), {}), **x} for name, x in peers.items()}
    tasks = {}
    for name, table in data.items():
        group = groups.get(table.pop("group", ""), {})
        chosen = table.pop("methods", [*group])
        task = Task(table.pop("name"), table.pop("steps"), {}, table.pop("published", None))
        words = {key: table.pop(key, "") for key in ("env", "flags", "recipes")}
        for method, command in {**{m: group[m] for m in chosen}, **table}.items():
            task.methods[method] = " ".join(command.format(**words).split())
        tasks[name] = task
    return tasks, peers, exercises.DIFFS | changes


TASKS, PEERS, CHANGES = read_tasks()


def split(command: str) -> tuple[list[str], list[str]]:
    """A command's words before its flags, and the flags."""
    words = command.split()
    names = list(takewhile(lambda word: not word.startswith("--"), words))
    return names, words[len(names) :]


def load_script(name: str, extras: list[str], root: Path = ROOT) -> ModuleType:
    """A new module of a checkout's script, with recipes, whose names may be joined by commas, or
    with one of CHANGES, change:NAME."""
    path = root / f"{name}.py"
    names = [x for extra in extras for x in extra.split(",")]
    text = path.read_text()
    if names and names[0].startswith("change:"):
        text = exercises.changed(CHANGES[names[0].removeprefix("change:")])
    elif names:
        return use().fresh(str(path), *names)
    script = ModuleType(name)
    script.__file__ = str(path)
    sys.modules[name] = script  # where dataclasses look
    exec(compile(text, str(path), "exec"), vars(script))
    return script


def use() -> ModuleType:
    """docs/recipes/use.py: fresh(SCRIPT, RECIPE, ...) and recipe(NAME) are modules. Then the tasks
    among the recipes can be imported, too: --env-id poc_memory:PocMemory-v0."""
    sys.path.append(str(ROOT / "docs/recipes"))
    return importlib.import_module("use")


def parse(script, flags: list[str]):
    """The script's Args, as its command line has them."""
    sys.argv[1:] = flags
    return script.parse_args()


def machine() -> str:
    """The processor's name and the number of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n") if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def commit(root: Path = ROOT, *paths: str) -> str:
    """The short name of a checkout's commit, -dirty if one of these files differs: the report leaves
    such rows out. Empty without git, and for a copy that is no checkout."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    git = ["git", "-C", str(root)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *(paths or ["*.py"])])
    return name.stdout.strip() + "-dirty" * (differs.returncode == 1)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, fields: list[str], rows: list[dict]) -> None:
    """Adds rows, and the header to a new file; other processes may do the same at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
        if file.seek(0, 2) == 0:
            writer.writeheader()
        writer.writerows(rows)
