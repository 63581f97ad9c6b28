"""The benchmarks: every task is a command, every change is one, a run becomes a row, the tables'
statistics, and every way to reset a state inside a sequence computes the same."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/tools")]
import blocks  # noqa: E402
import memories  # noqa: E402
import peers  # noqa: E402
import resets  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import speed  # noqa: E402

SMALL = "rppo_lstm --env-id CartPole-v1 --hidden-size 8 --num-envs 4 --num-steps 32"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "EPISODES", 2)
    return argparse.Namespace(results=tmp_path, runs_dir=tmp_path / "runs")


def commands():
    """Of each script, recipe and set of flags one command: others differ in the flags' values."""
    found = {}
    for task in rows.TASKS.values():
        for command in task.methods.values():
            found[shape(command)] = command, task.steps
    for steps, systems in speed.WORKS.values():
        for command in systems.values():
            words = command.split()
            words = words[2:] if words[0] in ("mpiexec", "until") else words
            if words[0] not in ("skrl", "product", "games", "spinning_up"):
                found[shape(" ".join(words))] = " ".join(words), steps
    return [pytest.param(*of, id=name) for name, of in found.items()]


def shape(command: str) -> str:
    names, flags = rows.split(command)
    return " ".join([*names, *(flag for flag in flags if flag.startswith("--"))])


@pytest.mark.parametrize("command, steps", commands())
def test_every_command_is_one(command, steps, monkeypatch):
    """The script, with its recipes or its change, takes its flags; or its peer exists."""
    names, flags = rows.split(command)
    if names[0] == "peer":
        assert names[1] in rows.PEERS and names[2]
        return
    if "envpool_tasks" in command:
        pytest.importorskip("envpool")
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script = rows.load_script(names[0], names[1:])
    args = rows.parse(script, [*flags, "--total-timesteps", str(steps or 1)])
    assert args.total_timesteps == (steps or 1)


@pytest.mark.parametrize("name", rows.CHANGES)
def test_a_change_changes_the_text(name):
    text = rows.exercises.changed(rows.CHANGES[name])
    compile(text, name, "exec")
    assert text != (ROOT / "rppo_lstm.py").read_text()


def test_a_text_is_changed_within_one_block():
    script = "X = 1\n\n\ndef f():\n    x = 1\n\n\nclass A:\n    # Above\n    def g(self):\n        x = 1\n"
    assert blocks.text_of(script, "A.g") == "    # Above\n    def g(self):\n        x = 1\n"
    assert blocks.patched(script, "A.g", "x = 1", "x = 2") == script[:-2] + "2\n"
    assert blocks.patched(script, "X", "1", "3") == "X = 3" + script[5:]
    for block, old in ("f", "x = 2"), ("A", " "), ("h", "x"):
        with pytest.raises(ValueError):
            blocks.patched(script, block, old, "")


def test_a_run_is_a_row_and_a_curve(options, monkeypatch):
    methods = {"lstm": SMALL, "changed": SMALL.replace("lstm ", "lstm change:carry_state ")}
    methods["wrong"] = f"{SMALL} --num-minibatches 3"
    monkeypatch.setitem(rows.TASKS, "task", rows.Task("Task", 512, methods))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    for method in methods:
        run.run("task", method, 3, options)
    found = rows.read(options.results / "learning.csv")
    assert [row["method"] for row in found] == [*methods]
    for row in found[:2]:
        assert row["error"] == "" and row["seed"] == "3" and int(row["global_step"]) >= 512
        assert 8 <= float(row["eval_mean"]) <= 500 and 8 <= float(row["sampled_mean"]) <= 500
    assert "must divide the 4 sequences" in found[2]["error"] and found[2]["eval_mean"] == ""
    curves = rows.read(options.results / "curves.csv")
    assert [row["method"] for row in curves] == ["lstm", "changed"]
    for row in curves:
        steps = [int(step) for step in row["steps"].split()]
        assert steps == sorted({*steps}) and len(row["returns"].split()) == len(steps) > 2


@pytest.mark.slow
def test_a_peer_is_trained_and_evaluated(monkeypatch):
    pytest.importorskip("sb3_contrib")
    monkeypatch.setattr(rows, "EPISODES", 2)
    settings = {"algorithm": "RecurrentPPO", "n_steps": 64, "n_epochs": 1, "normalize": True}
    settings |= {"linear": ["learning_rate"], "learning_rate": 1e-3, "visible": [1, 0, 1, 0]}
    monkeypatch.setitem(rows.PEERS, "small", settings)
    result = peers.train("small", "CartPole-v1", 1024, 1)
    assert result["global_step"] == 1024 and result["curve"][-1][0] == 1024
    assert len(result["evaluation"]) == len(result["sampled"]) == 2


def test_the_gradients_of_both_losses(monkeypatch):
    """With raw rewards the value loss drowns the policy's gradient; clipping bounds their sum."""
    monkeypatch.setattr(sys, "argv", ["run.py"])
    table = run.reward_scale([1], steps=1000)
    means = {divided: [np.array(row[3:5], float) for row in table if row[0] == divided]
             for divided in (True, False)}  # fmt: skip
    policy, value = np.mean(means[False], 0)
    assert value > 20 * policy and np.mean(means[True], 0)[0] > 5 * policy
    assert 0 < min(map(np.min, means[True])) and np.max(means[False]) < 0.6


def test_speeds_are_steps_over_seconds(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["speed.py"])
    clock, processor = speed.train(ROOT, SMALL, 640, 0, None)
    assert 50 < clock < 1e6 and 50 < processor < 1e6
    seconds, _ = speed.train(ROOT, SMALL, 10**6, 0, 10)  # to a return of 10, an iteration or two
    assert 0 < seconds < 60
    assert speed.train(ROOT, SMALL, 0, 0.2, None)[0] > 50  # for so many seconds


def test_the_statistics_of_the_tables():
    """The mean of the middle half; its interval covers the truth 95 times of 100."""
    pytest.importorskip("matplotlib")
    import report

    assert report.iqm(np.array([0, 100, 1, 2, 3, 4, 5, -90.0])) == pytest.approx(2.5)
    assert report.iqm(np.array([1.0, 2.0, 6.0])) == 3
    assert report.interval(np.full(5, 7.0)) == (7, 7, 7)
    assert report.shown(np.array([7.0])) == "7.0" and report.shown(np.array([-0.001])) == "0.00"
    random, covered = np.random.default_rng(1), 0
    for _ in range(100):
        _, low, high = report.interval(random.normal(size=30), samples=500)
        covered += low <= 0 <= high
    assert 0.88 <= covered / 100 <= 0.99


def test_a_table_has_the_rows_that_name_a_commit(tmp_path, monkeypatch):
    """Sampled returns are shown where they differ; a row of a changed script counts nowhere."""
    pytest.importorskip("matplotlib")
    import report

    found = [
        {"task": "lunarlander-masked", "method": method, "flags": "--env-id LunarLander-v3",
         "seed": seed, "steps": 1000, "eval_mean": -50 + seed, "sampled_mean": -50 + seed + gain,
         "commit": "abc-dirty" if method == "frames" else "abc"}
        for method, gain in (("lstm", 150), ("ablated", 1), ("frames", 0))
        for seed in range(3)
    ]  # fmt: skip
    rows.append(tmp_path / "learning.csv", rows.LEARNING, found)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = report.results("lunarlander-masked").replace("&nbsp;", " ").split("\n")
    assert lines[0] == "| task, agent | return | sampled | worst | solved |"
    assert lines[3:] == [
        "| LSTM | -49.0 [-50.0, -48.0] (3) | 101.0 [100.0, 102.0] | -50.0 | 0 of 3 |",
        "| no memory | -49.0 [-50.0, -48.0] (3) | | -50.0 | 0 of 3 |",
    ]


def test_a_detail_stands_beside_what_has_the_same_flags(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import report

    task = "details-cartpole-masked"
    found = [
        {"task": task, "method": method, "seed": seed, "eval_mean": 100 * seed}
        for method in ("nothing, sequences of 16", "replay from a zero state")
        for seed in range(1, 6)
    ]
    rows.append(tmp_path / "learning.csv", rows.LEARNING, found)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lines = report.detail("replay from a zero state").split("\n")[2:]
    assert lines[0].startswith("| as it is, sequences of 16 | 300.0 [")
    assert lines[1].startswith("| replay from a zero state | 300.0 [") and len(lines) == 2


EXACT = [
    pytest.param(way, kind, id=f"{way.name}-{kind}")
    for way in resets.WAYS for kind in way.kinds if way.exact
]  # fmt: skip


def ends() -> dict[str, torch.Tensor]:
    """final (T, B): scattered, adjacent final steps, first and last ones, and none at all."""
    adjacent = torch.zeros(7, 3, dtype=torch.bool)
    adjacent[2:5, 0] = adjacent[0, 1] = adjacent[6, 2] = True
    return {
        "scattered": resets.random_final(4, 0.2, 9),
        "adjacent": adjacent,
        "none": torch.zeros_like(adjacent),
    }


def error(way: resets.Way, kind: str, final: torch.Tensor) -> float:
    """The larger error, of h or of the gradients, against the loop in float64."""
    data, weights = resets.make_data(kind, final, hidden=6)
    data = data.to(torch.float64, "cpu")
    expected = resets.results(resets.LOOP, kind, data, weights)
    return max(resets.errors(resets.results(way, kind, data, weights), expected))


@pytest.mark.parametrize("way, kind", EXACT)
def test_every_way_agrees_with_the_loop(way, kind):
    if way not in resets.installed():
        pytest.skip(f"needs the package {way.package}")
    for final in ends().values():
        assert error(way, kind, final) <= 1e-12


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_without_resets_it_is_another_function(kind):
    way = resets.WAYS[1]
    found = {name: error(way, kind, final) for name, final in ends().items()}
    assert found["none"] <= 1e-12 and min(found["scattered"], found["adjacent"]) > 0.1


def test_what_the_csv_has_is_not_measured_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resets, "RATES", [0.0, 0.2])
    monkeypatch.setattr(resets, "ROUNDS", 1)
    ways = [way for way in resets.WAYS if way.name in ("ours", "padded")]
    options = argparse.Namespace(
        ways=ways, cells=["gru"], batches=[2], hidden=[4], device="cpu", results=tmp_path
    )
    for _ in range(2):
        resets.measure(options)
    assert "has its rows" in capsys.readouterr().out.splitlines()[-1]
    found = rows.read(tmp_path / "resets.csv")
    assert len(found) == 4 and not resets.failures(found)
    assert all(float(row["ms"]) > 0 and float(row["over_ours"]) > 0 for row in found)
    found[1]["error_grad64"] = "1e-9"
    assert len(resets.failures(found)) == 1


class Holds:
    """Keeps a number until the first step shows another: as it is, fading, or as a switch does."""

    encoder = (torch.nn.Linear(4, 1),)

    def __init__(self, kept):
        self.kept = kept

    def initial_state(self, N):
        return torch.zeros(1, N, 1, dtype=torch.float64)

    def predict(self, obs, state):
        obs = torch.as_tensor(obs, dtype=torch.float64)
        state = self.initial_state(len(obs)) if state is None else state
        state = torch.where(obs[:, 1:2] == 1, obs[:, :1], self.kept(state))
        return (state[0, :, 0] > 1e-9).long().numpy(), state


@pytest.mark.parametrize("distraction", ["no", "beside", "in its place"])
def test_recall_finds_out_for_how_long_a_memory_lasts(distraction, monkeypatch):
    monkeypatch.setattr(memories, "LENGTHS", (10, 30, 100, 300, 400))
    kept = [*memories.test(Holds(lambda h: h), distraction, 1)]
    assert kept == [(n, 1.0, 1.0) for n in memories.LENGTHS]
    faded = [*memories.test(Holds(lambda h: 0.9 * h), distraction, 1)]
    assert [score for _, score, _ in faded] == [1.0] * 3 + [0.5] * 2  # 0.9^n > 1e-9: n < 197
    assert faded[1][2] == pytest.approx(0.9**28)
    ends = [
        memories.ends(Holds(kept)) for kept in (lambda h: 0.9 * h + 1, lambda h: (3 * h).tanh())
    ]
    assert ends == [1, 2]


def test_recall_shows_a_cue_and_asks_for_it():
    for distraction, noisy in ("no", []), ("beside", [3]), ("in its place", [0]):
        env = memories.Recall(5, distraction)
        obs = [env.reset(seed=0)[0]]
        steps = [env.step(env.cue) for _ in range(5)]
        obs = np.array(obs + [step[0] for step in steps])
        assert obs[0, 0] == 2 * env.cue - 1
        assert obs[:5, 1].tolist() == [1, 0, 0, 0, 0] and obs[:5, 2].tolist() == [0, 0, 0, 0, 1]
        assert [column for column in (0, 3) if obs[1:, column].any()] == noisy
        assert [step[1:3] for step in steps] == [(0.0, False)] * 4 + [(1.0, True)]
