"""Recipes of environments: their rules, and what a wrapper makes of observations and rewards."""

import json
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from recipe_tools import FOLDER, driver, needs, reopened, run


def test_poc_memory():
    """Its rules, its optimum (1.2 in 7 steps), and Gymnasium's own checker."""
    import poc_memory

    env, returns, starts, sides = poc_memory.PocMemory(), [], set(), set()
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
    check_env(poc_memory.PocMemory(), skip_render_check=True)


@pytest.mark.parametrize("name", ["rppo_lstm", "ppo1_mpi"])
def test_poc_memory_trains(tmp_path, name):
    needs(name)
    script = driver.fresh(name, "poc_memory")
    agent, run_dir = run(script, tmp_path, total_timesteps=400)
    result = json.loads((run_dir / "result.json").read_text())
    assert agent.args.env_id == "PocMemory-v0" and -13 < np.mean(result["evaluation"]) < 1.4
    assert script.PRESETS["PocMemory-v0", False]["total_timesteps"] == 61_000


def side_by_side(name, recipe, env_id, steps=60):
    """The same actions in the script's environments and in the recipe's -> for each step and
    environment its episode so far, rows of (obs, the action and reward before it), and what the
    recipe makes of the last obs."""
    plain_script, script = driver.fresh(name), driver.fresh(name, recipe)
    plain = plain_script.make_envs(plain_script.Args(env_id=env_id), 3)
    changed = script.make_envs(script.Args(env_id=env_id), 3)
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
    assert ends >= 3
    assert changed.single_observation_space.shape == other[0].shape


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo"])
def test_frame_stack_gives_the_last_four_observations_of_the_episode(name):
    for episode, stacked in side_by_side(name, "frame_stack", "CartPole-v1"):
        frames = [obs for obs, _, _ in episode]
        assert np.array_equal(stacked, np.concatenate(([frames[0]] * 3 + frames)[-4:]))


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous"])
def test_frame_stack_has_no_memory(tmp_path, name):
    script = driver.fresh(name, "frame_stack")
    agent, run_dir = run(script, tmp_path, mask_velocity=True)
    reopened(run_dir)
    inputs = agent.encoder[0].in_features
    assert inputs == (16 if name == "rppo_lstm" else 12) and agent.args.seq_len == 1
    assert not any("cell" in key for key in agent.state_dict())


def test_previous_action_and_reward_are_inputs():
    for episode, x in side_by_side("rppo_lstm", "previous_action", "CartPole-v1"):
        obs, action, reward = episode[-1]
        one_hot = [0, 0] if action is None else np.eye(2)[action]
        assert np.array_equal(x, np.float32([*obs, *one_hot, reward]))


def test_previous_action_of_real_numbers():
    import shutil  # noqa: F401, so that the test's episodes are Pendulum's of 200 steps

    for episode, x in side_by_side("trpo", "previous_action", "Pendulum-v1", steps=205):
        obs, action, reward = episode[-1]
        assert np.allclose(x, [*obs, *([0.0] if action is None else action), reward], atol=1e-5)


def test_image_frames_are_grey_resized_stacked_and_channels_first():
    """Beside what is done by hand, over episodes of 5 steps."""
    script = driver.fresh("rppo_lstm", "image_frames")
    args = script.Args(env_id="Colours-v0", grey=True, image_size=20, image_stack=3)
    envs = script.make_envs(args, 2)
    plain = driver.fresh("rppo_lstm").make_envs(args, 2)
    assert envs.entries == [(3, 20, 20), (3,)]

    def by_hand(row):
        colours = row[: 40 * 48 * 3].reshape(40, 48, 3).astype(float)
        grey = colours @ [0.299, 0.587, 0.114]
        small = torch.nn.functional.adaptive_avg_pool2d(torch.tensor(grey)[None, None], 20)
        return small.numpy()[0, 0], row[40 * 48 * 3 :]

    (obs, _), (raw, _) = envs.reset(seed=3), plain.reset(seed=3)
    history, done, ends = [[by_hand(row)[0]] * 3 for row in raw], np.zeros(2, bool), 0
    for _ in range(14):
        for n in range(2):
            assert np.allclose(obs[n, :1200].reshape(3, 20, 20), history[n], atol=0.01)
            assert np.array_equal(obs[n, 1200:], by_hand(raw[n])[1])
        action = np.zeros(2, int)
        obs, _, terminated, truncated, _ = envs.step(action)
        raw, *_ = plain.step(action)
        for n in range(2):
            frame = by_hand(raw[n])[0]
            history[n] = [frame] * 3 if done[n] else [*history[n][1:], frame]
        done = terminated | truncated
        ends += done.sum()
    assert ends == 4


def test_reward_scale_leaves_returns_as_they_are(tmp_path):
    needs("ppo1_mpi")
    script = driver.fresh("ppo1_mpi", "ppo1_mujoco")
    envs = script.make_envs(script.Args(env_id="CartPole-v1", reward_scale=0.1), 1)
    envs.reset(seed=0)
    rewards, done = [], False
    while not done:
        _, reward, terminated, truncated, info = envs.step(np.zeros(1, int))
        rewards.append(reward[0])
        done = terminated[0] or truncated[0]
    assert set(rewards) == {np.float64(0.1)} or np.allclose(rewards, 0.1)
    assert info["run_statistics"]["r"][0] == len(rewards) == envs.return_queue[0]
    presets = script.PRESETS
    assert presets["Hopper-v5", False]["num_steps"] == 2048
    humanoid = presets["Humanoid-v5", False]
    assert humanoid["reward_scale"] == 0.1 and humanoid["schedule"] == "constant"
    steps = humanoid["num_steps"] * script.Args.num_envs
    assert steps / humanoid["num_minibatches"] == 64  # baselines' optim_batchsize


def test_ppo1_mujoco_runs_humanoid(tmp_path):
    needs("ppo1_mpi")
    pytest.importorskip("mujoco")
    script = driver.fresh("ppo1_mpi", "ppo1_mujoco")
    flags = {**script.PRESETS["Humanoid-v5", False], "env_id": "Humanoid-v5", "num_steps": 64}
    flags |= dict(num_minibatches=1, update_epochs=1, total_timesteps=64, eval_episodes=1)
    _, run_dir = run(script, tmp_path, **flags)
    reopened(run_dir)


@pytest.mark.parametrize("name", ["ppo1_mpi", "rppo_lstm"])
def test_ppo1_atari_plays_games(tmp_path, name):
    """Frames as rppo_gru_atari's, rewards their signs; the CNN reads four frames."""
    needs(name)
    needs("rppo_gru_atari")
    import ppo1_atari

    ppo1_atari.LIMIT = 400
    script = driver.fresh(name, "ppo1_atari")
    flags = dict(total_timesteps=24, num_envs=1, num_steps=8, num_minibatches=1, update_epochs=1)
    agent, run_dir = run(script, tmp_path, eval_episodes=1, **flags)
    reopened(run_dir)
    # In ppo1_mpi, as in rppo_lstm, policy and critic read one CNN.
    (eyes,) = [module for module in agent.modules() if hasattr(module, "cnns")]
    assert eyes.cnns[0][0].in_channels == 4 and agent.obs_stats.mean.numel() == 4 * 84**2
    atari = driver.fresh("rppo_gru_atari")
    theirs = atari.make_envs(atari.Args(frame_stack=4), 2, None, 400)
    ours = script.make_envs(script.Args(), 2)
    (x, _), (y, _) = theirs.reset(seed=0), ours.reset(seed=0)
    for _ in range(60):
        assert np.array_equal(x.reshape(2, -1), y)
        action = np.full(2, 3)
        x, rewards, *_ = theirs.step(action)
        y, signs, *_ = ours.step(action)
        assert np.array_equal(np.sign(rewards), signs)
    if name == "ppo1_mpi":
        assert script.PRESETS["ALE/Pong-v5", False]["total_timesteps"] == 10_000_000


@pytest.mark.parametrize("recipes", ["", "previous_action"])
def test_popgym(tmp_path, recipes):
    """RepeatPrevious: the observations are those of POPGym's task, one-hot, and returns in its range."""
    pytest.importorskip("popgym")
    script = driver.fresh("rppo_lstm", *recipes.split())
    env_id = "popgym:popgym-RepeatPreviousEasy-v0"
    agent, run_dir = run(script, tmp_path, env_id=env_id, total_timesteps=400)
    result = json.loads((run_dir / "result.json").read_text())
    assert agent.encoder[0].in_features == 4 + 5 * bool(recipes)
    assert all(-1.0001 <= x <= 1.0001 for x in result["returns"] + result["evaluation"])


def test_minigrid_memory_shows_nine_cells_and_pays_who_remembers():
    """A policy by hand: look at the object, walk, look to the left, go where its like is."""
    pytest.importorskip("minigrid")
    import minigrid_memory

    returns, left, forward = [], 0, 2
    env = gym.make("MemoryS9-v0")
    assert env.action_space.n == 3

    def objects(obs):
        return {*obs.reshape(9, 5).argmax(1)} & {3, 4}  # key, ball

    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        scale = minigrid_memory.SCALE
        assert np.array_equal(np.unique(obs), [0, scale]) and obs.sum() == 9 * scale
        cue, to_start = objects(obs), env.unwrapped.agent_pos[0] - 1
        for action in [left] * 2 + [forward] * to_start + [left] * 2 + [forward] * 6:
            obs, *_ = env.step(action)
            cue = objects(obs) or cue  # near the end the others are in sight
        obs, *_ = env.step(left)
        assert len(cue) == len(objects(obs)) == 1
        for action in [forward] if objects(obs) == cue else [left, left, forward]:
            _, reward, terminated, _, _ = env.step(action)
        assert terminated
        returns.append(reward)
    assert np.mean(returns) > 0.926


@pytest.mark.parametrize("pixels", [False, True])
def test_minigrid_memory_trains(tmp_path, pixels):
    pytest.importorskip("minigrid")
    script = driver.fresh("rppo_lstm", "minigrid_memory")
    agent, run_dir = run(script, tmp_path, pixels=pixels, total_timesteps=130, eval_episodes=1)
    reopened(run_dir)
    assert agent.args.env_id == "MemoryS9-v0" and script.PRESETS["MemoryS13-v0", False]
    assert agent.obs_stats.mean.numel() == (3 * 84 * 84 if pixels else 45)
    i, f, g, o = (agent.lstm.cell.bias_hh + agent.lstm.cell.bias_ih).detach().chunk(4)
    assert f.mean() == pytest.approx(2, abs=0.2) and max(x.abs().mean() for x in (i, g, o)) < 0.2
    if pixels:
        env = gym.make("MemoryS9Pixels-v0")
        obs, _ = env.reset(seed=0)
        assert obs.shape == (84, 84, 3) and obs.dtype == np.uint8 and env.action_space.n == 3


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_minigrid_memory_has_a_memory(name):
    needs(name)
    script = driver.fresh(name, "minigrid_memory")
    preset = script.PRESETS[(script.Args.env_id, False)]
    memory = preset.get("memory")  # of the scripts that have none unless told so
    assert memory == ("lstm" if hasattr(script.Args, "memory") else None)


@pytest.mark.parametrize("name", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_minigrid_memory_tells_objects_apart_by_pixels_as_by_symbols(name):
    """What the LSTM reads of a key and of a ball differs by 5 or 6; with symbols, by 3."""
    pytest.importorskip("minigrid")
    needs(name)
    script = driver.fresh(name, "minigrid_memory")
    apart = {}
    for pixels in True, False:
        torch.manual_seed(0)
        args = script.Args(pixels=pixels, num_envs=1)
        envs = script.make_envs(args, 1)
        agent = script.Agent(envs, args)
        features = {}
        for seed in range(50):  # the agent beside the object, which it sees after turning left
            envs.reset(seed=seed)
            (env,) = envs.unwrapped.envs
            grid = env.unwrapped
            for _ in range(2):
                obs, *_ = envs.step(np.zeros(1, np.int64))
            if grid.agent_pos[0] == 1:
                kind = grid.grid.get(1, grid.height // 2 - 1).type
                features[kind] = agent.encoder(torch.from_numpy(obs).float())[0]
        apart[pixels] = (features["key"] - features["ball"]).norm().item()
        if pixels:
            trained = [key for key, _ in agent.named_parameters() if "cnns" in key]
            kept = [key for key in agent.state_dict() if "cnns" in key]
            assert not trained and kept
            weight = agent.encoder[0].cnns[0][0].weight
            assert weight.mean((1, 2, 3)).abs().max() < 1e-6 and weight.shape == (16, 3, 28, 28)
    assert 4 < apart[True] < 7 and 2 < apart[False] < 4


def test_kill_ends_a_run_of_memory_gym(tmp_path):
    """SDL takes SIGTERM for the closing of a window, unless it is told not to."""
    pytest.importorskip("memory_gym")
    program = (
        f"import os, signal, sys; sys.path.insert(0, {str(FOLDER)!r}); import memory_gym_tasks\n"
        "memory_gym_tasks.make('MortarMayhem-Grid-v0', {}); os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("env_id, name", [("MortarMayhem-Grid-v0", "rppo_lstm"),
                                          ("MysteryPath-v0", "trpo")])  # fmt: skip
def test_memory_gym_tasks_train(tmp_path, env_id, name):
    pytest.importorskip("memory_gym")
    script = driver.fresh(name, "memory_gym_tasks")
    task = (
        '{"command_count": [2], "explosion_delay": [2]}'
        if "Mortar" in env_id
        else '{"max_steps": 16}'
    )
    flags = dict(
        num_envs=2, num_steps=32, total_timesteps=64, eval_episodes=1, grey=True, image_size=40
    )
    agent, run_dir = run(script, tmp_path, env_id=env_id, task=task, **flags)
    assert script.load(run_dir)["args"]["env_id"] == env_id and script.load(run_dir)["returns"]
    with pytest.raises(script.ArgumentError, match="--task"):
        run(script, tmp_path, env_id=env_id, task="{")
    if name == "rppo_lstm":  # one seed: every episode begins alike
        args = script.Args(env_id=env_id, seed_pool=1)
        envs = script.make_envs(args, 2)
        first, again = envs.reset(seed=0)[0], envs.reset(seed=1)[0]
        assert np.array_equal(first[0], first[1]) and np.array_equal(first, again)
    if name == "trpo":  # out of time: a truncation
        envs = script.make_envs(agent.args, 1)
        envs.reset(seed=0)
        for _ in range(16):
            _, _, terminated, truncated, _ = envs.step(np.zeros((1, 2), int))
        assert truncated[0] and not terminated[0]
