"""Recall: agents with different memories, trained on short episodes and tested on long ones.

    python benchmarks/memories.py        # results/recall.csv
    python benchmarks/memories.py speed  # results/throughput.csv
    python benchmarks/memories.py draw   # docs/img/recall.svg

The first observation shows a cue, -1 or 1; the action at the last step must name it. An agent is
trained once and tested on episodes of each of LENGTHS. `gap` says how far apart its state is after
one cue and after the other, as a share of what that was one step after the cue; `ends`, in how many
different states 20 random ones end up if nothing is shown for 3,000 steps. A run that has its rows
is skipped.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import rows
from rows import RESULTS, ROOT

LENGTHS = 10, 30, 100, 300, 1000, 3000, 10_000
EPISODES = 100  # of a test, half of them with each cue; 2 where nothing distracts
FILES = (
    "rppo_lstm.py", "rppo_continuous.py", "docs/recipes/use.py", "docs/recipes/memory",
    "docs/recipes/inputs/frame_stack.py", "docs/recipes/tasks",
)  # fmt: skip
FIELDS = "memory trained distraction seed steps tested score gap ends date commit".split()
MEMORIES = {  # recipes, flags
    "LSTM": ([], {}),
    "GRU": (["stacked_lstm"], {"recurrent_layers": "gru"}),
    "min_gru": (["min_gru"], {}),
    "lru": (["lru"], {}),
    "attention": (["attention"], {}),
    "four frames": (["frame_stack"], {}),
    "LSTM, gates half open": ([], {}),
    "GRU, gates open": (["stacked_lstm"], {"recurrent_layers": "gru"}),
    "LSTM, chrono": (["long_memory"], {}),
}


def observe(cue, first: bool, last: bool, noise):
    """Cue or noise, whether this is the first step, whether it is the last, noise of its own."""
    return np.stack([np.where(first, cue, noise[0]), 0 * cue + first, 0 * cue + last, noise[1]], -1)


def draw_noise(random, distraction: str, size=()):
    """Two numbers for each episode, 0 where there is no distraction."""
    on = {"no": (0, 0), "beside": (0, 1), "in its place": (1, 0)}[distraction]
    return [random.choice([-1.0, 1.0], size) * x for x in on]


class Recall(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int, distraction: str):
        self.length, self.distraction = length, distraction

    def observe(self):
        noise = draw_noise(self.np_random, self.distraction)
        last = self.t == self.length - 1
        return np.float32(observe(2 * self.cue - 1, self.t == 0, last, noise))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        done = self.t == self.length
        return self.observe(), float(done and action == self.cue), done, False, {}


gym.register("LongRecall-v0", Recall)


def train(memory: str, trained: int, distraction: str, seed: int, steps: int):
    recipes, flags = MEMORIES[memory]
    script = rows.load_script("rppo_lstm", recipes)

    class Agent(script.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            if memory == "LSTM, gates half open":
                self.lstm.cell.bias_ih.data.zero_()
            if memory == "GRU, gates open":  # r, z, n: z keeps
                self.lstm.layers[0].cell.bias_ih.data.chunk(3)[1].fill_(1)

    script.Agent = Agent
    task = f'{{"length": {trained}, "distraction": "{distraction}"}}'
    with tempfile.TemporaryDirectory() as folder:
        return script.train(
            script.Args(
                env_id="LongRecall-v0", env_kwargs=task, seed=seed, total_timesteps=steps,
                eval_episodes=0, runs_dir=folder, **flags,
            )
        )  # fmt: skip


def test(agent, distraction: str, seed: int):
    """-> for each of LENGTHS the share of right answers, and the gap. No action changes what comes
    next, so one long episode, asked at several steps, stands for several."""
    random = np.random.default_rng([seed, 1])
    N = EPISODES if distraction != "no" else 2
    answers = np.arange(N) % 2
    k = agent.encoder[0].in_features // 4  # frame_stack's frames
    state = frames = None
    first = 0.0
    for t in range(max(LENGTHS)):
        noise = draw_noise(random, distraction, N)
        obs, asked = (observe(2 * answers - 1, t == 0, last, noise) for last in (False, True))
        before = np.repeat(obs[:, None], k, 1) if frames is None else frames
        frames, asked = (np.concatenate([before[:, 1:], x[:, None]], 1) for x in (obs, asked))
        if t + 1 in LENGTHS:
            actions, _ = agent.predict(asked.reshape(N, -1), state)
            yield t + 1, (actions == answers).mean(), gap(state) / first if first else 0.0
        _, state = agent.predict(frames.reshape(N, -1), state)
        first = gap(state) if t == 0 else first


def gap(state) -> float:
    """The distance between the mean states (rows, N, ...) after one cue and after the other."""
    return (state[:, ::2].mean(1) - state[:, 1::2].mean(1)).norm().item() if state.numel() else 0.0


def ends(agent, N: int = 20) -> int:
    """In how many states, a hundredth of their size apart, random ones end up."""
    state = agent.initial_state(N).normal_(0, 3)
    nothing = observe(np.zeros(N), False, False, np.zeros((2, N)))
    for _ in range(3000):
        _, state = agent.predict(nothing, state)
    rest = state.movedim(1, 0).flatten(1)  # (N, numbers)
    near = (rest - rest[:, None]).norm(dim=-1) < 0.01 * rest.norm(dim=1).mean()
    return len(near.unique(dim=0))


def jobs():
    """Memory, training length, distraction, seed, steps; what matters most comes first."""
    few = [(m, s) for s in (1, 2, 3) for m in MEMORIES if "," not in m]
    more = [(m, s) for s in (4, 5) for m in ("LSTM", "GRU")]
    gates = [(m, s) for s in (1, 2, 3, 4, 5) for m in MEMORIES if "," in m]
    for memory, seed in few + more:
        yield memory, 10, "no", seed, 30_000
    for memory, seed in few + more:
        if memory != "four frames":
            yield memory, 10, "in its place", seed, 30_000
    for memory, seed in gates:
        yield memory, 10, "no", seed, 30_000
    for seed in 1, 2, 3, 4, 5:
        yield "GRU", 10, "no", seed, 60_000
    for length, steps in (5, 30_000), (30, 30_000), (30, 100_000):
        for memory, seed in few:
            if memory != "four frames":
                yield memory, length, "no", seed, steps
    for memory, seed in gates:
        if seed <= 3:
            yield memory, 30, "no", seed, 30_000


def measure() -> None:
    path = RESULTS / "recall.csv"
    names = FIELDS[:5]
    have = {tuple(row[name] for name in names) for row in rows.read(path)}
    for job in jobs():
        if tuple(map(str, job)) in have:
            continue
        agent = train(*job)
        row = dict(zip(names, job), date=time.strftime("%Y-%m-%d"))
        row["commit"] = rows.commit(ROOT, *FILES)
        if job[0] not in ("lru", "attention", "four frames"):  # of which it's known: one
            row["ends"] = ends(agent)
        found = test(agent, job[2], job[3])
        table = [row | dict(tested=n, score=f"{s:.3g}", gap=f"{g:.2e}") for n, s, g in found]
        rows.append(path, FIELDS, table)
        print(*job, *(row["score"] for row in table), flush=True)


def speed(repeats: int = 3, steps: int = 16_384) -> None:
    """Rows of throughput.csv: steps a second of CPU time, so that neighbours on the machine count
    little; all systems in turn, several times."""
    cartpole = {"env_id": "CartPole-v1", "mask_velocity": True}
    works = {
        ("memories", "CartPole without velocities", memory): ("rppo_lstm", recipes, cartpole | flags)
        for memory, (recipes, flags) in MEMORIES.items() if "," not in memory
    }  # fmt: skip
    for env_id, name, own in (
        ("Pendulum-v1", "rppo_continuous", []), ("HalfCheetah-v5", "rppo_continuous", []),
        ("MemoryS9-v0", "rppo_lstm", ["minigrid_memory"]),
    ):  # fmt: skip
        for system, recipes in ("ours", []), ("ours, EnvPool", ["envpool_tasks"]):
            works["envpool", env_id, system] = name, [*own, *recipes], {"env_id": env_id}
    found = {work: [] for work in works}
    notes = {}
    for _ in range(repeats):
        for work, (name, recipes, flags) in works.items():
            script = rows.load_script(name, recipes)
            preset = getattr(script, "PRESETS", {}).get((flags["env_id"], False), {})
            flags = preset | flags | {"total_timesteps": steps, "eval_episodes": 0}
            with tempfile.TemporaryDirectory() as folder:
                args = script.Args(**flags, runs_dir=folder, run_name="run")
                began = time.process_time()
                agent = script.train(args)
                seconds = time.process_time() - began
                done = json.loads(Path(folder, "run/result.json").read_text())["global_step"]
            found[work].append(done / seconds)
            notes[work] = f"CPU time, {sum(x.numel() for x in agent.parameters())} parameters"
            print(*work, f"{done / seconds:.0f}", flush=True)
    for work, sps in found.items():
        row = dict(zip(("section", "work", "system"), work), date=time.strftime("%Y-%m-%d"))
        row |= dict(
            commit=rows.commit(ROOT, *FILES), machine=rows.machine(), steps=steps, note=notes[work]
        )
        row |= dict(median=f"{np.median(sps):.0f}", min=f"{min(sps):.0f}", max=f"{max(sps):.0f}")
        row["sps"] = " ".join(f"{x:.0f}" for x in sps)
        rows.append(RESULTS / "throughput.csv", rows.SPEED, [row])


# --- docs/concepts/trained-on-10.md and docs/which-memory.md ---
def recall(words: str) -> str:
    """Agents trained on episodes of so many steps, with that distraction, as a table: the share of
    right answers, a mean over seeds; and the numbers of states in which each seed's memory ends."""
    import report  # which needs matplotlib

    body: dict[tuple, list[dict]] = {}
    for row in rows.read(RESULTS / "recall.csv"):
        if f"{row['trained']} {row['distraction']}" == words:
            body.setdefault((row["memory"], row["steps"]), []).append(row)
    lines = []
    for memory, steps in sorted(body, key=lambda key: [*MEMORIES].index(key[0])):
        of = {n: [r for r in body[memory, steps] if r["tested"] == str(n)] for n in LENGTHS}
        means = (np.mean([float(row["score"]) for row in found]) for found in of.values())
        name = memory if steps == "30000" else f"{memory}, {report.thousands(float(steps))} steps"
        ends = " ".join(sorted(row["ends"] for row in of[10] if row["ends"]))
        lines.append([f"{name} ({len(of[10])})", *(f"{x:.2f}" for x in means), ends])
    return report.markdown(["tested on", *(f"{n:,}" for n in LENGTHS), "states"], lines)


METHODS = dict(zip(MEMORIES, ("lstm", "gru", "min_gru", "lru", "attention", "frames")))
COMPARED = {  # tasks, and others that have the rows of some of their methods already
    "memories-cartpole-masked": "cartpole-masked",
    "memories-pendulum-masked": "pendulum-masked",
    "memories-poc-memory": "poc-memory",
    "memories-repeat-first": "memories-repeat-first",
    "memories-repeat-previous": "memories-repeat-previous",
}


def compared(_: str = "") -> str:
    """Each memory's returns, steps a second of CPU time, and numbers that are trained."""
    import report  # which needs matplotlib

    tasks = {task: report.runs(old) | report.runs(task) for task, old in COMPARED.items()}
    tasks = {task: found for task, found in tasks.items() if "min_gru" in found}
    speeds = report.speeds("memories").get("CartPole without velocities", {})
    body = []
    for memory, method in METHODS.items():
        found = [report.scores(of.get(method, [])) for of in tasks.values()]
        row = speeds[memory]
        numbers = (f"{float(x):,.0f}" for x in (row["median"], row["note"].split()[2]))
        body.append([memory, *map(report.counted, found), *numbers])
    titles = [rows.TASKS[task].title for task in tasks]
    return report.markdown(["", *titles, "steps a second", "parameters"], body)


def draw() -> None:
    """docs/img/recall.svg: right answers, and what is left of the difference between two cues."""
    import report  # which needs matplotlib

    figure, (right, apart) = report.plt.subplots(1, 2, figsize=(9.2, 3.3))
    for memory, color in zip([name for name in MEMORIES if "," not in name], report.COLORS):
        found: dict[int, list] = {}
        for row in rows.read(RESULTS / "recall.csv"):
            work = row["memory"], row["trained"], row["distraction"], row["steps"]
            if work == (memory, "10", "no", "30000"):
                found.setdefault(int(row["tested"]), []).append((row["score"], row["gap"]))
        lengths = sorted(found)
        scores, gaps = np.moveaxis(np.array([found[n] for n in lengths], float), -1, 0)
        label = f"{memory} ({scores.shape[1]})"
        right.plot(lengths, scores.mean(1), "o-", color=color, markersize=4, label=label)
        if gaps.any():
            apart.plot(lengths, np.maximum(gaps, 1e-8), color=color)
    right.set(title="right answers", xscale="log", xlabel="steps of an episode")
    apart.set(title="how far apart the two memories are", xscale="log", yscale="log")
    apart.set(xlabel="steps since the episode began")
    apart.legend(*right.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1))
    report.save(figure, "recall")


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    {"": measure, "draw": draw, "speed": speed}[" ".join(sys.argv[1:])]()
