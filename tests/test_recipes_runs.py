"""Recipes of runs: schedules, callbacks, keep_best; alone, under mpiexec and under torchrun."""

import csv
import gc
import json
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from gymnasium import spaces
from recipe_tools import FOLDER, driver, needs, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MASKED = dict(env_id="CartPole-v1", mask_velocity=True)


def scalars(run_dir, name):
    return [(x.step, x.value) for x in EventAccumulator(str(run_dir)).Reload().Scalars(name)]


def values_in(script):
    """What train's losses see: the module's ppo_loss is given clip_coef, optimisers their rate."""
    seen = []
    real = script.Run.log

    def log(self, steps, losses):
        args = self.args
        lr = self.optimizer.param_groups[0]["lr"]
        values = lr, getattr(args, "clip_coef", None), getattr(args, "ent_coef", None)
        seen.append((self.step / args.total_timesteps, *values))
        real(self, steps, losses)

    script.Run.log = log
    return seen


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_diagnostics_are_those_of_every_rollout_and_minibatch(tmp_path, name):
    """Against the inputs of compute_gae and ppo_loss, as they were recorded; the CSV has them."""
    needs(name)
    script = driver.fresh(name, "diagnostics", "callbacks")
    rollouts, shares = [], []
    gae, loss = script.compute_gae, getattr(script, "ppo_loss", None)

    def record_gae(rewards, values, terminated, done, *factors):
        shares.append([])
        advantages = gae(rewards, values, terminated, done, *factors)
        rollouts.append((values.copy(), done, advantages))  # train uses the array again
        return advantages

    def record_loss(logprob, old_logprob, advantage, clip_coef):
        ratio = np.exp((logprob - old_logprob).tolist())
        shares[-1].append(np.mean((ratio < 1 - clip_coef) | (ratio > 1 + clip_coef)))
        return loss(logprob, old_logprob, advantage, clip_coef)

    script.compute_gae = record_gae
    script.ppo_loss = record_loss
    environment = "Pendulum-v1" if name == "rppo_continuous" else "CartPole-v1"
    flags = dict(learning_rate=0.02, csv=True, total_timesteps=1200)
    _, run_dir = run(script, tmp_path, env_id=environment, **flags)
    explained, final = [], False
    for values, done, advantages in rollouts:
        counts = []  # the steps that do, as (t, environment)
        for t in range(len(done)):
            counts += [(t, n) for n in np.flatnonzero(~np.broadcast_to(final, done[t].shape))]
            final = done[t]
        t, n = np.transpose(counts)
        returns = values[t, n] + advantages[t, n]
        explained.append(1 - np.var(advantages[t, n]) / np.var(returns))
    assert len(explained) > 5 and any(done.any() for _, done, _ in rollouts)
    seen = [value for _, value in scalars(run_dir, "losses/explained_variance")]
    np.testing.assert_allclose(seen, explained, rtol=1e-4, atol=1e-4)
    with open(run_dir / "progress.csv") as file:
        rows = [*csv.DictReader(file)]
    np.testing.assert_allclose(
        [float(row["losses/explained_variance"]) for row in rows], seen, rtol=1e-5
    )
    if loss:
        seen = [value for _, value in scalars(run_dir, "losses/clipfrac")]
        expected = [np.mean(share) for share in shares]
        np.testing.assert_allclose(seen, expected, atol=1e-5)
        assert 0.01 < np.mean(seen) < 1
    events = EventAccumulator(str(run_dir)).Reload()
    text = events.Tensors("flags/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"learning_rate": 0.02' in text


FORMULAS = {
    "constant": lambda p: 1,
    "linear": lambda p: 1 - p,
    "polynomial": lambda p: (1 - p) ** 2,
    "middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075,
    "double_linear_con": lambda p: 1 - 2 * p if 1 - 2 * p >= 0.125 else 0.125,
    "double_middle_drop": lambda p: 1 - p if 1 - p >= 0.75 else 0.075 if 1 - p >= 0.25 else 0.125,
}


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
@pytest.mark.parametrize("kind", FORMULAS)
def test_schedules_equal_the_formulas(tmp_path, name, kind):
    needs(name)
    if name in ("rppo_continuous", "trpo") and kind in ("constant", "linear"):
        return  # as the others
    script = driver.fresh(name, "schedules")
    seen = values_in(script)
    flags = dict(learning_rate=0.01, learning_rate_final=0.001, learning_rate_schedule=kind)
    flags |= dict(schedule_power=2.0, total_timesteps=1000, eval_episodes=0)
    if name != "trpo":
        flags |= dict(clip_coef=0.3, clip_coef_schedule=kind, ent_coef=0.1, ent_coef_final=0.02)
        flags |= dict(ent_coef_schedule=kind)
    if name != "ppo1_mpi" and kind == "constant":
        flags |= dict(learning_rate_final=0.01)
    if hasattr(script.Args, "anneal_lr"):
        flags |= dict(anneal_lr=False)
    agent, run_dir = run(script, tmp_path, **flags)
    assert len(seen) >= 8
    for p, lr, clip, ent in seen:
        factor = FORMULAS[kind](p)
        assert lr == pytest.approx(0.001 + 0.009 * factor if kind != "constant" else 0.01)
        if name != "trpo":
            assert clip == pytest.approx(0.3 * factor)
            assert ent == pytest.approx(0.02 + 0.08 * factor if kind != "constant" else 0.1)
    saved = script.load(run_dir)["args"]
    assert saved["learning_rate"] == 0.01 and saved.get("clip_coef", 0.3) == 0.3


def test_schedules_end_earlier_resume_and_take_a_function(tmp_path, monkeypatch):
    (tmp_path / "shape.py").write_text("def half(p):\n    return 0.5 if p < 0.5 else 0.25\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = driver.fresh("rppo_lstm", "schedules")
    seen = values_in(script)
    flags = dict(clip_coef_schedule="shape:half", learning_rate=0.01, eval_episodes=0)
    flags |= dict(ent_coef=0.1, ent_coef_schedule="linear", schedule_steps=600, total_timesteps=600)
    _, run_dir = run(script, tmp_path, **flags)
    saved = script.load(run_dir)
    first = len(seen)
    script.train(script.Args(**{**saved["args"], "total_timesteps": 1200, "resume": str(run_dir)}))
    assert len(seen) > first
    for i, (p, lr, clip, ent) in enumerate(seen):
        steps = p * (600 if i < first else 1200)
        share = min(steps / 600, 1)
        assert clip == pytest.approx(0.2 * (0.5 if share < 0.5 else 0.25))
        assert ent == pytest.approx(0.1 * (1 - share), abs=1e-9)
        assert lr == pytest.approx(0.01 * (1 - share), abs=1e-9)  # the script's own is kept
    for kind, says in {"steep": "one of constant", "shape:none": "no attribute"}.items():
        with pytest.raises(script.ArgumentError, match=says):
            run(script, tmp_path, clip_coef_schedule=kind)
    trpo = driver.fresh("trpo", "schedules")
    with pytest.raises(trpo.ArgumentError, match="trpo has no clip_coef"):
        run(trpo, tmp_path, clip_coef_schedule="linear")


def test_callbacks_write_checkpoints_rows_and_histograms(tmp_path, capfd):
    script = driver.fresh("rppo_lstm", "callbacks")
    flags = dict(total_timesteps=400, checkpoint_every=100, histograms_every=200, csv=True)
    _, run_dir = run(script, tmp_path, quiet=True, **flags)
    assert "step/s" not in capfd.readouterr().err
    names = sorted(int(folder.name) for folder in (run_dir / "checkpoints").iterdir())
    assert len(names) == 4 and all(step // 100 == i + 1 for i, step in enumerate(names))
    for step in names:
        assert script.load(run_dir / "checkpoints" / str(step))["step"] == step
    rows = list(csv.DictReader(open(run_dir / "progress.csv")))
    logged = scalars(run_dir, "losses/value_loss")
    assert [int(row["step"]) for row in rows] == [step for step, _ in logged]
    for row, (_, value) in zip(rows, logged):
        assert float(row["losses/value_loss"]) == pytest.approx(value, rel=1e-5)
    events = EventAccumulator(str(run_dir), size_guidance={"histograms": 0}).Reload()
    weights = script.load(run_dir)["agent"]
    last = events.Histograms("lstm.cell.weight_hh")[-1].histogram_value
    assert (
        len(events.Histograms("actor.bias")) == 2
        and last.num == weights["lstm.cell.weight_hh"].numel()
    )


def test_callbacks_log_every_so_many_iterations(tmp_path):
    script = driver.fresh("rppo_lstm", "callbacks")
    _, all_of_them = run(script, tmp_path, total_timesteps=400)
    _, run_dir = run(script, tmp_path, total_timesteps=400, log_every=3, csv=True)
    every, third = (scalars(x, "charts/SPS") for x in (all_of_them, run_dir))
    assert [step for step, _ in third] == [step for step, _ in every][2::3]
    assert len(open(run_dir / "progress.csv").readlines()) == 1 + len(third)


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_callbacks_stop_at_a_return(tmp_path, name):
    """At the first iteration whose last 100 episodes are so good; CartPole's are always above 8."""
    needs(name)
    script = driver.fresh(name, "callbacks")
    flags = dict(env_id="CartPole-v1", total_timesteps=20_000, eval_episodes=0)
    _, run_dir = run(script, tmp_path, stop_at_return=8.0, **flags)
    saved = script.load(run_dir)
    assert len(saved["returns"]) == 100 and np.mean(saved["returns"]) >= 8
    assert saved["step"] == saved["args"]["total_timesteps"] < 6000
    lengths = scalars(run_dir, "charts/episodic_length")
    assert saved["step"] - lengths[-1][0] < 200  # the last iteration is logged


def keeps_the_best(run_dir):
    """The kept agent plays as well as the best of charts/eval_return, which it returns."""
    scores = [score for _, score in scalars(run_dir, "charts/eval_return")]
    script, args, _, agent, _ = driver.open_run(run_dir / "best")
    more = [None, script.EVAL_FRAMES] if hasattr(script, "EVAL_FRAMES") else []
    envs = script.make_envs(args, args.eval_episodes, *more)
    assert np.mean(script.evaluate(agent, envs, args.seed)) == pytest.approx(max(scores), rel=1e-5)
    assert float((run_dir / "best/return.txt").read_text()) == pytest.approx(max(scores), rel=1e-5)
    return scores


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo"])
def test_keep_best_keeps_an_agent_that_plays_and_changes_nothing(tmp_path, name):
    plain, _ = run(driver.fresh(name), tmp_path, total_timesteps=1200)
    script = driver.fresh(name, "keep_best")
    agent, run_dir = run(script, tmp_path, total_timesteps=1200, eval_every=300)
    assert all(torch.equal(x, plain.state_dict()[key]) for key, x in agent.state_dict().items())
    assert len(keeps_the_best(run_dir)) == 4
    best = run_dir / "best/return.txt"
    old = best.read_text()
    best.write_text("1000")  # better than all that follow
    args = {**script.load(run_dir)["args"], "total_timesteps": 1600, "resume": str(run_dir)}
    script.train(script.Args(**args))
    assert best.read_text() == "1000" != old
    assert script.load(run_dir / "best")["step"] <= 1300 < script.load(run_dir)["step"]
    with pytest.raises(script.ArgumentError, match="--eval-episodes 0: no return to choose by"):
        run(script, tmp_path, eval_episodes=0)


def test_keep_best_does_not_end_a_display_that_environments_share(tmp_path):
    script = driver.fresh("rppo_lstm", "keep_best")
    make_envs = script.make_envs
    closed = []

    def make_shared(args, *inputs):
        envs = make_envs(args, *inputs)
        close, step = envs.close, envs.step

        def closing():
            closed.append(True)
            close()

        def stepping(actions):
            assert not closed, "the display is gone"
            return step(actions)

        envs.close, envs.step = closing, stepping
        return envs

    script.make_envs = make_shared
    run(script, tmp_path, total_timesteps=600, eval_every=200)
    assert len(closed) == 2  # after training: the last evaluation's, and training's own
    assert len(scalars(tmp_path / "run0", "charts/eval_return")) == 3


def test_keep_best_does_not_end_pygames_display(tmp_path, monkeypatch):
    """An environment whose close() calls pygame.quit(), which is for all of a process: training
    goes on after each evaluation, also when an earlier run's environments are collected."""
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    closed = []

    class Painted(gym.Env):
        observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

        def __init__(self):
            pygame.init()
            self.screen = pygame.display.set_mode((8, 8))
            self.episodes = 0

        def look(self):
            self.screen.fill((51 * self.steps, 0, 0))  # pygame.error after pygame.quit()
            return np.float32([self.screen.get_at((3, 3))[0] / 255])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.steps = 0
            self.episodes += 1
            if self.episodes == 3:  # in the middle of training
                gc.collect()
            return self.look(), {}

        def step(self, action):
            self.steps += 1
            return self.look(), float(action), False, self.steps == 5, {}

        def close(self):
            closed.append(self)
            pygame.quit()

    monkeypatch.setitem(
        gym.registry, "Painted-v0", gym.envs.registration.EnvSpec("Painted-v0", Painted)
    )
    script = driver.fresh("rppo_lstm", "keep_best")
    for n in range(2):
        closed.clear()
        run(script, tmp_path, env_id="Painted-v0", total_timesteps=300, eval_every=100)
        assert len(scalars(tmp_path / f"run{n}", "charts/eval_return")) == 3
        assert len(closed) == 4 + 2  # of training and of the evaluation at the end


PROCESSES = {
    "ppo1_mpi": ("mpiexec -n 2 {python}", "--num-steps 64 --total-timesteps 1000 --eval-every 300"),
    "rppo_gru_atari": (
        "{python} -m torch.distributed.run --nproc-per-node 2 --master-port 29671",
        "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --hidden-size 8 "
        "--total-timesteps 64 --torch-threads 1 --eval-every 32",
    ),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_recipes_of_runs_in_several_processes(tmp_path, name):
    """The driver under mpiexec and torchrun: callbacks, keep_best and schedules at once; every file
    is written once, and the run opens again."""
    launcher, flags = PROCESSES[name]
    needs(name)
    short = ""
    if name == "rppo_gru_atari":  # a game ends after so many frames
        short = f"import {name}; {name}.EVAL_FRAMES = 200\n"
    program = tmp_path / "short.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\nimport use\n{short}use.main()"
    )
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = [*launcher.format(python=sys.executable).split(), str(program), name]
    command += ["callbacks,keep_best,schedules", *flags.split(), "--csv", "--clip-coef-schedule"]
    command += ["linear", "--checkpoint-every", "32", "--eval-episodes", "1"]
    command += ["--runs-dir", str(tmp_path), "--run-name", "a"]
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    run_dir = tmp_path / "a"
    assert len(list(run_dir.glob("events*"))) == 1
    assert len(scalars(run_dir, "charts/eval_return")) == (3 if name == "ppo1_mpi" else 2)
    steps = [int(row["step"]) for row in csv.DictReader(open(run_dir / "progress.csv"))]
    assert (
        steps == sorted(set(steps))
        and steps[-1] == json.loads((run_dir / "result.json").read_text())["global_step"]
    )
    script, _, _, _, saved = driver.open_run(run_dir)
    assert saved["script"] == f"{name}+schedules+keep_best+callbacks"
    for folder in (run_dir / "checkpoints").iterdir():
        assert script.load(folder)["step"] == int(folder.name)


def test_stopping_is_decided_for_all_ranks(tmp_path):
    needs("ppo1_mpi")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = ["mpiexec", "-n", "2", sys.executable, str(FOLDER / "callbacks.py"), "ppo1_mpi"]
    command += (
        "--stop-at-return 8 --total-timesteps 50000 --eval-episodes 0 --num-steps 256 "
        "--update-epochs 1 --encoder-size 8".split()
    )
    command += ["--runs-dir", str(tmp_path), "--run-name", "a"]
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert driver.open_run(tmp_path / "a")[-1]["step"] < 10_000


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_adam_has_the_numbers_of_the_flags(tmp_path, name):
    """The last update is torch's AdamW of the same gradients."""
    needs(name)
    script = driver.fresh(name, "adam")
    flags = dict(adam_eps=1e-3, adam_beta1=0.5, weight_decay=0.1, eval_episodes=0)
    seen = []
    real = torch.optim.Adam.step

    def step(self, *inputs):
        seen.append((type(self), self.param_groups[0]["eps"], self.param_groups[0]["betas"]))
        weights = [p.detach().clone().requires_grad_() for p in self.param_groups[0]["params"]]
        for weight, other in zip(weights, self.param_groups[0]["params"]):
            weight.grad = other.grad.clone()
        lr = self.param_groups[0]["lr"]
        twin = torch.optim.AdamW(weights, lr, (0.5, 0.999), 1e-3, weight_decay=0.1)
        first = not self.state
        real(self, *inputs)
        if first:
            real(twin)
            for weight, other in zip(weights, self.param_groups[0]["params"]):
                assert torch.allclose(weight, other, atol=1e-6)

    torch.optim.Adam.step = step
    try:
        run(script, tmp_path, total_timesteps=100, **flags)
    finally:
        torch.optim.Adam.step = real
    assert {x[1:] for x in seen} == {(1e-3, (0.5, 0.999))}


def test_eval_limit_ends_evaluations(tmp_path):
    """Pendulum's episodes have 200 steps; a return is the sum of what was played."""
    script = driver.fresh("rppo_continuous", "eval_limit")
    agent, run_dir = run(script, tmp_path, eval_steps=7, eval_episodes=3)
    evaluation = json.loads((run_dir / "result.json").read_text())["evaluation"]
    envs = script.make_envs(agent.args, 3)
    obs, _ = envs.reset(seed=1)
    state, total = None, np.zeros(3)
    for _ in range(7):
        action, state = agent.predict(obs, {}, state)
        obs, rewards, *_ = envs.step(action)
        total += rewards
    assert evaluation == pytest.approx(total.tolist(), rel=1e-5)
