"""The exercises: each diff fits rppo_lstm.py and trains; each check accepts what is right and names
what is wrong; the tasks pay what their docstrings say."""

import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import ROOT

import rppo_lstm

HERE = ROOT / "docs/exercises"
sys.path.insert(0, str(HERE))
import gae  # noqa: E402
import gru  # noqa: E402
import replay  # noqa: E402
import tasks  # noqa: E402, F401
import train as exercises  # noqa: E402


def train(name, tmp_path, **flags):
    """A few updates with an exercise's change, and the agent."""
    script = exercises.load(name, str(tmp_path))
    size = dict(num_steps=32, num_envs=4, num_minibatches=2, hidden_size=8, total_timesteps=300)
    small = dict(size, eval_episodes=2, runs_dir=str(tmp_path), env_id="tasks:Repeat-v0")
    return script.train(script.Args(**{**small, **flags}))


@pytest.mark.parametrize("name", exercises.DIFFS)
def test_each_change_trains_other_weights(name, tmp_path):
    flags = dict(env_id="tasks:Exit-v0") if name == "no_bootstrap" else {}
    flags |= dict(seq_len=8) if name == "recompute" else {}
    flags |= dict(clip_coef=0.01) if name == "value_clipping" else {}
    weights = []
    for change in "unchanged", name:
        agent = train(change, tmp_path, run_name=change, **flags)
        weights.append(torch.nn.utils.parameters_to_vector(agent.parameters()))
    assert weights[0].isfinite().all() and weights[1].isfinite().all()
    assert not torch.equal(*weights)
    saved = torch.load(tmp_path / name / "agent.pt", weights_only=True)
    assert saved["script"] == f"rppo_lstm_{name}"


def test_single_steps_are_sequences_of_one(tmp_path):
    single = train("single_steps", tmp_path, run_name="a")
    same = train("unchanged", tmp_path, run_name="b", seq_len=1)
    assert all(map(torch.equal, single.parameters(), same.parameters()))


def test_a_diff_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="no such line"):
        exercises.changed("@@ train @@\n-    no such line\n+    x = 1\n")


def blank(change):
    """compute_gae with other flags."""

    def wrong(rewards, values, terminated, done, gamma, lam):
        return rppo_lstm.compute_gae(rewards, values, *change(terminated, done), gamma, lam)

    return wrong


def test_the_check_of_gae():
    assert len(gae.check(gae.compute_gae)) == 3
    assert gae.check(rppo_lstm.compute_gae) == []
    for change in (lambda a, b: (b, b)), (lambda a, b: (a, a)):
        [wrong] = gae.check(blank(change))
        assert "truncated" in wrong


def loop(reset):
    def replayed(cell, x, h, c, final):
        outputs = []
        for t in range(len(x)):
            h, c = cell(x[t], (h, c))
            forgotten = [reset(y, final[t].unsqueeze(-1)) for y in (h, c)]
            outputs.append(forgotten[0] if reset is early else h)
            h, c = forgotten
        return torch.stack(outputs)

    return replayed


def early(y, final):
    return y.where(~final, 0)


def test_the_check_of_replay():
    assert "even where nothing is final" in replay.check(replay.replay)[0]
    assert replay.check(loop(lambda y, final: y.where(~final, 0))) == []
    assert "reset after it" in replay.check(loop(early))[0]
    assert "NaN" in replay.check(loop(lambda y, final: y * ~final))[0]
    assert "differs" in replay.check(loop(lambda y, final: y))[0]


def test_the_check_of_the_gru():
    """The answer of the page, put where the blank is."""
    assert "after a final step the outputs" in gru.check(gru.fused_gru)[0]
    page = (HERE / "06_gru.md").read_text()
    answer = page.split("```python\n")[1].split("```")[0]
    source = (HERE / "gru.py").read_text()
    lines = re.sub(r"(?m)^(?=.)", "    ", answer)
    names: dict = {}
    exec(re.sub(r"    # YOUR CODE HERE.*\n", lambda _: lines, source), names)
    assert gru.check(names["fused_gru"]) == []


def returns(env, policy, episodes=300):
    """Mean return of a policy that gets the observations of the episode so far."""
    found = []
    for seed in range(episodes):
        seen, total, done = [env.reset(seed=seed)[0]], 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(policy(seen))
            seen, total, done = [*seen, obs], total + reward, terminated or truncated
        found.append(total)
    return np.mean(found)


def test_the_tasks_pay_what_they_say():
    bell = gym.make("Bell-v0")
    assert returns(bell, lambda seen: int(np.any(seen))) == pytest.approx(1)
    assert returns(bell, lambda seen: 0) == pytest.approx(0.59, abs=0.06)
    repeat = gym.make("Repeat-v0")
    assert returns(repeat, lambda seen: int(seen[-4:][0].argmax()), 20) == pytest.approx(1)
    assert returns(repeat, lambda seen: 2) == pytest.approx(0.25, abs=0.03)
    assert returns(gym.make("Exit-v0"), lambda seen: 1) == 4
    assert returns(gym.make("Exit-v0", scale=10), lambda seen: 0) == pytest.approx(50, abs=10)
