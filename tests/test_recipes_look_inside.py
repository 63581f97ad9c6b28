"""look_inside: what can be read from a memory, with memories whose content is known."""

import csv
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import ROOT
from gymnasium import spaces
from recipe_tools import FOLDER, driver, needs, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import look_inside  # noqa: E402
import memory_look  # noqa: E402


class Two(nn.Module):
    """A memory of the present input and of the one before, or, where it must forget, the present
    one twice. x is (N, F), h is (N, 2 F), and c has x and a number that is 1 after the first step."""

    def __init__(self, forgets: bool):
        super().__init__()
        self.forgets = forgets

    def step(self, x, state):
        F = x.shape[-1]
        c = state[1]
        before = torch.where(c[:, F:] > 0, c[:, :F], x)
        if self.forgets:
            before = x
        return torch.stack([torch.cat([x, before], -1), torch.cat([x, torch.ones_like(x)], -1)])


def agent_of(script, args, forgets: bool):
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    agent.encoder = nn.Identity()
    agent.lstm = Two(forgets)
    return agent


class Suits(gym.Env):
    """One of four suits at random, as POPGym's RepeatPrevious shows; episodes have 30 steps."""

    observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.integers(4), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.integers(4), 0.0, False, self.steps == 30, {}


if "Suits-v0" not in gym.registry:
    gym.register("Suits-v0", Suits)


def test_a_velocity_that_is_a_difference_is_read_exactly():
    """MountainCar's velocity is its position less the one before. A memory of both has it; a memory
    of the present position alone has not."""
    script = driver.fresh("rppo_lstm")
    args = script.Args(env_id="MountainCar-v0", mask_velocity=True, hidden_size=4)
    r2s = []
    for forgets in False, True:
        agent = agent_of(script, args, forgets)
        obs, actions, steps = look_inside.play(script, args, agent, episodes=6)
        h = look_inside.remember(agent, obs)
        assert h.shape == (201, 6, 4) and steps.all()
        hidden = look_inside.velocities(script, args, actions)["velocity"]
        moved = np.diff(obs[..., :1], axis=0)
        assert (obs[..., 1] == 0).all() and np.abs(hidden[1:] - moved).max() < 1e-6
        r2s.append(look_inside.decode(h, hidden, steps, ridge=1e-9)[1])
    assert r2s[0] == pytest.approx(1, abs=1e-5) and r2s[1] < 0.5


def test_earlier_observations_are_read_as_far_back_as_they_are_kept():
    script = driver.fresh("rppo_lstm")
    args = script.Args(env_id="Suits-v0", hidden_size=8)
    agent = agent_of(script, args, forgets=False)
    obs, _, steps = look_inside.play(script, args, agent)
    h = look_inside.remember(agent, obs)
    r2s = [look_inside.decode(h, obs, steps, k)[1] for k in range(4)]
    assert r2s[:2] == pytest.approx([1, 1], abs=1e-4)
    assert max(r2s[2:]) < 0.05


def test_the_regression_reads_half_of_the_environments_only():
    """Of 600 steps, half is noise: R^2 is 1 / 2. What is held out or no step has no influence."""
    random = np.random.default_rng(1)
    h = random.normal(size=(300, 8, 5))
    signal = (h @ random.normal(size=(5, 1))) / 5**0.5
    y = 3 + signal / signal.std() + random.normal(size=(300, 8, 1))
    steps = random.random((300, 8)) < 0.5
    h[~steps] = y[~steps] = np.nan
    guess, r2 = look_inside.decode(h, y, steps)
    assert r2 == pytest.approx(0.5, abs=0.08)
    other = y.copy()
    other[:, 4:] = 7 * y[:, 4:]
    again, _ = look_inside.decode(h, other, steps)
    assert np.array_equal(guess[steps], again[steps])
    exact = np.where(steps[..., None], signal, np.nan)
    assert look_inside.decode(h, exact, steps, ridge=0)[1] == pytest.approx(1, abs=1e-12)
    constant, r2 = look_inside.decode(np.where(steps[..., None], 1.0, np.nan), y, steps)
    assert constant[steps].std() < 1e-9 and r2 == pytest.approx(0, abs=0.05)


def test_what_is_played_are_whole_first_episodes(tmp_path):
    """Up to and with the observation in which the pole has fallen or the cart is out of bounds."""
    script = driver.fresh("rppo_lstm")
    args = script.Args(env_id="CartPole-v1", mask_velocity=True)
    script.seed_everything(1)
    agent = script.Agent(script.make_envs(args, 1), args)
    obs, actions, steps = look_inside.play(script, args, agent, episodes=10)
    over = (np.abs(obs[..., 0]) > 2.4) | (np.abs(obs[..., 2]) > 12 * np.pi / 180)
    for i in range(10):
        length = steps[:, i].sum()
        assert steps[:length, i].all() and length > 8
        assert over[:length, i].tolist() == [False] * (length - 1) + [True]
    hidden = look_inside.velocities(script, args, actions)
    moved = np.diff(obs[..., 0], axis=0) / 0.02  # Euler's step: with the velocity before it
    same = steps[1:] & steps[:-1]
    assert np.abs(hidden["cart's velocity"][:-1, :, 0] - moved)[same].max() < 1e-4
    assert (obs[..., [1, 3]] == 0).all()
    h = look_inside.remember(agent, obs)
    x = agent.encoder(torch.from_numpy(obs))
    fused = agent.lstm(x, agent.initial_state(10), torch.zeros(steps.shape, dtype=torch.bool))
    assert np.abs(h - fused.detach().numpy()).max() < 1e-5
    assert "step" not in vars(agent.lstm)  # nobody watches it any more


@pytest.mark.parametrize(
    "name, recipes, flags, says",
    [
        ("rppo_lstm", (), dict(env_id="CartPole-v1", mask_velocity=True), "pole's angular"),
        ("rppo_lstm", (), dict(env_id="CartPole-v1"), "8 steps back"),
        ("rppo_lstm", ("stacked_lstm",), dict(mask_velocity=True), "cart's velocity"),
        ("rppo_lstm", ("feedforward",), dict(mask_velocity=True), "cart's velocity"),
        ("rppo_continuous", (), dict(env_id="Pendulum-v1", mask_velocity=True), "angular"),
        ("trpo", (), dict(memory="lstm", mask_velocity=True), "cart's velocity"),
        ("ppo1_mpi", (), dict(memory="lstm", mask_velocity=True), "cart's velocity"),
    ],
)
def test_runs_of_every_kind(tmp_path, capsys, name, recipes, flags, says):
    pytest.importorskip("matplotlib")
    needs(name)
    script = driver.fresh(name, *recipes)
    _, run_dir = run(script, tmp_path, eval_episodes=0, **flags)
    capsys.readouterr()
    figure = look_inside.look(run_dir)
    said = capsys.readouterr().out
    assert says in said
    if flags.get("mask_velocity"):
        r2s = [float(line.split()[-1]) for line in said.splitlines()]
        assert len(r2s) == len(figure.axes) and max(r2s) <= 1
        for axis, r2 in zip(figure.axes, r2s):
            true, read = (line.get_ydata() for line in axis.lines)
            assert len(true) == len(read) > 5 and f"{r2:.3f}" in axis.get_title()
    else:
        assert figure is None and said.startswith("0 steps back: R^2 ")


def test_what_cannot_be_read_is_one_line(tmp_path, run_script):
    needs("trpo")
    _, without = run(driver.fresh("trpo"), tmp_path, memory="none", eval_episodes=0)
    recipe = "docs/recipes/look_inside"
    for words, says in {
        (): "give the directory of a run",
        ("runs/none",): "runs/none is not the directory of a run",
        (without,): "the agent has no memory",
    }.items():
        refused = run_script(recipe, *words, check=2)
        assert len(refused.lines) == 1 and says in refused.stderr, refused.stderr


def test_pixels_are_refused(tmp_path, short_games):
    needs("rppo_gru_atari")
    script = driver.fresh("rppo_gru_atari")
    _, run_dir = run(script, tmp_path)
    with pytest.raises(ValueError, match="does not read pictures"):
        look_inside.look(run_dir)


def test_training_brings_the_velocities_into_the_memory(tmp_path):
    """After 20,000 steps, on the same episodes, more than before, and more than without memory. The
    benchmark's rows say so, and the program of the recipe draws a held-out episode."""
    pytest.importorskip("matplotlib")
    rows = memory_look.cartpole(str(tmp_path), 1, 10_000, total_timesteps=20_000, eval_episodes=0)
    assert {len(row) for row in rows} == {len(memory_look.COLUMNS)}
    table = [dict(zip(memory_look.COLUMNS, row)) for row in rows]
    for velocity in look_inside.NAMES["CartPole"]:
        r2 = {
            (row["agent"], row["steps"]): float(row["value"])
            for row in table
            if row["what"] == f"R^2, {velocity}"
        }
        [before, *_, after] = [r2[key] for key in sorted(r2) if key[0] == "lstm"]
        [without] = [r2[key] for key in r2 if key[0] == "memoryless"]
        assert len(r2) >= 4 and after > before + 0.1 and before > without + 0.1 and after > 0.7
        shown = {
            row["agent"]: [float(x["value"]) for x in table if x["agent"] == row["agent"] and x["at"] != "" and velocity in x["what"]]
            for row in table
        }  # fmt: skip
        true = np.array(shown["true"])
        errors = [np.abs(np.array(shown[name]) - true).mean() for name in ("lstm", "memoryless")]
        assert len(true) > 20 and 2 * errors[0] < errors[1]
    command = [sys.executable, str(FOLDER / "look_inside.py"), str(tmp_path / "lstm 1")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line.split(": R^2 ") for line in done.stdout.splitlines()]
    assert [name for name, _ in said] == look_inside.NAMES["CartPole"]
    assert (tmp_path / "lstm 1/memory.png").stat().st_size > 10_000


def test_the_untrained_agent_is_the_one_that_training_began_with(tmp_path):
    """A run that is stopped in its first iteration has saved it."""
    script = driver.fresh("rppo_lstm")
    seen = []

    class Stopped(script.Run):
        def __init__(self, args, envs, agent, optimizer):
            super().__init__(args, envs, agent, optimizer)
            seen.append({name: x.clone() for name, x in agent.state_dict().items()})

    script.Run = Stopped
    _, run_dir = run(script, tmp_path, eval_episodes=0)
    began = memory_look.untrained(run_dir).state_dict()
    assert all(torch.equal(began[name], x) for name, x in seen[0].items())


def test_cards_of_a_run_without_and_with_memory(tmp_path):
    """Rows of RepeatPrevious: without a memory the present card alone is read."""
    pytest.importorskip("popgym")
    small = dict(hidden_size=16, encoder_size=16, num_steps=32, eval_episodes=0)
    rows = memory_look.repeat(str(tmp_path), 1, 500, total_timesteps=500, **small)
    table = [dict(zip(memory_look.COLUMNS, row)) for row in rows]
    found = {(row["agent"], row["what"], row["at"]): float(row["value"]) for row in table}
    assert found["memoryless", "R^2", 0] > 0.95 and found["memoryless", "share right", 0] == 1
    for k in range(1, look_inside.BACK):
        assert found["memoryless", "R^2", k] < 0.1
        assert found["memoryless", "share right", k] == pytest.approx(0.25, abs=0.1)


def test_the_page_says_what_was_measured():
    """Sentences of the page, and the committed rows."""
    page = " ".join((ROOT / "docs/concepts/look-inside.md").read_text().split())
    with open(memory_look.RESULTS, newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == memory_look.COLUMNS
    assert {row["seed"] for row in rows if row["task"] == "cartpole"} == {"1", "2", "3"}
    r2 = {}  # of the agents at the end, and before training
    returns = []
    for row in rows:
        n = int(row["steps"] or -1)
        if row["what"].startswith("R^2, ") and (n == 0 or n > 100_000):
            kind = row["agent"], n > 0, "weak" in row["what"]
            r2.setdefault(kind, []).append(float(row["value"]))
        if row["task"] == "cartpole" and row["agent"] == "lstm" and row["what"] == "return":
            returns += [float(row["value"])] * (19_000 < n < 21_000)
    assert {len(values) for values in r2.values()} == {6}  # seeds and velocities
    assert min(r2["lstm", True, False]) >= 0.9 and max(r2["memoryless", True, False]) < 0.2
    assert max(r2["lstm", False, False]) < 0.75 and min(r2["lstm", False, True]) > 0.75
    assert len(returns) >= 3 and max(returns) < 100 and "still below 100" in page
    right = {
        (row["agent"], int(row["steps"]) > 0, int(row["at"])): float(row["value"])
        for row in rows
        if row["what"] == "share right"
    }
    assert min(right["lstm", True, k] for k in range(5)) > 0.99 > right["lstm", True, 5]
    assert right["lstm", False, 1] > 0.9 > 0.6 > right["lstm", False, 2]
    assert max(right["memoryless", True, k] for k in range(1, 12)) < 0.3
    assert "the last five suits" in page
