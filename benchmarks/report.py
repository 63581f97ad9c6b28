"""Tables and charts of benchmarks/results, which run.py, speed.py and resets.py write.

    python benchmarks/report.py                       # README.md's table, and the charts of docs/img
    python benchmarks/report.py table cartpole-masked pong
    python benchmarks/report.py curves cartpole-masked --methods lstm ablated --out curves.svg

Returns are interquartile means over a task's seeds, the mean of the middle half, with a 95 % bootstrap
interval (Agarwal et al. 2021, arXiv:2108.13264, whose stratified bootstrap for one task is this
one). Rows whose commit is unknown, or was changed when they were measured, count nowhere. Charts
have no background and mid-grey text, for light and for dark pages.
"""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import rows
from rows import RESULTS, ROOT

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rppo", "font.size": 10})
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

IMAGES = ROOT / "docs/img"
BLUE, ORANGE, GREEN, VIOLET, OLIVE, RED = COLORS = [
    "#3b8fd0", "#e0803a", "#3fa45b", "#b866b5", "#b59a2a", "#d05a5a",
]  # fmt: skip
GREY = "#808080"
TASKS, _ = rows.read_tasks()
METHODS = {  # for people
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
README = [
    "cartpole-masked", "pendulum-masked", "poc-memory", "minigrid-memory-s9", "minigrid-memory-s13",
]  # fmt: skip


# --- Statistics ---
def iqm(x: np.ndarray) -> np.ndarray:
    """(seeds, ...) -> (...): the mean without the lowest and the highest quarter of the seeds."""
    cut = len(x) // 4
    return np.sort(x, 0)[cut : len(x) - cut].mean(0)


def interval(x: np.ndarray, samples: int = 10_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seeds, ...) -> the interquartile mean, and the ends of its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    drawn = x[random.integers(len(x), size=(samples, len(x)))]  # (samples, seeds, ...)
    return iqm(x), *np.percentile(iqm(drawn.swapaxes(0, 1)), [2.5, 97.5], axis=0)


def number(x: float, scores: np.ndarray) -> str:
    """With two digits after the point where returns are near 1, none where they are thousands."""
    largest = abs(scores).max()
    shown = f"{x:.{2 if largest < 5 else 1 if largest < 1000 else 0}f}"
    return shown if float(shown) else shown.lstrip("-")  # no -0.00


def shown(scores: np.ndarray) -> str:
    """Interquartile mean [95 % interval] of the seeds' scores; one score has no interval."""
    if len(scores) == 1:
        return number(scores[0], scores)
    mean, low, high = (number(x, scores) for x in interval(scores))
    return f"{mean} [{low}, {high}]"


# --- Rows ---
def read(name: str, results: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of a CSV file, without those that name no commit that anybody else can have."""
    found = rows.read(results / f"{name}.csv")
    return [row for row in found if not row.get("commit", "").endswith(("-dirty", "-unknown"))]


def runs(task: str, results: Path = RESULTS) -> dict[str, list[dict[str, str]]]:
    """Of learning.csv: the rows of each method of a task."""
    methods: dict[str, dict[str, dict[str, str]]] = {}
    for row in read("learning", results):
        if row["task"] == task:
            methods.setdefault(row["method"], {})[row["seed"]] = row
    order = [*(TASKS[task].methods if task in TASKS else []), *methods]  # this project first
    return {m: [*methods[m].values()] for m in sorted(methods, key=order.index)}


def scores(found: list[dict[str, str]], column: str = "eval_mean") -> np.ndarray:
    return np.array([float(row[column]) for row in found if not row["error"]])


def returns(task: str, methods: list[str] | None = None, results: Path = RESULTS) -> dict:
    """Of curves.csv, for each method: its curves, each (points, 2): step, return."""
    known = {
        (row["method"], row["seed"]) for found in runs(task, results).values() for row in found
    }
    found: dict[str, list[np.ndarray]] = {}
    for row in rows.read(results / "curves.csv"):
        wanted = row["task"] == task and row["method"] in (methods or [row["method"]])
        if wanted and (row["method"], row["seed"]) in known:
            points = [np.fromstring(row[x], sep=" ") for x in ("steps", "returns")]
            found.setdefault(row["method"], []).append(np.stack(points, 1))
    if not found:
        raise ValueError(f"{results / 'curves.csv'} has no curve of {task}")
    return {m: found[m] for m in sorted(found, key=(methods or [*found]).index)}


def mean_curve(points: list[np.ndarray]) -> tuple[np.ndarray, tuple]:
    """60 steps (60,), and the interquartile mean there with the ends of its interval, each (60,)."""
    first = max(p[0, 0] for p in points)
    steps = np.linspace(first, min(p[-1, 0] for p in points), 60)
    curves = np.array([np.interp(steps, p[:, 0], p[:, 1]) for p in points])
    return steps, interval(curves, samples=2000)


def speeds(section: str) -> dict[str, dict[str, dict[str, str]]]:
    """Of throughput.csv: for each work of a section the latest row of each system, but none that
    compares checkouts of this project."""
    works: dict[str, dict[str, dict[str, str]]] = {}
    for row in read("throughput"):
        if row["section"] == section and not row["note"].startswith("compared"):
            works.setdefault(row["work"], {})[row["system"]] = row
    return works


# --- Tables, in Markdown ---
def markdown(head: list[str], body: list[list[str]], about: str = "") -> str:
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines
    )
    # For phones: long names may break in the middle, an interval may not.
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "<wbr>", text)
    text = re.sub(r"\[(\S+), (\S+)\]", r"[\1,&nbsp;\2]", text)
    text = re.sub(r"(\d) of (\d)", r"\1&nbsp;of&nbsp;\2", text)
    return f"{text}\n\n{about}\n{{.measured}}" if about else text


def thousands(steps: float) -> str:
    """1500000 as 1.5M."""
    return EngFormatter(sep="")(steps)


def results(names: str, results: Path = RESULTS) -> str:
    """Tasks, or all of a script: SCRIPT.py. Of each a row with its name, then one for each method.
    The threshold is Gymnasium's, if it has one. A column has the returns with sampled actions where
    they differ from the deterministic ones by more than both intervals."""
    tasks: list[str] = []
    for name in names.split():
        tasks += of_script(name.removesuffix(".py")) if name.endswith(".py") else [name]
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"benchmarks/tasks.toml has no task {task}")
    measured = {task: runs(task, results) for task in tasks}
    body = []
    for task, methods in measured.items():
        if not methods:
            continue
        first = next(iter(methods.values()))[0]
        spec = gym.registry.get(env_id(first["flags"]))
        threshold = spec.reward_threshold if spec else None
        title = f"{TASKS[task].title}, {thousands(int(first['steps']))} steps"
        body.append([f"**{title}**", "", "", "", "" if threshold is None else f"≥ {threshold:g}"])
        for method, found in methods.items():
            x = scores(found)
            failed = len(found) - len(x)
            count = f"({len(found)}, {failed} failed)" if failed else f"({len(found)})"
            row = [method_name(task, method), f"{shown(x) if len(x) else ''} {count}", "", "", ""]
            if len(x):
                row[2:4] = [if_different(found), number(x.min(), x)]
            if threshold is not None:
                row[4] = f"{(x >= threshold).sum()} of {len(found)}"  # a failed run is not
            body.append(row)
        if published := TASKS[task].published:
            body.append([f"*published: {published[1]}*", f"{published[0]:g}", "", "", ""])
    head = ["task, agent", "return", "sampled", "worst", "solved"]
    if not any(row[2] for row in body):
        head, body = head[:2] + head[3:], [row[:2] + row[3:] for row in body]
    parts = [markdown(head, body)] if body else []
    if missing := [task for task, methods in measured.items() if not methods]:
        parts.append(f"Not measured yet: `python benchmarks/run.py {' '.join(missing)}`.")
    return "\n\n".join(parts)


def of_script(script: str) -> list[str]:
    """The tasks that a script trains without a recipe; not those that compare its variants."""
    found = []
    for name, task in TASKS.items():
        plain = any(rows.split(command)[0] == [script] for command in task.methods.values())
        if plain and not name.startswith(("ablation", "details")):
            found.append(name)
    return found


def if_different(found: list[dict[str, str]]) -> str:
    """Mean and interval of the returns with sampled actions, if all seeds have been measured and
    their interval does not meet that of the deterministic scores; else nothing."""
    good = [row for row in found if not row["error"]]
    if len(good) < 2 or not all(row["sampled_mean"] for row in good):
        return ""
    sampled = scores(good, "sampled_mean")
    _, low, high = interval(scores(good))
    _, least, most = interval(sampled)
    return shown(sampled) if most < low or least > high else ""


def method_name(task: str, method: str) -> str:
    """For people. In MuJoCo's tables rows of two scripts meet."""
    name = METHODS.get(method, method)
    mujoco = task in ("halfcheetah", "hopper", "walker2d", "swimmer")
    ours = method.startswith(("lstm", "ablated"))
    return f"rppo_continuous.py, {name}" if mujoco and ours else name


def env_id(flags: str) -> str:
    """The environment among a run's flags; for a peer it is the second word. Earlier versions
    wrote CartPoleNoVel-v1 for CartPole-v1 --mask-velocity."""
    words = flags.split()
    name = words[words.index("--env-id") + 1] if "--env-id" in words else "".join(words[1:2])
    return name.replace("NoVel", "")


def figures() -> str:
    """README's table: the same script with and without memory, and a peer."""
    body = []
    for task in README:
        found = runs(task)
        x = [scores(found.get(method, [])) for method in ("lstm", "ablated", "sb3-contrib")]
        cells = [f"{shown(s)} ({len(s)})" if len(s) else "" for s in x]
        body.append([f"{TASKS[task].title}, {thousands(TASKS[task].steps)}", *cells])
    table = markdown(["task, steps", "LSTM", "no memory", "sb3-contrib"], body)
    return table.replace("<wbr>", "").replace("&nbsp;", " ")


def throughput(section: str) -> str:
    """A section of throughput.csv, with the ratio to the first peer's."""
    works = speeds(section)
    if not works:
        return f"Not measured yet: `python benchmarks/speed.py {section}`."
    body, peer_name, latest = [], "a peer", []
    for work, systems in works.items():
        body.append([f"**{work}**", "", ""])
        peer = next((name for name in systems if not name.startswith("ours")), None)
        peer_name = peer or peer_name
        for system, row in systems.items():
            median, low, high = (float(row[name]) for name in ("median", "min", "max"))
            ratio = f"{median / float(systems[peer]['median']):.1f}" if peer else ""
            name = system.replace("ours", "this project")
            body.append([name, f"{median:,.0f} ({low:,.0f}, {high:,.0f})", ratio])
            latest.append(row)
    head = ["work, system", "steps a second: median (min, max)", f"times {peer_name}"]
    commits = ", ".join(sorted({row["commit"] for row in latest}))
    return markdown(head, body, f"Machine: {latest[-1]['machine']}. Commits: {commits}.")


def gpu(section: str) -> str:
    """The GPU's rows of the machine that was measured last: a line for each work, or for each part
    of an iteration."""
    if section == "resets":
        return gpu_resets()
    found = [row for row in read("throughput") if row["section"] == f"gpu-{section}"]
    found = [row for row in found if row["machine"] == found[-1]["machine"]]
    down, across, unit = "work", "system", "steps a second"
    if section == "parts":
        down, across, unit = "system", "work", "milliseconds"
    names = list(dict.fromkeys(row[down] for row in found))
    if section != "parts":
        names.sort(key=lambda name: int(name.split()[0]))  # "8 games" before "64 games"
    columns = list(dict.fromkeys(row[across] for row in found))
    at = {(row[down], row[across]): f"{float(row['median']):,.0f}" for row in found}
    body = [[name, *(at.get((name, column), "") for column in columns)] for name in names]
    head = [unit, *(column.removeprefix("ours, ") for column in columns)]
    about = f"Machine: {found[-1]['machine']}. Commit: {found[-1]['commit']}."
    return markdown(head, body, about)


def gpu_resets() -> str:
    """resets.csv on the GPU that was measured last, where one step in a hundred ends an episode: the
    fused reset's time, and that of other ways divided by it."""
    found = [row for row in read("resets") if "cores" not in row["processor"]]
    found = [r for r in found if r["rate"] == "0.01" and r["processor"] == found[-1]["processor"]]
    ways = list(dict.fromkeys(row["way"] for row in found if row["way"] != "ours"))
    body = []
    for size in dict.fromkeys((row["cell"], row["batch"], row["hidden"]) for row in found):
        of = {r["way"]: r for r in found if (r["cell"], r["batch"], r["hidden"]) == size}
        times = [f"{float(of[way]['over_ours']):.1f}" for way in ways]
        cell, *numbers = size
        body.append(
            [", ".join([cell.upper(), *numbers]), f"{float(of['ours']['ms']):.1f} ms", *times]
        )
    about = f"Machine: {found[-1]['processor']}. Commit: {found[-1]['commit']}."
    return markdown(["cell, sequences, units", "fused reset", *ways], body, about)


DETAILS = {"details-cartpole-masked": "CartPole", "details-repeat-previous": "RepeatPrevious"}
REFERENCES = {  # of the mistakes that need other flags: what they are compared with
    "replay from a zero state": "nothing, sequences of 16",
    "states recomputed": "nothing, sequences of 16",
    "statistics updated too early": "nothing, observations normalised",
}


def detail(names: str, results: Path = RESULTS) -> str:
    """rppo_lstm.py as it is, and with each of these mistakes, on both tasks; all without names."""
    mistakes = [*TASKS["details-cartpole-masked"].methods]
    chosen = [name.strip() for name in names.split(";")] if names else mistakes
    for name in chosen:
        if name not in mistakes:
            raise ValueError(f"benchmarks/tasks.toml has no detail {name}")
    if names:
        chosen = [*dict.fromkeys(REFERENCES.get(name, "nothing") for name in chosen), *chosen]
    measured = [runs(task, results) for task in DETAILS]
    body = []
    for name in dict.fromkeys(chosen):
        x = [scores(found.get(name, [])) for found in measured]
        cells = [f"{shown(s)} ({len(s)})" if len(s) else "not measured" for s in x]
        body.append([name.replace("nothing", "as it is", 1), *cells])
    return markdown(["", *DETAILS.values()], body)


def exercise(name: str) -> str:
    """A change of docs/exercises beside the script as it is, on the same task and seeds."""
    tasks = [task for task in TASKS if task.startswith("exercise") and name in TASKS[task].methods]
    if not tasks:
        raise ValueError(f"benchmarks/tasks.toml has no exercise {name}")
    found = runs(tasks[0])
    seeds = [row["seed"] for row in found.get(name, [])]
    if not seeds:
        return f"Not measured yet: `python benchmarks/run.py {tasks[0]}`."
    body = []
    for method in "unchanged", name:
        of = {row["seed"]: row for row in found.get(method, [])}
        pairs = ["-"] * len(seeds)
        for i, seed in enumerate(seeds):
            if row := of.get(seed):
                pairs[i] = f"{float(row['eval_mean']):.3g}, {float(row['return_100']):.3g}"
        body.append([method.replace("_", " "), *pairs])
    head = "return of 100 episodes, and of the last 100 in training"
    about = f"`{found[name][0]['flags']}`, commit {found[name][0]['commit']}."
    return markdown([head, *(f"seed {seed}" for seed in seeds)], body, about)


PROBED = {  # of memory-look.csv: a table's columns, by name
    "velocities": {name: f"R^2, {name}" for name in ("cart's velocity", "pole's angular velocity")},
    "weak traces": {
        name: f"R^2, weak traces too, {name}"
        for name in ("cart's velocity", "pole's angular velocity")
    },
    "steps back": {
        "now": "share right, 0",
        "1 step back": "share right, 1",
        **{f"{k} steps back": f"share right, {k}" for k in range(2, 7)},
    },
}
AGENTS = {  # agent, and whether it is trained
    "LSTM, trained": ("lstm", True),
    "LSTM, untrained": ("lstm", False),
    "without memory, trained": ("memoryless", True),
}


def memory(what: str) -> str:
    """What was read from agents before and after training: R^2 of each seed, or the share of right
    guesses."""
    if what not in PROBED:
        raise ValueError(f"memory: {', '.join(PROBED)}, not {what!r}")
    body = []
    for name, (agent, trained) in AGENTS.items():
        cells = []
        for probed in PROBED[what].values():
            seeds: dict[str, str] = {}  # the row of the most steps is the last of a seed
            for row in read("memory-look"):
                key = row["what"] if row["at"] == "" else f"{row['what']}, {row['at']}"
                if (row["agent"], key, int(row["steps"] or 0) > 0) == (agent, probed, trained):
                    seeds[row["seed"]] = f"{float(row['value']):.2f}"
            cells.append(", ".join(seeds.values()))
        body.append([name, *cells])
    return markdown(["", *PROBED[what]], body)


# --- Charts ---
def panels(down: int, across: int, width: float, height: float, **options):
    """A figure, and its axes (down, across) in grey."""
    figure, axes = plt.subplots(down, across, figsize=(width, height), squeeze=False, **options)
    for axis in axes.flat:
        axis.tick_params(which="both", colors=GREY)
        axis.spines[:].set_color(GREY)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color=GREY, alpha=0.25)
    return figure, axes


def save(figure, out: Path) -> None:
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    plt.close(figure)


def curves(
    tasks: list[str], out: Path, methods: list[str] | None = None, each_seed=False,
    results: Path = RESULTS,
) -> None:  # fmt: skip
    """A panel for each task, a line for each method or, with each_seed, for each run."""
    figure, axes = panels(1, len(tasks), 5.4 * len(tasks), 3.3)
    for task, axis in zip(tasks, axes[0]):
        for (method, found), color in zip(returns(task, methods, results).items(), COLORS):
            label = f"{method_name(task, method)} ({len(found)} seeds)"
            if each_seed:
                for i, points in enumerate(found):
                    axis.plot(*points.T, color=color, linewidth=1.2, label=None if i else label)
            else:
                steps, (mean, low, high) = mean_curve(found)
                axis.plot(steps, mean, color=color, label=label)
                axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        axis.set_title(TASKS[task].title, color=GREY, fontsize=11)
        axis.set_xlabel("environment steps", color=GREY)
        axis.set_ylabel("return", color=GREY)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.legend(frameon=False, labelcolor=GREY)
    save(figure, out)


def overview(out: Path, text: str, task: str = "cartpole-masked") -> None:
    """README's picture: the same script with and without memory. It is narrow, so that it can be
    read on a phone."""
    figure, [[axis]] = panels(1, 1, 5.4, 3.3)
    names = {"lstm": "with its LSTM", "ablated": "without memory"}
    for (method, found), color in zip(returns(task, [*names]).items(), COLORS):
        steps, (mean, low, high) = mean_curve(found)
        axis.plot(steps, mean, color=color, linewidth=2)
        axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        end = iqm(scores(runs(task)[method]))
        axis.plot(steps[-1] * 1.03, end, "o", color=color, markersize=6, clip_on=False)
        axis.text(steps[-1] * 1.06, end, f"{end:.0f}", color=color, va="center")
        x, above = (0.62, 10) if mean[-1] > 250 else (0.97, 20)
        at = np.searchsorted(steps, x * steps[-1])
        axis.text(steps[at], mean[at] + above, f"{names[method]}  ", color=color, ha="right")
    axis.text(steps[-1] * 1.06, 455, "final agent,\nno sampling", color=text, fontsize=8, va="top")
    axis.set_title("CartPole without velocities: return", color=text, fontsize=11)
    axis.set_xlabel("environment steps, actions sampled", color=text)
    axis.set(xlim=(0, steps[-1] * 1.2), ylim=(0, 520), xticks=np.arange(0, 100_001, 20_000))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.tick_params(colors=text)
    save(figure, out)


def scaling(out: Path) -> None:
    """How steps a second grow with environments, units and the length of sequences, and what the
    LSTM's arithmetic alone would allow: (3 x 4 epochs + 1) 8 H (F + H) operations a step, at the
    speed of a large product of matrices on the same core."""
    works = {work: float(of["ours"]["median"]) for work, of in speeds("scaling").items()}
    peak = works.pop("GFLOP/s of a product of matrices")
    figure, axes = panels(1, 3, 9.2, 3, sharey=True)
    for what, axis in zip(("environments", "units", "steps a sequence"), axes[0]):
        found = {int(work.split()[0]): sps for work, sps in works.items() if work.endswith(what)}
        x = np.array(sorted(found))
        units = x if what == "units" else np.full(len(x), 128)
        floor = peak * 1e9 / (13 * 8 * units * (units + 64))
        axis.plot(x, [found[i] for i in x], "o-", color=BLUE, markersize=4)
        axis.plot(x, floor, ":", color=GREY)
        axis.set(xscale="log", yscale="log", xticks=x[:: 2 if len(x) > 6 else 1])
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.set_xlabel(what, color=GREY)
    axes[0, 0].text(1, floor[0] * 1.1, "arithmetic alone", color=GREY)
    axes[0, 0].set_ylabel("steps a second", color=GREY)
    axes[0, 0].yaxis.set_major_formatter(EngFormatter(sep=""))
    save(figure, out)


WAYS = {  # of resets.csv, in the chart: way, its label
    "ours": "fused reset",
    "segments": "segments (skrl)",
    "padded": "padded",
    "packed": "packed",
    "TorchRL, pad": "TorchRL",
    "loop of calls": "loop (CleanRL)",
    "sb3-contrib, padded": "sb3-contrib",
}


def spread(positions: list[float], gap: float) -> list[float]:
    """The same numbers in the same order, moved up until neighbours are a gap apart."""
    moved = list(positions)
    order = sorted(range(len(moved)), key=lambda i: moved[i])
    for below, above in zip(order, order[1:]):
        moved[above] = max(moved[above], moved[below] + gap)
    return moved


def resets(out: Path, batches: tuple[int, int] = (8, 64)) -> None:
    """Time over the reset rate, of an LSTM with 128 units: a panel for each B, a line for each way.
    Times are multiples of the fused reset's at rate 0, from ratios of neighbouring runs."""
    figure, axes = panels(len(batches), 1, 4.4, 6.4)
    found = [r for r in read("resets") if "cores" in r["processor"]]
    for batch, axis in zip(batches, axes[:, 0]):
        at = {}
        for row in found:
            if (row["cell"], row["batch"], row["hidden"]) == ("lstm", str(batch), "128"):
                at[float(row["rate"]), row["way"]] = row
        rates = sorted({rate for rate, _ in at})
        lines = {}
        for way in WAYS:
            ours = [float(at[rate, "ours"]["over_no_resets"]) for rate in rates]
            lines[way] = [x * float(at[rate, way]["over_ours"]) for x, rate in zip(ours, rates)]
        heights = spread([math.log(line[-1]) for line in lines.values()], gap=0.24)
        for (way, line), height, color in zip(lines.items(), heights, [*COLORS, GREY]):
            width = 3 if way == "ours" else 1.5
            axis.plot(range(len(rates)), line, "o-", color=color, linewidth=width, markersize=4)
            end = (len(rates) - 0.85, math.exp(height))
            axis.annotate(WAYS[way], (len(rates) - 1, line[-1]), end, color=color, va="center")
        unit = float(at[0.0, "ours"]["ms"])
        axis.set_title(f"{batch} sequences of 128 steps", color=GREY, fontsize=10)
        axis.set_yscale("log")
        axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axis.minorticks_off()
        axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axis.set_xlim(-0.2, len(rates) + 1.1)
        axis.set_ylabel(f"time relative to the\nfused reset ({unit:.0f} ms)", color=GREY)
    axes[-1, 0].set_xlabel("share of steps that end an episode", color=GREY)
    save(figure, out)


def reward_scale(out: Path) -> None:
    """The gradient steps of reward-scale.csv: geometric means over seeds."""
    figure, [[axis]] = panels(1, 1, 5, 3.8)
    found = read("reward-scale")
    words = {"True": "divided rewards", "False": "raw rewards"}
    last = min(max(int(r["iteration"]) for r in found if r["norm_reward"] == d) for d in words)
    for (divided, label), color in zip(words.items(), COLORS):
        for part, style in ("policy", "-"), ("value", "--"):
            means = []
            for i in range(1, last + 1):
                of = [r for r in found if (r["norm_reward"], r["iteration"]) == (divided, str(i))]
                means.append(math.exp(np.mean([math.log(float(row[part])) for row in of])))
            line = f"{part} loss, {label}"
            axis.plot(range(1, last + 1), means, style, color=color, label=line)
    axis.set(yscale="log", ylim=(1e-4, 1), xlim=(1, last))
    axis.set_xlabel("iteration", color=GREY)
    axis.set_ylabel("norm of the gradient in the\nshared layers, after clipping", color=GREY)
    axis.legend(frameon=False, labelcolor=GREY, loc="lower right", fontsize=9)
    save(figure, out)


def looked_at(**wanted: str) -> list[tuple[float, float]]:
    """(steps or at, value) of the rows of memory-look.csv that have these values."""
    found = [row for row in read("memory-look") if wanted.items() <= row.items()]
    return [(float(row["at"] or row["steps"]), float(row["value"])) for row in found]


def memory_episode(out: Path) -> None:
    """The pole's angular velocity in a held-out episode: true, read from the LSTM's h, and from the
    h of an agent without memory."""
    figure, [[axis]] = panels(1, 1, 5, 3.2)
    name = "pole's angular velocity"
    true = looked_at(agent="true", what=name, seed="1")
    axis.plot(*zip(*true), color=GREY, alpha=0.6, linewidth=5, label="true")
    for agent, color, label in (
        ("memoryless", ORANGE, "read without memory"), ("lstm", BLUE, "read from the LSTM")
    ):  # fmt: skip
        points = looked_at(agent=agent, what=f"{name}, read", seed="1")
        axis.plot(*zip(*points), color=color, linewidth=1.6, label=label)
    axis.set_xlabel("step of a held-out episode", color=GREY)
    axis.set_ylabel(f"{name},\nradians a second", color=GREY)
    above = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 3}
    axis.legend(frameon=False, labelcolor=GREY, fontsize=9, columnspacing=1, **above)
    save(figure, out)


def memory_training(out: Path) -> None:
    """R^2 of the hidden velocities over training, and the return as a share of 500: means over
    seeds."""
    figure, [[axis]] = panels(1, 1, 5, 3.8)

    def mean(agent: str, what: str, every: int):
        """Over the seeds, whose steps differ a little: they are rounded down to so many."""
        values: dict[float, list[float]] = {}
        for steps, value in looked_at(task="cartpole", agent=agent, what=what):
            values.setdefault(steps // every * every, []).append(value)
        return np.array([(n, np.mean(x)) for n, x in values.items()])

    steps, share = mean("lstm", "return", 5000).T
    axis.plot(steps, share / 500, color=GREEN, linewidth=1.4, label="return, LSTM")
    for velocity, style in ("pole's angular velocity", "-"), ("cart's velocity", "--"):
        short = velocity.split("'")[0]
        points = mean("lstm", f"R^2, {velocity}", 10_000).T
        axis.plot(*points, style, color=BLUE, label=f"{short}, LSTM")
        [(_, value)] = mean("memoryless", f"R^2, {velocity}", 10_000)
        axis.axhline(value, linestyle=style, color=ORANGE, label=f"{short}, without memory")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_ylim(-0.03, 1.05)
    axis.set_xlabel("environment steps of training", color=GREY)
    axis.set_ylabel("R² on held-out episodes; return / 500", color=GREY)
    place = {"loc": "lower right", "bbox_to_anchor": (1, 0.1)}
    axis.legend(frameon=False, labelcolor=GREY, fontsize=9, **place)
    save(figure, out)


def memory_steps_back(out: Path) -> None:
    """RepeatPreviousEasy: how often the suit shown k steps before is read rightly."""
    figure, [[axis]] = panels(1, 1, 5, 3.2)
    found = [row for row in read("memory-look") if row["what"] == "share right"]
    kinds = {
        ("lstm", True): (BLUE, "trained LSTM"),
        ("lstm", False): (VIOLET, "untrained LSTM"),
        ("memoryless", True): (ORANGE, "without memory"),
    }
    for kind, (color, label) in kinds.items():
        of = [row for row in found if (row["agent"], int(row["steps"]) > 0) == kind]
        points = [(int(row["at"]), 100 * float(row["value"])) for row in of]
        axis.plot(*zip(*points), "o-", color=color, markersize=5, label=label)
    axis.set(ylim=(0, 104), xticks=range(12))
    axis.set_xlabel("steps back", color=GREY)
    axis.set_ylabel("suits read rightly, %", color=GREY)
    axis.legend(frameon=False, labelcolor=GREY, fontsize=9)
    save(figure, out)


CURVES = {  # docs/img/NAME.svg: task, methods, a line for each seed?
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
CHARTS: dict[str, Callable[[Path], None]] = {
    "scaling": scaling, "resets": resets, "reward-scale": reward_scale,
    "memory-episode": memory_episode, "memory-training": memory_training,
    "memory-steps-back": memory_steps_back,
}  # fmt: skip


def everything() -> None:
    """README's table between its markers, README's picture, and the charts of the docs."""
    for name, (task, methods, each_seed) in CURVES.items():
        curves([task], IMAGES / f"{name}.svg", methods, each_seed)
    for scheme, text in ("light", "#404040"), ("dark", "#d0d0d0"):
        overview(IMAGES / f"readme-{scheme}.svg", text)
    for name, draw in CHARTS.items():
        draw(IMAGES / f"{name}.svg")
    path = ROOT / "README.md"
    markers = r"(<!-- figures: [^>]*-->).*?(<!-- end of figures -->)"
    table = f"\\1\n\n{figures()}\n\n\\2"
    path.write_text(re.sub(markers, table, path.read_text(), flags=re.S))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["all", "curves", "table"], nargs="?", default="all")
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--methods", nargs="+", help="of the curves; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"))
    options = parser.parse_args()
    if options.what == "all":
        everything()
    elif options.what == "curves":
        curves(options.tasks, options.out, options.methods, results=options.results)
    else:
        print(results(" ".join(options.tasks), options.results))


if __name__ == "__main__":
    main()
