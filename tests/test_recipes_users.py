"""What users of recipes ran into: each of these failed once."""

import csv
import inspect
import json
import os
import runpy
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from recipe_tools import FOLDER, driver, needs, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PENDULUM = {"env_id": "Pendulum-v1"}


def test_recipes_of_ones_own_keep_the_order_in_which_they_are_named(tmp_path, monkeypatch):
    for name in "own_b", "own_a", "own_c":
        (tmp_path / f"{name}.py").write_text("def use(script):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = driver.fresh("rppo_lstm", "own_b", "schedules", "own_a", "own_c", "own_a")
    assert script.SCRIPT == "rppo_lstm+schedules+own_b+own_a+own_c"


def test_a_recipe_may_be_applied_without_the_driver():
    for recipe in "networks", "stacked_lstm", "frame_stack", "critics", "long_memory":
        script = driver.fresh("rppo_lstm")
        __import__(recipe).use(script)
        assert vars(driver.fresh("rppo_lstm").Args()).keys() < vars(script.Args()).keys()


@pytest.mark.parametrize("recipes", ["schedules", "callbacks"])
def test_args_can_be_used_again(tmp_path, recipes):
    """A run changes what its schedules and its early end concern, but not for its caller."""
    script = driver.fresh("rppo_lstm", recipes)
    flags = dict(total_timesteps=600, num_envs=2, num_steps=16, num_minibatches=1, hidden_size=8)
    flags |= dict(eval_episodes=0, runs_dir=str(tmp_path))
    own = {
        "schedules": dict(learning_rate_schedule="linear", clip_coef_schedule="linear"),
        "callbacks": dict(stop_at_return=1.0, total_timesteps=10_000),
    }[recipes]
    args = script.Args(**{**flags, **own})
    before = dict(vars(args))
    for name in "a", "b":
        args.run_name = name
        script.train(args)
    assert vars(args) == before | {"run_name": "b"}
    a, b = (script.load(tmp_path / name) for name in "ab")
    assert a["step"] == b["step"] < 9000
    assert all(torch.equal(x, b["agent"][key]) for key, x in a["agent"].items())


def test_a_trained_agent_keeps_what_a_recipe_said_of_it(tmp_path):
    """A critic of its own needs four rows of states, after training as well."""
    script = driver.fresh("rppo_lstm", "critics")
    agent, _ = run(script, tmp_path, critic="separate")
    assert agent.args.separate_critic and len(agent.initial_state(1)) == 4
    agent.predict(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_eval_limit_returns_are_what_the_environment_gave(tmp_path, scale):
    needs("ppo1_mpi")
    script = driver.fresh("rppo_continuous", "ppo1_mujoco", "eval_limit")
    flags = dict(eval_steps=50, eval_episodes=3, reward_scale=scale, total_timesteps=64)
    agent, run_dir = run(script, tmp_path, **PENDULUM, **flags)
    evaluation = json.loads((run_dir / "result.json").read_text())["evaluation"]
    envs = driver.fresh("rppo_continuous").make_envs(agent.args, 3)
    obs, _ = envs.reset(seed=agent.args.seed)
    state, returns = None, np.zeros(3)
    for _ in range(50):
        action, state = agent.predict(obs, {}, state)
        obs, rewards, *_ = envs.step(action)
        returns += rewards
    assert evaluation == pytest.approx(returns.tolist(), rel=1e-5)


def test_reward_scale_counts_beside_ppo1_atari():
    for name in "ppo1_mpi", "rppo_gru_atari":
        needs(name)
    script = driver.fresh("ppo1_mpi", "ppo1_mujoco", "ppo1_atari")
    envs = script.make_envs(script.Args(env_id="ALE/Pong-v5", reward_scale=0.1), 1)
    envs.reset(seed=1)
    seen = {float(envs.step(np.zeros(1, int))[1][0]) for _ in range(200)}
    envs.close()
    assert sorted(seen) == pytest.approx([-0.1, 0.0])


class Both(gym.Env):
    observation_space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(3))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


SPACES = {
    "Dict": Both.observation_space,
    "Tuple": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3])]),
    "Discrete": spaces.Discrete(4, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": spaces.Box(-1, 1, (2, 2)),
}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("kind", SPACES)
def test_observations_are_one_or_a_batch_raw_or_flat(kind, n):
    from distributions import flattened

    space = SPACES[kind]
    space.seed(n)
    many = [space.sample() for _ in range(n)]
    batch = gym.vector.utils.concatenate(space, many, gym.vector.utils.create_empty_array(space, n))
    flat = np.float32([spaces.flatten(space, x) for x in many])
    for obs in batch, many, flat:
        rows, one = flattened(space, obs)
        assert not one and rows.dtype == np.float32 and np.array_equal(rows, flat)
    rows, one = flattened(space, many[0])
    assert one and np.array_equal(rows, flat[:1])
    if kind != "Discrete":  # (4,) could be the numbers of four environments
        rows, one = flattened(space, flat[0])
        assert one and np.array_equal(rows, flat[:1])
    if kind != "Box":
        with pytest.raises(ValueError, match="^obs is neither an observation of .* nor a batch"):
            flattened(space, {"c": np.zeros(n)})


def test_use_agent_takes_a_vector_environments_observations(tmp_path):
    from use_agent import Policy

    gym.register("Both-v0", Both)
    try:
        _, run_dir = run(driver.fresh("rppo_lstm"), tmp_path, env_id="Both-v0")
        policy = Policy(run_dir)
        obs, _ = gym.make_vec("Both-v0", 3, vectorization_mode="sync").reset(seed=1)
        assert policy.act(obs).shape == (3,) and policy.value(obs).shape == (3,)
    finally:
        del gym.registry["Both-v0"]


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete"])
def test_use_agent_takes_one_environments_mask(tmp_path, kind):
    """The mask of one environment, and that of a vector environment of one."""
    from use_agent import Policy

    space = spaces.Discrete(3) if kind == "Discrete" else spaces.MultiDiscrete([3, 2])
    mask = np.int8([0, 1, 0]) if kind == "Discrete" else np.int8([0, 1, 0, 1, 0])

    class Masked(Both):
        action_space = space

        def reset(self, **options):
            return super().reset(**options)[0], {"action_mask": mask.copy()}

        def step(self, action):
            return *super().step(0)[:4], {"action_mask": mask.copy()}

    gym.register("Masked-v0", Masked)
    try:
        _, run_dir = run(driver.fresh("rppo_lstm"), tmp_path, env_id="Masked-v0")
        policy = Policy(run_dir)
        obs, info = gym.make("Masked-v0").reset(seed=1)
        for of in info, {"action_mask": mask[None]}:
            action = policy.act(obs, of, deterministic=False)
            assert np.array_equal(action, 1 if kind == "Discrete" else [1, 0])
            shares = policy.probabilities(obs, of)[0]
            assert shares[0].tolist() == [0, 1, 0] and policy.density(obs, [action], of) == [1]
    finally:
        del gym.registry["Masked-v0"]


@pytest.mark.parametrize(("name", "recipe"), [
    ("rppo_lstm", "previous_action"), ("rppo_lstm", "frame_stack"), ("rppo_lstm", "image_frames"),
    ("rppo_continuous", "ppo1_mujoco"), ("rppo_lstm", "minigrid_memory"),
    ("rppo_lstm", "memory_gym_tasks"), ("ppo1_mpi", "ppo1_atari"), ("rppo_lstm", "callbacks"),
    ("rppo_lstm", "eval_limit"),
])  # fmt: skip
def test_what_a_recipe_replaces_takes_the_scripts_keywords(name, recipe):
    """make_envs(args, num_envs=...) and evaluate(..., deterministic=...), as of the plain script."""
    needs(name)
    module = {"minigrid_memory": "minigrid", "memory_gym_tasks": "memory_gym"}.get(recipe, "torch")
    pytest.importorskip(module)
    plain = driver.fresh(name)
    script = driver.fresh(name, recipe)
    replaced = 0
    for function in "make_envs", "evaluate":
        names = inspect.signature(getattr(plain, function)).parameters
        inspect.signature(getattr(script, function)).bind(**dict.fromkeys(names))
        replaced += getattr(script, function).__module__ != name
    assert replaced == 1


def test_keywords_reach_the_scripts_functions():
    script = driver.fresh("rppo_lstm", "previous_action", "frame_stack", "callbacks", "eval_limit")
    args = script.Args(env_id="CartPole-v1", hidden_size=8)
    agent = script.Agent(script.make_envs(args=args, num_envs=1), args)
    envs = script.make_envs(args, num_envs=2, render_mode="rgb_array")
    assert len(script.evaluate(agent, envs, seed=1, deterministic=False)) == 2


@pytest.mark.parametrize("squashed", [False, True])
def test_densities_of_actions_integrate_to_one(tmp_path, squashed):
    from use_agent import Policy

    script = driver.fresh("rppo_continuous", "squash")
    _, run_dir = run(script, tmp_path, squash_output=squashed, **PENDULUM)
    policy = Policy(run_dir)
    obs = np.tile(np.float32([[1, 0, 0.5]]), (20_000, 1))
    edge = 2 if squashed else 12
    actions = np.linspace(-edge, edge, 20_001)
    middles = (actions[1:] + actions[:-1]) / 2
    policy.state = policy.agent.initial_state(len(obs))
    density = policy.density(obs, middles)
    assert density.mean() * 2 * edge == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("squashed", [False, True])
def test_imitation_plays_the_experts_actions(tmp_path, squashed):
    """An expert that always plays 1.2, of actions from -2 to 2."""
    rng = np.random.default_rng(1)
    obs = rng.uniform(-1, 1, (400, 3)).astype(np.float32)
    file = tmp_path / "expert.npz"
    starts = np.arange(400) % 50 == 0
    np.savez(file, obs=obs, actions=np.full((400, 1), 1.2, np.float32), episode_starts=starts)
    script = driver.fresh("rppo_continuous", "squash", "imitation")
    args = script.Args(expert=str(file), clone_epochs=400, clone_learning_rate=1e-2, hidden_size=8,
                       squash_output=squashed, **PENDULUM)  # fmt: skip
    torch.manual_seed(1)
    agent = script.Agent(script.make_envs(args, 1), args)
    actions, _ = agent.predict(obs[:50])
    assert abs(actions.mean() - 1.2) < 0.15 and np.abs(actions - 1.2).max() < 0.3


def test_imitation_without_memory_learns_from_single_steps(tmp_path):
    from imitation import sequences

    file = tmp_path / "expert.npz"
    np.savez(file, obs=np.zeros((12, 4), np.float32), actions=np.zeros(12, np.int64),
             episode_starts=np.arange(12) % 6 == 0)  # fmt: skip
    script = driver.fresh("rppo_lstm", "imitation")
    for ablate, shape in {False: (6, 2), True: (1, 12)}.items():
        args = script.Args(ablate_memory=ablate, hidden_size=8)
        agent = script.Agent(script.make_envs(args, 1), args)
        assert sequences(agent, str(file))[2].shape == shape


def test_two_agents_of_one_script_may_differ_in_squash_output():
    script = driver.fresh("rppo_continuous", "squash")
    envs = script.make_envs(script.Args(**PENDULUM), 1)
    agents = []
    for squashed in True, False:
        torch.manual_seed(1)
        agents.append(script.Agent(envs, script.Args(squash_output=squashed, **PENDULUM)))
    squashing, plain = agents
    with torch.no_grad():
        for agent in agents:
            agent.actor.bias.fill_(0.5)
            agent.actor.weight.zero_()
    obs = np.zeros((1, 3), np.float32)
    assert squashing.predict(obs)[0].item() == pytest.approx(2 * np.tanh(0.5), rel=1e-5)
    assert plain.predict(obs)[0].item() == pytest.approx(0.5, rel=1e-5)


def test_evaluations_are_logged_between_rows_of_scalars(tmp_path):
    script = driver.fresh("rppo_lstm", "keep_best", "callbacks")
    flags = dict(eval_every=64, log_every=3, csv=True, total_timesteps=512)
    _, run_dir = run(script, tmp_path, **flags)
    events = EventAccumulator(str(run_dir)).Reload()
    logged = [x.step for x in events.Scalars("charts/eval_return")]
    rows = list(csv.DictReader(open(run_dir / "progress.csv")))
    assert [int(x["step"]) for x in rows if x["charts/eval_return"]] == logged
    assert len(logged) >= 6 and len(events.Scalars("losses/entropy")) < 4


def test_keep_best_takes_no_random_numbers_of_training(tmp_path):
    weights = []
    for recipes in (), ("keep_best",):
        script = driver.fresh("rppo_lstm", *recipes)
        own = {"eval_every": 64} if recipes else {}
        agent, _ = run(script, tmp_path, deterministic=False, total_timesteps=300, **own)
        weights.append(agent.state_dict())
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_a_resumed_run_has_each_step_once_in_its_csv_file(tmp_path):
    """What was played after the last agent.pt is played again."""
    script = driver.fresh("rppo_lstm", "scalars")
    _, run_dir = run(script, tmp_path, csv=True, total_timesteps=300, eval_episodes=0)
    saved = torch.load(run_dir / "agent.pt", weights_only=True)
    file = run_dir / "progress.csv"
    header, *rows = file.read_text().splitlines(keepends=True)
    lost = "".join(f"{saved['step'] + n}{row[row.index(',') :]}" for n, row in enumerate(rows, 1))
    file.write_text(header + "".join(rows) + lost + "12")  # killed while it wrote
    args = script.Args(**{**saved["args"], "resume": str(run_dir), "total_timesteps": 600})
    script.train(args)
    steps = [int(row["step"]) for row in csv.DictReader(open(file))]
    assert steps == sorted(set(steps)) and steps[: len(rows)] == [
        int(x.split(",")[0]) for x in rows
    ]
    assert steps[-1] >= 590


@pytest.mark.parametrize("critic", ["separate", "memoryless"])
def test_an_encoder_of_the_critics_own_on_atari(tmp_path, critic):
    """The CNN's weights lie in memory in another order than others."""
    needs("rppo_gru_atari")
    script = driver.fresh("rppo_gru_atari", "critics")
    agent, run_dir = run(script, tmp_path, critic=critic, share_encoder=False)
    own, other = agent.gru.encoder, agent.critic_gru.encoder
    pairs = [*zip(own.parameters(), other.parameters())]
    assert len(pairs) == 8
    for a, b in pairs:
        assert a.shape == b.shape and a.stride() == b.stride()
        assert a.dim() == 1 or not torch.allclose(a, b)
        if b.dim() > 1:
            rows = b.detach().flatten(1) / 2**0.5
            assert torch.allclose(rows @ rows.T, torch.eye(len(rows)), atol=0.05)


WRONG = {
    ("rppo_lstm", "long_memory", "longest", 2): "--longest 2: must be at least 3",
    (
        "rppo_lstm",
        "images",
        "cnn_channels",
        "32,a,64",
    ): "--cnn-channels '32,a,64': must be positive integers",
    ("rppo_lstm", "adam", "adam_beta1", 1.5): "--adam-beta1, --adam-beta2: must be from 0",
    ("rppo_lstm", "networks", "layers_before", "0"): "layers '0': must be positive integers",
    ("rppo_lstm", "critics", "critic", "seperate"): "--critic seperate: one of shared, detached",
    ("rppo_lstm", "activations", "activation", "x"): "--activation x: one of tanh, relu",
    ("trpo", "schedules", "clip_coef_schedule", "linear"): "--clip-coef-schedule: trpo has no",
}


@pytest.mark.parametrize("words", WRONG, ids=lambda words: " ".join(map(str, words)))
def test_wrong_values_are_answered_in_one_line(tmp_path, words):
    name, recipe, flag, value = words
    script = driver.fresh(name, recipe)
    with pytest.raises(script.ArgumentError) as refused:
        run(script, tmp_path, **{flag: value})
    assert str(refused.value).startswith(WRONG[words]) and "\n" not in str(refused.value)


def test_images_hide_the_warning_of_pixels_for_their_own_runs_alone(tmp_path, recwarn):
    flags = dict(env_id="Signs-v0", total_timesteps=64, eval_episodes=0)
    small = dict(cnn_channels="4,4,4", cnn_kernels="8,4,2")
    run(driver.fresh("rppo_lstm", "images"), tmp_path, **flags, **small)
    assert not [x for x in recwarn if "pixels" in str(x.message)]
    run(driver.fresh("rppo_lstm"), tmp_path, **flags)
    assert len([x for x in recwarn if "pixels" in str(x.message)]) == 1


def test_quiet_runs_are_played_quietly(run_script, tmp_path):
    script = driver.fresh("rppo_lstm", "callbacks")
    _, run_dir = run(script, tmp_path, quiet=True)
    played = run_script("docs/recipes/use", "--play", run_dir, "--render", "none")
    assert "episode" not in played.stderr and played.stdout.count("return") == 2


def test_a_flag_may_have_underscores_as_tyro_takes_them(monkeypatch):
    for words in (["--learning_rate", "0.5"], ["--learning_rate=0.5"], ["--learning-rate", "0.5"]):
        monkeypatch.setattr("sys.argv", ["evolve.py", "rppo_lstm", *words])
        assert driver.flag("learning-rate") == "0.5" and driver.flag("clip-coef") is None


def test_the_driver_has_help_and_says_what_it_cannot_find(tmp_path):
    def answer(program, *words):
        command = [sys.executable, str(program), *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    done = answer(FOLDER / "use.py", "--help")
    assert done.returncode == 0 and "python docs/recipes/use.py rppo_lstm" in done.stdout
    assert all(name in done.stdout.partition("Recipes: ")[2] for name in driver.RECIPES)
    (tmp_path / "use.py").write_text((FOLDER / "use.py").read_text())
    done = answer(tmp_path / "use.py", "rppo_lstm", "schedules")
    assert (done.returncode, done.stderr) == (2, "error: No module named 'rppo_lstm'\n")


@pytest.mark.parametrize(
    "name", ["distributions", "genes", "look_inside", "population", "record", "use_agent"]
)
def test_programs_that_take_a_run_have_help(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert not ended.value.code and f"python docs/recipes/{name}.py" in out


@pytest.mark.parametrize("name", ["poc_memory", "minigrid_memory"])
def test_a_recipe_that_is_a_program_registers_its_tasks_once(name, tmp_path):
    """Else Gymnasium warned of each, before anything else was printed."""
    if name == "minigrid_memory":
        pytest.importorskip("minigrid")
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 32 --eval-episodes 0"
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *flags.split()], cwd=tmp_path,
        capture_output=True, text=True, env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def one_line(words, tmp_path, code=2):
    """A program's only line of stderr, without "error: "."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=tmp_path, capture_output=True, text=True
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code and len(lines) == 1, done.stderr
    return lines[0].removeprefix("error: ")


def test_a_population_says_why_its_runs_failed(tmp_path):
    """Both attempts fail in the environment; nothing is scored, so nothing is printed but that."""
    (tmp_path / "boom.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Boom(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        raise RuntimeError('the boom')\n"
        "gym.register('Boom-v0', Boom)\n"
    )
    flags = ["rppo_lstm", "--env-id", "boom:Boom-v0", "--total-timesteps", 100, "--num-steps", 16]
    done = subprocess.run(
        [sys.executable, FOLDER / "population.py", "1", *map(str, flags)],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    said = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(said) == 2 and not done.stdout
    assert said[0].endswith("population/1 failed: RuntimeError: the boom")
    assert said[1] == "error: no run has a return"


@pytest.mark.parametrize(("words", "says"), [
    ("evolve.py rppo_lstm --tournament 5 --members 2", "--tournament: must be at most --members 2"),
    ("evolve.py rppo_lstm --generations 0", "--generations: must be at least 1"),
    ("population.py 0 rppo_lstm", "usage: population.py NUMBER"),
    ("population.py 1 rppo_lstm --eval-episodes 0", "--eval-episodes 0: no return to choose by"),
    ("use.py rppo_lstm networks, schedules", "separate recipes by commas, without spaces"),
])  # fmt: skip
def test_numbers_that_cannot_work_are_refused_before_any_work(tmp_path, words, says):
    program, *more = words.split()
    assert one_line([FOLDER / program, *more], tmp_path).startswith(says)
    assert not [*tmp_path.iterdir()]


def test_the_driver_refuses_another_scripts_run(tmp_path):
    _, run_dir = run(driver.fresh("rppo_lstm"), tmp_path)
    said = one_line([FOLDER / "use.py", "trpo.py", "--resume", run_dir], tmp_path)
    assert said == f"{run_dir} is a run of rppo_lstm, not of trpo"


def test_an_expert_of_few_episodes_or_of_actions_with_two_axes(tmp_path, monkeypatch):
    """record.py completes the file's name; one episode is too few; starts count for each axis."""
    from record import record

    class Two(Both):
        action_space = spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[1, 0], [5, 2]])

        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(0)

    gym.register("Two-v0", Two)
    monkeypatch.chdir(tmp_path)
    try:
        _, run_dir = run(driver.fresh("rppo_lstm"), tmp_path, env_id="Two-v0")
        with pytest.raises(ValueError, match="^0 episodes: must be at least 1"):
            record(str(run_dir), "none", 0)
        record(str(run_dir), "many", 8)
        record(str(run_dir), "one.npz", 1)
        script = driver.fresh("rppo_lstm", "imitation")
        flags = dict(env_id="Two-v0", clone_epochs=1)
        run(script, tmp_path, expert="many.npz", **flags)
        with pytest.raises(ValueError, match="two episodes or more"):
            run(script, tmp_path, expert="one.npz", **flags)
    finally:
        del gym.registry["Two-v0"]


def test_a_recorded_episode_ends_at_the_limit_of_evaluations(tmp_path, monkeypatch):
    """The environment never ends one; the file has the return until then."""
    from record import record

    class Endless(Both):
        def step(self, action):
            obs, _, _, _, info = super().step(action)
            return obs, 0.5, False, False, info

    gym.register("Endless-v0", Endless)
    monkeypatch.chdir(tmp_path)
    try:
        script = driver.fresh("rppo_lstm", "eval_limit")
        _, run_dir = run(script, tmp_path, env_id="Endless-v0", eval_steps=7)
        record(str(run_dir), "expert", 3)
        with np.load("expert.npz") as file:
            assert file["episode_returns"].tolist() == [3.5] * 3
            assert np.flatnonzero(file["episode_starts"]).tolist() == [0, 7, 14]
            assert len(file["rewards"]) == 21
    finally:
        del gym.registry["Endless-v0"]


def test_empty_files_of_recipes_do_not_stop_a_resumed_run(tmp_path):
    """A full disk leaves them behind."""
    script = driver.fresh("rppo_lstm", "scalars", "keep_best")
    flags = dict(csv=True, eval_every=64)
    _, run_dir = run(script, tmp_path, **flags)
    assert not (run_dir / "best/agent.tmp").exists()
    for name in "progress.csv", "best/return.txt":
        (run_dir / name).write_text("")
    args = script.Args(**{**script.load(run_dir)["args"], "total_timesteps": 400})
    args.resume = str(run_dir)
    script.train(args)
    assert float((run_dir / "best/return.txt").read_text()) > 0
    assert len((run_dir / "progress.csv").read_text().splitlines()) > 2


def test_images_that_no_cnn_can_read_are_refused(tmp_path):
    class Floats(Both):
        observation_space = spaces.Box(0, 1, (40, 40, 3))

    gym.register("Floats-v0", Floats)
    try:
        with pytest.raises(ValueError, match="^images: no uint8 image with three axes$"):
            run(driver.fresh("rppo_lstm", "images"), tmp_path, env_id="Floats-v0")
    finally:
        del gym.registry["Floats-v0"]
