"""Recipes, one or several, on a script.

    python docs/recipes/use.py rppo_lstm images,schedules --env-id my_module:MyEnv-v0
    python docs/recipes/use.py mine.py scalars       # a changed copy of one of the five scripts
    python docs/recipes/use.py --play runs/RUN       # or --resume: a run knows what made it
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi callbacks --stop-at-return 475

A recipe is a module with a function `use(script)`, which replaces names in a script: a subclass of
its Agent, its Run or its Args, another make_envs. Each builds on what the script has at that
moment, so they add up. `script.kind` says which of the five the script is, or is a copy of. A
recipe's flags are fields of its Args: --help shows them, agent.pt keeps them. Your own recipe is a
file NAME.py in the current directory or on PYTHONPATH.
"""

import copy
import importlib.util
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import cloudpickle
import gymnasium as gym
import numpy as np
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPTS = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"
# The order in which recipes are applied: environments, networks, weights, runs. Others come last.
ORDER = (
    "envpool_tasks", "poc_memory", "ppo1", "images", "minigrid_memory", "memory_gym_tasks",
    "previous_action", "frame_stack", "feedforward", "long_memory", "min_gru", "lru", "attention",
    "stacked_lstm", "networks", "sde", "squash", "multi_discrete", "action_masks",
    "cuda_graphs", "warm_start", "imitation", "carry_state", "recompute", "overlap", "losses",
    "eval_limit", "schedules", "two_groups", "keep_best", "scalars", "callbacks", "data_parallel",
)  # fmt: skip
ALIASES = {  # former names of recipes, in old runs and commands
    "image_frames": "images", "activations": "networks", "critics": "networks",
    "adam": "schedules", "diagnostics": "scalars", "ppo1_atari": "ppo1", "ppo1_mujoco": "ppo1",
}  # fmt: skip
sys.path += map(str, HERE.glob("*/"))  # --env-id poc_memory:PocMemory-v0
sys.modules.setdefault("use", sys.modules[__name__])  # recipes import this very module


class Wrapper(gym.vector.VectorWrapper):
    """Around what make_envs returns; it has whatever that has, such as return_queue."""

    def __getattr__(self, name):
        if name == "env":  # not there yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def observe(self, size: int) -> None:
        """Observations are vectors of that many numbers."""
        space = gym.spaces.Box(-np.inf, np.inf, (size,))
        self.single_observation_space = space
        self.observation_space = gym.vector.utils.batch_space(space, self.num_envs)


# Files, which are found by their paths: a module of the same name elsewhere is another module.
def import_file(file: Path):
    """A new module from a file, under a name that no import statement can mean."""
    name = f"{file.stem} from {file}"
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    cloudpickle.register_pickle_by_value(module)  # --async-envs: a process can't import it
    spec.loader.exec_module(module)
    for folder in (str(file.parent), os.getcwd()):  # --env-id my_module:MyEnv-v0
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def find(name: str, path: str | None = None) -> Path:
    """The file of a recipe, by the path that agent.pt holds, else by name. ValueError if none."""
    name = ALIASES.get(name, name)
    if path and Path(path).is_file():
        return Path(path)
    if name.endswith(".py"):
        return Path(name).resolve()
    folders = [*sorted(HERE.glob("*/")), HERE, Path.cwd(), *map(Path, sys.path)]
    for folder in folders:
        file = folder / f"{name}.py"
        if file.is_file() and file.resolve() != HERE / "use.py":
            return file.resolve()
    where = "docs/recipes and its folders, the current directory, PYTHONPATH"
    raise ValueError(f"no recipe {name!r} in {where}; recipes are {', '.join(known_recipes())}")


def known_recipes() -> list[str]:
    files = sorted(HERE.glob("**/*.py"))
    return [file.stem for file in files if "\ndef use(" in file.read_text()]


def recipe(name: str, path: str | None = None):
    """A recipe, or a program beside the recipes, as a module: one for all that ask for it."""
    file = find(name, path)
    known = sys.modules.get(f"{file.stem} from {file}")
    program = sys.modules["__main__"]  # or it would be a second module, and register tasks twice
    if known is None and getattr(program, "__file__", None):
        known = program if Path(program.__file__).resolve() == file else None
    return known or import_file(file)


def find_script(name: str) -> Path:
    """One of the five, or the path of any script."""
    if name.removesuffix(".py") in SCRIPTS and not Path(name).is_file():
        return ROOT / f"{name.removesuffix('.py')}.py"
    if name.endswith(".py"):
        return Path(name).resolve()
    raise ValueError(f"{name!r} is no script: name a file, or one of {', '.join(SCRIPTS)}")


def fresh(name: str, *names: str, paths: dict | None = None):
    """A new module of a script, with these recipes."""
    script = import_file(find_script(name))
    kinds = [kind for kind in SCRIPTS if getattr(script, "SCRIPT", "").startswith(kind)]
    if not kinds:
        raise ValueError(f"{script.__file__}: SCRIPT must begin with one of {', '.join(SCRIPTS)}")
    script.kind = kinds[0]
    script.recipes = {}
    return apply(script, names, paths or {})


def apply(script, names, paths: dict):
    """Applies recipes and writes their names into SCRIPT, their paths into agent.pt."""
    script.check("" not in names, "separate recipes by commas, without spaces")
    files = {file.stem: file for file in (find(name, paths.get(name)) for name in names)}
    for name in sorted(files, key=[*ORDER, *files].index):
        add(script, str(files[name]))
    script.SCRIPT = "+".join([script.SCRIPT, *(name for name in script.recipes if name in files)])
    contents = script.Run.contents
    script.Run.contents = lambda run: {**contents(run), "recipes": dict(script.recipes)}
    return script


def add(script, *names: str) -> None:
    """Applies recipes, but for those that the script already has."""
    for name in names:
        module = recipe(name)
        file = Path(module.__file__).resolve()
        if file.stem not in script.recipes:
            script.check(hasattr(module, "use"), f"{file} is no recipe: it has no use(script)")
            script.recipes[file.stem] = str(file)
            module.use(script)


# Runs
def made_by(run_dir) -> tuple[str, list[str], dict]:
    """A run's script, the names of its recipes, and their paths. ValueError if it is no run."""
    if not run_dir:
        raise ValueError("give the directory of a run")
    try:
        file = Path(run_dir, "agent.pt")
        saved = torch.load(file, map_location="cpu", weights_only=True)
        kind, *names = saved["script"].split("+")
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{run_dir} is not the directory of a run: {error!r:.150}") from error
    path = Path(saved.get("file", kind))
    beside = [path, ROOT / path.name, Path.cwd() / path.name]
    script = next((str(file) for file in beside if file.is_file()), str(path))
    return script, names, saved.get("recipes", {})


def open_run(run_dir):
    """A run's script, with its recipes; args, environments, agent, contents of agent.pt."""
    name, names, paths = made_by(run_dir)
    script = fresh(name, *names, paths=paths)
    args = script.Args(**script.load(run_dir)["args"])
    envs = script.make_envs(args, 1)
    if hasattr(script, "for_evaluation"):  # what a recipe puts around them, then and here
        envs = script.for_evaluation(envs, args)
    agent = script.Agent(envs, replace(args, play=str(run_dir))).eval()  # as --play does
    return script, args, envs, agent, script.load(run_dir, agent)


# What recipes share
def memory_name(script) -> str:
    """The name of an agent's memory in this script."""
    return "gru" if script.kind == "rppo_gru_atari" else "lstm"


def memories(agent) -> list[str]:
    """The names of an agent's memories; none of a script that has none unless told so."""
    names = "lstm", "gru", "critic_lstm", "critic_gru"
    return [name for name in names if hasattr(agent, name)]


def replace_memory(script, make) -> None:
    """make(args, input_size, hidden_size) returns what is in the place of the script's memory. A
    script that has one only if told so has it by default."""
    if not hasattr(script, "building"):

        class Agent(script.Agent):
            def __init__(self, envs, args):
                script.building = args  # the agent's, while it is built
                super().__init__(envs, args)

        script.building = None
        script.Agent = Agent
    if hasattr(script.Args, "memory"):

        @dataclass
        class Args(script.Args):
            memory: Literal["none", "lstm"] = "lstm"  # between the encoder and the actor

        script.Args = Args
    name = f"Reset{memory_name(script).upper()}"
    setattr(script, name, lambda inputs, units: make(script.building, inputs, units))


def knobs(script) -> None:
    """Gives each run.knobs, from which train reads its numbers at each iteration, for recipes to
    change. run.args stays what the user asked for, and is what agent.pt and result.json hold."""
    if hasattr(script.Run, "knobs"):
        return
    train = script.train

    class Run(script.Run):
        knobs = None

        def __init__(self, args, *others):
            super().__init__(copy.copy(args), *others)
            self.knobs = args

    script.Run = Run
    script.train = lambda args: train(copy.copy(args))


def stop(script, run, flag: str, value: float) -> None:
    """Ends training with this iteration, and says which flag wants it."""
    run.knobs.total_timesteps = run.step
    if is_first(script):
        run.bar.write(f"step {run.step}: {flag} {value:g} is reached, training ends")


def evaluation_envs(script, args, num_envs: int, render_mode: str | None = None):
    """As the script's own evaluation has them: a game of Atari's is cut after EVAL_FRAMES."""
    frames = [script.EVAL_FRAMES] if hasattr(script, "EVAL_FRAMES") else []
    return script.make_envs(args, num_envs, render_mode, *frames)


def is_first(script) -> bool:
    """Is this the process that writes? The only one, or rank 0 of mpiexec's or torchrun's."""
    return not hasattr(script, "world") or script.world().rank == 0


def of_first(script, x):
    """The first process's x, in all of them."""
    return script.world().bcast(x) if hasattr(script, "world") else x


def numbers(script, name: str, words: str) -> list[int]:
    """The positive integers that a flag has, separated by commas."""
    split = str(words).split(",")  # YAML makes a number of 64
    fits = all(word.isdecimal() and int(word) > 0 for word in split)
    script.check(fits, f"{name} {words!r}: must be positive integers, separated by commas")
    return [int(word) for word in split]


def choices(space) -> np.ndarray:
    """How many choices each of the K components of an action has: (K,)."""
    if isinstance(space, gym.spaces.MultiBinary):
        return np.full(space.shape, 2).ravel()
    return np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)


def change(module: torch.nn.Module, **methods) -> None:
    """Gives one module other methods, by a class of its own: its weights keep their names. A method
    has the old one as its first input."""
    kind = type(module)

    def method(name, new):
        return lambda self, *inputs: new(partial(getattr(kind, name), self), *inputs)

    changed = {name: method(name, new) for name, new in methods.items()}
    module.__class__ = type(kind.__name__, (kind,), changed)


@contextmanager
def same_random_numbers():
    """What is drawn within changes nothing that is drawn afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


# The command line
def flag(name: str) -> str | None:
    """What the command line says after --name, or after --name=."""
    for word, following in zip(sys.argv[1:], [*sys.argv[2:], None]):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == f"--{name}":
            return value if equals else following
    return None


@contextmanager
def one_line_errors(about: str = ""):
    """What a program refuses becomes one line, of rank 0, and exit code 2. --help prints about."""
    if about and sys.argv[1:] in (["--help"], ["-h"]):
        print(about, end="")
        sys.exit()
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if {os.environ.get("PMI_RANK", "0"), os.environ.get("RANK", "0")} == {"0"}:
            print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Runs the script with the recipes that the command line names; all flags are the script's."""
    with one_line_errors(f"{__doc__}\nRecipes: {', '.join(known_recipes())}.\n"):
        words = []
        while sys.argv[1:] and not sys.argv[1].startswith("-"):
            words.append(sys.argv.pop(1))
        name, names, paths = "rppo_lstm", [], {}
        if old_run := flag("play") or flag("resume"):
            name, names, paths = made_by(old_run)
        if words and (words[0].endswith(".py") or words[0] in SCRIPTS):
            name = words.pop(0)
        if words and old_run:
            raise ValueError(
                f"{' '.join(words)}: {old_run} has its recipes already, leave them out"
            )
        if words:
            names = words.pop(0).split(",")
        if words:
            raise ValueError(
                f"{' '.join(words)}: what is it? use.py SCRIPT recipe1,recipe2 --flags"
            )
        script = fresh(name, *names, paths=paths)
    script.main()


if __name__ == "__main__":
    main()
