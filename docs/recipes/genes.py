"""Genes: which flags evolve.py changes in the next generation, and how.

    python docs/recipes/genes.py rppo_lstm networks,warm_start  # a first draw, and its offspring

Genes are the flags in NUMBERS, SIZES and CHOICES that a script has with its recipes: the learning
rate and other coefficients, sizes of layers, and what other recipes add: networks the numbers of
layers and their activation, images the channels of a CNN, warm_start noise that is added to all
weights at birth. An offspring differs from its parent in one of them.
"""

import random
import sys

import numpy as np
import use as driver
from activations import ACTIVATIONS

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
CHOICES = {"activation": [*ACTIVATIONS], "init_noise": [0.01, 0.03, 0.1]}


def names_of(script) -> list[str]:
    """The genes of a script; not flags that the command line has."""
    known = *NUMBERS, *SIZES, *CHOICES
    left_out = {name for name in known if driver.flag(name.replace("_", "-")) is not None}
    if hasattr(script.Args, "layers_before"):  # which replaces it
        left_out.add("encoder_size")
    if getattr(script.Args, "cnn_kernels", "").count(",") != 2:  # SIZES has three channels
        left_out.add("cnn_channels")
    return [name for name in known if hasattr(script.Args, name) and name not in left_out]


def power_of_2(low: int, high: int) -> int:
    return 2 ** random.randint(low.bit_length() - 1, high.bit_length() - 1)


def draw(name: str):
    """A first value; the logarithm of a number is uniform."""
    if name in CHOICES:
        return random.choice(CHOICES[name])
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
    if name in CHOICES:
        value = draw(name)
    elif name in SIZES:
        value = resized(name, genes[name])
    else:
        low, high, factors = NUMBERS[name]
        value = type(low)(min(max(genes[name] * random.choice(factors), low), high))
    return {**kept(genes), name: value}


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        script = driver.fresh(*",".join(sys.argv[1:]).split(","))
        first = kept({name: draw(name) for name in names_of(script)})
        print(first, mutate(first), sep="\n")
