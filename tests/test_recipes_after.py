"""Programs for a trained agent: use_agent, export_onnx, imitation, look_inside, sb3_weights."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium import spaces
from recipe_tools import Sampled, build, driver, needs, run, sampled
from torch.distributions import Categorical, Independent, Normal

KINDS = {  # script, recipes, flags: agents of every kind
    "lstm": ("rppo_lstm", [], dict(env_id="CartPole-v1", mask_velocity=True)),
    "dict": ("rppo_lstm", ["images", "multi_discrete"], dict(env_id="Signs-v0", grey=True)),
    "trpo": ("trpo", ["images"], dict(env_id="BoxSigns-v0", memory="lstm")),
    "masks": ("ppo1_mpi", ["action_masks"], dict(env_id="Masked-v0")),
    "squash": ("rppo_continuous", ["squash"], dict(env_id="Pendulum-v1", squash_output=True)),
    "tuple": ("trpo", ["images", "stacked_lstm"], dict(env_id="Colours-v0", memory="lstm")),
}


# --- use_agent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_with_raw_observations_acts_as_the_environments_of_training_do(kind, tmp_path):
    """For one observation at a time, with its masks; images are transformed once."""
    name, recipes, flags = KINDS[kind]
    needs(name)
    _, run_dir = run(driver.fresh(name, *recipes), tmp_path, eval_episodes=0, **flags)
    policy = driver.recipe("use_agent").Policy(run_dir)
    env = gym.make(policy.args.env_id, disable_env_checker=True)
    _, _, envs, agent, _ = driver.open_run(run_dir)
    obs, info = env.reset(seed=5)
    rows, _ = envs.reset(seed=5)
    state = None
    for _ in range(12):
        value = policy.value(obs, info)
        action = policy.act(obs, info)
        wanted, next_state = agent.predict(rows, state)
        assert np.array_equal(action, wanted[0])
        seen, values = driver.recipe("use_agent").look(policy.script, agent, rows, state)
        assert values.item() == pytest.approx(value.item(), rel=1e-5)
        state = next_state
        obs, _, terminated, truncated, info = env.step(np.copy(action))
        rows, _, _, _, _ = envs.step(wanted)
        if terminated or truncated:
            break
    assert torch.equal(policy.state, state)
    policy.reset()
    assert policy.state is None


def test_probabilities_and_densities(tmp_path):
    """Of choices they are softmax's and sum to 1; of squashed numbers the density's integral is 1."""
    use_agent = driver.recipe("use_agent")
    _, run_dir = run(driver.fresh("rppo_lstm"), tmp_path, env_id="CartPole-v1")
    policy = use_agent.Policy(run_dir)
    batch = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    p = policy.probabilities(batch)
    log_pi, _, _ = policy.agent.step(torch.from_numpy(batch), policy.agent.initial_state(5))
    assert np.abs(p - log_pi.exp().detach().numpy()).max() < 1e-6 and p.shape == (5, 2)
    assert np.allclose(policy.density(batch, np.ones(5, int)), p[:, 1])
    flags = dict(env_id="Pendulum-v1", squash_output=True)
    _, run_dir = run(driver.fresh("rppo_continuous", "squash"), tmp_path, **flags)
    policy = use_agent.Policy(run_dir)
    places = np.linspace(-2, 2, 4001)[1:-1]
    rows = np.repeat(batch[:1, :3], len(places), 0)
    assert np.trapezoid(policy.density(rows, places[:, None]), places) == pytest.approx(1, abs=0.01)
    mean, std = policy.probabilities(rows[:1])
    assert mean.shape == std.shape == (1, 1) and std > 0
    with pytest.raises(ValueError, match="neither an observation of"):
        use_agent.flattened(spaces.Dict(a=spaces.Discrete(2)), {"b": 1})


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_look_is_what_training_computes(name):
    """Log-probabilities and values as evaluate_actions, or trpo's forward, gives them."""
    needs(name)
    script = driver.fresh(name)
    box = name == "rppo_continuous"
    space = spaces.Box(-1, 1, (2,)) if box else spaces.Discrete(3)
    flags = dict(memory="lstm") if hasattr(script.Args, "memory") else {}
    agent = build(script, space, **flags)
    torch.manual_seed(1)
    obs = torch.randn(4, 3)
    state = torch.randn_like(agent.initial_state(4))
    policy, value = driver.recipe("use_agent").look(script, agent, obs.numpy(), state)
    assert isinstance(policy, Independent if box else Categorical)
    actions = policy.sample().clone()
    final = torch.zeros(1, 4, dtype=torch.bool)
    if name == "trpo":
        again = agent(agent.normalize(obs[None]), state, final, ~final)
        logprob = again.log_prob(actions)
    else:
        logprob, _, replayed = agent.evaluate_actions(obs[None], state, final, actions[None])
        assert (replayed - value).abs().max() < 1e-5
    assert (logprob - policy.log_prob(actions)).abs().max() < 1e-5
    assert isinstance(policy.base_dist, Normal) if box else True


def test_agents_that_see_earlier_steps_are_refused(tmp_path):
    _, run_dir = run(driver.fresh("rppo_lstm", "previous_action"), tmp_path, env_id="CartPole-v1")
    with pytest.raises(ValueError, match="also sees earlier steps"):
        driver.recipe("use_agent").Policy(run_dir)


# --- export_onnx -----------------------------------------------------------------------------------


BYTES = sampled(spaces.Discrete(2), spaces.Box(0, 255, (3,), np.uint8))


@pytest.mark.parametrize(
    "name, recipes, flags",
    [
        ("rppo_lstm", ["networks", "action_masks"], dict(env_id="Masked-v0", critic="separate")),
        ("rppo_lstm", [], dict(env_id=BYTES, norm_obs=True)),
        ("trpo", ["multi_discrete", "images"], dict(env_id="Signs-v0")),
        ("rppo_continuous", ["sde"], dict(env_id="Pendulum-v1", use_sde=True)),
    ],
)
def test_a_file_acts_as_the_agent_does(name, recipes, flags, tmp_path):
    """One file, weights and all; its state goes in and out."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    _, run_dir = run(driver.fresh(name, *recipes), tmp_path, **flags)
    (tmp_path / "onnx").mkdir()
    file = tmp_path / "onnx/agent.onnx"
    driver.recipe("export_onnx").export(str(run_dir), str(file))
    assert [path.name for path in file.parent.iterdir()] == ["agent.onnx"]
    session = runtime.InferenceSession(str(file))
    script, _, envs, agent, _ = driver.open_run(run_dir)
    state = None
    fed = agent.initial_state(1).numpy()
    obs, _ = envs.reset(seed=1)
    names = [x.name for x in session.get_inputs()]
    for _ in range(20):
        wanted, state = agent.predict(obs, state)
        inputs = {"obs": np.float32(obs), "state": fed}
        action, fed = session.run(None, {name: inputs[name] for name in names})
        sent = script.to_env(torch.from_numpy(action), agent.action_space)
        assert np.allclose(sent, wanted, atol=1e-5) and np.allclose(fed, state, atol=1e-5)
        obs = envs.step(wanted)[0]


# --- imitation -------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_was_played(tmp_path):
    """An environment that writes into its actions; rewards are the actions that it got."""
    _, run_dir = run(driver.fresh("rppo_continuous"), tmp_path, env_id="InPlace-v0")
    driver.recipe("imitation").record(str(run_dir), str(tmp_path / "expert"), 3)
    with np.load(tmp_path / "expert.npz") as file:
        assert np.allclose(file["actions"][:, 0], file["rewards"]) and len(file["obs"]) == 30
        assert np.flatnonzero(file["episode_starts"]).tolist() == [0, 10, 20]
        assert file["episode_returns"] == pytest.approx(file["rewards"].reshape(3, 10).sum(1))


@pytest.mark.parametrize(
    "name, recipes, space",
    [
        ("rppo_lstm", ["multi_discrete"], spaces.MultiBinary(2)),
        ("ppo1_mpi", ["multi_discrete"], spaces.MultiDiscrete([2, 2], np.uint8)),
        ("trpo", [], spaces.Discrete(2, start=3)),
        ("rppo_continuous", [], spaces.Box(-1, 1, (2,))),
    ],
)
def test_cloning_learns_an_experts_rule(name, recipes, space, tmp_path):
    """Every component is whether the observation's first number is positive."""
    needs(name)
    random = np.random.default_rng(1)
    obs = random.normal(size=(400, 2)).astype(np.float32)
    rule = np.repeat(obs[:, :1] > 0, int(np.prod(space.shape or 1)), 1)
    first = 3 if isinstance(space, spaces.Discrete) else 0
    actions = (rule + first).reshape(400, *space.shape)
    actions = 0.5 * actions - 0.25 if isinstance(space, spaces.Box) else actions
    starts = np.arange(400) % 20 == 0
    rows = dict(obs=obs, actions=actions.astype(space.dtype), episode_starts=starts)
    np.savez(tmp_path / "e.npz", **rows)
    script = driver.fresh(name, "imitation", *recipes)
    flags = dict(expert=str(tmp_path / "e.npz"), clone_epochs=40, clone_learning_rate=3e-3)
    flags |= dict(env_id=sampled(space), total_timesteps=1, learning_rate=0.0)
    agent, _ = run(script, tmp_path, **flags)
    found, _ = agent.predict(obs[:100])
    if isinstance(space, spaces.Box):
        assert np.abs(found - actions[:100]).mean() < 0.1
    else:
        assert (found == actions[:100]).mean() > 0.95


# --- look_inside -----------------------------------------------------------------------------------


class Two(nn.Module):
    """A memory of the present input and of the one before, or, where it must forget, the present
    one twice: h (N, 2 F). Its state is the last input and whether there was one."""

    def __init__(self, inputs: int, forgets: bool):
        super().__init__()
        self.inputs, self.forgets = inputs, forgets

    def initial_state(self, num_envs):
        return torch.zeros(2, num_envs, self.inputs)

    def step(self, x, state):
        before = x if self.forgets else torch.where(state[1] > 0, state[0], x)
        return torch.cat([x, before], -1), torch.stack([x, torch.ones_like(x)])


def test_a_velocity_that_is_a_difference_is_read_exactly():
    """MountainCar's velocity is its position less the one before. A memory of both has it; a memory
    of the present position alone has not."""
    look_inside = driver.recipe("look_inside")
    script = driver.fresh("rppo_lstm")
    args = script.Args(env_id="MountainCar-v0", mask_velocity=True, hidden_size=4)
    r2s = []
    for forgets in False, True:
        agent = script.Agent(script.make_envs(args, 1), args)
        agent.encoder, agent.lstm = nn.Identity(), Two(2, forgets)
        obs, actions, steps = look_inside.play(script, args, agent, episodes=6)
        h = look_inside.remember(agent, obs)
        assert h.shape == (201, 6, 4) and steps.all()
        hidden = look_inside.velocities(script, args, actions)["velocity"]
        assert (obs[..., 1] == 0).all()
        assert np.abs(hidden[1:] - np.diff(obs[..., :1], axis=0)).max() < 1e-6
        r2s.append(look_inside.decode(h, hidden, steps, ridge=1e-9)[1])
    assert r2s[0] == pytest.approx(1, abs=1e-5) and r2s[1] < 0.5


def test_the_regression_reads_half_of_the_environments_only():
    """Of the variance, half is noise: R^2 is 1 / 2. What is held out or no step has no influence."""
    decode = driver.recipe("look_inside").decode
    random = np.random.default_rng(1)
    h = random.normal(size=(300, 8, 5))
    signal = (h @ random.normal(size=(5, 1))) / 5**0.5
    y = 3 + signal / signal.std() + random.normal(size=(300, 8, 1))
    steps = random.random((300, 8)) < 0.5
    h[~steps] = y[~steps] = np.nan
    guess, r2 = decode(h, y, steps)
    assert r2 == pytest.approx(0.5, abs=0.08)
    other = y.copy()
    other[:, 4:] = 7 * y[:, 4:]
    again, _ = decode(h, other, steps)
    assert np.array_equal(guess[steps], again[steps])
    constant, r2 = decode(np.where(steps[..., None], 1.0, np.nan), y, steps)
    assert constant[steps].std() < 1e-9 and r2 == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(
    "name, recipes, flags, says",
    [
        ("rppo_lstm", ["stacked_lstm"], dict(mask_velocity=True), "cart's velocity: R^2"),
        ("rppo_lstm", ["networks"], dict(critic="separate"), "8 steps back: R^2"),
        ("trpo", [], dict(memory="lstm"), "8 steps back: R^2"),
        ("ppo1_mpi", [], dict(memory="lstm", mask_velocity=True), "pole's angular velocity: R^2"),
    ],
)
def test_what_runs_of_every_kind_remember(name, recipes, flags, says, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    needs(name)
    _, run_dir = run(driver.fresh(name, *recipes), tmp_path, env_id="CartPole-v1", **flags)
    capsys.readouterr()
    figure = driver.recipe("look_inside").look(run_dir)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(says) for line in lines)
    assert max(float(line.split()[-1]) for line in lines) <= 1
    assert (figure is not None) == bool(flags.get("mask_velocity"))


def test_reused_observations_are_copied():
    """Every observation is the same array, which the environment overwrites."""
    script = driver.fresh("rppo_lstm")
    args = script.Args(env_id="CartPole-v1")
    envs = script.make_envs(args, 3)
    step, reused = envs.step, np.zeros((3, 4), np.float32)

    def overwrites(actions):
        obs, *others = step(actions)
        reused[:] = obs
        return reused, *others

    agent = script.Agent(envs, args)
    envs.step = overwrites
    script.make_envs = lambda *_: envs
    obs, _, _ = driver.recipe("look_inside").play(script, args, agent, episodes=3)
    assert len(np.unique(obs[1:9, 0, 0])) == 8


# --- sb3_weights -----------------------------------------------------------------------------------


def same_actions(agent, envs, model, normalize=lambda obs: obs, steps: int = 250) -> None:
    """Over episodes, both with their memories; agent's actions are played."""
    obs, _ = envs.reset(seed=3)
    state = theirs = final = None
    start = np.ones(envs.num_envs, bool)
    for _ in range(steps):
        ours, state = agent.predict(obs, state, final)
        action, theirs = model.predict(normalize(obs), theirs, start, deterministic=True)
        assert np.allclose(ours, action, atol=1e-4)
        start = np.zeros(envs.num_envs, bool) if final is None else final
        obs, _, terminated, truncated, _ = envs.step(ours)
        final = terminated | truncated


@pytest.mark.parametrize(
    "env_id, critic, options",
    [
        ("CartPole-v1", dict(enable_critic_lstm=True), dict(net_arch=[8], n_lstm_layers=2)),
        ("CartPole-v1", dict(enable_critic_lstm=False, shared_lstm=True),
         dict(net_arch=dict(pi=[8, 4], vf=[6]), activation_fn=nn.LeakyReLU)),
        ("Pendulum-v1", dict(enable_critic_lstm=False), dict(net_arch=[], use_expln=True)),
    ],
)  # fmt: skip
def test_a_model_of_sb3_acts_the_same_here_and_back_there(env_id, critic, options, tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    kwargs = dict(lstm_hidden_size=12, **critic, **options)
    sde = dict(use_sde=True) if "use_expln" in options else {}
    model = contrib.RecurrentPPO("MlpLstmPolicy", env_id, policy_kwargs=kwargs, seed=1, **sde)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(tmp_path / "model.zip")
    recipe = driver.recipe("sb3_weights")
    recipe.convert(str(tmp_path / "model.zip"), env_id, str(tmp_path / "run"))
    script, args, _, agent, _ = driver.open_run(tmp_path / "run")
    envs = script.make_envs(args, 4)
    same_actions(agent, envs, model)
    recipe.convert_back(str(tmp_path / "run"), str(tmp_path / "back.zip"))
    back = contrib.RecurrentPPO.load(tmp_path / "back.zip")
    same_actions(agent, envs, back)
    for name, value in model.policy.state_dict().items():
        assert torch.equal(value, back.policy.state_dict()[name]), name


@pytest.mark.parametrize("norm_obs", [True, False])
def test_statistics_and_hyperparameters_go_there_and_back(tmp_path, norm_obs):
    """VecNormalize's statistics on the way here; on the way back they and the encoder are in the zip
    file."""
    contrib = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    venv = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_obs=norm_obs)
    small = dict(lstm_hidden_size=8, net_arch=[])
    model = contrib.RecurrentPPO(
        "MlpLstmPolicy", venv, learning_rate=lambda left: 3e-4 * left, n_steps=64, n_epochs=3,
        clip_range=0.1, policy_kwargs=small, seed=1,
    )  # fmt: skip
    model.learn(256)
    model.save(tmp_path / "model.zip")
    venv.save(str(tmp_path / "vec.pkl"))
    recipe = driver.recipe("sb3_weights")
    model_file, run_dir, statistics = (str(tmp_path / x) for x in ("model.zip", "run", "vec.pkl"))
    recipe.convert(model_file, "CartPole-v1", run_dir, statistics)
    script, args, _, agent, _ = driver.open_run(run_dir)
    assert agent.return_stats.var == pytest.approx(venv.ret_rms.var)
    assert (args.norm_obs, args.norm_reward) == (norm_obs, True)
    assert (args.learning_rate, args.anneal_lr, args.vf_coef) == (3e-4, False, 1.0)
    assert (args.clip_coef, args.update_epochs) == (0.1, 3)
    same_actions(agent, script.make_envs(args, 4), model, venv.normalize_obs)
    script = driver.fresh("rppo_lstm")
    _, run_dir = run(script, tmp_path, env_id="CartPole-v1", norm_obs=True)
    recipe.convert_back(str(run_dir), str(tmp_path / "ours.zip"))
    script, args, _, agent, _ = driver.open_run(run_dir)
    same_actions(agent, script.make_envs(args, 4), contrib.RecurrentPPO.load(tmp_path / "ours.zip"))


def test_what_is_not_converted_is_named(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    recipe = driver.recipe("sb3_weights")

    def refused(env, says, **options):
        model = contrib.RecurrentPPO("MlpLstmPolicy", env, **options)
        model.save(tmp_path / "m.zip")
        with pytest.raises(ValueError, match=says):
            recipe.convert(str(tmp_path / "m.zip"), "CartPole-v1", str(tmp_path / "no"))

    contrib.TRPO("MlpPolicy", "CartPole-v1").save(tmp_path / "m.zip")
    with pytest.raises(ValueError, match="isn't RecurrentPPO's"):
        recipe.convert(str(tmp_path / "m.zip"), "CartPole-v1", str(tmp_path / "no"))
    picture = Sampled(spaces.Discrete(2), spaces.Box(0, 255, (36, 36, 3), np.uint8))
    refused(picture, "divides images by 255")
    refused(Sampled(spaces.MultiDiscrete([2, 2])), "only Discrete and Box")
    refused(Sampled(spaces.Discrete(3)), "CartPole-v1 has actions")
    bias = dict(lstm_kwargs=dict(bias=False))
    refused(Sampled(spaces.Discrete(2)), "only an LSTM with biases", policy_kwargs=bias)
    activation = dict(activation_fn=nn.Softplus)
    refused(Sampled(spaces.Discrete(2)), "Softplus: not one of", policy_kwargs=activation)
    _, run_dir = run(driver.fresh("rppo_lstm", "previous_action"), tmp_path, env_id="CartPole-v1")
    with pytest.raises(ValueError, match="previous_action has no counterpart"):
        recipe.convert_back(str(run_dir), str(tmp_path / "m.zip"))
