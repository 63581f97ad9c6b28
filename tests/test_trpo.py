"""TRPO: Fisher-vector product, conjugate gradient, line search, and one whole step as sb3-contrib's."""

import copy
import importlib
import json
import warnings
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, awkward_ends, toy
from gymnasium import spaces
from torch.distributions import kl_divergence

trpo = MODULES.get("trpo") or importlib.import_module("trpo")
OBSERVATIONS = spaces.Box(-9, 9, (3,), np.float32)
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float32),
}
MEMORIES = "none", "lstm"


def spaces_of(actions):
    return SimpleNamespace(
        single_action_space=ACTIONS[actions], single_observation_space=OBSERVATIONS
    )


def build(actions, dtype=torch.float32, **flags):
    """An agent with generic weights."""
    torch.manual_seed(3)
    args = trpo.Args(**{"encoder_size": 8, "hidden_size": 6, "norm_obs": False, **flags})
    agent = trpo.Agent(spaces_of(actions), args).to(dtype)
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            size = 0.1 if name == "log_std" else 0.4
            parameter.add_(size * torch.randn_like(parameter))
    return agent


def some_legal(agent, *shape):
    """Masks that forbid about half of the choices of a component, and leave one at least."""
    exists = torch.as_tensor(agent.exists)
    preference = torch.rand(*shape, *exists.shape).masked_fill(~exists, -1.0)
    best = preference == preference.amax(-1, keepdim=True)
    return (preference > 0.5) | best


def batch(agent, dtype=torch.float32, T=24, masked=False):
    """Made-up data with every awkward end: rollout, actions and advantages as trpo_step takes them."""
    final = awkward_ends(T)[2][:-1]
    torch.manual_seed(5)
    obs = torch.randn(*final.shape, 3, dtype=dtype)
    state = torch.randn_like(agent.initial_state(final.shape[1]))
    legal = torch.as_tensor(agent.exists).expand(*final.shape, *agent.exists.shape)
    rollout = obs, some_legal(agent, *final.shape) if masked else legal, state, final
    with torch.no_grad():
        actions = agent(*rollout).sample()
    advantages = torch.randn(len(actions), dtype=dtype)
    return rollout, actions, (advantages - advantages.mean()) / advantages.std(correction=0)


def moving(agent):
    """The parameters that a step of the policy moves."""
    return [p for name, p in agent.named_parameters() if not name.startswith("critic")]


def flat(agent):
    return torch.nn.utils.parameters_to_vector(moving(agent)).detach().clone()


def policy_at(agent, rollout, theta):
    """The policy with parameters theta, as a function of it."""
    named = {n: p for n, p in agent.named_parameters() if not n.startswith("critic")}
    parts = theta.split([p.numel() for p in named.values()])
    parts = {n: part.view_as(p) for part, (n, p) in zip(parts, named.items())}
    return torch.func.functional_call(agent, parts, rollout)


def hessian_of_the_mean_kl(agent, rollout, every=1):
    """The definition: the mean KL from the distribution at theta, differentiated twice at theta;
    of every k-th of each environment's steps that count."""
    with torch.no_grad():
        old = agent(*rollout)
    final = rollout[3]
    steps = [0] * final.shape[1]  # of each environment that count
    chosen = []  # by row
    for n in (~final).nonzero()[:, 1].tolist():
        chosen.append(steps[n] % every == 0)
        steps[n] += 1

    def kl(theta):
        return kl_divergence(old, policy_at(agent, rollout, theta))[chosen].mean()

    return torch.autograd.functional.hessian(kl, flat(agent))


def product_of(agent, rollout, damping=0.0):
    with torch.no_grad():
        old = agent(*rollout)
    parameters = moving(agent)
    kl = kl_divergence(old, agent(*rollout)).mean()
    gradient = trpo.flat_gradient(kl, parameters, create_graph=True)
    return partial(trpo.fisher_vector_product, gradient, parameters, damping)


def difference_of(agent, rollout, damping=0.0):
    with torch.no_grad():
        old = agent(*rollout)
    policy = partial(agent, *rollout)
    return partial(trpo.fisher_vector_difference, policy, old, moving(agent), damping)


def naive(self, x, state, final):
    """ResetLSTM's definition."""
    rows = []
    for t in range(len(x)):
        state = self.step(x[t], state)
        rows.append(state[0])
        state = state.where(~final[t][:, None], 0.0)
    return torch.stack(rows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("actions", ACTIONS)
def test_fisher_vector_product_is_the_hessian_of_the_mean_kl(actions, masked):
    agent = build(actions, torch.float64)
    rollout = batch(agent, torch.float64, masked=masked)[0]
    hessian = hessian_of_the_mean_kl(agent, rollout)
    product, difference = product_of(agent, rollout), difference_of(agent, rollout)
    for length in 1.0, 1e-6, 1e6:
        v = torch.randn(len(hessian), dtype=torch.float64) * length
        expected = hessian @ v
        for ours in product(v), difference(v):
            assert (ours - expected).norm() <= 1e-8 * expected.norm(), float(expected.norm())
    for damped in product_of(agent, rollout, 0.3), difference_of(agent, rollout, 0.3):
        assert (damped(v) - expected - 0.3 * v).norm() <= 1e-8 * expected.norm()
    assert torch.equal(product(0 * v), 0 * v)


@pytest.mark.parametrize("actions", ["box", "discrete", "multibinary"])
def test_product_through_the_fused_lstm_is_the_loop_differentiated_twice(actions, monkeypatch):
    """float32 and fused, against float64, a cell call a step, autograd of autograd; resets everywhere."""
    agent = build(actions, memory="lstm", hidden_size=64, encoder_size=64)
    torch.manual_seed(0)
    fresh = trpo.Agent(spaces_of(actions), agent.args)  # as training starts
    agent.load_state_dict(fresh.state_dict())
    with torch.no_grad():
        agent.actor.weight.mul_(30)
    rollout = batch(agent, T=48, masked=not agent.box)[0]
    v = torch.randn(len(flat(agent)))
    before = flat(agent)
    ours = difference_of(agent, rollout)(v).double()
    assert torch.equal(flat(agent), before)
    monkeypatch.setattr(trpo.ResetLSTM, "forward", naive)
    obs, legal, state, final = rollout
    expected = product_of(agent.double(), (obs.double(), legal, state.double(), final))(v.double())
    assert ours @ expected / ours.norm() / expected.norm() >= 0.9999
    assert (ours - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("actions", ACTIONS)
def test_acting_and_replay_are_one_policy(actions, memory, masked):
    agent = build(actions, memory=memory)
    (obs, legal, state, final), _, _ = batch(agent, T=10, masked=masked)
    replayed = agent(obs, legal, state, final)
    rows = []
    for t in range(len(obs)):
        h, state = agent.step(obs[t], state)
        rows.append(h)
        state = state.where(~final[t][:, None], 0.0)
    acting = agent.policy(torch.stack(rows)[~final], legal[~final])
    assert kl_divergence(acting, replayed).abs().max() <= 1e-6
    assert (acting.mode - replayed.mode).abs().max() <= 1e-5
    torch.manual_seed(1)
    h, legal = rows[0][:1], legal[0, :1]
    policy = agent.policy(h, legal)
    noise = agent.sample_noise(40000)
    assert noise.shape == (40000, len(agent.exists))
    sampled = agent.act(h.expand(40000, -1), legal.expand(40000, -1, -1), noise)
    assert torch.is_floating_point(sampled) == agent.box
    sampled = sampled.float()
    expected = policy.sample((40000,)).float()[:, 0]
    assert (sampled.mean(0) - expected.mean(0)).abs().max() <= 0.04
    assert (sampled.std(0) - expected.std(0)).abs().max() <= 0.04
    if not agent.box:  # all legal choices at their probabilities, and no other
        K, A = agent.exists.shape
        counts = torch.stack([(sampled == a).float().mean(0) for a in range(A)], -1)
        assert (counts - policy.base_dist.probs[0]).abs().max() <= 0.02
        assert (counts[~legal[0]] == 0).all() and (counts[legal[0]] > 0).all()
        assert legal[0][torch.arange(K), policy.mode[0]].all()
        assert masked == (not torch.equal(legal[0], torch.as_tensor(agent.exists)))


@pytest.mark.parametrize("actions", ["discrete", "multidiscrete", "multibinary"])
def test_kl_of_masked_policies_is_that_over_legal_choices(actions):
    """By hand, in float64: probabilities, KL and entropy are those of legal choices alone."""
    agent = build(actions, torch.float64)
    rollout, taken, _ = batch(agent, torch.float64, masked=True)
    obs, legal, _, final = rollout
    obs, legal = obs[~final], legal[~final]

    def by_hand():
        """(M, K, A): probabilities, 0 where a choice is illegal."""
        weights = agent.actor(agent.encoder(obs)).unflatten(-1, agent.exists.shape).exp() * legal
        return weights / weights.sum(-1, keepdim=True)

    with torch.no_grad():
        old, p = agent(*rollout), by_hand()
        for parameter in moving(agent):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        new, q = agent(*rollout), by_hand()
    assert (~legal).any(-1).all(-1).float().mean() > 0.1
    zero = torch.zeros_like(p)
    kl = (p * (p / q).log()).where(legal, zero).sum((-2, -1))
    entropy = -(p * p.log()).where(legal, zero).sum((-2, -1))
    assert kl.isfinite().all() and kl.max() > 0.1
    assert (kl_divergence(old, new) - kl).abs().max() <= 1e-12
    assert (old.entropy() - entropy).abs().max() <= 1e-12
    logprob = p.gather(-1, taken.unsqueeze(-1)).log().sum((-2, -1))
    assert (old.log_prob(taken) - logprob).abs().max() <= 1e-12


@pytest.mark.parametrize("memory", MEMORIES)
def test_predict_is_the_mode_carries_the_state_and_resets_it(memory):
    agent = build("box", memory=memory)
    obs, state, other = np.ones((2, 3)), None, agent.initial_state(2)
    for t in range(4):
        final = np.array([False, t == 2])
        action, state = agent.predict(obs, {}, state, final)
        h, other = agent.step(torch.from_numpy(np.float32(obs)), other)
        expected = agent.actor(h).detach().clamp(-1, 1)
        other = other.where(torch.from_numpy(~final)[:, None], 0.0)
        assert np.abs(action - expected.numpy()).max() <= 1e-6 and torch.equal(state, other)
    assert not np.array_equal(action, agent.predict(obs, {}, state, deterministic=False)[0])


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_sampled_actions_are_those_of_the_rollout(memory):
    """The generator of the CPU draws their noise, as in training, so that a run repeats on a GPU."""
    agent = build("box", memory=memory)
    obs = np.float32(np.random.default_rng(1).normal(size=(4, 3)))
    torch.manual_seed(5)
    actions, _ = agent.predict(obs, deterministic=False)
    torch.manual_seed(5)
    with torch.no_grad():
        noise = agent.sample_noise(4)
        h, _ = agent.step(torch.from_numpy(obs), agent.initial_state(4))
        legal = torch.from_numpy(agent.exists).expand(4, -1, -1)
        expected = agent.act(h, legal, noise)
    assert np.array_equal(actions, expected.clamp(-1, 1).numpy())
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("actions", ["discrete", "multidiscrete"])
def test_predict_takes_legal_actions(actions, deterministic):
    agent = build(actions)
    for _ in range(50):
        legal = some_legal(agent, 4).numpy()
        masks = [row[agent.exists].astype(np.int8) for row in legal]
        info = {"action_mask": masks, "_action_mask": np.ones(4, bool)}
        action, _ = agent.predict(np.random.randn(4, 3), info, deterministic=deterministic)
        action = np.reshape(action, (4, -1))
        assert all(legal[n, k, a] for n, row in enumerate(action) for k, a in enumerate(row))


@pytest.mark.parametrize("actions", ACTIONS)
def test_kl_is_the_joint_one(actions):
    """The sum over components, not sb3-contrib's mean."""
    agent = build(actions, torch.float64)
    rollout, _, _ = batch(agent, torch.float64)
    with torch.no_grad():
        p = agent(*rollout)
        for parameter in moving(agent):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        q = agent(*rollout)
    old, new = p.base_dist, q.base_dist
    if agent.box:
        (m, s), (n, r) = (old.mean, old.stddev), (new.mean, new.stddev)
        parts = (r / s).log() + (s**2 + (m - n) ** 2) / (2 * r**2) - 0.5
    else:
        parts = (old.probs * (old.logits - new.logits)).sum(-1)
    joint = kl_divergence(p, q)
    assert (parts.sum(-1) - joint).abs().max() <= 1e-12 and 0 < joint.min() and joint.max() > 0.1


@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_surrogate_gradient_is_the_policy_gradient_and_ppos(actions):
    agent = build(actions, torch.float64)
    rollout, taken, advantages = batch(agent, torch.float64)
    with torch.no_grad():
        old = agent(*rollout)
    new = agent(*rollout)
    logprob = new.log_prob(taken)
    objective = trpo.surrogate(new, old, taken, advantages)
    ppo = -MODULES["rppo_lstm"].ppo_loss(logprob, logprob.detach(), advantages, 0.2)[0]
    reinforce = (logprob * advantages).mean()
    parameters = moving(agent)
    ours, *others = (
        trpo.flat_gradient(x, parameters, retain_graph=True) for x in (objective, ppo, reinforce)
    )
    assert ours.norm() > 0.01
    for other in others:
        assert (ours - other).abs().max() <= 1e-15


@pytest.mark.parametrize("n", [1, 5, 40])
def test_conjugate_gradient_is_a_dense_solve(n):
    torch.manual_seed(n)
    root = torch.randn(n, n, dtype=torch.float64)
    matrix, b = root @ root.T + 0.5 * torch.eye(n), torch.randn(n, dtype=torch.float64) * 1e6
    solution = torch.linalg.solve(matrix, b)
    x = trpo.conjugate_gradient(lambda v: matrix @ v, b, 4 * n)
    assert (x - solution).norm() <= 1e-8 * solution.norm()
    calls = []
    trpo.conjugate_gradient(lambda v: calls.append(1) or matrix @ v, b, 3)
    assert len(calls) <= 3


def test_conjugate_gradient_is_safe():
    b, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert torch.equal(trpo.conjugate_gradient(lambda v: v, zero, 10), zero)  # no gradient: no step
    assert torch.equal(trpo.conjugate_gradient(torch.zeros_like, b, 10), zero)  # a singular matrix
    assert torch.equal(trpo.conjugate_gradient(lambda v: -v, b, 10), zero)  # not positive
    for bad in float("nan"), float("inf"):
        assert torch.equal(trpo.conjugate_gradient(lambda v, bad=bad: v * bad, b, 10), zero)
        assert torch.equal(trpo.conjugate_gradient(lambda v: v, b * bad, 10), zero)
    half = torch.diag(torch.tensor([2.0, 0.0]))  # singular, but b is in its range
    x = trpo.conjugate_gradient(lambda v: half @ v, torch.tensor([3.0, 0.0]), 10)
    assert torch.equal(x, torch.tensor([1.5, 0]))


def test_line_search_takes_the_first_fraction_that_improves_within_the_region(monkeypatch):
    """rows: the surrogate, of which 1 is the old one's, and the KL of the fractions 1, 1/2, ..."""
    nan, inf = float("nan"), float("inf")

    def search(rows, max_iter=4):
        agent = build("box", line_search_max_iter=max_iter, line_search_shrinking_factor=0.5)
        rollout, taken, advantages = batch(agent)
        left, before = iter(rows), flat(agent)
        inputs = moving(agent), agent.args, taken, 0 * advantages + 1, torch.ones_like(before)
        with monkeypatch.context() as patch:
            patch.setattr(trpo, "kl_divergence", lambda old, new: torch.tensor([new[1]]))
            patch.setattr(trpo, "surrogate", lambda new, *others: torch.tensor(new[0]))
            found = trpo.line_search(lambda: next(left), None, *inputs)
        assert torch.equal(flat(agent), before + found[2] if found[2] else before)
        return found

    assert search([(2.0, 0.005)]) == (pytest.approx(0.005), 1.0, 1.0)
    assert search([(2.0, 0.02), (1.5, 0.009)]) == (pytest.approx(0.009), 0.5, 0.5)  # too far first
    assert search([(0.5, 0.001), (1.25, 0.001)])[2] == 0.5  # worse first
    assert search([(2.0, nan), (nan, 0.001), (inf, 0.001), (2.0, 0.001)])[2] == 0.125
    assert search([(1.0, 0.0)] * 4) == (0.0, 0.0, 0.0)  # no better is no improvement
    assert search([(2.0, 0.02)] * 4) == (0.0, 0.0, 0.0)
    assert search([(2.0, 0.02), (2.0, 0.001)], max_iter=1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("actions,memory", [("discrete", "none"), ("box", "none"), ("box", "lstm")])
def test_the_step_is_the_natural_gradient_as_long_as_the_trust_region(
    actions, memory, factor, monkeypatch
):
    """Against F^-1 g by a dense solve; factor: of each environment every third step is in F, but
    all are in g."""
    flags = {
        "cg_max_steps": 400,
        "target_kl": 1e-3,
        "sub_sampling_factor": factor,
        "memory": memory,
        "encoder_size": 4,
        "hidden_size": 3,
    }
    agent = build(actions, torch.float64, **flags)
    rollout, taken, advantages = batch(agent, torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(trpo.ResetLSTM, "forward", naive)
        damped = hessian_of_the_mean_kl(agent, rollout, factor)
    damped = damped + 0.1 * torch.eye(len(damped))
    theta = flat(agent)
    reinforce = (agent(*rollout).log_prob(taken) * advantages).mean()
    gradient = trpo.flat_gradient(reinforce, moving(agent))
    direction = torch.linalg.solve(damped, gradient)
    full = (2e-3 / (direction @ damped @ direction)).sqrt() * direction
    kl, improvement, expected, fraction, entropy = trpo.trpo_step(
        agent, agent.args, rollout, taken, advantages
    )
    moved = flat(agent) - theta
    assert fraction > 0 and kl < 1e-3 and improvement > 0
    # Conjugate gradient stops at a residual of 1e-5, which is what the tolerance here is.
    assert (moved - fraction * full).norm() <= 1e-3 * moved.norm()
    assert expected == pytest.approx(float(gradient @ moved), rel=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("actions", ACTIONS)
def test_a_step_improves_within_the_region_and_moves_the_policy_alone(actions, memory, masked):
    agent = build(actions, memory=memory)
    rollout, taken, advantages = batch(agent, masked=masked)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    with torch.no_grad():
        old = agent(*rollout)
    kl, improvement, expected, fraction, entropy = trpo.trpo_step(
        agent, agent.args, rollout, taken, advantages
    )
    with torch.no_grad():
        new = agent(*rollout)
    true_kl = float(kl_divergence(old, new).mean())
    gain = float((((new.log_prob(taken) - old.log_prob(taken)).exp() - 1) * advantages).mean())
    assert fraction > 0 and 0.001 < true_kl < 0.01
    assert kl_divergence(old, new).isfinite().all()
    assert entropy == pytest.approx(float(old.entropy().mean()), rel=1e-5)
    assert kl == pytest.approx(true_kl, abs=1e-6) and 0 < gain == pytest.approx(
        improvement, abs=1e-5
    )
    assert 0.5 < improvement / expected < 1.5
    moved = {k for k, v in agent.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {k for k, _ in agent.named_parameters() if not k.startswith("critic")}


@pytest.mark.parametrize("memory", MEMORIES)
def test_final_steps_count_for_nothing(memory):
    """Not even where the ratio of their probabilities overflows."""
    thetas = []
    for noise in 0.0, 1e6:
        agent = build("box", memory=memory)
        (obs, legal, state, final), taken, advantages = batch(agent)
        obs = obs + noise * torch.randn_like(obs) * final[..., None]
        trpo.trpo_step(agent, agent.args, (obs, legal, state, final), taken, advantages)
        thetas.append(flat(agent))
    assert thetas[0].isfinite().all() and (thetas[0] - thetas[1]).norm() <= 1e-5 * thetas[0].norm()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "case", ["no gradient", "nan advantages", "nan KL", "infinite KL", "too far"]
)
def test_parameters_are_as_before_where_no_step_is_accepted(case, memory, monkeypatch):
    agent = build("box", memory=memory, line_search_max_iter=1 if case == "too far" else 10)
    rollout, taken, advantages = batch(agent)
    advantages = {"no gradient": 0.0, "nan advantages": float("nan")}.get(case, 1.0) * advantages
    value = {"nan KL": float("nan"), "infinite KL": float("inf"), "too far": 0.0101}.get(case)
    if value:
        real = trpo.kl_divergence  # keep the graph
        monkeypatch.setattr(trpo, "kl_divergence", lambda old, new: real(old, new) * 0 + value)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    logs = trpo.trpo_step(agent, agent.args, rollout, taken, advantages)
    kl, improvement, expected, fraction, entropy = logs
    assert kl == improvement == fraction == 0.0 and (expected == 0.0 or case == "nan advantages")
    assert np.isfinite(entropy)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())


def test_a_singular_fisher_matrix_without_damping():
    """An input that is always 0 and units without effect: F has a null space; the step is still good."""
    agent = build("multidiscrete", cg_damping=0.0)
    rollout, taken, advantages = batch(agent)
    rollout[0][..., 1] = 0.0
    with torch.no_grad():
        agent.actor.weight[:, :4] = 0.0
    kl, improvement, _, fraction, _ = trpo.trpo_step(agent, agent.args, rollout, taken, advantages)
    assert fraction > 0 and 0 < kl < 0.01 and improvement > 0
    assert all(p.isfinite().all() for p in agent.parameters())


def test_fit_critic_moves_the_critic_alone_towards_the_returns():
    agent = build("box", n_critic_updates=60, batch_size=32)
    (obs, _, _, final), _, _ = batch(agent)
    obs = obs[~final]
    returns = obs.sum(-1).sin()
    before = {k: v.clone() for k, v in agent.named_parameters()}
    error = (agent.critic(obs).squeeze(-1) - returns).square().mean().item()
    optimizer = torch.optim.Adam(agent.critic.parameters(), 1e-2, eps=1e-5)
    mean = trpo.fit_critic(agent.critic, agent.args, optimizer, obs, returns)
    after = (agent.critic(obs).squeeze(-1) - returns).square().mean().item()
    assert after < 0.05 * error and after < mean < error
    moved = {k for k, v in agent.named_parameters() if not torch.equal(v, before[k])}
    assert moved == {k for k in before if k.startswith("critic")}


class Toy(gym.Env):
    """Random walks whose reward depends on the action, in episodes of about 20 steps."""

    observation_space = OBSERVATIONS

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action):
        obs = self.np_random.normal(size=3).astype(np.float32)
        return (
            obs,
            float(np.sum(np.asarray(action) * obs[0]) + obs[1]),
            self.np_random.random() < 0.05,
            False,
            {},
        )


@pytest.mark.parametrize("actions", ["discrete", "multidiscrete", "box"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_one_whole_step_is_sb3_contribs(actions, num_envs, monkeypatch):
    """From the same weights and rollout: the policy's step and ten passes of the critic give the same.

    sb3-contrib averages the KL of Box over the components, so its target_kl and damping are ours
    divided by their number. It starts conjugate gradient from noise of 1e-4, set to zero here.
    (MultiBinary has one logit a component there and two here, which damping treats differently.)
    """
    sb3 = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.vec_env import DummyVecEnv

    space, T = ACTIONS[actions], 512
    parts = 2 if actions == "box" else 1
    env = DummyVecEnv([lambda: Toy(space)] * num_envs)
    peer = sb3.TRPO(
        "MlpPolicy",
        env,
        n_steps=T,
        seed=1,
        device="cpu",
        target_kl=0.01 / parts,
        cg_damping=0.1 / parts,
    )
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * num_envs)  # fills the buffer
    buffer, theirs = peer.rollout_buffer, peer.policy
    agent = build(actions, encoder_size=64)
    pairs = {
        "encoder.0": theirs.mlp_extractor.policy_net[0], "encoder.2": theirs.mlp_extractor.policy_net[2],
        "actor": theirs.action_net, "critic.0": theirs.mlp_extractor.value_net[0],
        "critic.2": theirs.mlp_extractor.value_net[2], "critic.4": theirs.value_net,
    }  # fmt: skip
    names = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in pairs.items()
        for kind in ("weight", "bias")
    }
    if actions == "box":
        names["log_std"] = theirs.log_std
    parameters = dict(agent.named_parameters())
    assert parameters.keys() == names.keys()
    # Ours has logits for choices that a component lacks, which do nothing; the peer's are the rest.
    used = {name: torch.ones(len(p), dtype=torch.bool) for name, p in parameters.items()}
    if actions == "multidiscrete":
        exists = torch.as_tensor(agent.exists).flatten()
        used |= {"actor.weight": exists, "actor.bias": exists}
    with torch.no_grad():
        for name, parameter in names.items():
            parameters[name][used[name]] = parameter
    first = {name: parameter.detach().clone() for name, parameter in names.items()}
    obs, taken = (
        torch.from_numpy(buffer.observations),
        torch.from_numpy(buffer.actions).view(T * num_envs, -1),
    )
    advantages, returns = (
        torch.from_numpy(buffer.advantages).flatten(),
        torch.from_numpy(buffer.returns),
    )

    np.random.seed(0)
    orders = [np.random.permutation(T * num_envs) for _ in range(1 + agent.args.n_critic_updates)][
        1:
    ]
    np.random.seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)
        peer.train()
    logged = peer.logger.name_to_value
    assert logged["train/is_line_search_success"] == 1.0

    legal = torch.as_tensor(agent.exists).expand(T, num_envs, *agent.exists.shape)
    final = torch.zeros(T, num_envs, dtype=torch.bool)
    rollout = obs, legal, agent.initial_state(num_envs), final
    normalized = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    assert trpo.trpo_step(agent, agent.args, rollout, taken, normalized)[3] > 0
    optimizer = torch.optim.Adam(
        agent.critic.parameters(), agent.args.learning_rate, eps=1e-5, fused=True
    )
    sequence = iter(orders)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(next(sequence)))
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (obs, returns)]  # in the order of its buffer
    value_loss = trpo.fit_critic(agent.critic, agent.args, optimizer, *rows)
    assert value_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
    for name, parameter in names.items():
        # From here on parameters are views of what the line search accepted.
        ours = dict(agent.named_parameters())[name][used[name]]
        error, step = (ours - parameter).norm(), (parameter - first[name]).norm()
        assert error <= 1e-4 * parameter.norm() and error <= 1e-2 * step and step > 0, name


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1)}),
    ],
)
def test_other_actions_are_refused_with_one_true_line(space):
    with pytest.raises(trpo.ArgumentError, match="use MultiDiscrete, or a Box of floats"):
        trpo.num_choices(space)


@pytest.mark.parametrize(
    "low,high,warns",
    [
        (-1, 1, False),
        (-2, 2, False),  # Pendulum
        (-np.inf, np.inf, False),
        (np.float32(-3.4e38), np.float32(3.4e38), False),
        (300, 500, True),
        (300, np.inf, True),
        (-100, 100, True),
        (0, 0.01, True),
        (np.array([-1, -1, 0]), np.array([1, 1, 20]), True),
    ],
)
def test_actions_far_from_the_first_ones_warn(low, high, warns):
    shape = None if isinstance(low, np.ndarray) else (3,)
    space = spaces.Box(low, high, shape, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trpo.num_choices(space).tolist() == [1, 1, 1]
    assert [("RescaleAction" in str(w.message)) for w in caught] == [True] * warns


def test_actions_are_clipped_and_finite():
    space = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 3], np.float32))
    taken = trpo.to_env(torch.tensor([[-9.0, -9.0], [0.5, 2.5], [9.0, 9.0]]), space)
    assert taken.tolist() == [[-1, 0], [0.5, 2.5], [1, 3]] and taken.dtype == np.float32
    with pytest.raises(FloatingPointError, match=r"actions\[1, 0\] is nan"):
        trpo.to_env(torch.tensor([[0.0, 0.0], [float("nan"), 0.0]]), space)


def test_shapes_that_would_broadcast_are_refused():
    agent = build("box", torch.float64)
    rollout, taken, advantages = batch(agent, torch.float64)
    policy, parameters = partial(agent, *rollout), moving(agent)
    with torch.no_grad():
        old, one = (
            policy(),
            agent(*(x[:1, :1] for x in rollout[:2]), *rollout[2:3], rollout[3][:1, :1]),
        )
    assert one.batch_shape == (1,)
    v, column = torch.ones_like(flat(agent)), torch.ones_like(flat(agent))[:, None]
    gradient = trpo.flat_gradient(
        kl_divergence(old, policy()).mean(), parameters, create_graph=True
    )
    for call, name in [
        (lambda: trpo.surrogate(policy(), old, taken, advantages[:, None]), "advantage"),
        (lambda: trpo.surrogate(policy(), old, taken, advantages[:1]), "advantage"),
        (lambda: trpo.surrogate(policy(), old, taken[:, :1], advantages), "actions"),
        (lambda: trpo.surrogate(policy(), old, taken[:1], advantages), "actions"),
        (lambda: trpo.surrogate(one, old, taken[:1], advantages), "old_logprob"),
        (lambda: trpo.fisher_vector_product(gradient, parameters, 0.1, column), "v"),
        (lambda: trpo.fisher_vector_product(gradient, parameters, 0.1, v[:1]), "v"),
        (lambda: trpo.fisher_vector_difference(policy, old, parameters, 0.1, column), "v"),
        (
            lambda: trpo.line_search(
                policy, old, parameters, agent.args, taken, advantages, column
            ),
            "step",
        ),
        (lambda: trpo.compute_gae(*np.ones((1, 5, 2)), np.ones((6, 1)), *np.zeros((2, 5, 2)), 0.9, 0.9), "values"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is .* must have the shape"):
            call()
    assert torch.equal(flat(agent), flat(build("box", torch.float64)))


def test_the_line_search_takes_a_generator_of_parameters():
    """As agent.parameters() is: after its first use it is empty, and nothing would move."""
    found = []
    for make in (list, iter):
        agent = build("box", torch.float64)
        rollout, taken, advantages = batch(agent, torch.float64)
        policy = partial(agent, *rollout)
        with torch.no_grad():
            old = policy()
        gradient = trpo.flat_gradient(
            trpo.surrogate(policy(), old, taken, advantages), moving(agent)
        )
        result = trpo.line_search(
            policy, old, make(moving(agent)), agent.args, taken, advantages, 1e-3 * gradient
        )
        found.append((result, flat(agent)))
    assert found[0][0] == found[1][0] and found[0][0][2] > 0
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], flat(build("box", torch.float64)))


def test_other_memories_are_refused():
    with pytest.raises(trpo.ArgumentError, match="--memory gru: must be none or lstm"):
        trpo.check_args(trpo.Args(memory="gru"))
    with pytest.raises(trpo.ArgumentError, match="--line-search-shrinking-factor 1.5: must be"):
        trpo.check_args(trpo.Args(line_search_shrinking_factor=1.5))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("masks", ["always", "step", "sometimes"])
@pytest.mark.parametrize("space", [spaces.Discrete(4, start=3), spaces.MultiDiscrete([2, 4])])
def test_training_with_action_masks_takes_no_illegal_action(space, masks, memory, tmp_path):
    """Toy asserts it, in training and in evaluation, however masks come and go."""
    env_id = toy(masks=masks, action_space=space)
    flags = {"memory": memory, "runs_dir": str(tmp_path), "run_name": "a", "num_envs": 3}
    sizes = {"encoder_size": 8, "hidden_size": 8, "num_steps": 32, "total_timesteps": 300}
    args = trpo.Args(env_id, eval_episodes=3, deterministic=masks != "step", **flags, **sizes)
    agent = trpo.train(args)
    assert all(p.isfinite().all() for p in agent.parameters())
    assert len(json.loads((tmp_path / "a/result.json").read_text())["evaluation"]) == 3


class Legal(gym.Env):
    """Of four choices two are legal, others at each step, and the observation says which. One of
    the legal ones pays 1. An illegal one is an error."""

    observation_space, action_space = spaces.Box(0, 1, (4,), np.float32), spaces.Discrete(4)

    def row(self):
        self.legal = np.zeros(4, np.int8)
        self.legal[self.np_random.choice(4, 2, replace=False)] = 1
        return self.legal.astype(np.float32), {"action_mask": self.legal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.row()

    def step(self, action):
        assert self.legal[action]
        self.t += 1
        paid = float(action == np.flatnonzero(self.legal)[0])
        obs, info = self.row()
        return obs, paid, False, self.t == 16, info


gym.register("TrpoLegal-v0", Legal)


def test_masked_policies_learn_within_the_trust_region(tmp_path, monkeypatch):
    """Every KL is finite and below the target, and the return rises to the best of 16."""
    figures, log = [], trpo.Run.log
    monkeypatch.setattr(
        trpo.Run,
        "log",
        lambda run, steps, losses: figures.extend(losses) or log(run, steps, losses),
    )
    flags = {"runs_dir": str(tmp_path), "run_name": "a", "target_kl": 0.05, "eval_episodes": 4}
    sizes = {"num_envs": 4, "num_steps": 64, "n_critic_updates": 2, "total_timesteps": 6_000}
    trpo.train(trpo.Args("TrpoLegal-v0", **flags, **sizes))
    rows = torch.stack(figures)
    assert rows.isfinite().all()
    kl, fraction = (rows[:, trpo.LOSSES.index(name)] for name in ("kl", "step_fraction"))
    assert (kl < 0.05).all() and (kl > 1e-4).float().mean() > 0.8 and (fraction > 0).sum() > 15
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert min(result["evaluation"]) >= 15


class Solitary(gym.Env):
    """Episodes of one step: every second step of a rollout is final, and with T = 1 a rollout has none
    that counts."""

    observation_space, action_space = (
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-1, 1, (1,), np.float32),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(2, np.float32), float(action[0]), True, False, {}


class Ends(gym.Env):
    """Episodes of random length that end in each way, with actions that are not counted from 0. The
    observation holds the number of the step, so that each is another one."""

    observation_space, action_space = (
        spaces.Box(-9, 9, (3,), np.float32),
        spaces.Discrete(3, start=2),
    )
    steps = 0

    def row(self):
        Ends.steps += 1
        return self.np_random.normal(size=3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.row(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        terminated, truncated = self.np_random.random(2) < 0.15
        return self.row(), float(action == 3) * 5, bool(terminated), bool(truncated), {}


gym.register("TrpoSolitary-v0", Solitary)
gym.register("TrpoEnds-v0", Ends)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_rollout_without_a_step_that_counts_is_skipped(memory, tmp_path):
    flags = {"memory": memory, "runs_dir": str(tmp_path), "eval_episodes": 2, "num_envs": 2}
    agent = trpo.train(trpo.Args("TrpoSolitary-v0", num_steps=1, total_timesteps=10, **flags))
    assert agent.obs_stats.count == 10


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_update_gets_what_the_rollout_computed(memory, tmp_path, monkeypatch):
    """Each rollout is played again from its data, one cell call a step, with the agent of that time."""
    T, N, seen, following, last_ended = 40, 3, [], None, None
    real = {name: getattr(trpo, name) for name in ("compute_gae", "trpo_step", "fit_critic")}

    def make_envs(args, num_envs, *others):
        envs = real_make_envs(args, num_envs, *others)
        step = envs.step
        envs.step = lambda action: seen.append(("env", action, step(action))) or seen[-1][2]
        return envs

    def watched(name):
        def function(*inputs):
            if name == "trpo_step":
                seen.append(("agent", copy.deepcopy(inputs[0])))
            copied = copy.deepcopy([x for x in inputs if not isinstance(x, torch.nn.Module)][:8])
            output = real[name](*inputs)
            seen.append((name, copied, copy.deepcopy(output)))
            return output

        return function

    def watched_log(run, steps, losses):
        logged.append(dict(zip(trpo.LOSSES, losses[0].tolist())))
        log(run, steps, losses)

    real_make_envs, log, logged = trpo.make_envs, trpo.Run.log, []
    monkeypatch.setattr(trpo, "make_envs", make_envs)
    monkeypatch.setattr(trpo.Run, "log", watched_log)
    for name in real:
        monkeypatch.setattr(trpo, name, watched(name))
    args = trpo.Args("TrpoEnds-v0", num_envs=N, num_steps=T, total_timesteps=3 * T * N, seed=4)
    args.memory, args.eval_episodes, args.runs_dir = memory, 0, str(tmp_path)
    args.encoder_size = args.hidden_size = 8
    trained = trpo.train(args)
    stats, running, sums = trained.obs_stats, np.zeros(N), []  # of rewards, discounted
    steps, calls = [x for x in seen if x[0] == "env"], [x for x in seen if x[0] != "env"]
    assert len(calls) // 4 >= 3 and len(steps) == len(calls) // 4 * T
    # Statistics are those of all observations, but for the final ones.
    every = [real_make_envs(args, N).reset(seed=args.seed)[0], *(x[2][0] for x in steps[:-1])]
    ends = np.stack([np.zeros(N, bool), *(x[2][2] | x[2][3] for x in steps[:-1])])
    rows = np.float64(every)[~ends]
    assert stats.count == len(rows) and len(rows) < 0.9 * T * N * len(calls) // 4
    assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9
    assert np.abs(stats.var.numpy() - rows.var(0)).max() <= 1e-9
    for number in range(len(calls) // 4):
        (_, gae, advantages), (_, agent), (_, step, figures), (_, critic, value_loss) = calls[
            4 * number :
        ][:4]
        names = "kl", "improvement", "expected_improvement", "step_fraction", "entropy"
        expected = dict(zip(names, figures)) | {"value_loss": value_loss / 2}  # as in PPO
        assert logged[number] == pytest.approx(expected)
        rewards, values, terminated, done, gamma, lam = gae
        _, (obs, legal, state, final), taken, normalized = step
        assert legal.all() and legal.shape == (T, N, 1, 3)
        rows = steps[number * T :][:T]
        ended = np.stack([x[2][2] | x[2][3] for x in rows])
        assert np.array_equal(done, ended) and (gamma, lam) == (args.gamma, args.gae_lambda)
        assert np.array_equal(terminated, np.stack([x[2][2] for x in rows]))
        for (_, _, outputs), counts in zip(rows, ~final.numpy()):
            running = outputs[1] + args.gamma * running
            sums.extend(running[counts])
            running[outputs[2] | outputs[3]] = 0
        paid = np.stack([x[2][1] for x in rows])
        assert np.abs(rewards - paid / np.sqrt(np.var(sums) + 1e-8)).max() <= 1e-5 < paid.std()
        assert final.any() and np.array_equal(final[1:], ended[:-1])
        raw = torch.from_numpy(np.stack([np.float32(x[2][0]) for x in rows]))
        assert torch.equal(obs[1:], agent.normalize(raw[:-1]))
        assert number or all(len(set(x)) == 3 for x in zip(*(x[1] for x in rows)))  # new noise
        # The policy's output and the critic's at each step, the final ones too
        if number:  # the state, and which step is final, come from the rollout before
            assert np.array_equal(final[0], last_ended)
            assert (state - following).abs().max() <= 1e-5
        h, inputs, last_ended = state, [], ended[-1]
        with torch.no_grad():
            for t, x in enumerate([*obs, agent.normalize(raw[-1])]):
                following, features = h, agent.encoder(x)
                if memory == "lstm":
                    h = agent.lstm.step(features, h)
                    x = torch.cat([x, h[0]], -1)
                    if t < T:
                        h = h.where(~final[t][:, None], 0.0)
                inputs.append(x)
            inputs = torch.stack(inputs)
            expected = agent.critic(inputs).squeeze(-1).numpy()
        assert np.abs(values - expected).max() <= 1e-5
        counts = ~final
        assert np.array_equal(taken[:, 0] + 2, np.stack([x[1] for x in rows])[counts])
        a = torch.from_numpy(advantages)[counts]
        assert (normalized - (a - a.mean()) / a.std(correction=0)).abs().max() <= 1e-5
        examples, returns = critic[-2:]
        assert (examples - inputs[:-1][counts]).abs().max() <= 1e-5
        assert (returns - torch.from_numpy(advantages + values[:-1])[counts]).abs().max() <= 1e-5
    assert trained.return_stats.count == len(sums)


def test_observations_are_normalised_and_clipped():
    agent = build("box", norm_obs=True)
    agent.obs_stats.update(torch.randn(50, 3) * torch.tensor([7, 0.1, 0]) + 100)
    raw = torch.tensor([[110.0, 99.95, 100.0], [1e6, -1e6, 100.0]])
    mean, var = agent.obs_stats.mean.numpy(), agent.obs_stats.var.numpy()
    expected = ((raw.numpy() - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)
    assert 0.1 < abs(expected[0, 0]) < 5 and expected[1].tolist() == [10, -10, 0]
    assert np.abs(agent.normalize(raw).numpy() - expected).max() <= 1e-5
