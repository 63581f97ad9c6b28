"""Curves and tables of benchmarks/results.

    python benchmarks/plot.py curves cartpole-masked --out docs/img/cartpole.svg
    python benchmarks/plot.py table cartpole cartpole-masked [--out table.md]

Both give the interquartile mean over a task's seeds, which is the mean of the middle half, with a
95 % bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264, whose stratified bootstrap for one
task is this one). The figure has no background and mid-grey text, for light and for dark pages.
"""

import argparse
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
from learning import RESULTS, read

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rppo", "font.size": 10})
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

COLORS = ["#3b8fd0", "#e0803a", "#3fa45b", "#b866b5", "#b59a2a", "#d05a5a"]
GREY = "#808080"


def iqm(x: np.ndarray) -> np.ndarray:
    """(seeds, ...) -> (...): the mean without the lowest and the highest quarter of the seeds."""
    cut = len(x) // 4
    return np.sort(x, 0)[cut : len(x) - cut].mean(0)


def interval(x: np.ndarray, samples: int = 10_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seeds, ...) -> the interquartile mean, and the ends of its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    means = [iqm(x[random.integers(len(x), size=len(x))]) for _ in range(samples)]
    return iqm(x), *np.percentile(means, [2.5, 97.5], axis=0)


def table(tasks: list[str], results: Path = RESULTS) -> str:
    """Markdown: a row for each task and method. The threshold is Gymnasium's, if it has one."""
    lines = [
        "| task | method | steps | seeds | return: IQM [95 %] | worst seed | solved |",
        "|---|---|---|---|---|---|---|",
    ]
    runs: dict[tuple[str, str], dict[str, dict]] = {}
    for row in read(results / "learning.csv"):
        runs.setdefault((row["task"], row["method"]), {})[row["seed"]] = row
    for task in tasks:
        of_task = {method: seeds for (t, method), seeds in runs.items() if t == task}
        if not of_task:
            raise ValueError(f"{results / 'learning.csv'} has no task {task}")
        for method, seeds in of_task.items():
            rows = list(seeds.values())
            scores = np.array([float(r["eval_mean"]) for r in rows if not r["error"]])
            failed = len(rows) - len(scores)
            count = f"{len(rows)}, {failed} failed" if failed else f"{len(rows)}"
            mean = worst = solved = "-"
            if len(scores):
                mean = "{:.1f} [{:.1f}, {:.1f}]".format(*interval(scores))
                worst = f"{scores.min():.1f}"
            spec = gym.registry.get(env_id(rows[0]["flags"]))
            if spec is not None and spec.reward_threshold is not None:
                share = (scores >= spec.reward_threshold).sum() / len(rows)  # a failed run is not
                solved = f"{share:.0%} (>= {spec.reward_threshold:g})"
            steps = f"{int(rows[0]['steps']):,}"
            lines.append(f"| {task} | {method} | {steps} | {count} | {mean} | {worst} | {solved} |")
    return "\n".join(lines)


def env_id(flags: str) -> str:
    """The environment among a run's flags; a peer's stands in the second place. Earlier versions
    wrote CartPoleNoVel-v1 for CartPole-v1 --mask-velocity."""
    words = flags.split()
    name = words[words.index("--env-id") + 1] if "--env-id" in words else words[1]
    return name.replace("NoVel", "")


def curves(tasks: list[str], out: Path, methods: list[str] | None, results: Path = RESULTS) -> None:
    """A panel for each task, a line for each method."""
    runs: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for row in read(results / "curves.csv"):
        of_method = runs.setdefault((row["task"], row["method"]), {})
        of_method.setdefault(row["seed"], {})[float(row["step"])] = float(row["return"])
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 3.4), squeeze=False)
    for task, axis in zip(tasks, axes[0]):
        drawn = {m: s for (t, m), s in runs.items() if t == task and m in (methods or [m])}
        if not drawn:
            raise ValueError(f"{results / 'curves.csv'} has no curve of {task}")
        for (method, seeds), color in zip(drawn.items(), COLORS):
            points = [np.array(sorted(c.items())) for c in seeds.values()]  # each (points, 2)
            first = max(p[0, 0] for p in points)
            steps = np.linspace(first, min(p[-1, 0] for p in points), 60)
            returns = np.array([np.interp(steps, p[:, 0], p[:, 1]) for p in points])
            mean, low, high = interval(returns, samples=2000)
            axis.plot(steps, mean, color=color, label=f"{method} ({len(points)} seeds)")
            axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        axis.set_title(task, color=GREY)
        axis.set_xlabel("environment steps", color=GREY)
        axis.set_ylabel("return", color=GREY)
        axis.tick_params(colors=GREY)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(color=GREY, alpha=0.3)
        axis.spines[:].set_color(GREY)
        axis.legend(frameon=False, labelcolor=GREY)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["curves", "table"])
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--methods", nargs="+", help="of the curves; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--out", type=Path, help="an .svg file, or a table's file")
    options = parser.parse_args()
    if options.what == "curves":
        out = options.out or Path(f"{options.tasks[0]}.svg")
        curves(options.tasks, out, options.methods, options.results)
    elif options.out:
        options.out.write_text(table(options.tasks, options.results) + "\n")
    else:
        print(table(options.tasks, options.results))


if __name__ == "__main__":
    main()
