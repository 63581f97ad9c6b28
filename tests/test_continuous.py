"""rppo_continuous.py: the Gaussian, gSDE and running statistics, against what defines each."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, awkward_ends, toy
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

SCRIPT = "rppo_continuous"
module = MODULES[SCRIPT]
BOX = spaces.Box(-1, 1, (2,), np.float32)
BOXES = {
    "vector": BOX,
    "float64 matrix": spaces.Box(
        np.array([[-1.0, 0], [2, -3]]), np.array([[1.0, 5], [4, -2.5]]), dtype=np.float64
    ),
    "half a bound": spaces.Box(-np.inf, np.float32([np.inf, 0.5, np.inf]), (3,), np.float32),
    "scalar, float16": spaces.Box(-0.1, 0.3, (), np.float16),
}  # fmt: skip
POLICIES = {
    "gaussian": {},
    "gSDE": {"use_sde": True},
    "gSDE, redrawn": {"use_sde": True, "sde_sample_freq": 3},
    "raw observations": {"norm_obs": False},
    "separate critic, gSDE": {"separate_critic": True, "use_sde": True},
    "short sequences": {"seq_len": 8},
    "no memory": {"ablate_memory": True},
    "no memory, gSDE": {"ablate_memory": True, "use_sde": True},
}


class Scales(gym.ObservationWrapper):
    """Toy's observations, one large and far from 0, one small, one constant."""

    def observation(self, obs):
        return (obs * [100, 0.01, 0] + [5000, -3, 7]).astype(np.float32)


@pytest.fixture(scope="module")
def env_id():
    return toy(action_space=BOX, observation_space=spaces.Box(-1, 1, (3,), np.float32))


@pytest.fixture(autouse=True)
def scales(monkeypatch):
    """Environments of this file's runs have observations on three scales."""
    real = gym.make_vec

    def make_vec(*inputs, **options):
        return real(*inputs, wrappers=[Scales], **options)

    monkeypatch.setattr(gym, "make_vec", make_vec)


def build(action_space=BOX, dtype=torch.float32, **flags):
    """An agent for observations (N, 3), whose weights, also biases, are not close to 0."""
    torch.manual_seed(1)
    args = module.Args(**{"encoder_size": 5, "hidden_size": 6, **flags})
    envs = gym.vector.VectorEnv()
    envs.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    envs.single_action_space = action_space
    agent = module.Agent(envs, args).to(dtype)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent


def played(seen):
    """What a watched run's training played -> obs (R, T, N, 3), final (R, T, N) of R rollouts; the
    steps that ended an episode are those before final ones."""
    T, N = seen.args.num_steps, seen.args.num_envs
    obs = np.stack([seen.resets[0][0], *(step[1] for step in seen.env[:-1])])
    ended = np.stack([np.zeros(N, bool), *(step[3] | step[4] for step in seen.env[:-1])])
    return obs.reshape(-1, T, N, 3), ended.reshape(-1, T, N)


# --- the Gaussian ---


@pytest.mark.parametrize("sde", [False, True])
def test_density_is_the_multivariate_normals(sde):
    """In float64, with the covariance of its definition: diag(sigma^2), or that of h @ noise."""
    agent = build(dtype=torch.float64, use_sde=sde)
    h, action = torch.randn(7, 5, 6, dtype=torch.float64), torch.randn(7, 5, 2, dtype=torch.float64)
    sigma = agent.log_std.exp()
    variance = (h**2 @ sigma**2 + 1e-6) if sde else (sigma**2).expand(7, 5, 2)
    reference = torch.distributions.MultivariateNormal(agent.actor(h), torch.diag_embed(variance))
    policy = agent.policy(h)
    assert policy.log_prob(action).shape == policy.entropy().shape == (7, 5)
    assert (policy.log_prob(action) - reference.log_prob(action)).abs().max() <= 1e-12
    assert (policy.entropy() - reference.entropy()).abs().max() <= 1e-12


def test_standard_deviation_starts_as_told_and_is_the_same_in_every_state(env_id):
    envs = module.make_envs(module.Args(env_id=env_id), 1)
    policy = module.Agent(envs, module.Args(log_std_init=-1.5)).policy(torch.randn(4, 5, 128))
    assert torch.allclose(policy.stddev, torch.full((4, 5, 2), -1.5).exp())
    assert policy.mean.abs().max() < 0.3  # the policy's layer starts small


@pytest.mark.parametrize("sde", [False, True])
def test_acting_samples_the_policy(sde):
    """100,000 environments in one state: mean, standard deviations and no correlation."""
    agent, n = build(use_sde=sde), 100_000
    h = torch.randn(1, 6).expand(n, 6)
    with torch.no_grad():
        noise, policy = agent.sample_noise(n), agent.policy(h)
        z = (agent.act(h, noise) - policy.mean) / policy.stddev
    assert noise.shape == ((n, 6, 2) if sde else (n, 2))
    assert (noise.std(0) / agent.log_std.exp() - 1).abs().max() < 5 / (2 * n) ** 0.5
    assert z.mean(0).abs().max() < 5 / n**0.5
    assert (z.std(0) - 1).abs().max() < 5 / (2 * n) ** 0.5
    assert (z[:, 0] * z[:, 1]).mean().abs() < 5 / n**0.5


@pytest.mark.parametrize("name", BOXES)
def test_the_environment_gets_clipped_actions_of_its_shape_and_type(name):
    space = BOXES[name]
    components = spaces.flatdim(space)
    actions = torch.randn(9, components) * 10
    taken = module.to_env(actions, space)
    assert taken.dtype == space.dtype and batch_space(space, 9).contains(taken)
    expected = np.maximum(np.minimum(actions.numpy(), space.high.ravel()), space.low.ravel())
    assert np.array_equal(taken.reshape(9, -1), expected.astype(space.dtype))
    agent = build(space)
    for deterministic in True, False:
        action, state = agent.predict(np.ones((9, 3), np.float32), deterministic=deterministic)
        assert batch_space(space, 9).contains(action) and state.shape == (2, 9, 6)


@pytest.mark.parametrize("name", ["gaussian", "gSDE"])
def test_the_unclipped_action_is_stored_the_clipped_one_played(name, env_id, watch):
    flags = {"num_envs": 2, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1}
    seen = watch(SCRIPT, env_id, total_timesteps=20, log_std_init=2.0, **flags, **POLICIES[name])
    (_, _, _, stored), _, rollout = seen.replays[0]
    assert rollout == 0 and stored.shape == (16, 2, 2)
    taken = np.stack([step[0] for step in seen.env[:16]])
    order = [0, 1] if np.array_equal(stored[:, 0].numpy().clip(-1, 1), taken[:, 0]) else [1, 0]
    assert np.array_equal(stored.numpy().clip(-1, 1), taken[:, order])
    assert 0.1 < (stored.abs() > 1).float().mean() < 0.9


@pytest.mark.parametrize(
    "space, advice",
    [
        (spaces.Discrete(3), "try rppo_lstm.py"),
        (spaces.MultiDiscrete([2, 3]), "try rppo_lstm.py"),
        (spaces.MultiBinary(3), "try rppo_lstm.py"),
        (spaces.Box(0, 9, (2,), np.int64), "use MultiDiscrete for integers, else a float Box"),
        (spaces.Box(0, 5, (2,), np.uint8), "use MultiDiscrete for integers, else a float Box"),
        (spaces.Dict(a=BOX), "use MultiDiscrete for integers, else a float Box"),
        (spaces.Tuple([BOX, spaces.Discrete(2)]), "use MultiDiscrete for integers, else"),
    ],
    ids=str,
)
def test_other_actions_are_refused(space, advice):
    with pytest.raises(module.ArgumentError, match=advice):
        build(space)


@pytest.mark.parametrize(
    "low, high, far",
    [
        (300, 500, True),
        (-11, 1, True),
        (0, 1e6, True),
        (0, 0.05, True),
        (20, np.inf, True),
        ([-1, -1], [1, 255], True),
        ([-1, 0], [1, 0.01], True),
        (-2, 2, False),
        (-10, 10, False),
        (0, 0.1, False),
        (-np.inf, np.inf, False),
        (0, np.finfo(np.float32).max, False),
    ],
    ids=str,
)
def test_actions_far_from_1_are_warned_of_once(low, high, far, recwarn):
    space = spaces.Box(np.float32(low), np.float32(high), np.shape(low), np.float32)
    build(space)
    warned = [str(warning.message) for warning in recwarn]
    text = f"actions of {space}: far from [-1, 1]; use gymnasium.wrappers.RescaleAction"
    assert warned == [text] * far


def test_rescaled_actions_reach_the_whole_of_a_far_box(recwarn):
    """What the warning advises: 0 is the middle of the bounds, and there is no warning."""
    env_id = toy(action_space=spaces.Box(300, 500, (2,), np.float32))
    gym.register("Near-v0", lambda: gym.wrappers.RescaleAction(gym.make(env_id), -1, 1))
    envs = module.make_envs(module.Args(env_id="Near-v0"), 3)
    agent = module.Agent(envs, module.Args())
    obs, _ = envs.reset(seed=1)
    action, _ = agent.predict(obs)
    envs.step(action)  # a Toy asserts that its space contains the action
    assert np.abs(action).max() < 0.1 and not len(recwarn)


class NaN(gym.Env):
    """Its fifth step's observation has a NaN. It keeps what it is told to do."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    told: list[float] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        self.told.extend(action.tolist())
        obs = np.array([0, np.nan if self.t == 5 else 0, 0], np.float32)
        return obs, 1.0, False, False, {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_observation_of_nan_makes_no_action(asynchronous, tmp_path, monkeypatch):
    monkeypatch.setattr(NaN, "told", [])
    gym.register(f"NaN{asynchronous}-v0", NaN)
    flags = {"async_envs": asynchronous, "runs_dir": str(tmp_path), "num_envs": 4}
    with pytest.raises(FloatingPointError, match=r"^obs\[0, 1\] is nan$"):
        module.train(module.Args(env_id=f"NaN{asynchronous}-v0", **flags))
    assert len(NaN.told) == (0 if asynchronous else 5 * 4) and np.isfinite(NaN.told).all()


@pytest.mark.parametrize("sde", [False, True])
def test_weights_of_nan_act_in_no_environment(sde):
    """An update may end in weights that are not finite, though its losses were."""
    agent = build(use_sde=sde)
    obs = np.ones((4, 3), np.float32)
    with torch.no_grad():
        agent.actor.bias[1] = np.nan
    for deterministic in True, False:
        with pytest.raises(FloatingPointError, match=r"^actions\[0, 1\] is nan$"):
            agent.predict(obs, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_predict_plays_as_a_loop_over_steps_does(name, deterministic):
    """The state goes on, and is zero after a final step; sampled actions are those of new noise."""
    agent = build(**POLICIES[name])
    obs = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    final = np.zeros((6, 4), bool)
    final[2, 1] = final[3, :3] = final[4, 0] = True
    state, expected = None, agent.initial_state(4)
    for t in range(6):
        torch.manual_seed(t)
        action, state = agent.predict(obs[t], {}, state, final[t], deterministic)
        with torch.no_grad():
            h, _, expected = agent.step(torch.as_tensor(obs[t]), expected)
            torch.manual_seed(t)
            actions = agent.actor(h) if deterministic else agent.act(h, agent.sample_noise(4))
        expected[:, final[t]] = 0
        assert np.array_equal(action, actions.clamp(-1, 1).numpy())
        assert torch.equal(state, expected)
        assert state.any() == (not agent.args.ablate_memory)


# --- gSDE ---


def test_gsdes_noise_sends_no_gradient_to_the_lstm():
    """The entropy moves the noise's size only; a log-probability reaches h through the mean."""
    agent = build(use_sde=True)
    h = torch.randn(7, 6, requires_grad=True)
    agent.policy(h).entropy().sum().backward()
    assert h.grad is None and agent.log_std.grad.abs().min() > 0
    action = torch.randn(7, 2)
    agent.policy(h).log_prob(action).sum().backward()
    with torch.no_grad():
        std, mean = agent.policy(h).stddev, agent.actor(h)
        expected = ((action - mean) / std**2) @ agent.actor.weight
    assert (h.grad - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_gsde_is_that_of_stable_baselines3():
    """Noise, log-probability, entropy and gradients, for the same weights and matrices."""
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    agent = build(use_sde=True)
    h = torch.randn(40, 6, requires_grad=True)
    theirs = distributions.StateDependentNoiseDistribution(2)
    theirs.latent_sde_dim = 6
    theirs.proba_distribution(agent.actor(h), agent.log_std, h)
    theirs.exploration_matrices = noise = agent.sample_noise(40).detach()
    action = (theirs.distribution.mean + theirs.get_noise(h)).detach()
    assert (agent.act(h, noise) - action).abs().max() <= 1e-5

    policy = agent.policy(h)
    inputs = [agent.log_std, *agent.actor.parameters(), h]
    pairs = (policy.log_prob(action), theirs.log_prob(action)), (policy.entropy(), theirs.entropy())
    for ours, reference in pairs:
        assert (ours - reference).abs().max() <= 1e-5
        ours = torch.autograd.grad(ours.mean(), inputs, retain_graph=True, materialize_grads=True)
        reference = torch.autograd.grad(
            reference.mean(), inputs, retain_graph=True, materialize_grads=True
        )
        for a, b in zip(ours, reference):
            assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())


@pytest.mark.parametrize("sde", [False, True])
def test_policy_is_that_of_sb3_contrib(sde):
    """Log-probabilities, entropies and values of sequences with resets, for the same weights."""
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")
    types = pytest.importorskip("sb3_contrib.common.recurrent.type_aliases")
    ours = build(dtype=torch.float64, separate_critic=True, norm_obs=False, use_sde=sde)
    observations = spaces.Box(-np.inf, np.inf, (5,), np.float32)  # theirs are our encoder's output
    theirs = policies.RecurrentActorCriticPolicy(
        observations, BOX, lambda _: 1e-3, net_arch=[], lstm_hidden_size=6, use_sde=sde
    ).double()
    theirs.extract_features = lambda features: features  # would be float32
    with torch.no_grad():
        for mine, lstm in (ours.lstm, theirs.lstm_actor), (ours.critic_lstm, theirs.lstm_critic):
            for name, parameter in mine.cell.named_parameters():
                getattr(lstm, f"{name}_l0").copy_(parameter)
        theirs.action_net.load_state_dict(ours.actor.state_dict())
        theirs.value_net.load_state_dict(ours.critic.state_dict())
        theirs.log_std.copy_(ours.log_std)
    final = awkward_ends()[2][:-1]
    T, N = final.shape
    shapes = (T, N, 3), (T, N, 2), (4, N, 6)
    obs, actions, state = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    starts = torch.cat([torch.zeros(1, N), final[:-1]]).double()
    flat = [
        x.transpose(0, 1).flatten(0, 1) for x in (ours.encoder(obs), actions, starts)
    ]  # (N T, ...)
    states = types.RNNStates((state[0:1], state[1:2]), (state[2:3], state[3:4]))
    value, logprob, entropy = theirs.evaluate_actions(flat[0], flat[1], states, flat[2])
    for a, b in zip(ours.evaluate_actions(obs, state, final, actions), (logprob, entropy, value)):
        assert (a - b.view(N, T).T[~final]).abs().max() <= 1e-10


@pytest.mark.parametrize(
    "flags, drawn",
    [
        ({"use_sde": True}, [0]),
        ({"use_sde": True, "sde_sample_freq": 4}, [0, 4, 8, 12]),
        ({"use_sde": True, "sde_sample_freq": 5}, [0, 5, 10, 15]),
        ({"use_sde": True, "sde_sample_freq": 1}, [*range(16)]),
        ({"use_sde": True, "sde_sample_freq": 99}, [0]),
        ({"sde_sample_freq": 4}, [*range(16)]),
    ],
    ids=str,
)
def test_noise_is_drawn_at_a_rollouts_start_and_every_n_steps(
    flags, drawn, env_id, watch, monkeypatch
):
    noises, real = [], module.Agent.act

    def act(agent, h, noise):
        noises.append(noise)
        return real(agent, h, noise)

    monkeypatch.setattr(module.Agent, "act", act)
    seen = watch(
        SCRIPT, env_id, num_envs=3, num_steps=16, num_minibatches=1, total_timesteps=60, **flags
    )
    assert len(noises) == 16 * len(seen.logs) >= 32
    new = [t for t in range(len(noises)) if t == 0 or noises[t] is not noises[t - 1]]
    assert new == [16 * k + t for k in range(len(seen.logs)) for t in drawn]
    values = torch.stack([noises[t].flatten() for t in new])
    assert (
        len(values.unique()) == values.numel()
    )  # no number of one draw, or environment, is another's


def test_no_steps_between_new_noise_is_refused():
    for freq in 0, -2:
        with pytest.raises(module.ArgumentError, match=f"--sde-sample-freq {freq}: must be"):
            module.check_args(module.Args(sde_sample_freq=freq))


def test_gsde_noise_is_a_function_of_the_lstms_output():
    agent = build(use_sde=True)
    h = torch.randn(1, 6).expand(4, 6)
    noise = agent.sample_noise(4)
    first = agent.act(h, noise)
    assert torch.equal(first, agent.act(h, noise)) and len(first.unique(dim=0)) == 4
    assert torch.allclose(
        agent.act(3 * h, noise) - agent.actor(3 * h), 3 * (first - agent.actor(h)), atol=1e-5
    )


# --- running statistics ---


def test_statistics_are_numpys_over_valid_steps(env_id, watch, tmp_path):
    """Every observation but the last of an episode, once; agent.pt holds them."""
    seen = watch(SCRIPT, env_id, num_envs=3, num_steps=16, num_minibatches=1, total_timesteps=180)
    obs, final = played(seen)
    rows = obs[~final].astype(np.float64)
    stats = seen.agent.obs_stats
    assert final.sum() > 20 and stats.count.unique().item() == len(rows) == sum(
        n for n, _ in seen.logs
    )
    assert np.abs(stats.mean.numpy() / rows.mean(0) - 1).max() <= 1e-9
    assert np.abs(stats.var.numpy()[:2] / rows.var(0)[:2] - 1).max() <= 1e-9 and stats.var[2] == 0
    saved = torch.load(tmp_path / seen.args.run_name / "agent.pt", weights_only=True)["agent"]
    for name in "mean", "var", "count":
        assert torch.equal(saved[f"obs_stats.{name}"], getattr(stats, name))
        assert saved[f"obs_stats.{name}"].dtype == torch.float64


def test_observations_are_normalised_and_clipped():
    agent = build()
    agent.obs_stats.update(torch.randn(50, 3) * torch.tensor([7, 0.1, 0]) + 100)
    raw = torch.randn(9, 4, 3) * torch.tensor([7, 0.1, 0]) + 100
    raw[3, 2] = torch.tensor([1e6, -1e6, 100.0])
    mean, var = agent.obs_stats.mean.numpy(), agent.obs_stats.var.numpy()
    normal = torch.tensor(
        ((raw.numpy() - mean) / np.sqrt(var + 1e-8)).clip(-10, 10), dtype=torch.float32
    )
    assert normal[3, 2].tolist() == [10, -10, 0]
    assert torch.equal(agent.normalize(raw), normal)
    plain = build(norm_obs=False)
    plain.load_state_dict(agent.state_dict())
    assert torch.equal(plain.normalize(raw), raw)
    # predict takes observations as the environment returns them, final ones too.
    action, state = agent.predict(raw[3].numpy())
    expected, expected_state = plain.predict(normal[3].numpy())
    assert np.array_equal(action, expected) and torch.equal(state, expected_state)


@pytest.mark.parametrize("name", POLICIES)
def test_old_log_probabilities_are_the_behaviour_policys(name, env_id, watch):
    """The ratio of every rollout's only minibatch is 1, although the statistics, and with them the
    policy, move between rollouts: they move after the update. The density is of what was acted."""
    flags = {"num_envs": 3, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1}
    seen = watch(SCRIPT, env_id, total_timesteps=180, learning_rate=1e-2, **flags, **POLICIES[name])
    assert len(seen.losses) == len(seen.logs) >= 4
    for logprob, old_logprob, _, _ in seen.losses:
        assert logprob.std() > 0.01 and (logprob - old_logprob).abs().max() <= 1e-5
    # The statistics of a rollout's steps are those of the rollouts before.
    if seen.args.norm_obs:
        obs, final = played(seen)
        rows = obs[:2][~final[:2]]
        agent = seen.first
        agent.load_state_dict(seen.updates[2][1], strict=False)
        assert agent.obs_stats.count.sum() == 0
        agent.obs_stats.update(torch.tensor(rows))
        (third_obs, state), (h, value, _) = seen.steps[2 * 17]  # 16 steps and a bootstrap each
        assert np.array_equal(third_obs.numpy(), obs[2, 0])
        with torch.no_grad():
            again = agent.step(third_obs, state)
        assert torch.allclose(h, again[0], atol=1e-6) and torch.allclose(value, again[1], atol=1e-6)


def test_evaluation_freezes_the_statistics_and_draws_nothing(env_id, watch):
    flags = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 200}
    agent = watch(SCRIPT, env_id, use_sde=True, **flags).agent
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    rng = torch.get_rng_state()
    envs = module.make_envs(module.Args(env_id=env_id), 4)
    returns = module.evaluate(agent, envs, seed=1)
    assert len(set(returns)) == 4 and torch.equal(torch.get_rng_state(), rng)
    obs = np.ones((2, 3), np.float32)
    samples = [agent.predict(obs, deterministic=False)[0] for _ in range(2)]
    assert not np.isclose(*samples).any()  # gSDE's matrices are new at every call
    assert before["obs_stats.count"].min() > 100
    assert all(torch.equal(before[name], value) for name, value in agent.state_dict().items())
