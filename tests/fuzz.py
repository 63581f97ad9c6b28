"""A random search for combinations of recipes and flags that go wrong.

    python tests/fuzz.py                              # 500 of them, two at a time
    python tests/fuzz.py --combinations 1 --first 137 # number 137 again

A combination is a script, two to six of its recipes and random flags. It is wrong unless the first
minibatch of each update has log ratios of 0 (recipe check_replay), the weights are finite, the
agent that is opened from its file plays the episodes that it played after training, the run can be
resumed, and use_agent acts. Recipes may refuse one another, in one line.
"""

import argparse
import random
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from recipe_tools import driver
from test_recipes import LETTERS, PACKAGES, RECIPES, trains

LEFT_OUT = {*PACKAGES, "imitation", "warm_start", "data_parallel"}  # need files, or processes


def combination(number: int):
    """A letter of a script, names of recipes, flags: the same for the same number."""
    rng = random.Random(number)
    letter = rng.choices("LCTPG", [4, 3, 2, 2, 1])[0]
    names = [name for name, (letters, _) in RECIPES.items() if letter in letters]
    names = rng.sample(sorted({*names} - LEFT_OUT), rng.randint(2, 6))
    names = sorted(names, key=lambda name: rng.random())
    if letter != "T":
        names.append("check_replay")
    flags: dict = {"seed": rng.randrange(10**6), "eval_episodes": rng.choice([1, 2])}
    if letter in "LC":
        flags |= {"num_envs": rng.choice([2, 4]), "num_steps": rng.choice([8, 16])}
        flags |= {"seq_len": rng.choice([0, 4, 8]), "norm_obs": rng.random() < 0.5}
        flags |= {"gamma": rng.choice([0.0, 0.9, 1.0]), "ablate_memory": rng.random() < 0.1}
    if letter == "T":
        flags |= {"num_envs": rng.choice([1, 3]), "sub_sampling_factor": rng.choice([1, 2])}
        flags |= {"memory": rng.choice(["none", "lstm"])}
    if letter == "P":
        flags |= {"memory": rng.choice(["none", "lstm"]), "seq_len": rng.choice([4, 8])}
    if letter == "G":
        flags |= {"eval_episodes": 0, "frame_stack": rng.choice([1, 2])}
    return letter, names, flags


def opened(run_dir: Path) -> None:
    """use_agent acts in an environment of the user's own, if the run has no vector recipe."""
    use_agent = driver.recipe("use_agent")
    try:
        policy = use_agent.Policy(run_dir)
    except ValueError as error:
        assert "earlier steps" in str(error), error
        return
    obs, info = policy.envs.reset(seed=1)
    action, _ = policy.agent.predict(obs, None)
    assert policy.envs.action_space.contains(action) or isinstance(
        policy.envs.single_action_space, gym.spaces.Box
    )
    policy.envs.step(action)


def tried(number: int) -> tuple[str, str]:
    """right, refused or wrong, and what to say of it."""
    torch.set_num_threads(1)
    letter, names, flags = combination(number)
    what = f"{number}: {LETTERS[letter]} {','.join(names)} {flags}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipes = {**RECIPES, "check_replay": ("LCGP", {})}
            trains(Path(folder), letter, names, flags, recipes)
            opened(next(Path(folder).iterdir()))
        except ValueError as error:
            if type(error).__name__ == "ArgumentError" and "\n" not in str(error):
                if "check_replay" not in str(error):
                    return "refused", f"{what}\n    {error}"
            return "wrong", f"{what}\n{traceback.format_exc()}"
        except (Exception, SystemExit):
            return "wrong", f"{what}\n{traceback.format_exc()}"
    return "right", what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--combinations", type=int, default=500)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="what was refused, and why")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.combinations)
    counts = {"right": 0, "refused": 0, "wrong": 0}
    with ProcessPoolExecutor(args.jobs) as pool:
        for outcome, what in pool.map(tried, numbers):
            counts[outcome] += 1
            if outcome == "wrong" or args.verbose and outcome == "refused":
                print(f"{outcome} {what}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
