"""Evolution: a population of runs, of which the better have offspring, slightly changed.

    python docs/recipes/training/evolve.py rppo_lstm --env-id CartPole-v1 --mask-velocity
    python docs/recipes/training/evolve.py trpo networks --members 6 --generations 10
    python docs/recipes/training/evolve.py rppo_lstm --no-evolve --env-id CartPole-v1  # the control
    python docs/recipes/training/evolve.py rppo_lstm --mutation 0.7 \\
        --genes '{"learning_rate": [1e-4, 1e-2], "num_steps": [64, 512, 0.5, 2], "activation": []}'

Every member is a run of its own, of any script and recipes. In each generation all train for
--steps more. Then all are evaluated on the same episodes, and on new ones in every generation, so
that luck with episodes decides nothing. Elitism: the best stays as it is. Tournaments: for each
other place --tournament members are drawn, and the best of them has an offspring, which differs in
one gene and starts from its parent's weights (the recipe warm_start; weights of another size are
copied as far as they overlap).

Genes are the flags in NUMBERS, SIZES and CHOICES that the script and its recipes have and that
your command doesn't set: learning rate and coefficients, sizes of layers, of the recipe networks
their number and their activation, of images a CNN's channels, of warm_start noise that is added to
all weights at birth. --genes names others, or fewer: of each number the least, the most and, if you
like, the factors by which it shrinks and grows; [] where it has a place in the tables. With a
--mutation below 1 some offspring have their parent's genes. Learning rates aren't annealed. A run
that fails is repeated once (the recipe population), then it ranks last. RUNS_DIR/evolve/best is the
last generation's best. (Jaderberg et al. 2017, arXiv:1711.09846; AgileRL.)
"""

import argparse
import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver

NUMBERS = {  # the range of the first draws, and an offspring's factors
    "learning_rate": (1e-4, 1e-2, (0.8, 1.25)),
    "clip_coef": (0.05, 0.4, (0.8, 1.25)),
    "ent_coef": (1e-4, 1e-1, (0.8, 1.25)),
    "target_kl": (0.003, 0.1, (0.8, 1.25)),
    "hidden_size": (32, 256, (0.5, 2)),
    "encoder_size": (32, 128, (0.5, 2)),
}
SIZES = {  # of layers: the least and the most units, and how many layers there may be
    "layers_before": (32, 128, (1, 3)),
    "layers_after": (32, 128, (1, 3)),
    "cnn_channels": (8, 64, (3, 3)),
}


def all_choices() -> dict:
    return {
        "activation": [*driver.recipe("networks").ACTIVATIONS], "init_noise": [0.01, 0.03, 0.1],
    }  # fmt: skip


def names_of(script) -> list[str]:
    """The genes of a script; not flags that the command line has."""
    known = *NUMBERS, *SIZES, *all_choices()
    left_out = {name for name in known if driver.flag(name.replace("_", "-")) is not None}
    if hasattr(script.Args, "layers_before"):  # which replaces it
        left_out.add("encoder_size")
    if getattr(script.Args, "cnn_kernels", "").count(",") != 2:  # SIZES has three channels
        left_out.add("cnn_channels")
    return [name for name in known if hasattr(script.Args, name) and name not in left_out]


def set_genes(script, words: str) -> list[str]:
    """The names in --genes, whose numbers go into NUMBERS."""
    try:
        genes = json.loads(words)
        for name, (low, high, *factors) in ((name, x) for name, x in genes.items() if x):
            usual = (0.5, 2) if isinstance(low, int) else (0.8, 1.25)
            NUMBERS[name] = low, high, tuple(factors) or usual
    except (ValueError, TypeError, AttributeError) as error:
        raise script.ArgumentError(f"--genes {words}: {error}") from error
    known = {*NUMBERS, *SIZES, *all_choices()}
    wrong = [name for name in genes if name not in known or not hasattr(script.Args, name)]
    script.check(not wrong, f"--genes: {', '.join(wrong)}: no such flag, or no range")
    return list(genes)


def power_of_2(low: int, high: int) -> int:
    return 2 ** random.randint(low.bit_length() - 1, high.bit_length() - 1)


def draw(name: str):
    """A first value; the logarithm of a number is uniform."""
    if name in all_choices():
        return random.choice(all_choices()[name])
    if name in SIZES:
        low, high, (fewest, _) = SIZES[name]
        return ",".join(str(power_of_2(low, high)) for _ in range(fewest))
    low, high, _ = NUMBERS[name]
    if isinstance(low, int):
        return power_of_2(low, high)
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def resized(name: str, value: str) -> str:
    """One layer more or less at the end, or one of twice or half the size."""
    low, high, (fewest, most) = SIZES[name]
    sizes = [int(size) for size in value.split(",")]
    change = random.choice(["add", "remove", "resize"])
    if change == "add" and len(sizes) < most:
        sizes.append(sizes[-1])
    elif change == "remove" and len(sizes) > fewest:
        sizes.pop()
    else:
        place = random.randrange(len(sizes))
        sizes[place] = min(max(int(sizes[place] * random.choice((0.5, 2))), low), high)
    return ",".join(map(str, sizes))


def kept(genes: dict) -> dict:
    """The genes of one that stays as it is: no new noise in its weights."""
    return {name: 0.0 if name == "init_noise" else x for name, x in genes.items()}


def mutate(genes: dict) -> dict:
    """An offspring's genes."""
    name = random.choice(list(genes))
    if name in all_choices():
        value = draw(name)
    elif name in SIZES:
        value = resized(name, genes[name])
    else:
        low, high, factors = NUMBERS[name]
        value = type(low)(min(max(genes[name] * random.choice(factors), low), high))
    return {**kept(genes), name: value}


def evolve(options, words: list[str], names: list[str], folder: Path, mutation=1.0) -> Path:
    """All generations: runs in this folder, of use.py's words and of flags with these names -> the
    last generation's best."""
    population = driver.recipe("population")
    random.seed(options.seed)
    everyone = range(options.members)
    genes = [kept({name: draw(name) for name in names}) for _ in everyone]
    parents: list[Path] = []
    for generation in range(options.generations):
        runs = {}
        for member in everyone:
            seed = options.seed + generation * options.members + member
            flags = ["--seed", str(seed), "--eval-seed", str(options.seed + generation)]
            for gene, value in genes[member].items():
                flags += [f"--{gene}", str(value)]
            if parents and (parents[member] / "agent.pt").exists():  # it did not fail at once
                flags += ["--init-from", str(parents[member]), "--overlap"]
            runs[folder / f"{generation}-{member}"] = [*words, *flags]
        scores = population.train_all(runs, options.processes)
        folders = list(runs)
        elite = int(np.argmax(scores))
        print(f"generation {generation}: {[round(x, 1) for x in scores]}, best {genes[elite]}")
        chosen = list(everyone)  # without evolution everyone stays as it is
        if options.evolve and generation + 1 < options.generations:
            tournaments = [random.sample(everyone, options.tournament) for _ in everyone[1:]]
            chosen = [elite, *(max(drawn, key=scores.__getitem__) for drawn in tournaments)]
            children = [
                mutate(genes[i]) if random.random() < mutation else kept(genes[i])
                for i in chosen[1:]
            ]
            for member, (i, child) in enumerate(zip(chosen[1:], children), 1):
                changes = {name: x for name, x in child.items() if x != kept(genes[i])[name]}
                print(f"    {generation + 1}-{member}: from {folders[i].name}, changed: {changes}")
            genes = [kept(genes[elite]), *children]
        parents = [folders[i] for i in chosen]
    return folders[elite]


def use(script):
    evaluate = script.evaluate

    @dataclass
    class Args(script.Args):
        eval_seed: int = 0  # of the evaluation's episodes; 0: the run's

    def on_same_episodes(agent, envs, seed, *others, **options):
        if agent.args.eval_seed:
            seed = script.env_seed(agent.args.eval_seed, script.EVALUATION)
        return evaluate(agent, envs, seed, *others, **options)

    script.Args = Args
    script.evaluate = on_same_episodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("words", nargs="+", help="the script, then recipes, separated by commas")
    parser.add_argument("--evolve", action=argparse.BooleanOptionalAction, default=True)
    numbers = {"members": 4, "generations": 5, "steps": 20_000, "tournament": 2, "seed": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    parser.add_argument("--genes", help="names and ranges, in JSON")
    parser.add_argument("--mutation", type=float, default=1.0, help="probability of a change")
    parser.add_argument("--runs-dir", default="runs")
    options, flags = parser.parse_known_args()
    for name in numbers.keys() - {"seed"}:
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: must be at least 1")
    if options.tournament > options.members:
        raise ValueError(f"--tournament: must be at most --members {options.members}")
    name, *more = options.words
    recipes = sorted({"warm_start", "evolve", *",".join(more).split(",")} - {""})
    script = driver.fresh(name, *recipes)
    if hasattr(script.Args, "anneal_lr"):  # a generation is too short to anneal in
        flags.append("--no-anneal-lr")
    folder = Path(options.runs_dir, "evolve").resolve()
    script.check(not folder.exists(), f"{folder} exists: choose another --runs-dir")
    words = [name, ",".join(recipes), *flags, "--total-timesteps", str(options.steps)]
    names = set_genes(script, options.genes) if options.genes else names_of(script)
    best = evolve(options, words, names, folder, options.mutation)
    shutil.copytree(best, folder / "best")
    print(f"{folder}/best: return {driver.recipe('population').score(best):.1f}")


if __name__ == "__main__":
    with driver.one_line_errors():
        main()
