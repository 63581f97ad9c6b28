"""Tables and charts of benchmarks/results, which run.py, speed.py and resets.py write.

    python benchmarks/report.py                  # README's table, and the charts of docs/img
    python benchmarks/report.py TASK [TASK ...]  # prints their table

Returns are interquartile means over a task's seeds, the mean of the middle half, with a 95 % bootstrap
interval (Agarwal et al. 2021, arXiv:2108.13264, whose stratified bootstrap for one task is this
one). Rows of a script that was changed when it was measured count nowhere. Charts have no
background and mid-grey text, for light and for dark pages.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import rows
from rows import ROOT, TASKS

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

BLUE, ORANGE, GREEN, VIOLET, *_ = COLORS = [
    "#3b8fd0", "#e0803a", "#3fa45b", "#b866b5", "#b59a2a", "#d05a5a",
]  # fmt: skip
GREY = "#808080"
matplotlib.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "rppo", "savefig.transparent": True,
    "font.size": 10, "axes.titlesize": 11, "axes.titlecolor": GREY, "axes.labelcolor": GREY,
    "axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "xtick.color": GREY,
    "ytick.color": GREY, "legend.frameon": False, "legend.labelcolor": GREY,
})  # fmt: skip
RESULTS = rows.RESULTS
IMAGES = ROOT / "docs/img"

METHODS = {  # for people
    "lstm": "LSTM",
    "gru": "GRU",
    "ablated": "no memory",
    "envpool": "LSTM, EnvPool's mazes",
    "frames": "four frames",
    "lstm, previous action": "LSTM, sees its last action",
    "lstm, half open": "LSTM, forget gates half open",
    "lstm, chrono": "LSTM, longer memory",
    "lstm, gamma 0.5": "LSTM, gamma 0.5",
    "lstm, separate critic": "LSTM, separate critic",
    "lstm, sequences of 1": "LSTM, sequences of 1",
    "lstm, slow memory": "LSTM, memory's learning rate a tenth",
    "lstm, states recomputed": "LSTM, states recomputed",
    "trpo": "trpo.py",
    "trpo, lstm": "trpo.py with an LSTM",
    "trpo, gSDE": "trpo.py with gSDE",
    "ppo1": "ppo1_mpi.py",
    "ppo1, lstm": "ppo1_mpi.py with an LSTM",
    "sb3-ppo": "stable-baselines3's PPO",
    "sb3-contrib-trpo": "sb3-contrib's TRPO",
}


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
    text = f"{x:.{2 if largest < 5 else 1 if largest < 1000 else 0}f}"
    return text if float(text) else text.lstrip("-")  # no -0.00


def shown(scores: np.ndarray) -> str:
    """Interquartile mean [95 % interval] of the seeds' scores; one score has no interval."""
    if len(scores) == 1:
        return number(scores[0], scores)
    mean, low, high = (number(x, scores) for x in interval(scores))
    return f"{mean} [{low}, {high}]"


def counted(scores: np.ndarray) -> str:
    return f"{shown(scores)} ({len(scores)})" if len(scores) else ""


# --- Rows ---
def read(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file, without those that name no commit that anybody else can have."""
    found = rows.read(RESULTS / f"{name}.csv")
    return [row for row in found if not row.get("commit", "").endswith("-dirty")]


def runs(task: str) -> dict[str, list[dict[str, str]]]:
    """Of learning.csv: the rows of each method of a task, this project's first."""
    found = {(r["method"], r["seed"]): r for r in read("learning") if r["task"] == task}
    methods = dict.fromkeys([*TASKS[task].methods, *(method for method, _ in found)])
    grouped = {m: [row for (of, _), row in found.items() if of == m] for m in methods}
    return {method: of for method, of in grouped.items() if of}


def scores(found: list[dict[str, str]], column: str = "eval_mean") -> np.ndarray:
    return np.array([float(row[column]) for row in found if not row["error"]])


def curves(task: str, methods: list[str]) -> dict[str, list[np.ndarray]]:
    """Of curves.csv: those of each method, each (2, points): steps, returns."""
    counting = {(method, row["seed"]) for method, of in runs(task).items() for row in of}
    found: dict[str, list[np.ndarray]] = {method: [] for method in methods}
    for row in rows.read(RESULTS / "curves.csv"):
        run = row["method"], row["seed"]
        if row["task"] == task and row["method"] in methods and run in counting:
            points = [np.fromstring(row[x], sep=" ") for x in ("steps", "returns")]
            found[row["method"]].append(np.stack(points))
    return found


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


def results(names: str) -> str:
    """Of each task a row with its name, then one for each method. The threshold is Gymnasium's, if it
    has one. A column has the returns with sampled actions where they differ from the deterministic
    ones by more than both intervals."""
    body = []
    for task in names.split():
        methods = runs(task) if task in TASKS else {}
        if not methods:
            raise ValueError(f"learning.csv has no task {task}")
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
    return markdown(head, body)


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
    """The environment among a run's flags; for a peer it is the second word."""
    words = flags.split()
    return words[words.index("--env-id") + 1] if "--env-id" in words else "".join(words[1:2])


def figures() -> str:
    """README's table: the same script with and without memory, and a peer."""
    tasks = "cartpole-masked pendulum-masked poc-memory minigrid-memory-s9 minigrid-memory-s13"
    body = []
    for task in tasks.split():
        found = runs(task)
        cells = [counted(scores(found[method])) for method in ("lstm", "ablated", "sb3-contrib")]
        body.append([f"{TASKS[task].title}, {thousands(TASKS[task].steps)}", *cells])
    table = markdown(["task, steps", "LSTM", "no memory", "sb3-contrib"], body)
    return table.replace("<wbr>", "").replace("&nbsp;", " ")


DETAILS = {"details-cartpole-masked": "CartPole", "details-repeat-previous": "RepeatPrevious"}
REFERENCES = {  # of the mistakes that need other flags: what they are compared with
    "replay from a zero state": "nothing, sequences of 16",
    "states recomputed": "nothing, sequences of 16",
    "statistics updated too early": "nothing, observations normalised",
}


def detail(names: str) -> str:
    """rppo_lstm.py as it is, and with each of these mistakes, on both tasks; all without names."""
    mistakes = [*TASKS["details-cartpole-masked"].methods]
    chosen = [name.strip() for name in names.split(";")] if names else mistakes
    for name in chosen:
        if name not in mistakes:
            raise ValueError(f"benchmarks/tasks.toml has no detail {name}")
    if names:
        chosen = [*(REFERENCES.get(name, "nothing") for name in chosen), *chosen]
    measured = [runs(task) for task in DETAILS]
    body = []
    for name in dict.fromkeys(chosen):
        cells = [counted(scores(found.get(name, []))) for found in measured]
        body.append([name.replace("nothing", "as it is", 1), *cells])
    return markdown(["", *DETAILS.values()], body)


def exercise(name: str) -> str:
    """A change of docs/exercises beside the script as it is, on the same task and seeds."""
    tasks = [task for task in TASKS if task.startswith("exercise") and name in TASKS[task].methods]
    found = runs(tasks[0]) if tasks else {}
    if name not in found:
        raise ValueError(f"learning.csv has no exercise {name}")
    seeds = [row["seed"] for row in found[name]]
    body = []
    for method in "unchanged", name:
        of = {row["seed"]: f"{float(row['eval_mean']):.3g}, {float(row['return_100']):.3g}"
              for row in found[method]}  # fmt: skip
        body.append([method.replace("_", " "), *(of.get(seed, "-") for seed in seeds)])
    head = "return of 100 episodes, and of the last 100 in training"
    about = f"`{found[name][0]['flags']}`, commit {found[name][0]['commit']}."
    return markdown([head, *(f"seed {seed}" for seed in seeds)], body, about)


def throughput(section: str) -> str:
    """A section of throughput.csv, with the ratio to the first peer's."""
    body, peer_name, latest = [], "a peer", []
    for work, systems in speeds(section).items():
        body.append([f"**{work}**", "", ""])
        peer = next((name for name in systems if not name.startswith("ours")), None)
        peer_name = peer or peer_name
        for system, row in systems.items():
            median, low, high = (float(row[name]) for name in ("median", "min", "max"))
            ratio = f"{median / float(systems[peer]['median']):.1f}" if peer else ""
            name = system.replace("ours", "this project")
            body.append([name, f"{median:,.0f} ({low:,.0f}, {high:,.0f})", ratio])
            latest.append(row)
    if not latest:
        raise ValueError(f"throughput.csv has no section {section}")
    head = ["work, system", "steps a second: median (min, max)", f"times {peer_name}"]
    commits = ", ".join(sorted({row["commit"] for row in latest}))
    return markdown(head, body, f"Machine: {latest[-1]['machine']}. Commits: {commits}.")


def grid(unit: str, cells: dict[tuple[str, str], str], machine: str, commit: str) -> str:
    """A table of cells by row and column, both in the order in which they appear."""
    down, across = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    body = [[name, *(cells.get((name, column), "") for column in across)] for name in down]
    return markdown([unit, *across], body, f"Machine: {machine}. Commit: {commit}.")


def gpu(section: str) -> str:
    """The GPU's rows of the machine that was measured last: a line for each work, or for each part
    of an iteration."""
    if section == "resets":
        return gpu_resets()
    found = [row for row in read("throughput") if row["section"] == f"gpu-{section}"]
    found = [row for row in found if row["machine"] == found[-1]["machine"]]
    cells, last = {}, found[-1]
    if section != "parts":
        found.sort(key=lambda row: int(row["work"].split()[0]))  # "8 games" before "64 games"
    for row in found:
        work, system = row["work"], row["system"].removeprefix("ours, ")
        key = (row["system"], work) if section == "parts" else (work, system)
        cells[key] = f"{float(row['median']):,.0f}"
    unit = "milliseconds" if section == "parts" else "steps a second"
    return grid(unit, cells, last["machine"], last["commit"])


def gpu_resets() -> str:
    """resets.csv on the GPU that was measured last, where one step in a hundred ends an episode: the
    fused reset's time, and that of other ways divided by it."""
    found = [r for r in read("resets") if "cores" not in r["processor"] and r["rate"] == "0.01"]
    found = [row for row in found if row["processor"] == found[-1]["processor"]]
    cells = {}
    for row in found:
        size = f"{row['cell'].upper()}, {row['batch']}, {row['hidden']}"
        if row["way"] == "ours":
            cells[size, "fused reset"] = f"{float(row['ms']):.1f} ms"
        else:
            cells[size, row["way"]] = f"{float(row['over_ours']):.1f}"
    return grid("cell, sequences, units", cells, found[-1]["processor"], found[-1]["commit"])


VELOCITIES = "cart's velocity", "pole's angular velocity"
PROBES = {"velocities": "R^2", "weak traces": "R^2, weak traces too"}
AGENTS = {  # agent, and whether it is trained
    "LSTM, trained": ("lstm", True),
    "LSTM, untrained": ("lstm", False),
    "without memory, trained": ("memoryless", True),
}


def looked_at(trained: bool | None = None, **wanted: str) -> list[dict[str, str]]:
    """The rows of memory-look.csv that have these values, of agents after or before training."""
    found = [row for row in read("memory-look") if wanted.items() <= row.items()]
    return [row for row in found if trained in (None, row["steps"] != "0")]


def memory(name: str) -> str:
    """What was read from agents before and after training: R^2 of each seed."""
    if name not in PROBES:
        raise ValueError(f"memory: {', '.join(PROBES)}, not {name!r}")
    body = []
    for label, (agent, trained) in AGENTS.items():
        cells = []
        for velocity in VELOCITIES:
            found = looked_at(trained, agent=agent, what=f"{PROBES[name]}, {velocity}")
            # The row of the most steps is the last of a seed.
            seeds = {row["seed"]: f"{float(row['value']):.2f}" for row in found}
            cells.append(", ".join(seeds.values()))
        body.append([label, *cells])
    return markdown(["", *VELOCITIES], body)


# --- Charts ---
def save(figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def mean_curve(axis, runs: list[np.ndarray], color: str, **style) -> tuple[np.ndarray, np.ndarray]:
    """Draws the interquartile mean of runs and its interval, and returns its 60 steps and returns."""
    steps = np.linspace(max(x[0, 0] for x in runs), min(x[0, -1] for x in runs), 60)
    of_runs = np.array([np.interp(steps, *x) for x in runs])
    mean, low, high = interval(of_runs, samples=2000)
    axis.plot(steps, mean, color=color, **style)
    axis.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
    return steps, mean


def learning(name: str, task: str, methods: list[str], each_seed: bool = False) -> None:
    """A line for each method or, with each_seed, for each run."""
    figure, axis = plt.subplots(figsize=(5.4, 3.3))
    for (method, found), color in zip(curves(task, methods).items(), COLORS):
        label = f"{method_name(task, method)} ({len(found)} seeds)"
        if each_seed:
            for i, points in enumerate(found):
                axis.plot(*points, color=color, linewidth=1.2, label=None if i else label)
        else:
            mean_curve(axis, found, color, label=label)
    axis.set(title=TASKS[task].title, xlabel="environment steps", ylabel="return")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.legend()
    save(figure, name)


def overview(name: str, text: str) -> None:
    """README's picture: the same script with and without memory. It is narrow, so that it can be
    read on a phone."""
    figure, axis = plt.subplots(figsize=(5.4, 3.3))
    task, labels = "cartpole-masked", {"lstm": "with its LSTM", "ablated": "without memory"}
    for (method, found), color in zip(curves(task, [*labels]).items(), COLORS):
        steps, mean = mean_curve(axis, found, color, linewidth=2)
        end = iqm(scores(runs(task)[method]))
        axis.plot(steps[-1] * 1.03, end, "o", color=color, markersize=6, clip_on=False)
        axis.text(steps[-1] * 1.06, end, f"{end:.0f}", color=color, va="center")
        x, above = (0.62, 10) if mean[-1] > 250 else (0.97, 20)
        at = np.searchsorted(steps, x * steps[-1])
        axis.text(steps[at], mean[at] + above, f"{labels[method]}  ", color=color, ha="right")
    axis.text(steps[-1] * 1.06, 455, "final agent,\nno sampling", color=text, fontsize=8, va="top")
    axis.set_title("CartPole without velocities: return", color=text)
    axis.set_xlabel("environment steps, actions sampled", color=text)
    axis.set(xlim=(0, steps[-1] * 1.2), ylim=(0, 520), xticks=np.arange(0, 100_001, 20_000))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.tick_params(colors=text)
    save(figure, name)


def scaling() -> None:
    """How steps a second grow with environments, units and the length of sequences, and what the
    LSTM's arithmetic alone would allow: (3 x 4 epochs + 1) 8 H (F + H) operations a step, at the
    speed of a large product of matrices on the same core."""
    works = {work: float(of["ours"]["median"]) for work, of in speeds("scaling").items()}
    peak = works.pop("GFLOP/s of a product of matrices")
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 3), sharey=True)
    for what, axis in zip(("environments", "units", "steps a sequence"), axes):
        found = {int(work.split()[0]): sps for work, sps in works.items() if work.endswith(what)}
        x = np.array(sorted(found))
        units = x if what == "units" else np.full(len(x), 128)
        floor = peak * 1e9 / (13 * 8 * units * (units + 64))
        axis.plot(x, [found[i] for i in x], "o-", color=BLUE, markersize=4)
        axis.plot(x, floor, ":", color=GREY)
        axis.set(xscale="log", yscale="log", xticks=x[:: 2 if len(x) > 6 else 1], xlabel=what)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
    axes[0].text(1, floor[0] * 1.1, "arithmetic alone", color=GREY)
    axes[0].set_ylabel("steps a second")
    axes[0].yaxis.set_major_formatter(EngFormatter(sep=""))
    save(figure, "scaling")


WAYS = {  # of resets.csv, in the chart: way, its label
    "ours": "fused reset",
    "segments": "segments (skrl)",
    "padded": "padded",
    "packed": "packed",
    "TorchRL, pad": "TorchRL",
    "loop of calls": "loop (CleanRL)",
    "sb3-contrib, padded": "sb3-contrib",
}


def resets() -> None:
    """Time over the reset rate, of an LSTM with 128 units: a panel for each B, a line for each way.
    Times are multiples of the fused reset's at rate 0, from ratios of neighbouring runs."""
    figure, axes = plt.subplots(2, 1, figsize=(4.4, 6.4))
    found = [row for row in read("resets") if "cores" in row["processor"]]
    for batch, axis in zip(("8", "64"), axes):
        at = {}
        for row in found:
            if (row["cell"], row["batch"], row["hidden"]) == ("lstm", batch, "128"):
                at[float(row["rate"]), row["way"]] = row
        rates = sorted({rate for rate, _ in at})
        ours = [float(at[rate, "ours"]["over_no_resets"]) for rate in rates]
        lines = {way: [x * float(at[rate, way]["over_ours"]) for x, rate in zip(ours, rates)]
                 for way in WAYS}  # fmt: skip
        heights, below = {}, 0.0  # of the labels, none on top of another
        for way in sorted(lines, key=lambda way: lines[way][-1]):
            below = heights[way] = max(lines[way][-1], below * np.exp(0.24))
        for (way, line), color in zip(lines.items(), [*COLORS, GREY]):
            width = 3 if way == "ours" else 1.5
            axis.plot(range(len(rates)), line, "o-", color=color, linewidth=width, markersize=4)
            end = (len(rates) - 0.85, heights[way])
            axis.annotate(WAYS[way], (len(rates) - 1, line[-1]), end, color=color, va="center")
        milliseconds = float(at[0.0, "ours"]["ms"])
        axis.set_title(f"{batch} sequences of 128 steps", fontsize=10)
        axis.set(yscale="log", xlim=(-0.2, len(rates) + 1.1))
        axis.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.set_ylabel(f"time relative to the\nfused reset ({milliseconds:.0f} ms)")
    axes[-1].set_xlabel("share of steps that end an episode")
    save(figure, "resets")


def reward_scale() -> None:
    """The gradient steps of reward-scale.csv: geometric means over seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.8))
    words = {"True": "divided rewards", "False": "raw rewards"}
    logs: dict[tuple, list[float]] = defaultdict(list)
    for row in read("reward-scale"):
        for part in "policy", "value":
            logs[row["norm_reward"], part, int(row["iteration"])].append(np.log(float(row[part])))
    last = min(max(i for divided, _, i in logs if divided == of) for of in words)
    iterations = range(1, last + 1)
    for (divided, label), color in zip(words.items(), COLORS):
        for part, style in ("policy", "-"), ("value", "--"):
            means = [np.exp(np.mean(logs[divided, part, i])) for i in iterations]
            axis.plot(iterations, means, style, color=color, label=f"{part} loss, {label}")
    axis.set(yscale="log", ylim=(1e-4, 1), xlim=(1, last), xlabel="iteration")
    axis.set_ylabel("norm of the gradient in the\nshared layers, after clipping")
    axis.legend(loc="lower right", fontsize=9)
    save(figure, "reward-scale")


def values(x: str, **wanted: str) -> list[tuple[float, float]]:
    """Of memory-look.csv: a column and the value, of the rows that have these values."""
    return [(float(row[x]), float(row["value"])) for row in looked_at(**wanted)]


def memory_episode() -> None:
    """The pole's angular velocity in a held-out episode: true, read from the LSTM's h, and from the
    h of an agent without memory."""
    figure, axis = plt.subplots(figsize=(5, 3.2))
    name = "pole's angular velocity"
    true = values("at", agent="true", what=name, seed="1")
    axis.plot(*zip(*true), color=GREY, alpha=0.6, linewidth=5, label="true")
    for agent, color, label in (
        ("memoryless", ORANGE, "read without memory"), ("lstm", BLUE, "read from the LSTM")
    ):  # fmt: skip
        points = values("at", agent=agent, what=f"{name}, read", seed="1")
        axis.plot(*zip(*points), color=color, linewidth=1.6, label=label)
    axis.set(xlabel="step of a held-out episode", ylabel=f"{name},\nradians a second")
    axis.legend(fontsize=9, columnspacing=1, loc="lower center", bbox_to_anchor=(0.45, 1), ncols=3)
    save(figure, "memory-episode")


def memory_training() -> None:
    """R^2 of the hidden velocities over training, and the return as a share of 500: means over
    seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.8))

    def mean(agent: str, what: str, every: int):
        """Over the seeds, whose steps differ a little: they are rounded down to so many."""
        found: dict[float, list[float]] = {}
        for steps, value in values("steps", task="cartpole", agent=agent, what=what):
            found.setdefault(steps // every * every, []).append(value)
        return np.array([*found]), np.array([np.mean(x) for x in found.values()])

    steps, share = mean("lstm", "return", 5000)
    axis.plot(steps, share / 500, color=GREEN, linewidth=1.4, label="return, LSTM")
    for velocity, style in zip(VELOCITIES[::-1], ("-", "--")):
        short = velocity.split("'")[0]
        points = mean("lstm", f"R^2, {velocity}", 10_000)
        axis.plot(*points, style, color=BLUE, label=f"{short}, LSTM")
        _, [value] = mean("memoryless", f"R^2, {velocity}", 10_000)
        axis.axhline(value, linestyle=style, color=ORANGE, label=f"{short}, without memory")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set(ylim=(-0.03, 1.05), xlabel="environment steps of training")
    axis.set_ylabel("R² on held-out episodes; return / 500")
    axis.legend(fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.1))
    save(figure, "memory-training")


def memory_steps_back() -> None:
    """RepeatPreviousEasy: how often the suit shown k steps before is read rightly."""
    figure, axis = plt.subplots(figsize=(5, 3.2))
    labels = "trained LSTM", "untrained LSTM", "without memory"
    for (agent, trained), label, color in zip(AGENTS.values(), labels, (BLUE, VIOLET, ORANGE)):
        found = looked_at(trained, agent=agent, what="share right")
        points = [(int(row["at"]), 100 * float(row["value"])) for row in found]
        axis.plot(*zip(*points), "o-", color=color, markersize=5, label=label)
    axis.set(ylim=(0, 104), xticks=range(12), xlabel="steps back", ylabel="suits read rightly, %")
    axis.legend(fontsize=9)
    save(figure, "memory-steps-back")


def everything() -> None:
    """README's table between its markers, README's picture, and the charts of the docs."""
    learning("cartpole-masked", "cartpole-masked", ["lstm", "sb3-contrib", "frames", "ablated"])
    mistakes = ["unchanged", "final steps trained on", "rewards not normalised"]
    learning("mistakes", "ablation-cartpole-masked", mistakes)
    lengths = ["unchanged", "sequences of 32", "sequences of 16"]
    learning("sequences", "ablation-repeat-previous", lengths)
    learning("patience", "minigrid-memory-s9", ["lstm", "ablated"], each_seed=True)
    for scheme, text in ("light", "#404040"), ("dark", "#d0d0d0"):
        overview(f"readme-{scheme}", text)
    for draw in scaling, resets, reward_scale, memory_episode, memory_training, memory_steps_back:
        draw()
    path = ROOT / "README.md"
    markers = r"(<!-- figures: [^>]*-->).*?(<!-- end of figures -->)"
    table = f"\\1\n\n{figures()}\n\n\\2"
    path.write_text(re.sub(markers, table, path.read_text(), flags=re.S))


def main() -> None:
    global RESULTS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV files")
    options = parser.parse_args()
    RESULTS = options.results
    if options.tasks:
        print(results(" ".join(options.tasks)))
    else:
        everything()


if __name__ == "__main__":
    main()
