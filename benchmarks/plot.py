"""Curves and tables of benchmarks/results.

    python benchmarks/plot.py curves cartpole-masked --out docs/img/cartpole.svg
    python benchmarks/plot.py table cartpole cartpole-masked [--out table.md]
    python benchmarks/plot.py readme  # README.md's tables, and the charts of docs/img

The first two give the interquartile mean over a task's seeds, which is the mean of the middle half, with a
95 % bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264, whose stratified bootstrap for one
task is this one). The figure has no background and mid-grey text, for light and for dark pages.
"""

import argparse
import hashlib
import re
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import throughput
from learning import RESULTS, ROOT, TASKS, read, read_curves

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rppo", "font.size": 10})
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

COLORS = ["#3b8fd0", "#e0803a", "#3fa45b", "#b866b5", "#b59a2a", "#d05a5a"]
GREY = "#808080"
ZOO = "rl-baselines3-zoo, one run"
# Published returns on the same task, after as many steps where nothing else is said: a method's
# return and its source. Results on a similar task (other observations, another version of MuJoCo's
# robots) are quoted in the notes of docs/results.md only.
PUBLISHED = {
    "cartpole-masked": (500, ZOO),
    "pendulum-masked": (-218, ZOO),
    "mountaincarcontinuous-masked": (91.5, ZOO),
    "trpo-cartpole": (500, ZOO),
    "trpo-acrobot": (-83, ZOO),
    "trpo-mountaincar": (-107, ZOO),
    "trpo-pendulum": (-175, ZOO),
    "trpo-mountaincarcontinuous": (92.5, ZOO),
    "trpo-lunarlander": (133, ZOO),
    "trpo-lunarlandercontinuous": (262, ZOO),
    "halfcheetah": (1803, "sb3-contrib's TRPO, 3 seeds"),
    "swimmer": (359, "sb3-contrib's TRPO, 3 seeds"),
    "poc-memory": (1.197, "recurrent-ppo-truncated-bptt, 10 runs"),
    "minigrid-memory-s9-pixels": (0.926, "recurrent-ppo-truncated-bptt"),
    "popgym-repeat-previous-easy": (0.999, "Morad et al. 2023, GRU, 15M steps"),
    "pong": (19.8, "CleanRL, 10M steps, 3 seeds"),
    "breakout": (128.9, "CleanRL, 10M steps, 3 seeds"),
}
NAMES = {  # of tasks, for people
    "cartpole": "CartPole",
    "cartpole-masked": "CartPole without velocities",
    "pendulum-masked": "Pendulum without velocities",
    "mountaincarcontinuous-masked": "MountainCarContinuous without velocities",
    "lunarlander-masked": "LunarLander without velocities",
    "lunarlandercontinuous-masked": "LunarLanderContinuous without velocities",
    "poc-memory": "PocMemory",
    "minigrid-memory-s9": "MiniGrid MemoryS9, symbols",
    "minigrid-memory-s9-pixels": "MiniGrid MemoryS9, pixels",
    "minigrid-memory-s13": "MiniGrid MemoryS13, symbols",
    "popgym-repeat-first-easy": "RepeatFirstEasy",
    "popgym-repeat-previous-easy": "RepeatPreviousEasy",
    "popgym-repeat-previous-medium": "RepeatPreviousMedium",
    "popgym-repeat-previous-medium-5m": "RepeatPreviousMedium",
    "popgym-repeat-previous-medium-15m": "RepeatPreviousMedium",
    "popgym-count-recall-easy": "CountRecallEasy",
    "popgym-count-recall-easy-15m": "CountRecallEasy",
    "popgym-autoencode-easy": "AutoencodeEasy",
    "popgym-autoencode-easy-15m": "AutoencodeEasy",
    "popgym-higher-lower-easy": "HigherLowerEasy",
    "popgym-cartpole-easy": "PositionOnlyCartPoleEasy",
    "popgym-multiarmed-bandit-easy": "MultiarmedBanditEasy",
    "layers-cartpole-masked": "CartPole without velocities, layers of other systems",
    "ablation-cartpole-masked": "CartPole without velocities",
    "ablation-repeat-previous": "RepeatPreviousEasy",
    "ablation-repeat-first": "RepeatFirstEasy",
    "ppo1-cartpole": "CartPole, one rank",
    "ppo1-cartpole-masked": "CartPole without velocities, one rank",
    "trpo-cartpole": "CartPole",
    "trpo-cartpole-masked": "CartPole without velocities",
    "trpo-acrobot": "Acrobot",
    "trpo-mountaincar": "MountainCar",
    "trpo-pendulum": "Pendulum",
    "trpo-mountaincarcontinuous": "MountainCarContinuous",
    "trpo-lunarlander": "LunarLander",
    "trpo-lunarlandercontinuous": "LunarLanderContinuous",
    "halfcheetah": "HalfCheetah",
    "hopper": "Hopper",
    "walker2d": "Walker2d",
    "swimmer": "Swimmer",
    "ant": "Ant",
    "pong": "Pong from single frames",
    "breakout": "Breakout from single frames",
}
METHODS = {
    "lstm": "LSTM",
    "gru": "GRU",
    "ablated": "no memory",
    "frames": "four frames",
    "lstm, previous action": "LSTM, sees its last action",
    "lstm, half open": "LSTM, forget gates half open",
    "lstm, chrono": "LSTM, longer memory",
    "lstm, gamma 0.5": "LSTM, gamma 0.5",
    "lstm, separate critic": "LSTM, separate critic",
    "lstm, sequences of 1": "LSTM, sequences of 1",
    "trpo": "trpo.py",
    "trpo, lstm": "trpo.py with an LSTM",
    "trpo, gSDE": "trpo.py with gSDE",
    "ppo1": "ppo1_mpi.py",
    "ppo1, lstm": "ppo1_mpi.py with an LSTM",
    "sb3-ppo": "stable-baselines3's PPO",
    "sb3-contrib-trpo": "sb3-contrib's TRPO",
}
README = {  # the rows of README's table of returns: task, the method of this project
    "cartpole-masked": "lstm",
    "pendulum-masked": "lstm",
    "poc-memory": "lstm",
    "minigrid-memory-s9": "lstm",
    "popgym-repeat-first-easy": "lstm",
}


README_SPEEDS = [  # of README's table of speeds: script and work
    ("rppo_lstm.py", "CartPole, 8 environments"),
    ("rppo_gru_atari.py", "Breakout, 8 environments"),
    ("trpo.py", "HalfCheetah, 1 environment"),
]


def iqm(x: np.ndarray) -> np.ndarray:
    """(seeds, ...) -> (...): the mean without the lowest and the highest quarter of the seeds."""
    cut = len(x) // 4
    return np.sort(x, 0)[cut : len(x) - cut].mean(0)


def interval(x: np.ndarray, samples: int = 10_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seeds, ...) -> the interquartile mean, and the ends of its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    drawn = x[random.integers(len(x), size=(samples, len(x)))]  # (samples, seeds, ...)
    return iqm(x), *np.percentile(iqm(drawn.swapaxes(0, 1)), [2.5, 97.5], axis=0)


def table(tasks: list[str], results: Path = RESULTS) -> str:
    """Markdown: of each task a row with its name, then a row for each method. The threshold is
    Gymnasium's, if it has one. There is a column for sampled actions if a method has returns there
    that differ from its deterministic ones by more than both intervals."""
    cells = [["task, agent", "return", "sampled", "worst", "solved"]]
    runs: dict[tuple[str, str], dict[str, dict]] = {}
    for row in read(results / "learning.csv"):
        runs.setdefault((row["task"], row["method"]), {})[row["seed"]] = row
    for task in tasks:
        of_task = {method: seeds for (t, method), seeds in runs.items() if t == task}
        if not of_task:
            raise ValueError(f"{results / 'learning.csv'} has no task {task}")
        first = next(row for seeds in of_task.values() for row in seeds.values())
        spec = gym.registry.get(env_id(first["flags"]))
        threshold = spec.reward_threshold if spec else None
        title = f"{NAMES.get(task, task)}, {thousands(int(first['steps']))} steps"
        at = "" if threshold is None else f"≥ {threshold:g}"
        cells.append([f"**{title}**", "", "", "", at])
        order = [*TASKS.get(task, (0, {}))[1], *of_task]  # this project first
        for method, seeds in sorted(of_task.items(), key=lambda x: order.index(x[0])):
            rows = list(seeds.values())
            scores = np.array([float(r["eval_mean"]) for r in rows if not r["error"]])
            failed = len(rows) - len(scores)
            count = f"({len(rows)}, {failed} failed)" if failed else f"({len(rows)})"
            mean = worst = solved = sampled = ""
            if len(scores):
                mean, worst = shown(scores), number(scores.min(), scores)
                sampled = if_different(scores, [r["sampled_mean"] for r in rows if not r["error"]])
            if threshold is not None:
                solved = f"{(scores >= threshold).sum()} of {len(rows)}"  # a failed run is not
            name = method_name(task, method)
            cells.append([name, f"{mean} {count}", sampled, worst, solved])
        if task in PUBLISHED:
            value, by = PUBLISHED[task]
            cells.append([f"*published: {by}*", f"{value:g}", "", "", ""])
    if not any(row[2] for row in cells[1:]):
        cells = [row[:2] + row[3:] for row in cells]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in cells]
    lines.insert(1, "|---" * len(cells[0]) + "|")
    return "\n".join(lines)


def if_different(scores: np.ndarray, sampled: list[str]) -> str:
    """Mean and interval of the returns with sampled actions, if all seeds have been measured and
    their interval does not meet that of the deterministic scores; else nothing."""
    if "" in sampled or len(sampled) < 2:
        return ""
    returns = np.array(sampled, float)
    _, low, high = interval(scores)
    _, least, most = interval(returns)
    return shown(returns) if most < low or least > high else ""


def method_name(task: str, method: str) -> str:
    """For people. In MuJoCo's tables rows of two scripts meet."""
    name = METHODS.get(method, method)
    mujoco = task in ("halfcheetah", "hopper", "walker2d", "swimmer")
    ours = method.startswith(("lstm", "ablated"))
    return f"rppo_continuous.py, {name}" if mujoco and ours else name


def thousands(steps: int) -> str:
    """1500000 as 1.5M."""
    return EngFormatter(sep="")(steps)


def number(x: float, scores: np.ndarray) -> str:
    """With two digits after the point where returns are near 1, none where they are thousands."""
    largest = abs(scores).max()
    return f"{x:.{2 if largest < 5 else 1 if largest < 1000 else 0}f}"


def shown(scores: np.ndarray) -> str:
    """Interquartile mean [95 % interval] of the seeds' scores; one score has no interval."""
    if len(scores) == 1:
        return number(scores[0], scores)
    mean, low, high = (number(x, scores) for x in interval(scores))
    return f"{mean} [{low}, {high}]"


def env_id(flags: str) -> str:
    """The environment among a run's flags; for a peer it is the second word. Earlier versions
    wrote CartPoleNoVel-v1 for CartPole-v1 --mask-velocity."""
    words = flags.split()
    name = words[words.index("--env-id") + 1] if "--env-id" in words else "".join(words[1:2])
    return name.replace("NoVel", "")


def returns(task: str, methods: list[str] | None = None, results: Path = RESULTS) -> dict:
    """Of curves.csv, for each method: the number of seeds, 60 steps (60,), and the interquartile
    mean of the returns there with the ends of its interval, each (60,)."""
    runs: dict[str, list[np.ndarray]] = {}
    for (of_task, method, _), curve in read_curves(results / "curves.csv").items():
        if of_task == task and method in (methods or [method]):
            runs.setdefault(method, []).append(np.array(curve, float))
    if not runs:
        raise ValueError(f"{results / 'curves.csv'} has no curve of {task}")
    found = {}
    for method, points in runs.items():  # each (points, 2): step, return
        first = max(p[0, 0] for p in points)
        steps = np.linspace(first, min(p[-1, 0] for p in points), 60)
        curves = np.array([np.interp(steps, p[:, 0], p[:, 1]) for p in points])
        found[method] = len(points), steps, interval(curves, samples=2000)
    return found


def curves(
    tasks: list[str],
    out: Path,
    methods: list[str] | None,
    results: Path = RESULTS,
    each_seed=False,
) -> None:
    """A panel for each task, a line for each method or, with each_seed, for each run."""
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.4 * len(tasks), 3.3), squeeze=False)
    for task, axis in zip(tasks, axes[0]):
        if each_seed:
            draw_seeds(axis, task, methods, results)
        else:
            draw_means(axis, task, methods, results)
        axis.set_title(NAMES.get(task, task), color=GREY, fontsize=11)
        axis.set_xlabel("environment steps", color=GREY)
        axis.set_ylabel("return", color=GREY)
        axis.tick_params(colors=GREY)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(color=GREY, alpha=0.3)
        axis.spines[:].set_color(GREY)
        axis.legend(frameon=False, labelcolor=GREY)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    description = "of results " + digest(
        [(task, method) for task in tasks for method in methods or ()]
    )
    figure.savefig(out, transparent=True, metadata={"Date": None, "Description": description})
    plt.close(figure)


def draw_means(axis, task: str, methods: list[str] | None, results: Path) -> None:
    """Interquartile means over seeds, with their intervals."""
    drawn = returns(task, methods, results)
    order = sorted(drawn, key=lambda method: (methods or [*drawn]).index(method))
    for method, color in zip(order, COLORS):
        seeds, steps, (mean, low, high) = drawn[method]
        axis.plot(steps, mean, color=color, label=f"{method_name(task, method)} ({seeds} seeds)")
        axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)


def draw_seeds(axis, task: str, methods: list[str] | None, results: Path) -> None:
    runs = read_curves(results / "curves.csv").items()
    for method, color in zip(methods or ["lstm"], COLORS):
        found = [np.array(points) for run, points in runs if run[:2] == (task, method)]
        for i, points in enumerate(found):
            label = f"{method_name(task, method)} ({len(found)} seeds)" if i == 0 else None
            axis.plot(*points.T, color=color, linewidth=1.2, label=label)


CHARTS = {  # docs/img/NAME.svg: task, methods, a line for each seed?
    "cartpole-masked": ("cartpole-masked", ["lstm", "sb3-contrib", "frames", "ablated"], False),
    "mistakes": (
        "ablation-cartpole-masked",
        ["unchanged", "final steps trained on", "rewards not normalised"],
        False,
    ),
    "sequences": (
        "ablation-repeat-previous",
        ["unchanged", "sequences of 32", "sequences of 16"],
        False,
    ),
    "patience": ("minigrid-memory-s9", ["lstm", "ablated"], True),
}


SYSTEMS = {  # of throughput.csv's sections: script, task
    "w1": ("rppo_lstm.py", "CartPole"),
    "w1-pendulum": ("rppo_continuous.py", "Pendulum"),
    "w2": ("rppo_gru_atari.py", "Breakout"),
    "w3": ("trpo.py", "HalfCheetah"),
    "w4-passes": ("ppo1_mpi.py", "CartPole"),  # not w4, where the passes differ
}


def speeds(section: str | None = None) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """Of throughput.csv, by section and work: the latest row of each system, but not of other
    checkouts of this project (--against)."""
    systems = {system for *_, system, _ in throughput.SYSTEMS}
    works: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in read(RESULTS / "throughput.csv"):
        if section in (None, row["section"]) and row["system"] in systems:
            works.setdefault((row["section"], row["work"]), {})[row["system"]] = row
    return works


def peers_of(systems: dict[str, dict[str, str]]) -> list[dict[str, str]]:
    """The rows of other systems."""
    return [row for name, row in systems.items() if not name.startswith("ours")]


def compared() -> list[tuple[str, str, dict[str, str], dict[str, str]]]:
    """(script, work, our row, a peer's row) of each work and peer: our first row, which does what
    the peer does, without --amp and shorter sequences."""
    found = []
    for (section, work), systems in speeds().items():
        if section in SYSTEMS:
            script, task = SYSTEMS[section]
            ours = [row for name, row in systems.items() if name.startswith("ours")]
            found += [(script, f"{task}, {work}", ours[0], peer) for peer in peers_of(systems)]
    return found


def figures() -> str:
    """README's two tables. Returns are interquartile means over seeds with 95 % intervals; beside
    them the same script without memory and other agents. Speeds are medians, beside a peer's."""
    lines = [
        "| task, steps | LSTM | no memory | four frames | sb3-contrib |",
        "|---|---|---|---|---|",
    ]
    runs: dict[str, dict[str, list[float]]] = {}
    for row in read(RESULTS / "learning.csv"):
        if not row["error"]:
            methods = runs.setdefault(row["task"], {})
            methods.setdefault(row["method"], []).append(float(row["eval_mean"]))
    for task, method in README.items():
        cells = {m: f"{shown(np.array(x))} ({len(x)})" for m, x in runs[task].items()}
        row = [cells.get(name, "") for name in (method, "ablated", "frames", "sb3-contrib")]
        collection = "POPGym " if task.startswith("popgym") else ""
        title = f"{collection}{NAMES[task]}, {thousands(TASKS[task][0])}"
        lines.append(f"| {' | '.join([title, *row])} |")
    lines += ["", "| script, work | steps a second | sb3-contrib | times |", "|---|---|---|---|"]
    for script, work, own, peer in compared():
        if peer["system"] == "sb3-contrib" and (script, work) in README_SPEEDS:
            ratio = float(own["median"]) / float(peer["median"])
            both = " | ".join(f"{float(row['median']):,.0f}" for row in (own, peer))
            lines.append(f"| {script}, {work} | {both} | {ratio:.1f} |")
    return "\n".join(lines)


def overview(out: Path, text: str, task: str = "cartpole-masked") -> None:
    """README's picture: the same script with and without memory. It is narrow, so that it can be
    read on a phone."""
    figure, axis = plt.subplots(figsize=(5.4, 3.3))
    names = {"lstm": "with its LSTM", "ablated": "without memory"}
    drawn = sorted(returns(task, list(names)).items(), reverse=True)
    scores: dict[str, list[float]] = {}
    for row in read(RESULTS / "learning.csv"):
        if row["task"] == task and not row["error"]:
            scores.setdefault(row["method"], []).append(float(row["eval_mean"]))
    for (method, (_, steps, (mean, low, high))), color in zip(drawn, COLORS):
        axis.plot(steps, mean, color=color, linewidth=2)
        axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        end = iqm(np.array(scores[method]))
        axis.plot(steps[-1] * 1.03, end, "o", color=color, markersize=6, clip_on=False)
        axis.text(steps[-1] * 1.06, end, f"{end:.0f}", color=color, va="center")
        x, above = (0.62, 10) if mean[-1] > 250 else (0.97, 20)
        at = np.searchsorted(steps, x * steps[-1])
        axis.text(steps[at], mean[at] + above, f"{names[method]}  ", color=color, ha="right")
    axis.text(steps[-1] * 1.06, 455, "final agent,\nno sampling", color=text, fontsize=8, va="top")
    axis.set_title("CartPole without velocities: return", color=text, fontsize=11)
    axis.set_xlabel("environment steps, actions sampled", color=text)
    axis.set_xlim(0, steps[-1] * 1.2)
    axis.set_ylim(0, 520)
    axis.set_xticks(np.arange(0, 100_001, 20_000))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.tick_params(colors=text)
    axis.spines[:].set_color(GREY)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=GREY, alpha=0.25)
    figure.tight_layout()
    description = "of results " + digest([(task, method) for method in names])
    figure.savefig(out, transparent=True, metadata={"Date": None, "Description": description})
    plt.close(figure)


def scaling(out: Path, text: str = GREY) -> None:
    """How steps a second grow with environments, units and the length of sequences, and what the
    LSTM's arithmetic alone would allow: (3 x 4 epochs + 1) 8 H (F + H) operations a step, at the
    speed of a large product of matrices on the same core."""
    works = {work: float(s["ours"]["median"]) for (_, work), s in speeds("scaling").items()}
    peak = works.pop("GFLOP/s of a product of matrices")
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 3), sharey=True)
    for what, axis in zip(("environments", "units", "steps a sequence"), axes):
        rows = {int(work.split()[0]): sps for work, sps in works.items() if work.endswith(what)}
        x = np.array(sorted(rows))
        units = x if what == "units" else np.full(len(x), 128)
        floor = peak * 1e9 / (13 * 8 * units * (units + 64))
        axis.plot(x, [rows[i] for i in x], "o-", color=COLORS[0], markersize=4)
        axis.plot(x, floor, ":", color=GREY)
        axis.text(
            x[0], floor[0] * 1.1, "arithmetic alone" if what == "environments" else "", color=GREY
        )
        axis.set(xscale="log", yscale="log", xticks=x[:: 2 if len(x) > 6 else 1])
        axis.xaxis.set_major_formatter(
            EngFormatter(sep="", places=0) if max(x) > 9999 else "{x:.0f}"
        )
        axis.minorticks_off()
        axis.set_xlabel(what, color=text)
        axis.tick_params(colors=text)
        axis.spines[:].set_color(GREY)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color=GREY, alpha=0.25)
    axes[0].set_ylabel("steps a second", color=text)
    axes[0].yaxis.set_major_formatter(EngFormatter(sep=""))
    figure.tight_layout()
    figure.savefig(out, transparent=True, metadata={"Date": None})
    plt.close(figure)


def digest(runs: list[tuple[str, str]]) -> str:
    """A hash of what these tasks and methods scored; a picture's file holds it, so that a test sees
    when it is out of date."""
    curves = read_curves(RESULTS / "curves.csv").items()
    drawn: list = [curve for curve in curves if curve[0][:2] in runs]
    rows = read(RESULTS / "learning.csv")
    drawn += [row["eval_mean"] for row in rows if (row["task"], row["method"]) in runs]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]


def readme() -> None:
    """Writes README's tables between their markers, its picture for light and dark pages, and the
    charts of the docs."""
    for name, (task, methods, each_seed) in CHARTS.items():
        curves([task], ROOT / f"docs/img/{name}.svg", methods, each_seed=each_seed)
    for scheme, text in ("light", "#404040"), ("dark", "#d0d0d0"):
        overview(ROOT / f"docs/img/readme-{scheme}.svg", text)
    if speeds("scaling"):
        scaling(ROOT / "docs/img/scaling.svg")
    path = ROOT / "README.md"
    table = f"\\1\n\n{figures()}\n\n\\2"
    path.write_text(re.sub(MARKERS, table, path.read_text(), flags=re.S))


MARKERS = r"(<!-- figures: [^>]*-->).*?(<!-- end of figures -->)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["curves", "table", "readme"])
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--methods", nargs="+", help="of the curves; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--out", type=Path, help="an .svg file, or a table's file")
    options = parser.parse_args()
    if options.what == "readme":
        return readme()
    if not options.tasks:
        parser.error("which TASK?")
    if options.what == "curves":
        out = options.out or Path(f"{options.tasks[0]}.svg")
        curves(options.tasks, out, options.methods, options.results)
    elif options.out:
        options.out.write_text(table(options.tasks, options.results) + "\n")
    else:
        print(table(options.tasks, options.results))


if __name__ == "__main__":
    main()
