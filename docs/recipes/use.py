"""Recipes, one or several, on a script: the driver.

    python docs/recipes/use.py rppo_lstm images,schedules --env-id my_module:MyEnv-v0
    python docs/recipes/use.py --play runs/RUN  # or --resume: a run knows its script and recipes
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi callbacks --stop-at-return 475
    torchrun --nproc-per-node 2 docs/recipes/use.py rppo_gru_atari schedules --clip-coef 0.2

A recipe is a module in this folder, whose `use(script)` replaces names in a script: a subclass of
its Agent, its Run or its Args, another make_envs. Each builds on what the script has at that
moment, so that they add up; a flag of a recipe is a field of its Args, which --help shows and
agent.pt keeps. `python docs/recipes/images.py rppo_lstm ...` is short for one recipe. The run's
name and agent.pt say which recipes made it: rppo_lstm+images+schedules.
"""

import copy
import importlib
import importlib.util
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(HERE), str(ROOT)]
SCRIPTS = "rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"
# In the order in which they are applied: environments, networks, weights, runs.
RECIPES = (
    "poc_memory", "minigrid_memory", "memory_gym_tasks", "ppo1_atari", "ppo1_mujoco",
    "image_frames", "images", "previous_action", "frame_stack", "feedforward", "long_memory",
    "networks", "critics", "activations", "stacked_lstm", "sde", "squash", "warm_start",
    "imitation", "adam", "eval_limit", "schedules", "keep_best", "diagnostics", "scalars",
    "callbacks",
)  # fmt: skip


class Wrapper(gym.vector.VectorWrapper):
    """Around what make_envs returns; has whatever that has, such as return_queue."""

    def __getattr__(self, name):
        if name == "env":  # not there yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def observe(self, size: int) -> None:
        """Observations are vectors of that many numbers."""
        space = gym.spaces.Box(-float("inf"), float("inf"), (size,))
        self.single_observation_space = space
        self.observation_space = gym.vector.utils.batch_space(space, self.num_envs)


def memory_name(script) -> str:
    """The script's class of memories."""
    return "ResetGRU" if hasattr(script, "ResetGRU") else "ResetLSTM"


def memories(agent) -> list[str]:
    """The names of an agent's memories; none of a script that has none unless told so."""
    names = "lstm", "gru", "critic_lstm", "critic_gru"
    return [name for name in names if hasattr(agent, name)]


def is_first(script) -> bool:
    """Is this the process that writes? The only one, or the first of torchrun's or mpiexec's."""
    if hasattr(script, "world"):
        return script.world().rank == 0
    return getattr(script, "RANK", 0) == 0


def of_first(script, x):
    """The first process's x, in all of them."""
    if hasattr(script, "world"):
        return script.world().bcast(x)
    if hasattr(script, "gather"):
        return script.gather(x)[0]
    return x


def add(script, *names: str) -> None:
    """Applies recipes, but for those that the script already has."""
    known = applied(script)
    for name in names:
        if name not in known:
            module = importlib.import_module(name)
            script.check(hasattr(module, "use"), f"{name} is no recipe: it has no use(script)")
            known.append(name)
            module.use(script)


def applied(script) -> list[str]:
    """The names of the recipes that a script has."""
    return script.__dict__.setdefault("recipes", [])


def keep_args(script) -> None:
    """train works on a copy of its Args, so that the caller's can be used again."""
    train = script.train
    script.train = lambda args: train(copy.copy(args))


def without_warning(script, words: str) -> None:
    """A run that begins does not give the warning that begins with these words."""

    class Run(script.Run):
        def __init__(self, *inputs):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", words)
                super().__init__(*inputs)

    script.Run = Run


def numbers(script, name: str, words: str) -> list[int]:
    """The positive integers that a flag has, separated by commas."""
    split = words.split(",")
    fits = all(word.isdecimal() and int(word) > 0 for word in split)
    script.check(fits, f"{name} {words!r}: must be positive integers, separated by commas")
    return [int(word) for word in split]


def apply(script, names):
    """Applies recipes and writes their names into SCRIPT; returns the script."""
    script.check("" not in names, "separate recipes by commas, without spaces")
    for name in names:
        known = name in RECIPES or ("." not in name and importlib.util.find_spec(name))
        script.check(known, f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    names = sorted(dict.fromkeys(names), key=[*RECIPES, *names].index)  # yours come last
    add(script, *names)
    script.SCRIPT = "+".join([script.SCRIPT, *names])
    keep_args(script)
    return script


def check_script(name: str) -> None:
    """ValueError for what is no script."""
    if name not in SCRIPTS:
        raise ValueError(f"the first argument must be one of {', '.join(SCRIPTS)}")


def made_by(run_dir) -> list[str]:
    """The script and the recipes of a run."""
    if run_dir == "":
        raise ValueError("give the directory of a run")
    try:
        file = Path(run_dir, "agent.pt")
        return torch.load(file, map_location="cpu", weights_only=True)["script"].split("+")
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{run_dir} is not the directory of a run: {error!r:.150}") from error


def fresh(name: str, *names: str):
    """A copy of a script with these recipes, which leaves the script itself as it is."""
    check_script(name)
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return apply(script, names)


def open_run(run_dir):
    """A run's script, a copy with its recipes; args, environments, agent, contents of agent.pt."""
    script = fresh(*made_by(run_dir))
    args = script.Args(**script.load(run_dir)["args"])
    envs = script.make_envs(args, 1)
    if limit := getattr(args, "eval_steps", 0):  # of the recipe eval_limit
        envs = importlib.import_module("eval_limit").Limit(envs, limit)
    agent = script.Agent(envs, replace(args, play=str(run_dir))).eval()  # as --play does
    return script, args, envs, agent, script.load(run_dir, agent)


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
        print(about, end="")  # in one write, for `--help | head`
        sys.exit()
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("PMI_RANK", "0") == "0":  # mpiexec sets it
            print("error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)


def main(recipe: str = "", default: str = "rppo_lstm") -> None:
    """Runs the script and the recipes that the command line names; all flags are the script's."""
    about = "" if recipe or sys.argv[2:] else f"{__doc__}\nRecipes: {', '.join(RECIPES)}.\n"
    named = ""
    names = [recipe] if recipe else []
    program = sys.modules["__main__"]
    if Path(getattr(program, "__file__", "")).stem == recipe:
        sys.modules[recipe] = program  # else it would be imported again, and register tasks twice
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        named = sys.argv.pop(1).removesuffix(".py")
        if not recipe and sys.argv[1:] and not sys.argv[1].startswith("-"):
            names = sys.argv.pop(1).split(",")
    with one_line_errors(about):
        name = named or (default if recipe else "")
        if old_run := flag("play") or flag("resume"):
            name, *more = made_by(old_run)
            names += more
            if named not in ("", name):
                raise ValueError(f"{old_run} is a run of {name}, not of {named}")
        check_script(name)
        script = importlib.import_module(name)
    parse_args = script.parse_args

    def with_recipes():  # here, so that the script's main reports what a recipe refuses
        apply(script, names)
        return parse_args()

    script.parse_args = with_recipes
    script.main()


if __name__ == "__main__":
    main()
