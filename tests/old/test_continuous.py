"""rppo_continuous.py: the Gaussian, gSDE and the running normalisation, against what defines each."""

import itertools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CONTINUOUS_ACTIONS, DISCRETE_ACTIONS, MODULES, OBSERVATION_SPACES, act, awkward_ends
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from test_agent import build, rollout

SCRIPT = "rppo_continuous"
module = MODULES[SCRIPT]
SDE = [
    {"use_sde": True, "sde_full_std": full, "sde_expln": expln, "squash_output": squash,
     "log_std_init": -1.0 if squash else 0.1}  # theirs stores tanh(a), which float32 cannot invert where it is near 1
    for full, expln, squash in itertools.product([True, False], repeat=3)
]  # fmt: skip


class Logged(gym.Env):
    """Episodes of 5 steps that end by truncation, or of 3 by termination; every row and reward is logged.

    rows holds (observation, final) since the last seeded reset, sums the discounted sums of rewards (gamma 0.9).
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    made: list["Logged"] = []

    def __init__(self, render_mode=None):
        self.made.append(self)

    def row(self, final):
        obs = (self.np_random.normal(size=3) * [1, 100, 0] + [0, 5, 7]).astype(np.float32)
        self.rows.append((obs, final))
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.rows, self.sums, self.actions = [], [], []
        self.steps, self.sum, self.length = 0, 0.0, int(self.np_random.choice([3, 5]))
        return self.row(False), {}

    def step(self, action):
        self.actions.append(action)
        self.steps += 1
        reward = float(np.float32(self.np_random.normal() * 30))
        self.sum = 0.9 * self.sum + reward
        self.sums.append(self.sum)
        done = self.steps == self.length
        return self.row(done), reward, done and self.length == 3, done and self.length == 5, {}


gym.register("Logged-v0", Logged)


def train(tmp_path, **flags):
    """A run on Logged, one checkpoint at its start -> agent."""
    Logged.made.clear()
    defaults = {
        "env_id": "Logged-v0", "num_envs": 3, "num_steps": 16, "num_minibatches": 1, "total_timesteps": 180,
        "hidden_size": 8, "encoder_sizes": (8,), "gamma": 0.9, "checkpoint_every": 10**6, "runs_dir": str(tmp_path),
        "run_name": str(len(list(tmp_path.iterdir()))), "torch_threads": 1,
    }  # fmt: skip
    return module.train(module.Args(**{**defaults, **flags}))


# --- the Gaussian ---


def test_gaussian_is_torch_distributions_in_float64():
    torch.manual_seed(0)
    mean, action = torch.randn(2, 7, 5, 3, dtype=torch.float64)
    std = torch.rand(7, 5, 3, dtype=torch.float64) * 3 + 1e-3
    reference = torch.distributions.Independent(torch.distributions.Normal(mean, std), 1)
    far = reference.log_prob(action)  # down to -1e7 where the deviation is small
    assert ((module.gaussian_log_prob(action, mean, std, False) - far) / far).abs().max() <= 1e-12
    near = mean + std * action
    assert (module.gaussian_log_prob(near, mean, std, False) - reference.log_prob(near)).abs().max() <= 1e-12
    assert (module.gaussian_entropy(std) - reference.entropy()).abs().max() <= 1e-12
    tanh = torch.distributions.TransformedDistribution(reference, torch.distributions.TanhTransform(cache_size=1))
    small = 0.5 * action.tanh()  # where the 1e-6 that guards the logarithm hardly counts
    expected = tanh.log_prob(tanh.transforms[0](small))
    assert (module.gaussian_log_prob(small, mean, std, True) - expected).abs().max() <= 1e-5


def test_deviation_does_not_depend_on_the_state_and_starts_as_told():
    agent = module.Agent(OBSERVATION_SPACES["vector"], CONTINUOUS_ACTIONS["box"], module.Args(log_std_init=-1.5))
    mean, std, _ = agent.distribution(torch.randn(4, 5, 128))
    assert mean.shape == (4, 5, 2) and torch.allclose(std, torch.full((4, 5, 2), -1.5).exp())
    assert mean.abs().max() < 0.3  # the policy's last layer starts small


def test_acting_samples_the_gaussian_and_stores_it_unclipped():
    agent, n = build(SCRIPT, action_space=CONTINUOUS_ACTIONS["one"], log_std_init=1.0), 100_000
    obs = [torch.zeros(n, 3)]
    with torch.no_grad():
        action, logprob, _, _ = act(agent, obs, agent.initial_state(n))
        mean, std, _ = agent.step(obs, agent.initial_state(n))[0]
    z = (action - mean) / std
    assert abs(z.mean()) < 4.5 / n**0.5 and abs(z.var() - 1) < 4.5 * (2 / n) ** 0.5
    assert torch.allclose(logprob, torch.distributions.Normal(mean, std).log_prob(action).sum(-1), atol=1e-5)
    assert action.abs().max() > 2.5  # beyond the bounds
    taken = agent.to_env(action)
    assert np.array_equal(taken, action.numpy().clip(-2, 2))


def test_the_environment_gets_clipped_or_rescaled_actions(tmp_path):
    train(tmp_path, log_std_init=2.0)
    taken = np.concatenate([env.actions for env in Logged.made])
    assert np.abs(taken).max() == 1.0 and (np.abs(taken) < 1).any()
    box = CONTINUOUS_ACTIONS["matrix, float64"]
    agent = build(SCRIPT, action_space=box, squash_output=True)
    action = torch.tensor([[-50.0, 50.0, 0.0, 0.5]])
    expected = [[-1.0, 5.0], [3.0, -2.5 + 0.5 * np.tanh(0.5)]]
    assert np.abs(agent.to_env(action)[0] - expected).max() < 1e-6 and box.contains(agent.to_env(action)[0])


@pytest.mark.parametrize("flags", [{}, SDE[0], {"squash_output": True}], ids=["gaussian", "gSDE", "squashed"])
@pytest.mark.parametrize("actions", CONTINUOUS_ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATION_SPACES)
def test_every_space(observations, actions, flags):
    if flags.get("squash_output") and actions == "unbounded":
        pytest.skip("refused: see below")
    final = awkward_ends(10)[2][:-1]
    agent = build(SCRIPT, OBSERVATION_SPACES[observations], CONTINUOUS_ACTIONS[actions], **flags)
    initial, obs, action, logprob, value, _ = rollout(agent, final)
    new_logprob, entropy, new_value = agent.evaluate_actions(obs, initial, final, action)
    # A CNN's features are large, and so are the roundings of a batch of another size.
    tolerance = 5e-5 if observations.startswith(("image", "dict")) else 1e-5
    assert ((new_logprob - logprob)[~final].exp() - 1).abs().max() <= tolerance
    assert (new_value - value)[~final].abs().max() <= 1e-5
    assert entropy.shape == logprob.shape == final.shape
    assert batch_space(agent.action_space, 6).contains(agent.to_env(action[0]))
    for deterministic in True, False:
        single, _ = agent.predict(agent.observation_space.sample(), None, True, deterministic)
        assert agent.action_space.contains(single)


@pytest.mark.parametrize("actions", DISCRETE_ACTIONS)
def test_discrete_actions_are_sent_to_the_other_script(actions):
    with pytest.raises(module.ArgumentError, match="use rppo_lstm.py"):
        module.Agent(OBSERVATION_SPACES["vector"], DISCRETE_ACTIONS[actions], module.Args())


def test_squashing_needs_bounds():
    with pytest.raises(module.ArgumentError, match="--squash-output"):
        build(SCRIPT, action_space=CONTINUOUS_ACTIONS["unbounded"], squash_output=True)


# --- gSDE ---


@pytest.mark.parametrize("flags", SDE, ids=lambda f: " ".join(k for k, v in f.items() if v is True))
def test_sde_is_that_of_stable_baselines3(flags):
    """Log-probability, entropy, and their gradients for the same weights; noise for the same matrices."""
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    agent = build(SCRIPT, head_sizes=(5,), **flags)
    policy = torch.randn(40, 6)
    theirs = distributions.StateDependentNoiseDistribution(2, flags["sde_full_std"], flags["sde_expln"], flags["squash_output"])
    theirs.latent_sde_dim = 5
    features = agent.actor[:-1](policy)
    theirs.proba_distribution(agent.actor[-1](features), agent.log_std, features)
    agent.sample_noise(40)
    theirs.exploration_matrices = agent.noise
    action = (theirs.distribution.mean + theirs.get_noise(features)).detach()
    mean, std, same = agent.distribution(policy)
    assert agent.log_std.shape == (5, 2 if flags["sde_full_std"] else 1)
    assert ((mean + (same[:, None] @ agent.noise)[:, 0]) - action).abs().max() <= 1e-6

    ours = module.gaussian_log_prob(action, mean, std, flags["squash_output"])
    reference = theirs.log_prob(action.tanh() if flags["squash_output"] else action)
    assert (ours - reference).abs().max() <= 1e-5
    if not flags["squash_output"]:
        assert (module.gaussian_entropy(std) - theirs.entropy()).abs().max() <= 1e-5
    parameters = [agent.log_std, *agent.actor.parameters()]
    for a, b in zip(torch.autograd.grad(ours.mean(), parameters), torch.autograd.grad(reference.mean(), parameters)):
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())


def test_squashed_entropy_is_estimated_by_the_log_probability():
    agent, final = build(SCRIPT, squash_output=True), awkward_ends()[2][:-1]
    initial, obs, action, *_ = rollout(agent, final)
    logprob, entropy, _ = agent.evaluate_actions(obs, initial, final, action)
    assert torch.equal(entropy, -logprob)


@pytest.mark.parametrize("full", [True, False])
def test_noise_matrices_have_the_deviations_that_the_density_says(full):
    agent, n = build(SCRIPT, use_sde=True, sde_full_std=full, log_std_init=-1.0), 50_000
    agent.sample_noise(n)
    sigma = module.sde_sigma(agent.log_std, False).expand(6, 2)
    assert agent.noise.shape == (n, 6, 2)
    assert ((agent.noise.std(0) / sigma - 1).abs() < 5 / (2 * n) ** 0.5).all()
    assert (agent.noise.mean(0).abs() < 5 * sigma / n**0.5).all()
    _, std, features = agent.distribution(torch.randn(1, 6).expand(n, 6))
    noise = (features[:, None] @ agent.noise)[:, 0]
    assert ((noise.std(0) / std[0] - 1).abs() < 5 / (2 * n) ** 0.5).all()


def test_noise_is_a_function_of_the_features_until_it_is_drawn_anew():
    agent = build(SCRIPT, use_sde=True)
    obs, state = [torch.randn(1, 3).expand(4, 3)], agent.initial_state(4)
    first, second = agent.act(obs, state)[0], agent.act(obs, state)[0]
    assert torch.equal(first, second)  # no noise of its own in a step
    assert len(first.unique(dim=0)) == 4  # but one for each environment
    agent.sample_noise(4)
    assert not torch.isclose(agent.act(obs, state)[0], first).any()


@pytest.mark.parametrize("freq,draws", [(-1, 1), (4, 4), (5, 4), (1, 16)])
def test_noise_is_drawn_at_a_rollouts_start_and_every_n_steps(freq, draws, tmp_path, monkeypatch):
    calls = []
    draw = module.Agent.sample_noise
    monkeypatch.setattr(module.Agent, "sample_noise", lambda agent, n: calls.append(n) or draw(agent, n))
    train(tmp_path, use_sde=True, sde_sample_freq=freq, total_timesteps=30)
    assert calls == [3] * draws


@pytest.mark.parametrize("sde", [False, True])
def test_policy_agrees_with_sb3_contrib(sde):
    """Log-probabilities, entropies and values of whole sequences with resets, for the same weights."""
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    space, box = OBSERVATION_SPACES["vector"], CONTINUOUS_ACTIONS["box"]
    ours = build(SCRIPT, encoder_sizes=(), head_sizes=(8,), critic="separate", use_sde=sde, norm_obs=False)
    theirs = policies.RecurrentActorCriticPolicy(space, box, lambda _: 1e-3, net_arch=[8], lstm_hidden_size=6, use_sde=sde)
    with torch.no_grad():
        for mine, lstm in (ours.memory, theirs.lstm_actor), (ours.critic_memory, theirs.lstm_critic):
            for name, parameter in mine.cells[0].named_parameters():
                getattr(lstm, f"{name}_l0").copy_(parameter)
        for mine, other in (
            (ours.actor[0], theirs.mlp_extractor.policy_net[0]), (ours.critic[0], theirs.mlp_extractor.value_net[0]),
            (ours.actor[-1], theirs.action_net), (ours.critic[-1], theirs.value_net),
        ):  # fmt: skip
            other.load_state_dict(mine.state_dict())
        theirs.log_std.copy_(ours.log_std)
    final = awkward_ends()[2][:-1]
    state, obs, action, *_ = rollout(ours, final)
    logprob, entropy, value = ours.evaluate_actions(obs, state, final, action)
    T, N = final.shape
    starts = torch.cat([torch.zeros(1, N), final[:-1].float()])
    flat = [x.transpose(0, 1).reshape(T * N, *x.shape[2:]) for x in (obs[0], action, starts)]  # theirs is (N, T)
    states = RNNStates((state[0:1], state[1:2]), (state[2:3], state[3:4]))
    their_value, their_logprob, their_entropy = theirs.evaluate_actions(flat[0], flat[1], states, flat[2])
    for a, b in (value, their_value), (logprob, their_logprob), (entropy, their_entropy):
        assert (a - b.view(N, T).T)[~final].abs().max() <= 1e-5


# --- running normalisation ---


def test_statistics_are_numpys_over_valid_rows(tmp_path):
    """Four rollouts: every observation but an episode's last, and every discounted sum of rewards, once."""
    agent = train(tmp_path)
    rows = np.array([obs for env in Logged.made for obs, final in env.rows[:-1] if not final], np.float64)
    stats = agent.obs_stats
    assert stats.count.unique().item() == len(rows) == agent.return_stats.count.item()
    assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9
    assert np.abs(stats.var.numpy() / rows.var(0).clip(1e-30) - 1)[:2].max() <= 1e-9 and stats.var[2] == 0
    sums = np.concatenate([env.sums for env in Logged.made])
    assert abs(agent.return_stats.mean.item() - sums.mean()) <= 1e-5 * abs(sums).max()
    assert abs(agent.return_stats.var.item() / sums.var() - 1) <= 1e-5
    saved = torch.load(tmp_path / "0" / "agent.pt", weights_only=True)["agent"]
    assert torch.equal(saved["obs_stats.mean"], stats.mean) and saved["obs_stats.mean"].dtype == torch.float64


def test_every_row_is_normalised_final_ones_too():
    agent = build(SCRIPT)
    agent.obs_stats.update(torch.randn(50, 3) * 7 + 100)
    raw = torch.randn(9, 4, 3) * 7 + 100
    raw[3, 2] = torch.tensor([1e6, -1e6, 100.0])
    expected = (raw.double() - agent.obs_stats.mean) / (agent.obs_stats.var + 1e-8) ** 0.5
    expected = agent.encoder([expected.clamp(-10, 10).float()])
    assert torch.equal(agent.encode([raw]), expected)
    state = agent.initial_state(4)
    plain = build(SCRIPT, norm_obs=False)
    plain.load_state_dict({k: v for k, v in agent.state_dict().items() if "obs_stats" not in k}, strict=False)
    normal = ((raw[3].double() - agent.obs_stats.mean) / (agent.obs_stats.var + 1e-8).sqrt()).clamp(-10, 10).float()
    assert torch.allclose(agent.get_value([raw[3]], state), plain.get_value([normal], state), atol=1e-6)
    # predict takes observations as the environment gives them.
    a, b = agent.predict(raw[3].numpy(), deterministic=True)[0], plain.predict(normal.numpy(), deterministic=True)[0]
    assert np.allclose(a, b, atol=1e-6) and not np.allclose(a, plain.predict(raw[3].numpy(), deterministic=True)[0])


def test_images_are_not_normalised():
    agent = build(SCRIPT, OBSERVATION_SPACES["image HWC"])
    assert not agent.norm_obs and agent.obs_stats.mean.shape == ()
    both = build(SCRIPT, OBSERVATION_SPACES["dict"])
    assert both.obs_stats.mean.shape == (5,)  # one-hot place and speed
    both.obs_stats.update(torch.randn(9, 5) + 3)
    vector, image = torch.randn(4, 5), torch.randint(255, (4, 3, 36, 36), dtype=torch.uint8)
    normal = ((vector - both.obs_stats.mean) / (both.obs_stats.var + 1e-8).sqrt()).clamp(-10, 10).float()
    assert torch.equal(both.encode([vector, image]), both.encoder([normal, image]))


@pytest.mark.parametrize("flags", [{}, {"use_sde": True, "sde_sample_freq": 3}, {"critic": "separate", "seq_len": 8}], ids=str)
def test_old_log_probabilities_are_the_behaviour_policys(flags, tmp_path, monkeypatch):
    """The first ratio of every update is 1 although the statistics, and with them the policy, move between rollouts."""
    ratios, real = [], module.ppo_loss

    def loss(logprob, old, advantages, weight, clip):
        ratios.append(((logprob - old).exp() - 1)[weight > 0].abs().max().item())
        return real(logprob, old, advantages, weight, clip)

    monkeypatch.setattr(module, "ppo_loss", loss)
    agent = train(tmp_path, update_epochs=1, **flags)
    assert len(ratios) >= 4 and max(ratios) <= 1e-5
    assert agent.obs_stats.count.min() > 100


def test_evaluation_and_prediction_freeze_the_statistics_and_draw_nothing_from_training(tmp_path):
    agent = train(tmp_path, use_sde=True)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    noise, rng = agent.noise.clone(), torch.get_rng_state()
    args = module.Args(env_id="Logged-v0")
    returns = module.evaluate(agent, module.make_envs(args, 2), 4, seed=1)
    assert len(returns) == 4 and torch.equal(agent.noise, noise) and torch.equal(torch.get_rng_state(), rng)
    agent.predict(np.ones((2, 3), np.float32))
    assert all(torch.equal(before[k], v) for k, v in agent.state_dict().items())


def test_resumed_statistics_are_those_of_the_run_never_stopped(tmp_path, monkeypatch):
    flags = {"checkpoint_every": 2, "total_timesteps": 400, "use_sde": True, "sde_sample_freq": 4}
    whole = train(tmp_path, **flags)
    real, calls = module.save, []

    def stop(path, **contents):  # the third checkpoint is written, then the power fails
        real(path, **contents)
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, **flags, run_name="stopped")
    monkeypatch.setattr(module, "save", real)
    resumed = train(tmp_path, **flags, run_name="stopped", resume=str(tmp_path / "stopped"))
    assert whole.obs_stats.count.min() > 300
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


# --- runs ---


@pytest.mark.slow
def test_car_racing_runs(run_script, tmp_path):
    pytest.importorskip("Box2D")
    flags = "--env-id CarRacing-v3 --num-envs 2 --num-steps 32 --num-minibatches 1 --update-epochs 1 --total-timesteps 250"
    run_script(SCRIPT, *flags.split(), "--run-name", "a", timeout=600)
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert 250 <= result["global_step"] < 314 and result["sps"] > 1


@pytest.mark.slow
def test_pendulum_without_velocities_is_learnt(run_script, tmp_path):
    """A policy that ignores its observations gets about -1200."""
    run_script(SCRIPT, *"--env-id PendulumNoVel-v1 --run-name a --eval-episodes 20".split(), timeout=1200)
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert result["eval_mean_return"] > -250
