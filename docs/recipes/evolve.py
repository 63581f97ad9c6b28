"""Evolution: a population of runs, of which the better have offspring, slightly changed.

    python docs/recipes/evolve.py rppo_lstm --env-id CartPole-v1 --mask-velocity
    python docs/recipes/evolve.py trpo networks --members 6 --generations 10 --env-id Pendulum-v1
    python docs/recipes/evolve.py rppo_lstm --no-evolve --env-id CartPole-v1  # the control

Every member is a run of its own, of any script and recipes. In each generation all train for
--steps more; then they are scored by their evaluations. Elitism: the best stays as it is.
Tournaments: for each other place --tournament members are drawn, and the best of them has an
offspring, with one of its flags in MUTATIONS changed. It starts from the parent's weights (the
recipe warm_start); where its networks are of another size, weights are copied as far as they
overlap. A run that fails, or is killed, is repeated once, and then counts as the worst. The best
of all is kept in RUNS_DIR/evolve/best. (Jaderberg et al. 2017; AgileRL.)
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import use as driver

# Of a flag that the script has: the range of the first draws, and an offspring's factors
MUTATIONS = {
    "learning_rate": (1e-4, 1e-2, (0.8, 1.25)),
    "clip_coef": (0.05, 0.4, (0.8, 1.25)),
    "ent_coef": (1e-4, 1e-1, (0.8, 1.25)),
    "target_kl": (0.003, 0.1, (0.8, 1.25)),  # of trpo
    "hidden_size": (32, 256, (0.5, 2)),
    "encoder_size": (32, 128, (0.5, 2)),
}


def draw(low, high):
    """Between the two, its logarithm uniform; a power of 2 between integers."""
    if isinstance(low, int):
        return 2 ** random.randint(low.bit_length() - 1, high.bit_length() - 1)
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def mutate(genes: dict) -> dict:
    name = random.choice(list(genes))
    low, high, factors = MUTATIONS[name]
    value = min(max(genes[name] * random.choice(factors), low), high)
    return {**genes, name: type(genes[name])(value)}


def score(folder: Path) -> float:
    file = folder / "result.json"
    return float(np.mean(json.loads(file.read_text())["evaluation"])) if file.exists() else -np.inf


def train(command: list[str], folder: Path, genes: dict, parent: Path | None, seed: int) -> Path:
    """A generation of one member; returns the folder of its run."""
    command = [*command, "--runs-dir", str(folder.parent), "--run-name", folder.name]
    command += ["--seed", str(seed)]
    for gene, value in genes.items():
        command += [f"--{gene}", str(value)]
    if parent:
        command += ["--init-from", str(parent), "--overlap"]
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 2:  # a flag that cannot be used: for all members alike
            raise ValueError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        if done.returncode == 0:
            return folder
    return folder


def evolve(options, command: list[str], names: list[str], folder: Path) -> Path:
    """All generations; returns the folder of the best run."""
    random.seed(options.seed)
    genes = [{name: draw(*MUTATIONS[name][:2]) for name in names} for _ in range(options.members)]
    parents: list[Path | None] = [None] * options.members
    best = None
    for generation in range(options.generations):
        folders = [folder / f"{generation}-{member}" for member in range(options.members)]
        seeds = [options.seed + member for member in range(options.members)]
        with ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(partial(train, command), folders, genes, parents, seeds))
        scores = [score(run) for run in folders]
        elite = int(np.argmax(scores))
        print(f"generation {generation}: {[round(x, 1) for x in scores]}, best {genes[elite]}")
        if best is None or scores[elite] >= score(best):
            best = folders[elite]
        parents = list(folders)  # without evolution everyone stays as it is
        if options.evolve:
            chosen = [elite]
            for _ in range(options.members - 1):
                drawn = random.sample(range(options.members), options.tournament)
                chosen.append(max(drawn, key=scores.__getitem__))
            parents = [folders[i] for i in chosen]
            genes = [genes[elite], *(mutate(genes[i]) for i in chosen[1:])]
        parents = [run if (run / "agent.pt").exists() else None for run in parents]
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("words", nargs="+", help="the script, and recipes with commas")
    parser.add_argument("--evolve", action=argparse.BooleanOptionalAction, default=True)
    numbers = {"members": 4, "generations": 5, "steps": 20_000, "tournament": 2, "seed": 1}
    for name, default in {**numbers, "processes": os.cpu_count()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runs-dir", default="runs")
    options, flags = parser.parse_known_args()
    name, *more = options.words
    recipes = {"warm_start", *",".join(more).split(",")} - {""}
    script = driver.fresh(name, *recipes)
    names = [gene for gene in MUTATIONS if hasattr(script.Args, gene)]
    own = {"anneal_lr": ["--no-anneal-lr"], "schedule": ["--schedule", "constant"]}
    flags += [word for flag in own if hasattr(script.Args, flag) for word in own[flag]]
    command = [sys.executable, str(driver.HERE / "use.py"), name, ",".join(recipes)]
    command += [*flags, "--total-timesteps", str(options.steps)]
    folder = Path(options.runs_dir, "evolve").resolve()
    script.check(not folder.exists(), f"{folder} exists: another --runs-dir, please")
    best = evolve(options, command, names, folder)
    shutil.copytree(best, folder / "best")
    print(f"{folder}/best: return {score(best):.1f}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
