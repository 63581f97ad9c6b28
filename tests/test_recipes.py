"""The recipes of docs/recipes, run as a reader would, and what they promise."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, awkward_ends
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

RECIPES = sorted((ROOT / "docs/recipes").glob("*.py"))
SHORT = "--mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2 --hidden-size 8 --eval-episodes 2".split()


@pytest.fixture
def recipe(monkeypatch):
    """Imports a recipe; the script that it changes is as before after the test."""
    for script in MODULES.values():
        for name in "Agent", "ResetLSTM", "Run", "make_envs":
            if hasattr(script, name):
                monkeypatch.setattr(script, name, getattr(script, name))
    script = MODULES["rppo_lstm"]
    monkeypatch.setattr(script, "PRESETS", dict(script.PRESETS))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/recipes/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def run_recipe(run_script, name, *flags, **options):
    return run_script(f"docs/recipes/{name}", *flags, **options)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
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


def test_warm_start_begins_with_the_other_runs_weights(run_script, tmp_path):
    run_script("rppo_lstm", *SHORT, "--total-timesteps", 300, "--run-name", "a")
    flags = "--total-timesteps 100 --run-name b --learning-rate 0".split()
    run_recipe(run_script, "warm_start", "runs/a", *SHORT, *flags)
    a, b = (MODULES["rppo_lstm"].load(tmp_path / "runs" / name) for name in "ab")
    same = [
        torch.equal(x, b["agent"][name]) for name, x in a["agent"].items() if "stats" not in name
    ]
    assert all(same) and len(same) == 10 and b["step"] < a["step"]
    refused = run_recipe(
        run_script, "warm_start", "runs/a", *SHORT[:-4], "--hidden-size", 9, check=2
    )
    assert "size mismatch" in refused.stderr


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


def test_frame_stack_of_continuous_actions(run_script, tmp_path):
    """A run of it goes on, too, and has no memory."""
    script = "frame_stack", "rppo_continuous"
    flags = "--env-id Pendulum-v1 --mask-velocity --num-envs 4 --num-steps 32 --num-minibatches 2"
    flags += " --hidden-size 8 --eval-episodes 1 --run-name a --total-timesteps"
    run_recipe(run_script, *script, *flags.split(), 256)
    run_recipe(run_script, *script, "--resume", "runs/a", "--total-timesteps", 512)
    saved = MODULES["rppo_continuous"].load(tmp_path / "runs/a")
    assert saved["step"] >= 512 and saved["args"]["seq_len"] == 1
    assert saved["agent"]["encoder.0.weight"].shape[1] == 12
    assert not any("cell" in name for name in saved["agent"])
    flags = "--env-id envs:BoxFaulty-v0 --num-steps 8 --num-minibatches 2 --run-name b".split()
    env = {"PYTHONPATH": str(ROOT / "tests"), "FAULT": "reset"}
    failed = run_recipe(run_script, *script, *flags, check=1, env=env)
    assert failed.lines[-1].endswith(f"frame_stack.py rppo_continuous --resume {tmp_path}/runs/b")


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


def test_minigrid_shows_nine_cells_and_pays_who_remembers(recipe):
    """A policy by hand: look at the object, walk, look to the left, go where its like is."""
    pytest.importorskip("minigrid")
    module, returns = recipe("minigrid_memory"), []
    left, forward = 0, 2
    env = gym.make("MemoryS9-v0")
    assert env.action_space.n == 3

    def objects(obs):
        return {*obs.reshape(9, 5).argmax(1)} & {3, 4}  # key, ball

    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        assert np.array_equal(np.unique(obs), [0, module.SCALE]) and obs.sum() == 9 * module.SCALE
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


def test_minigrid_trains(run_script, tmp_path):
    pytest.importorskip("minigrid")
    flags = "--total-timesteps 3000 --run-name a --eval-episodes 3 --num-steps 64".split()
    run_recipe(run_script, "minigrid_memory", *flags, "--ablate-memory")
    saved = MODULES["rppo_lstm"].load(tmp_path / "runs/a")
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    biases = saved["agent"]["lstm.cell.bias_hh"] + saved["agent"]["lstm.cell.bias_ih"]
    i, f, g, o = biases.chunk(4)
    assert saved["args"]["ablate_memory"] and saved["args"]["env_id"] == "MemoryS9-v0"
    assert f.mean() == pytest.approx(2, abs=0.2) and max(x.abs().mean() for x in (i, g, o)) < 0.2
    assert len(result["evaluation"]) == 3 and all(0 <= x < 1 for x in result["evaluation"])


def test_four_frames_of_minigrid_have_no_memory(run_script, tmp_path):
    """Its recipe as a module gives the environment, and leaves the script's layers alone."""
    pytest.importorskip("minigrid")
    flags = "--env-id minigrid_memory:MemoryS9-v0 --total-timesteps 300 --run-name a --num-steps 32"
    run_recipe(run_script, "frame_stack", *flags.split(), "--eval-episodes", 1)
    agent = MODULES["rppo_lstm"].load(tmp_path / "runs/a")["agent"]
    assert agent["encoder.0.weight"].shape[1] == 4 * 45
    assert not any("cell" in name for name in agent)


class Signs(gym.Env):
    """An image is bright or dark, a number 1 or -1; an action must say both. Episodes have 8 steps,
    which give up to 1 each."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (36, 40, 1), np.uint8), vector=spaces.Box(-1, 1, (1,))
    )
    action_space = spaces.MultiDiscrete([2, 2])

    def observe(self):
        self.signs = self.np_random.integers(2, size=2)
        image = self.np_random.integers(0, 128, (36, 40, 1)) + 127 * self.signs[0]
        return {"image": np.uint8(image), "vector": np.float32(2 * self.signs[1:] - 1)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        distance = np.abs(
            (np.clip(action, -1, 1) + 1) / 2 - self.signs if self.box else action - self.signs
        )
        self.steps += 1
        return self.observe(), float(1 - distance.mean()), False, self.steps == 8, {}

    box = False


class BoxSigns(Signs):
    action_space, box = spaces.Box(-1, 1, (2,)), True


@pytest.mark.parametrize(
    "name, env_id", [("rppo_lstm", "Signs-v0"), ("rppo_continuous", "BoxSigns-v0")]
)
def test_images_and_vectors_of_a_dict_are_both_read(recipe, tmp_path, monkeypatch, name, env_id):
    script = MODULES[name]
    gym.register(env_id, Signs if name == "rppo_lstm" else BoxSigns)
    monkeypatch.setattr(script, "Agent", script.Agent)
    module = recipe("images")
    module.use(script)
    more = {"norm_obs": False, "log_std_init": -0.5} if name == "rppo_continuous" else {}
    args = script.Args(env_id=env_id, total_timesteps=12_000, num_envs=16, num_steps=32, hidden_size=32,
                       gamma=0.0, anneal_lr=False, runs_dir=str(tmp_path), run_name="a", **more)  # fmt: skip
    agent = script.train(args)
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert np.mean(result["evaluation"]) > 7.5  # of 8; 6 if one entry is not read
    image, number = np.zeros((1, 1440), np.float32), np.ones((1, 1), np.float32)
    x = torch.from_numpy(np.hstack([image, number]))
    pixels = x[:, :1440].reshape(1, 36, 40, 1).permute(0, 3, 1, 2) / 255
    cnn, identity = agent.encoder.parts
    assert torch.equal(cnn(x[:, :1440]), cnn.layers(pixels)) and torch.equal(
        identity(x[:, 1440:]), x[:, 1440:]
    )


def test_images_refuses_what_the_cnn_cannot_read(recipe, tmp_path, run_script, monkeypatch):
    script, refused = MODULES["rppo_lstm"], run_recipe(run_script, "images", "trpo", check=2)
    assert refused.lines == ["error: say rppo_lstm or rppo_continuous, then its flags"]
    module = recipe("images")
    small = spaces.Box(0, 255, (35, 40, 3), np.uint8)
    with pytest.raises(script.ArgumentError, match="too small"):
        module.Encoder(script, [small], 64)
    cnn = module.ImageCNN((4, 84, 84))
    frames = torch.rand(2, 3, 4 * 84 * 84) * 255
    assert torch.equal(cnn(frames)[1], cnn.layers(frames[1].view(3, 4, 84, 84) / 255))


def test_car_racing_runs(run_script, tmp_path):
    pytest.importorskip("Box2D")
    flags = "--env-id CarRacing-v3 --num-envs 1 --num-steps 16 --num-minibatches 1 --update-epochs 1".split()
    more = "--total-timesteps 32 --hidden-size 16 --eval-episodes 0 --run-name a".split()
    run_recipe(run_script, "images", "rppo_continuous", *flags, *more)
    saved = MODULES["rppo_continuous"].load(tmp_path / "runs/a")
    assert saved["step"] == 32 and saved["agent"]["encoder.layer.0.weight"].shape == (64, 4096)
    assert not saved["args"]["norm_obs"]


def test_long_memory_lets_gradients_through_dozens_of_steps(recipe):
    """The gradient of the cell with respect to that of 31 steps before, on average over units."""
    script = MODULES["rppo_lstm"]
    plain, long = script.ResetLSTM, recipe("long_memory").LongLSTM
    assert script.ResetLSTM is long

    def gradient(memory):
        start = torch.zeros(2, 1, 128, requires_grad=True)
        state = start
        for x in torch.randn(31, 1, 64).tanh():
            state = memory.step(x, state)
        return torch.autograd.grad(state[1].sum(), start)[0][1].abs().mean().item()

    for seed in range(3):
        torch.manual_seed(seed)
        assert gradient(plain(64, 128)) < 1e-6
        memory = long(64, 128)
        assert 0.4 < gradient(memory) < 0.7
        input_gate, forget_gate, *others = memory.cell.bias_ih.detach().chunk(4)
        assert torch.equal(input_gate, -forget_gate) and not torch.stack(others).any()
        steps = forget_gate.exp()
        assert 1 <= steps.min() < 8 and 120 < steps.max() <= 127
        assert steps.mean() == pytest.approx(64, abs=12)


def test_long_memory_learns_what_a_plain_lstm_does_not_begin_to_learn(recipe):
    """The symbol of 20 steps ago, one of four: how often it is named in updates 81 to 100."""
    script = MODULES["rppo_lstm"]
    plain, long = script.ResetLSTM, recipe("long_memory").LongLSTM

    def named(memory_class):
        torch.manual_seed(1)
        memory, head = memory_class(4, 128), script.linear(128, 4, std=0.01)
        optimizer = torch.optim.Adam([*memory.parameters(), *head.parameters()], 1e-3)
        right = []
        for _ in range(100):
            symbols = torch.randint(4, (40, 16))
            h = memory(torch.eye(4)[symbols], torch.zeros(2, 16, 128), torch.zeros(40, 16).bool())
            logits, target = head(h)[20:].flatten(0, 1), symbols[:-20].flatten()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, target).backward()
            optimizer.step()
            right.append((logits.argmax(-1) == target).float().mean())
        return torch.stack(right[-20:]).mean().item()

    assert named(plain) < 0.28 and named(long) > 0.31


@pytest.mark.parametrize("kinds", ["LL", "LG", "GL", "GG"])
def test_layers_are_the_loop_over_all(recipe, monkeypatch, kinds):
    module = recipe("stacked_lstm")
    monkeypatch.setattr(
        module, "LAYERS", [module.ResetLSTM if k == "L" else module.ResetGRU for k in kinds]
    )
    rows = sum(2 if k == "L" else 1 for k in kinds)
    memory = module.Stack(3, 5).double()
    final = awkward_ends()[2][:-1]
    torch.manual_seed(0)
    x, state = torch.randn(*final.shape, 3).double(), torch.randn(rows, final.shape[1], 5).double()
    outputs = memory(x, state, final)
    for t in range(len(x)):
        state = memory.step(x[t], state)
        h = state[-2 if kinds[-1] == "L" else -1]
        assert (outputs[t] - h)[~final[t]].abs().max() <= 1e-12
        state = state.where(~final[t][:, None], 0.0)


@pytest.mark.parametrize("kinds", ["LL", "LG"])
def test_layers_train_and_replay_what_was_played(recipe, tmp_path, monkeypatch, kinds):
    module, script, seen = recipe("stacked_lstm"), MODULES["rppo_lstm"], []
    monkeypatch.setattr(
        module, "LAYERS", [module.ResetLSTM if k == "L" else module.ResetGRU for k in kinds]
    )
    real = script.ppo_loss

    def watched(logprob, old_logprob, *rest):
        seen.append((logprob - old_logprob).abs().max().item())
        return real(logprob, old_logprob, *rest)

    monkeypatch.setattr(script, "ppo_loss", watched)
    args = script.Args(num_steps=32, seq_len=8, hidden_size=8, num_minibatches=1, update_epochs=1, total_timesteps=700,
                       eval_episodes=1, runs_dir=str(tmp_path))  # fmt: skip
    agent = script.train(args)
    assert isinstance(agent, module.StackedAgent) and len(seen) == 3 and max(seen) <= 1e-5


def keeps_the_best(run_dir, script):
    """The kept agent plays as well as the best of charts/eval_return, which it returns."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scores = [
        s.value for s in EventAccumulator(str(run_dir)).Reload().Scalars("charts/eval_return")
    ]
    args = script.Args(**script.load(run_dir / "best")["args"])
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    script.load(run_dir / "best", agent)
    assert np.mean([*script.evaluate(agent, envs, args)]) == pytest.approx(max(scores))
    assert float((run_dir / "best/return.txt").read_text()) == pytest.approx(max(scores))
    return scores


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
    module.use(script)
    agent = script.train(script.Args(**flags, runs_dir=str(tmp_path), run_name="a"))
    assert all(torch.equal(x, plain[name]) for name, x in agent.state_dict().items())
    assert len(keeps_the_best(tmp_path / "a", script)) == 4
    best = (tmp_path / "a/best/return.txt").read_text()
    (tmp_path / "a/best/return.txt").write_text("1000")  # better than all that follow
    script.train(
        script.Args(
            **{**flags, "total_timesteps": 2600}, resume=str(tmp_path / "a"), runs_dir=str(tmp_path)
        )
    )
    assert (tmp_path / "a/best/return.txt").read_text() == "1000" != best
    assert script.load(tmp_path / "a/best")["step"] <= 2100 < script.load(tmp_path / "a")["step"]


def test_keep_best_needs_episodes_to_choose_by(run_script, tmp_path):
    flags = "rppo_lstm", "--eval-episodes", 0
    refused = run_recipe(run_script, "keep_best", *flags, check=2)
    assert refused.lines == ["error: --eval-episodes 0: no return to choose by"]
    assert not (tmp_path / "runs").exists()


PROCESSES = {
    "ppo1_mpi": ("mpiexec -n 2 {python}", "--num-steps 64 --total-timesteps 1000"),
    "rppo_gru_atari": (
        "{python} -m torch.distributed.run --nproc-per-node 2 --master-port 29671",
        "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --hidden-size 8 --total-timesteps 64 "
        "--torch-threads 1",
    ),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_keep_best_writes_once_of_several_processes(tmp_path, name, short_games):
    launcher, flags = PROCESSES[name]
    pytest.importorskip({"ppo1_mpi": "mpi4py", "rppo_gru_atari": "ale_py"}[name])
    program = tmp_path / "keep.py"  # as the recipe, but evaluating more often
    short_games(200)
    shorter = (
        "import functools, gymnasium\ngymnasium.make_vec = functools.partial("
        "gymnasium.make_vec, max_num_frames_per_episode=200)\n"
    ) * (name == "rppo_gru_atari")
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'docs/recipes')!r})\nimport keep_best, {name}\n"
        f"{shorter}keep_best.EVERY = {300 if name == 'ppo1_mpi' else 32}\nkeep_best.use({name})\n{name}.main()"
    )
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = [*launcher.format(python=sys.executable).split(), str(program), *flags.split()]
    command += ["--eval-episodes", "1", "--runs-dir", str(tmp_path), "--run-name", "a"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores = keeps_the_best(tmp_path / "a", MODULES[name])
    assert len(scores) == (3 if name == "ppo1_mpi" else 2)
    assert len([*(tmp_path / "a").glob("events*")]) == 1


def onnx_agrees(session, agent, observations, legal=None):
    """Every action is the agent's, each feeding back its own state."""
    state = agent.initial_state(1)
    exported = state.numpy()
    for obs in observations:
        action, state = agent.predict(obs, {}, state)
        inputs = {"obs": obs, "state": exported} | ({} if legal is None else {"legal": legal})
        choices, exported = session.run(None, inputs)
        assert choices[0, 0] == action[0] and np.abs(exported - state.numpy()).max() <= 1e-5


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
    rows = np.random.default_rng(0).normal(size=(1000, 1, 4)).astype(np.float32)
    onnx_agrees(session, agent, rows, agent.exists[None])
    refused = run_recipe(run_script, "export_onnx", "runs/none", "agent.onnx", check=2)
    assert len(refused.lines) == 1 and "runs/none" in refused.stderr


def test_onnx_export_of_a_gru_threads_the_state(run_script, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("ale_py")
    runtime = pytest.importorskip("onnxruntime")
    flags = "--num-envs 1 --num-steps 8 --num-minibatches 1 --update-epochs 1 --total-timesteps 8 --eval-episodes 0"
    run_script("rppo_gru_atari", *flags.split(), "--run-name", "a")
    run_recipe(run_script, "export_onnx", "runs/a", "agent.onnx")
    script = MODULES["rppo_gru_atari"]
    args = script.Args(**script.load(tmp_path / "runs/a")["args"])
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    script.load(tmp_path / "runs/a", agent)
    with torch.no_grad():
        agent.actor.weight.normal_()  # actions that depend on the state
    module = importlib.util.spec_from_file_location(
        "e", ROOT / "docs/recipes/export_onnx.py"
    ).loader.load_module()
    torch.save(
        {**script.load(tmp_path / "runs/a"), "agent": agent.state_dict()},
        tmp_path / "runs/a/agent.pt",
    )
    module.main(str(tmp_path / "runs/a"), str(tmp_path / "agent.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "agent.onnx"))
    envs.action_space.seed(0)
    frames = [
        envs.reset(seed=0)[0],
        *(envs.step(envs.action_space.sample())[0] for _ in range(999)),
    ]
    onnx_agrees(session, agent, frames)


def test_sb3_weights_act_as_their_model_does(run_script, recipe, tmp_path):
    """Every action of 10 episodes, and the values."""
    sb3 = pytest.importorskip("sb3_contrib")
    settings = dict(lstm_hidden_size=16, net_arch=[24, 24])
    model = sb3.RecurrentPPO(
        "MlpLstmPolicy", "CartPole-v1", n_steps=64, seed=1, policy_kwargs=settings, device="cpu"
    )
    model.learn(500)
    model.save(tmp_path / "model.zip")
    run_recipe(run_script, "sb3_weights", "model.zip", "CartPole-v1", "runs/a")
    script, module = MODULES["rppo_lstm"], recipe("sb3_weights")
    args = script.Args(**script.load(tmp_path / "runs/a")["args"])
    envs = script.make_envs(args, 1)
    agent = module.Sb3Agent(envs, args)
    script.load(tmp_path / "runs/a", agent)
    steps, legal = 0, torch.from_numpy(agent.exists)[None]
    for episode in range(10):
        obs, info = envs.reset(seed=episode)
        state = theirs = None
        start, done = np.ones(1, bool), False
        while not done:
            before = agent.initial_state(1) if state is None else state
            action, state = agent.predict(obs, info, state)
            expected, theirs = model.predict(obs, theirs, start, deterministic=True)
            assert action[0] == expected[0]
            obs, _, terminated, truncated, info = envs.step(action)
            start, done, steps = np.zeros(1, bool), (terminated | truncated)[0], steps + 1
        pair = tuple(torch.from_numpy(x) for x in theirs)
        assert torch.allclose(torch.cat(pair)[:, 0], state[:2, 0], atol=1e-5)
    assert steps > 80
    with torch.inference_mode():
        value = agent.step(torch.as_tensor(obs), legal, before)[1]
        of_critic = tuple(x.unsqueeze(0) for x in before[2:])
        theirs = model.policy.predict_values(torch.as_tensor(obs), of_critic, torch.zeros(1))
    assert value.item() == pytest.approx(theirs.item(), abs=1e-5)
    flags = "--resume runs/a --total-timesteps 1024 --eval-episodes 1".split()
    run_recipe(run_script, "sb3_weights", *flags)
    assert script.load(tmp_path / "runs/a")["step"] >= 1000
    refused = run_recipe(run_script, "sb3_weights", "none.zip", "CartPole-v1", "runs/b", check=2)
    assert len(refused.lines) == 1


def test_sb3_weights_refuse_other_layers(run_script, tmp_path):
    sb3 = pytest.importorskip("sb3_contrib")
    settings = dict(activation_fn=torch.nn.ReLU)
    sb3.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs=settings).save(tmp_path / "relu")
    words = "relu.zip", "CartPole-v1", "runs/b"
    refused = run_recipe(run_script, "sb3_weights", *words, check=2)
    assert refused.lines == ["error: relu.zip: its layers are not of tanh"]
    assert not (tmp_path / "runs").exists()


def test_imitation(run_script, recipe, tmp_path):
    """The file is what was played; a clone finds its expert's actions more probable than a fresh
    agent does, and its episodes are longer."""
    script = MODULES["ppo1_mpi"]
    flags = "--total-timesteps 20000 --eval-episodes 1 --run-name expert".split()
    run_script("ppo1_mpi", *flags)
    flags = "record runs/expert expert.npz --eval-episodes 25".split()
    run_recipe(run_script, "imitation", *flags)
    data = dict(np.load(tmp_path / "expert.npz"))
    starts = np.flatnonzero(data["episode_starts"])
    assert len(starts) == len(data["episode_returns"]) == 25 and starts[0] == 0
    assert np.array_equal(np.add.reduceat(data["rewards"], starts), data["episode_returns"])
    env = gym.make("CartPole-v1")
    for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(data["obs"])])):
        obs, _ = env.reset(seed=1 + n)
        for row in range(start, end):
            assert np.allclose(obs, data["obs"][row], atol=1e-5)
            obs, *_ = env.step(data["actions"][row])
    flags = "--total-timesteps 256 --learning-rate 0 --eval-episodes 20 --run-name".split()
    run_recipe(run_script, "imitation", "expert.npz", *flags, "a")
    run_script("ppo1_mpi", *flags, "b")
    logprob, played = {}, {}
    for name in "ab":
        args = script.Args(**script.load(tmp_path / "runs" / name)["args"])
        agent = script.Agent(script.make_envs(args, 1), args)
        script.load(tmp_path / "runs" / name, agent)
        obs, actions = torch.tensor(data["obs"]), torch.tensor(data["actions"]).reshape(-1, 1)
        with torch.no_grad():
            h, *_ = agent.step(obs, agent.initial_state(len(obs)))
            logprob[name] = agent.logprob_entropy(h, actions)[0].mean().item()
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        played[name] = np.mean(result["evaluation"])
    assert abs(logprob["b"] - np.log(0.5)) < 0.02 and logprob["a"] > logprob["b"] + 0.2
    assert played["a"] > 1.5 * played["b"], played
    # Two rollouts of 256 steps, minus final ones: the expert's steps are not counted.
    assert 256 <= script.load(tmp_path / "runs/a")["step"] < 512
    refused = run_recipe(run_script, "imitation", "none.npz", check=2)
    assert len(refused.lines) == 1 and "none.npz" in refused.stderr
    for size in 0, 1000:
        (tmp_path / "cut.npz").write_bytes((tmp_path / "expert.npz").read_bytes()[:size])
        refused = run_recipe(run_script, "imitation", "cut.npz", check=2)
        assert len(refused.lines) == 1 and "cut.npz cannot be imitated" in refused.stderr


@pytest.mark.slow
def test_evolution_survives_a_killed_member(tmp_path):
    """One generation of a member is killed; the best has trained for all generations nonetheless."""
    pytest.importorskip("ray")
    text = (ROOT / "docs/recipes/evolve.py").read_text()
    for old, new in {
        "MEMBERS, GENERATIONS, STEPS = 4, 5, 20_000": "MEMBERS, GENERATIONS, STEPS = 3, 3, 2_000",
        'str(Path(__file__).parent / "../..")': repr(str(ROOT)),
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "evolve.py").write_text(text)
    short = tempfile.mkdtemp(dir="/tmp")  # a socket's path has at most 107 bytes
    flags = "--env-id CartPole-v1 --mask-velocity --hidden-size 16 --eval-episodes 2 --run-name a"
    command = [
        sys.executable,
        str(tmp_path / "evolve.py"),
        *flags.split(),
        "--runs-dir",
        str(tmp_path),
    ]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": short}
        )
    killed = None
    while process.poll() is None:
        time.sleep(0.2)
        find = ["pgrep", "-f", f"rppo_lstm.py --resume {short}"]
        for pid in subprocess.run(find, capture_output=True, text=True).stdout.split():
            if killed is None:
                killed = int(pid)
                os.kill(killed, 9)
    output = (tmp_path / "log").read_text()
    assert process.returncode == 0 and killed, output[-2000:]
    assert MODULES["rppo_lstm"].load(tmp_path / "a/best")["step"] >= 6000


def test_evolution_refuses_what_it_would_ignore(run_script, tmp_path):
    pytest.importorskip("ray")
    run_script("rppo_lstm", *SHORT, "--run-name", "a", "--total-timesteps", 128)
    before = (tmp_path / "runs/a/agent.pt").read_bytes()
    for flags, says in {
        "--resume runs/a": "--resume, --play: only of rppo_lstm.py",
        "--num-minibatches 3": "--num-minibatches 3: must divide the 8 sequences of a rollout",
    }.items():
        refused = run_recipe(run_script, "evolve", *flags.split(), check=2)
        assert refused.lines == [f"error: {says}"]
    assert (tmp_path / "runs/a/agent.pt").read_bytes() == before
