"""The benchmarks' own contracts: a row a run, whatever is killed, and the statistics of the tables."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import MODULES, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import learning  # noqa: E402

SMALL = "rppo_lstm.py --env-id CartPole-v1 --hidden-size 8 --num-envs 4 --num-steps 32"


@pytest.fixture
def options(tmp_path):
    paths = {name: tmp_path / f"{name}.csv" for name in ("learning", "curves")}
    return argparse.Namespace(runs_dir=tmp_path / "runs", commit="abc", **paths)


def started(task: str, options) -> subprocess.Popen:
    """learning.run in a process group of its own."""
    options.runs_dir.mkdir(exist_ok=True)
    code = f"""
import sys
from argparse import Namespace
from pathlib import PosixPath
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import learning
learning.TASKS = {learning.TASKS!r}
print(learning.run({task!r}, "lstm", 3, {options!r}))
"""
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_queue_goes_on(options, monkeypatch):
    """kill -9 of the queue and of the training in the middle: the same command ends with one row,
    of a run that was resumed, whose seconds nobody knows."""
    steps = 15_000
    monkeypatch.setattr(learning, "TASKS", {"task": (steps, {"lstm": SMALL})})
    process, agent = started("task", options), options.runs_dir / "task__lstm__3/agent.pt"
    deadline = time.time() + 60
    while not agent.exists():
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not options.learning.exists() and not agent.with_name("result.json").exists()
    first = agent.stat().st_ctime_ns
    assert learning.run("task", "lstm", 3, options).startswith("task__lstm__3: ")
    [row] = learning.read(options.learning)
    assert (row["task"], row["seed"], row["commit"], row["error"]) == ("task", "3", "abc", "")
    assert int(row["global_step"]) >= steps and row["wall_seconds"] == ""
    assert row["eval_episodes"] == "100" and 9 < float(row["eval_mean"]) <= 500
    assert 9 < float(row["sampled_mean"]) <= 500 and row["sampled_mean"] != row["eval_mean"]
    assert agent.stat().st_ctime_ns > first
    [(run, curve)] = learning.read_curves(options.curves).items()
    points = [step for step, _ in curve]
    assert run == ("task", "lstm", "3")
    assert points == sorted({*points}) and 10 < len(points) <= learning.POINTS
    assert learning.run("task", "lstm", 3, options) == "task__lstm__3: has a row"
    assert len(learning.read(options.learning)) == 1
    options.learning.unlink()  # without its row it begins anew
    learning.run("task", "lstm", 3, options)
    assert float(learning.read(options.learning)[0]["wall_seconds"]) > 0


def test_a_killed_peer_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """With its weights, Adam's moments, curve, learning rate and number of rewards in its
    statistics. Saving changes no number of a run that is not stopped."""
    PPO = pytest.importorskip("stable_baselines3").PPO
    train, seen, learnt = PPO.train, [], []

    def watched(model):
        rate = model.lr_schedule(model._current_progress_remaining)
        adam = model.policy.optimizer.state_dict()["state"]
        numbers = [x.flatten() for moments in adam.values() for x in moments.values()]
        numbers += [x.detach().flatten() for x in model.policy.parameters()]
        learnt.append(np.concatenate(numbers))
        seen.append((model.num_timesteps, rate, model.env.ret_rms.count))
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        train(model)

    def run(folder: str, save_seconds: float) -> dict:
        monkeypatch.setattr(learning, "SAVE_SECONDS", save_seconds)
        settings = '{"n_steps": 256, "learning_rate": 1e-3, "linear": ["learning_rate"], '
        settings += '"normalize": true}'
        learning.peer("PPO", "CartPole-v1", settings, "2048", "1", str(tmp_path / folder))
        return json.loads((tmp_path / folder / "result.json").read_text())

    monkeypatch.setattr(learning, "EPISODES", 2)
    monkeypatch.setattr(PPO, "train", watched)
    stop_at = 0
    assert run("saves", -1) == run("never saves", 1e9)
    whole, seen[:] = seen[:8], []
    after_five = learnt[5]
    stop_at = 6
    with pytest.raises(KeyboardInterrupt):
        run("stopped", -1)
    stop_at, seen[:], learnt[:] = 0, [], []
    result = run("stopped", -1)
    assert seen == [pytest.approx(row) for row in whole[5:]]
    assert np.array_equal(learnt[0], after_five) and not np.array_equal(learnt[1], after_five)
    curve = [step for step, _ in result["curve"]]
    assert result["global_step"] == 2048 and curve == sorted({*curve}) and curve[0] < 1280


def test_an_interrupted_run_begins_anew_if_its_text_changed(options, monkeypatch):
    monkeypatch.setattr(learning, "TASKS", {"task": (256, {"lstm": SMALL})})
    run_dir = options.runs_dir / "task__lstm__1"
    run_dir.mkdir(parents=True)
    (run_dir / "agent.pt").write_text("not one")  # to resume it would be an error
    before = {"what": [*SMALL.split(" ", 1), 256, "another hash"], "commit": "old"}
    run_dir.with_suffix(".json").write_text(json.dumps(before))
    learning.run("task", "lstm", 1, options)
    [row] = learning.read(options.learning)
    assert (row["commit"], row["error"]) == ("abc", "") and float(row["wall_seconds"]) > 0


def test_a_run_depends_on_the_script_that_its_recipe_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    files = (
        "rppo_lstm.py",
        "trpo.py",
        "docs/recipes/a.py",
        "docs/exercises/train.py",
        "docs/exercises/1.md",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = {
        "rppo_lstm.py": {"rppo_lstm.py"},
        "docs/recipes/a.py": {"rppo_lstm.py", "trpo.py", "docs/recipes/a.py"},
        "docs/exercises/train.py": {*files} - {"docs/recipes/a.py"},
    }
    for script, names in expected.items():
        for name in files:
            before = learning.fingerprint(script)
            (tmp_path / name).write_text((tmp_path / name).read_text() + name)
            assert (learning.fingerprint(script) != before) == (name in names), (script, name)


def test_a_failure_is_a_row(options, monkeypatch):
    wrong = {"task": (1000, {"lstm": f"{SMALL} --num-minibatches 3"})}
    monkeypatch.setattr(learning, "TASKS", wrong)
    options.runs_dir.mkdir()
    said = learning.run("task", "lstm", 1, options)
    [row] = learning.read(options.learning)
    assert "must divide the 4 sequences" in row["error"] and row["error"] in said
    assert row["eval_mean"] == ""


def test_every_task_is_a_command(monkeypatch):
    """The scripts' own parsers take the flags of each task; recipes and exercises exist."""
    parsed = 0
    for steps, methods in learning.TASKS.values():
        for command in methods.values():
            script, *flags = shlex.split(command)
            if script == "peer":
                continue
            assert (ROOT / script).exists()
            if script.removesuffix(".py") in MODULES:
                monkeypatch.setattr(sys, "argv", [script, *flags, "--total-timesteps", str(steps)])
                assert MODULES[script.removesuffix(".py")].parse_args().total_timesteps == steps
                parsed += 1
    assert parsed > 30


@pytest.mark.parametrize("text, seeds", [("3", [3]), ("1:5", [1, 2, 3, 4, 5])])
def test_seeds_are_one_or_a_range(text, seeds):
    assert list(learning.seed_range(text)) == seeds
    with pytest.raises(argparse.ArgumentTypeError, match="^3:1 has no seed$"):
        learning.seed_range("3:1")


@pytest.mark.parametrize("flags", ["--seeds one", "--methods lstn"])
def test_a_wrong_flag_is_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["learning.py", "cartpole", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        learning.main()
    assert flags.split()[1] in capsys.readouterr().err.splitlines()[-1]


def test_the_words_before_the_flags_go_along_when_a_run_goes_on():
    assert learning.names("rppo_continuous --env-id Pendulum-v1") == ["rppo_continuous"]
    assert learning.names("--env-id CartPole-v1 --mask-velocity") == learning.names("") == []


def test_the_statistics_of_the_tables():
    """The mean of the middle half; its interval covers the truth 95 times of 100."""
    pytest.importorskip("matplotlib")
    import plot

    assert plot.iqm(np.array([0, 100, 1, 2, 3, 4, 5, -90.0])) == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert plot.iqm(np.array([1.0, 2.0, 6.0])) == 3
    assert plot.interval(np.full(5, 7.0)) == (7, 7, 7)
    assert plot.shown(np.array([7.0])) == "7.0" and plot.shown(np.ones(2)) == "1.00 [1.00, 1.00]"
    random, covered = np.random.default_rng(1), 0
    for _ in range(100):
        _, low, high = plot.interval(random.normal(size=30), samples=500)
        covered += low <= 0 <= high
    assert 0.88 <= covered / 100 <= 0.99


def test_sampled_returns_are_shown_where_they_differ(tmp_path):
    pytest.importorskip("matplotlib")
    import plot

    rows = [
        {"task": "lunarlander-masked", "method": method, "flags": "--env-id LunarLander-v3",
         "seed": seed, "steps": 1000, "eval_mean": -50 + seed, "sampled_mean": sampled}
        for method, gain in (("lstm", 150), ("ablated", 1), ("frames", None))
        for seed in range(3)
        for sampled in ["" if gain is None else -50 + seed + gain]
    ]  # fmt: skip
    learning.append(tmp_path / "learning.csv", learning.FIELDS, rows)
    lines = plot.table(["lunarlander-masked"], tmp_path).split("\n")
    assert lines[0] == "| task, agent | return | sampled | worst | solved |"
    assert lines[1] == "|---|---|---|---|---|"
    assert lines[3:6] == [
        "| LSTM | -49.0 [-50.0, -48.0] (3) | 101.0 [100.0, 102.0] | -50.0 | 0 of 3 |",
        "| no memory | -49.0 [-50.0, -48.0] (3) | | -50.0 | 0 of 3 |",
        "| four frames | -49.0 [-50.0, -48.0] (3) | | -50.0 | 0 of 3 |",
    ]
    (tmp_path / "learning.csv").unlink()
    learning.append(tmp_path / "learning.csv", learning.FIELDS, rows[3:])
    lines = plot.table(["lunarlander-masked"], tmp_path).split("\n")
    assert lines[0] == "| task, agent | return | worst | solved |"
    assert lines[3] == "| no memory | -49.0 [-50.0, -48.0] (3) | -50.0 | 0 of 3 |"
