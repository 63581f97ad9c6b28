"""The recipes of docs/recipes, run as a reader would, and what they promise."""

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, awkward_ends
from gymnasium.utils.env_checker import check_env

RECIPES = sorted((ROOT / "docs/recipes").glob("*.py"))
SHORT = "--mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 8 --eval-episodes 2".split()


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe; the script that it changes is as before after the test."""
    script = MODULES["rppo_lstm"]
    for name in "Agent", "ResetLSTM", "Run", "make_envs":
        monkeypatch.setattr(script, name, getattr(script, name))
    monkeypatch.setattr(script, "PRESETS", dict(script.PRESETS))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/recipes/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def run_recipe(run_script, name, *flags, check=0):
    return run_script(f"docs/recipes/{name}", *flags, check=check)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.split("\n")) <= 80 and max(map(len, text.split("\n"))) <= 100
    assert f"python docs/recipes/{path.name}" in text.split('"""')[1]


def test_poc_memory(recipe):
    """Its rules, its optimum (1.2 in 7 steps), and Gymnasium's own checker."""
    module, returns, starts, sides = recipe("poc_memory"), [], set(), set()
    env = module.PocMemory()
    for seed in range(400):
        obs, _ = env.reset(seed=seed)
        goals, position, total, steps, done = obs[[0, 2]], obs[1], 0.0, 0, False
        starts.add(round(float(position), 1))
        sides.add(tuple(goals))
        while not done:
            obs, reward, done, truncated, _ = env.step(int(goals[1] > 0))
            total, steps = total + reward, steps + 1
            if steps <= 2:  # frozen, visible, free
                assert reward == 0.0 and obs[1] == position and np.array_equal(obs[[0, 2]], goals)
            elif not done:
                assert reward == pytest.approx(-0.1) and np.array_equal(obs[[0, 2]], [0, 0])
        assert reward == pytest.approx(1.6) and abs(obs[1]) == 1.0 and not truncated
        returns.append((total, steps))
    assert starts == {-0.4, -0.2, 0.0, 0.2, 0.4} and sides == {(-1, 1), (1, -1)}
    assert np.mean(returns, 0) == pytest.approx([1.2, 7], abs=0.15)
    check_env(module.PocMemory(), skip_render_check=True)


def test_poc_memory_trains(run_script, tmp_path):
    run_recipe(
        run_script, "poc_memory", "--total-timesteps", 2000, "--run-name", "a", "--num-steps", 32
    )
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert result["global_step"] >= 2000 and -13 < np.mean(result["evaluation"]) < 1.4


def test_two_layers_are_the_loop_over_both(recipe):
    module = recipe("stacked_lstm")
    memory = module.StackedLSTM(3, 5).double()
    final = awkward_ends()[2][:-1]
    torch.manual_seed(0)
    x, state = torch.randn(*final.shape, 3).double(), torch.randn(4, final.shape[1], 5).double()
    outputs = memory(x, state, final)
    for t in range(len(x)):
        state = memory.step(x[t], state)
        assert (outputs[t] - state[-2])[~final[t]].abs().max() <= 1e-12
        state = state.where(~final[t][:, None], 0.0)


def test_two_layers_train_and_replay_what_was_played(recipe, tmp_path, monkeypatch):
    module, script, seen = recipe("stacked_lstm"), MODULES["rppo_lstm"], []
    real = script.ppo_loss

    def watched(logprob, old_logprob, *rest):
        seen.append((logprob - old_logprob).abs().max().item())
        return real(logprob, old_logprob, *rest)

    monkeypatch.setattr(script, "ppo_loss", watched)
    args = script.Args(num_steps=32, seq_len=8, hidden_size=8, num_minibatches=1, update_epochs=1, total_timesteps=700,
                       eval_episodes=1, runs_dir=str(tmp_path))  # fmt: skip
    agent = script.train(args)
    assert isinstance(agent, module.StackedAgent) and len(seen) == 3 and max(seen) <= 1e-5


def test_keep_best_keeps_an_agent_that_plays_and_changes_nothing(recipe, tmp_path, monkeypatch):
    script = MODULES["rppo_lstm"]
    flags = dict(
        num_envs=4,
        num_steps=32,
        num_minibatches=2,
        hidden_size=8,
        total_timesteps=2000,
        eval_episodes=2,
    )
    plain = script.train(
        script.Args(**flags, runs_dir=str(tmp_path), run_name="plain")
    ).state_dict()
    module = recipe("keep_best")
    monkeypatch.setattr(module, "EVERY", 500)
    monkeypatch.setattr(script, "Run", module.KeepBest)
    agent = script.train(script.Args(**flags, runs_dir=str(tmp_path), run_name="a"))
    assert all(torch.equal(x, plain[name]) for name, x in agent.state_dict().items())
    script.load(tmp_path / "a/best", agent)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = [
        s.value
        for s in EventAccumulator(str(tmp_path / "a")).Reload().Scalars("charts/eval_return")
    ]
    args = script.Args(**script.load(tmp_path / "a/best")["args"])
    assert len(scores) == 4
    assert np.mean([*script.evaluate(agent, script.make_envs(args, 1), args)]) == pytest.approx(
        max(scores)
    )


def test_warm_start_begins_with_the_other_runs_weights(run_script, tmp_path):
    run_script("rppo_lstm", *SHORT, "--total-timesteps", 300, "--run-name", "a")
    run_recipe(
        run_script,
        "warm_start",
        "runs/a",
        *SHORT,
        "--total-timesteps",
        100,
        "--run-name",
        "b",
        "--learning-rate",
        0,
    )
    a, b = (MODULES["rppo_lstm"].load(tmp_path / "runs" / name) for name in "ab")
    same = [
        torch.equal(x, b["agent"][name]) for name, x in a["agent"].items() if "stats" not in name
    ]
    assert all(same) and len(same) == 10 and b["step"] < a["step"]
    refused = run_recipe(
        run_script, "warm_start", "runs/a", *SHORT[:-4], "--hidden-size", 9, check=2
    )
    assert "size mismatch" in refused.stderr


def test_onnx_export_threads_the_state(run_script, tmp_path):
    """Every action of 1,000 steps is the agent's, the states fed back."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run_script("rppo_lstm", *SHORT, "--total-timesteps", 2000, "--run-name", "a")
    run_recipe(run_script, "export_onnx", "runs/a", "agent.onnx")
    script = MODULES["rppo_lstm"]
    args = script.Args(**script.load(tmp_path / "runs/a")["args"])
    agent = script.Agent(script.make_envs(args, 1), args)
    script.load(tmp_path / "runs/a", agent)
    session = runtime.InferenceSession(str(tmp_path / "agent.onnx"))
    state, legal = agent.initial_state(1), agent.exists[None]
    exported = state.numpy()
    for obs in np.random.default_rng(0).normal(size=(1000, 1, 4)).astype(np.float32):
        action, state = agent.predict(obs, {}, state)
        choices, exported = session.run(None, {"obs": obs, "legal": legal, "state": exported})
        assert choices[0, 0] == action[0] and np.abs(exported - state.numpy()).max() <= 1e-5


def side_by_side(recipe, name, env_id, steps=60):
    """The same actions in the script's environments and in the recipe's -> for each step and
    environment its episode so far, rows of (obs, the action and reward before it), and what the
    recipe makes of the last obs."""
    script = MODULES["rppo_lstm"]
    args = script.Args(env_id=env_id)
    plain = script.make_envs(args, 3)
    recipe(name)
    changed = script.make_envs(args, 3)
    (obs, _), (other, _) = plain.reset(seed=0), changed.reset(seed=0)
    plain.action_space.seed(0)
    episodes, ended, ends = [[(x, None, 0.0)] for x in obs], np.zeros(3, bool), 0
    for _ in range(steps):
        yield from zip(episodes, other)
        action = plain.action_space.sample()
        obs, rewards, terminated, truncated, _ = plain.step(action)
        other, *others = changed.step(action)
        assert all(np.array_equal(x, y) for x, y in zip((rewards, terminated, truncated), others))
        for n in range(3):
            row = (obs[n], None, 0.0) if ended[n] else (obs[n], action[n], rewards[n])
            episodes[n] = [row] if ended[n] else [*episodes[n], row]
        ended = terminated | truncated
        ends += ended.sum()
    assert ends >= 5
    assert changed.single_observation_space.shape == other[0].shape


def test_frame_stack_gives_the_last_four_observations_of_the_episode(recipe):
    for episode, stacked in side_by_side(recipe, "frame_stack", "CartPole-v1"):
        frames = [obs for obs, _, _ in episode]
        assert np.array_equal(stacked, np.concatenate(([frames[0]] * 3 + frames)[-4:]))


def test_frame_stack_has_no_memory(recipe, run_script, tmp_path):
    run_recipe(run_script, "frame_stack", *SHORT, "--total-timesteps", 300, "--run-name", "a")
    script = MODULES["rppo_lstm"]
    recipe("frame_stack")
    saved = script.load(tmp_path / "runs/a")
    args = script.Args(**saved["args"])
    agent = script.Agent(script.make_envs(args, 1), args)
    script.load(tmp_path / "runs/a", agent)
    obs, legal = torch.randn(5, 16), torch.ones(5, 1, 2, dtype=torch.bool)
    logp, value, _ = agent.step(obs, legal, agent.initial_state(5))
    other_logp, other_value, _ = agent.step(obs, legal, torch.randn(2, 5, 8))
    assert torch.equal(logp, other_logp) and torch.equal(value, other_value)
    assert args.seq_len == 1 and not any("cell" in name for name in saved["agent"])


def test_previous_action_and_reward_are_inputs(recipe):
    for episode, x in side_by_side(recipe, "previous_action", "CartPole-v1"):
        obs, action, reward = episode[-1]
        one_hot = [0, 0] if action is None else np.eye(2)[action]
        assert np.array_equal(x, np.float32([*obs, *one_hot, reward]))


@pytest.mark.parametrize("name", ["rppo_lstm", "docs/recipes/previous_action"])
def test_popgym(run_script, tmp_path, name):
    """RepeatPrevious: the observations are those of POPGym's task, one-hot, and returns in its range."""
    pytest.importorskip("popgym")
    flags = (
        "--env-id popgym:popgym-RepeatPreviousEasy-v0 --total-timesteps 600 --run-name a".split()
    )
    run_script(name, *SHORT[1:], *flags)
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    saved = MODULES["rppo_lstm"].load(tmp_path / "runs/a")["agent"]
    assert saved["encoder.0.weight"].shape[1] == 4 + ("previous" in name) * 5
    assert all(-1.0001 <= x <= 1.0001 for x in result["returns"] + result["evaluation"])
    assert len(result["evaluation"]) == 2
