"""Draws learning curves from benchmarks/results: python benchmarks/plot.py OUT.png TITLE NAME=LABEL [NAME=LABEL ...]

Each line is the interquartile mean over seeds of the training return, the band its 95 % bootstrap interval.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    target, title, *series = sys.argv[1:]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=110)
    for item in series:
        name, label = item.split("=")
        result = json.loads((RESULTS / f"{name}.json").read_text())
        curves = [np.array(seed["curve"]) for seed in result["seeds"].values() if seed.get("curve")]
        steps = np.linspace(max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves), 60)
        returns = np.array([np.interp(steps, c[:, 0], c[:, 1]) for c in curves])
        generator = np.random.default_rng(0)
        cut = len(returns) // 4
        def iqm(x, cut=cut):
            return np.sort(x, -2)[..., cut : x.shape[-2] - cut, :].mean(-2)
        resampled = iqm(returns[generator.integers(len(returns), size=(2000, len(returns)))])
        low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
        (line,) = axes.plot(steps, iqm(returns), label=f"{label} ({len(returns)} seeds)")
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(title=title, xlabel="environment steps", ylabel="return of training episodes")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main()
