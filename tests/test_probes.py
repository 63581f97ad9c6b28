"""The probes: what agents that know, guess and don't know score; check on trains that fail; check_memory
and the recipe check_replay on memories that are right and wrong."""

import importlib
import sys
from functools import cache

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import MODULES, ROOT

sys.path[:0] = [str(ROOT / "docs/probes"), str(ROOT / "docs/recipes")]
import mistakes  # noqa: E402
import probes  # noqa: E402
from probe_scripts import SCRIPTS, trainer  # noqa: E402

MEMORIES = [("rppo_lstm", "ResetLSTM"), ("rppo_gru_atari", "ResetGRU")]


def actions(values, box: bool):
    """-1, 0, 1 -> as the environment takes them."""
    values = np.asarray(values)
    return values[:, None].astype(np.float32) if box else values.astype(int) + 1


def score(name: str, agent, box: bool = False) -> list[float]:
    """agent(obs, final) returns -1, 0 or 1 for each environment."""
    envs = [probes.PROBES[name](box) for _ in range(32)]
    return probes.play(lambda obs, final: actions(agent(obs, final), box), envs, steps=256)


def constant(answer):
    return lambda obs, final: np.full(len(obs), answer)


class Player:
    """One environment's agent each, which a rule (history of the episode's observations, of the last
    episode's) -> answer makes."""

    def __init__(self, rule):
        self.rule = rule
        self.histories = self.old = None

    def __call__(self, obs, final):
        if self.histories is None:
            self.histories, self.old = [[] for _ in obs], [None for _ in obs]
        answers = []
        for i, x in enumerate(obs):
            self.histories[i].append(x)
            answers.append(self.rule(self.histories[i], self.old[i]))
            if final is not None and final[i]:
                self.old[i], self.histories[i] = self.histories[i], []
        return answers


def previous(history, old):
    return history[-2][0] if len(history) > 1 else 1


def recall(history, old):
    return history[1][1] if len(history) > 1 else 0


def leaking(history, old):
    asks = history[-1][:3]
    if old is None or not asks.any():
        return 1  # as before the first episode
    return old[3][4] if asks[0] else old[2][3]


def leaking_last(history, old):
    return leaking(history, old) if history[-1][0] else 0


def latch(history, old):
    return -1 if any(x[0] for x in history) else 1


def unreset_latch(history, old):
    return -1 if any(x[0] for x in history + (old or [])) else 1


def rollout(history, old):
    return history[0][0] * (1 if history[-1][1] else -1)


def early(history, old):
    return history[0][0]


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize(
    "name, agent, expected",
    [
        ("Now", lambda obs, final: obs[:, 0], [1]),
        ("Now", constant(0), [0.5]),
        ("Now", Player(previous), [0]),
        ("Previous", Player(previous), [1]),
        ("Previous", constant(0), [0.5]),
        ("Previous", constant(1), [0]),
        ("Recall", Player(recall), [1]),
        ("Recall", constant(1), [0]),
        ("Leak", constant(0), [0.5, 0.5, 0.5]),
        ("Leak", constant(1), [0, 0, 0]),
        ("Leak", Player(leaking), [1, 1, 1]),
        ("Leak", Player(leaking_last), [1, 0.5, 0.5]),
        ("Latch", Player(latch), [1, 1]),
        ("Latch", constant(0), [0.5, 0.5]),
        ("Latch", constant(1), [-1, 1]),
        ("Latch", Player(unreset_latch), [1, 0]),
        ("Rollout", Player(rollout), [1, 1]),
        ("Rollout", Player(early), [1, -1]),
        ("Limit", constant(-1), [1]),
        ("Limit", constant(1), [0]),
        ("FinalStep", constant(0), [1]),
        ("FinalStep", constant(1), [0]),
        ("FinalValue", constant(-1), [1]),
        ("FinalValue", constant(1), [0]),
    ],
)  # fmt: skip
def test_an_agent_scores_what_the_docstring_says(name, agent, expected, box):
    if isinstance(agent, Player):
        agent = Player(agent.rule)
    chance = 0.15 if 0 in expected and name not in ("Limit", "FinalStep", "FinalValue") else 1e-6
    assert np.abs(np.subtract(score(name, agent, box), expected)).max() <= chance


@pytest.mark.parametrize("name", probes.PROBES)
def test_each_mistake_is_recognised_by_its_scores(name):
    probe = probes.PROBES[name]
    assert probes.verdict(probe, probe.right) == (True, None)
    for mistake, scores in probe.wrong.items():
        assert probes.verdict(probe, scores) == (False, mistake)
        assert np.abs(np.subtract(scores, probe.right)).max() >= 0.5


@cache
def worth(name: str, leave: bool, steps: int = 4000):
    """Of the first decision: the mean reward, the shares of terminations and truncations."""
    env = probes.PROBES[name]()
    rows = []
    for seed in range(steps):
        env.reset(seed=seed)
        if not getattr(env, "costs", False) and not getattr(env, "kind", 0):  # it does decide
            _, reward, terminated, truncated, _ = env.step(2 if leave else 0)
            rows.append([reward, terminated, truncated])
    return np.mean(rows, 0)


@pytest.mark.parametrize("gamma", [0.9, 0.99, 0.999])
def test_only_the_mistake_makes_leaving_better(gamma):
    # Staying for ever: V = r + gamma V for what goes on, and for what is truncated if bootstrapped
    reward, terminated, truncated = worth("Limit", leave=False)
    leaving = worth("Limit", leave=True)[0]
    assert reward / (1 - gamma * (1 - terminated)) > leaving + 0.5
    assert reward / (1 - gamma * (1 - terminated - truncated)) < leaving - 0.5

    reward, terminated, truncated = worth("FinalStep", leave=False)
    leaving = worth("FinalStep", leave=True)[0]  # half of it is staying
    going_on = 1 - terminated - truncated
    stay = reward / (1 - gamma * (1 - terminated))
    assert stay > leaving + 0.5
    assert reward / (1 - gamma * going_on) > leaving  # truncation as termination doesn't show here
    next_start = 0.5 * (-20 + stay) + 0.5 * stay
    assert reward + gamma * (going_on * stay + truncated * next_start) < leaving - 0.5

    reward, terminated, truncated = worth("FinalValue", leave=False)
    stay = reward / (1 - gamma * (1 - terminated))
    zero_state = -4.0  # what zeros without a past are worth
    wrong = reward + gamma * truncated * zero_state
    assert stay > 0.5 + 0.5 and wrong / (1 - gamma * (1 - terminated - truncated)) < 0.5 - 0.5
    next_start = (4 - 4 + stay) / 3
    assert reward + gamma * ((1 - terminated - truncated) * stay + truncated * next_start) > 0.5


@pytest.mark.parametrize("probe", probes.ALL + probes.BOX)
def test_a_seed_fixes_all_that_follows(probe):
    def play():
        env = gym.make(probe)
        env.action_space.seed(1)
        rows = [env.reset(seed=3)[0]]
        for _ in range(60):
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            assert env.observation_space.contains(obs)
            rows += [obs, reward, terminated, truncated]
            if terminated or truncated:
                rows.append(env.reset()[0])
        return np.hstack(rows)

    assert np.array_equal(play(), play())


def test_no_rollout_of_16_steps_has_both_the_cue_and_a_late_question():
    env = probes.Rollout()
    obs, _ = env.reset(seed=1)
    shown = [obs]
    while not (step := env.step(0))[2]:
        shown.append(step[0])
    cues, late = (np.flatnonzero(np.array(shown)[:, i]) for i in (0, 2))
    assert late.min() - cues.max() >= 16


def test_check_goes_on_after_trains_that_fail(capsys):
    def train(env_id, steps, seed):
        if "Now" in env_id:
            raise RuntimeError("exploded")
        if "Limit" in env_id:
            return None
        if "FinalStep" in env_id:
            return lambda obs, final: [0]
        return lambda obs, final: np.zeros(len(obs), int) / 0

    ids = ["probes:Now-v0", "probes:Limit-v0", "CartPole-v1", 3, *probes.ALL[7:8], *probes.ALL[3:4]]
    rows = probes.check(train, ids)
    assert [row.probe for row in rows] == [str(name) for name in ids]
    assert not any(row.right or row.mistake for row in rows)
    assert np.isnan([row.score for row in rows]).all()
    assert "exploded" in rows[0].note and "exploded" in capsys.readouterr().err


def test_a_probe_is_not_tried_where_a_needed_one_is_wrong():
    tried = []

    def train(env_id, steps, seed):
        tried.append(env_id)
        return lambda obs, final: np.ones(len(obs), int)  # always 0

    rows = {row.probe: row for row in probes.check(train)}
    assert tried == [f"probes:{name}-v0" for name in ("Now", "Limit", "FinalStep")]
    assert rows["probes:Now-v0"].mistake == "observations off by one"
    assert rows["probes:Now-v0"].score == 0.5
    assert rows["probes:FinalStep-v0"].right and rows["probes:Limit-v0"].right
    assert np.isnan(rows["probes:Previous-v0"].score) and not rows["probes:Previous-v0"].mistake


@pytest.mark.parametrize("script, name", MEMORIES)
def test_check_memory_accepts_the_scripts_memories(script, name):
    torch.manual_seed(1)
    probes.check_memory(getattr(MODULES[script], name)(5, 4), 5, 4)


class Loop(torch.nn.Module):
    """A memory whose replay is a loop, with one mistake."""

    def __init__(self, mistake: str = ""):
        super().__init__()
        self.cell, self.mistake = torch.nn.GRUCell(5, 4), mistake

    def initial_state(self, N):
        return torch.full((1, N, 4), float(self.mistake == "initial state"))

    def step(self, x, state):
        h = self.cell(x, state[0])
        return h, h[None] if self.mistake != "shape" else h

    def forward(self, x, state, final):
        hs = []
        for t in range(len(x)):
            h = self.cell(x[t], state[0].detach() if self.mistake == "detached" else state[0])
            hs.append(h)
            end = final[t - 1] * bool(t) if self.mistake == "late" else final[t]
            if self.mistake == "none":
                end = torch.zeros_like(end)
            if self.mistake == "all":
                end = final[t].any().expand_as(end)
            keep = 1e-3 if self.mistake == "nearly" else 0.0
            state = torch.where(end[:, None], keep * h, h)[None]
        return torch.stack(hs)


def test_check_memory_accepts_a_loop():
    probes.check_memory(Loop(), 5, 4)


@pytest.mark.parametrize(
    "mistake", ["initial state", "shape", "none", "late", "all", "nearly", "detached"]
)
def test_check_memory_refuses_a_memory_that_is_wrong(mistake):
    torch.manual_seed(1)
    with pytest.raises(AssertionError):
        probes.check_memory(Loop(mistake), 5, 4)


def checked(script_name: str):
    """A fresh script with the recipe check_replay."""
    driver = importlib.import_module("use")
    return driver.fresh(script_name, "check_replay")


TINY = dict(num_envs=4, num_steps=16, num_minibatches=2, total_timesteps=128, eval_episodes=0)


def test_check_replay_lets_a_right_memory_train(tmp_path):
    script = checked("rppo_lstm")
    args = script.Args(env_id="probes:Latch-v0", runs_dir=str(tmp_path), **TINY)
    script.train(args)
    assert script.load(script.Run.latest)["step"] >= 128


def test_check_replay_refuses_a_memory_without_its_reset_in_the_first_update(tmp_path):
    script = checked("rppo_lstm")

    class NoReset(script.ResetLSTM):
        def forward(self, x, state, final):
            return super().forward(x, state, torch.zeros_like(final))

    script.ResetLSTM = NoReset
    args = script.Args(env_id="probes:Latch-v0", runs_dir=str(tmp_path), **TINY)
    with pytest.raises(script.ArgumentError, match="log ratio"):
        script.train(args)
    assert script.load(script.Run.latest)["step"] == 0


@pytest.mark.parametrize("mistake", mistakes.MISTAKES)
def test_each_mistake_changes_the_script(mistake):
    script = mistakes.changed(mistake)
    assert script.train.__code__.co_filename == mistake


@pytest.mark.parametrize(
    "mistake, name",
    [("right", None), ("truncation as termination", "truncation taken for termination")],
)
def test_an_agent_trained_for_8000_steps_is_right_and_one_with_a_mistake_is_not(mistake, name):
    train = trainer(mistakes.changed(mistake), SCRIPTS["rppo_lstm"])
    act = train("probes:Limit-v0", 8000, 1)
    scores = probes.play(act, [probes.Limit() for _ in range(8)])
    assert probes.verdict(probes.Limit, scores) == (name is None, name)


@pytest.mark.slow
def test_rppo_lstm_is_right_on_every_probe():
    rows = probes.check(trainer(MODULES["rppo_lstm"], SCRIPTS["rppo_lstm"]), seed=2)
    assert all(row.right for row in rows)
