"""Evolution: a population of runs, of which the better have offspring, slightly changed.

    python docs/recipes/evolve.py rppo_lstm --env-id CartPole-v1 --mask-velocity
    python docs/recipes/evolve.py trpo networks --members 6 --generations 10 --env-id Pendulum-v1
    python docs/recipes/evolve.py rppo_lstm --no-evolve --env-id CartPole-v1  # the control

Every member is a run of its own, of any script and recipes. In each generation all train for
--steps more; then they are scored by their evaluations. Elitism: the best stays as it is.
Tournaments: for each other place --tournament members are drawn, and the best of them has an
offspring, with one of its genes changed (the recipe genes). It starts from the parent's weights
(the recipe warm_start); where its networks have another size, weights are copied as far as they
overlap. Learning rates are not annealed. A run that fails or is killed is repeated once (the recipe
population); if that fails, too, it ranks last. The best of all is kept in RUNS_DIR/evolve/best.
(Jaderberg et al. 2017; AgileRL.)
"""

import argparse
import random
import shutil
from pathlib import Path

import numpy as np
import use as driver
from genes import draw, kept, mutate, names_of
from population import score, train_all


def evolve(options, words: list[str], names: list[str], folder: Path) -> None:
    """All generations: runs in this folder, of use.py's words and of flags with these names."""
    random.seed(options.seed)
    everyone = range(options.members)
    genes = [kept({name: draw(name) for name in names}) for _ in everyone]
    parents: list[Path] = []
    for generation in range(options.generations):
        runs = {}
        for member in everyone:
            flags = ["--seed", str(options.seed + member)]
            for gene, value in genes[member].items():
                flags += [f"--{gene}", str(value)]
            if parents and (parents[member] / "agent.pt").exists():  # it did not fail at once
                flags += ["--init-from", str(parents[member]), "--overlap"]
            runs[folder / f"{generation}-{member}"] = [*words, *flags]
        scores = train_all(runs, options.processes)
        folders = list(runs)
        elite = int(np.argmax(scores))
        print(f"generation {generation}: {[round(x, 1) for x in scores]}, best {genes[elite]}")
        chosen = list(everyone)  # without evolution everyone stays as it is
        if options.evolve:
            tournaments = [random.sample(everyone, options.tournament) for _ in everyone[1:]]
            chosen = [elite, *(max(drawn, key=scores.__getitem__) for drawn in tournaments)]
            genes = [kept(genes[elite]), *(mutate(genes[i]) for i in chosen[1:])]
        parents = [folders[i] for i in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("words", nargs="+", help="the script, then recipes, separated by commas")
    parser.add_argument("--evolve", action=argparse.BooleanOptionalAction, default=True)
    numbers = {"members": 4, "generations": 5, "steps": 20_000, "tournament": 2, "seed": 1}
    for name, default in {**numbers, "processes": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runs-dir", default="runs")
    options, flags = parser.parse_known_args()
    for name in numbers.keys() - {"seed"}:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: must be at least 1")
    if options.tournament > options.members:
        raise ValueError(f"--tournament: must be at most --members {options.members}")
    name, *more = options.words
    recipes = sorted({"warm_start", *",".join(more).split(",")} - {""})
    script = driver.fresh(name, *recipes)
    if hasattr(script.Args, "anneal_lr"):  # a generation is too short to anneal in
        flags.append("--no-anneal-lr")
    if hasattr(script.Args, "schedule"):
        flags += ["--schedule", "constant"]
    folder = Path(options.runs_dir, "evolve").resolve()
    script.check(not folder.exists(), f"{folder} exists: choose another --runs-dir")
    words = [name, ",".join(recipes), *flags, "--total-timesteps", str(options.steps)]
    evolve(options, words, names_of(script), folder)
    best = max(folder.iterdir(), key=score)
    shutil.copytree(best, folder / "best")
    print(f"{folder}/best: return {score(best):.1f}")


if __name__ == "__main__":
    with driver.one_line_errors():
        main()
