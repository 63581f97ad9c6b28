"""TRPO's parts: the Fisher-vector product, conjugate gradient, the line search, the step."""

from functools import partial

import numpy as np
import pytest
import reference
import torch
from support import MODULES, awkward_ends
from test_numbers import build
from torch.distributions import kl_divergence

trpo = MODULES["trpo"]
SPACES = "discrete", "box"


def agent_of(actions="box", dtype=torch.float64, **flags):
    return build("trpo", actions, norm_obs=False, **flags).to(dtype)


def batch(agent, T=24):
    """Made-up data with every awkward end, as trpo_step takes it: rollout, actions, advantages."""
    final = awkward_ends(T)[2][:-1]
    torch.manual_seed(5)
    dtype = agent.actor.weight.dtype
    obs = torch.randn(*final.shape, 3, dtype=dtype)
    state = torch.randn_like(agent.initial_state(final.shape[1])).to(dtype)
    rollout = dict(obs=obs, lstm_state=state, final=final)
    with torch.no_grad():
        actions = agent(**rollout, chosen=~final).sample()
    return rollout, actions, trpo.normalize_advantage(torch.randn(len(actions), dtype=dtype))


def moving(agent):
    """The parameters that a step of the policy moves."""
    return [p for name, p in agent.named_parameters() if not name.startswith("critic")]


def flat(agent):
    return torch.nn.utils.parameters_to_vector(moving(agent)).detach().clone()


def hessian_of_the_mean_kl(agent, rollout, chosen):
    """The definition: the mean KL from the distribution at theta, differentiated twice at theta."""
    named = {n: p for n, p in agent.named_parameters() if not n.startswith("critic")}
    with torch.no_grad():
        old = agent(**rollout, chosen=chosen)

    def kl(theta):
        pieces = theta.split([p.numel() for p in named.values()])
        moved = {n: piece.view_as(p) for piece, (n, p) in zip(pieces, named.items())}
        inputs = *rollout.values(), chosen
        return kl_divergence(old, torch.func.functional_call(agent, moved, inputs)).mean()

    return torch.autograd.functional.hessian(kl, flat(agent), vectorize=True)


def products(agent, rollout, chosen, damping=0.0):
    """fisher_vector_product and fisher_vector_difference, as functions of v."""
    policy = partial(agent, **rollout, chosen=chosen)
    with torch.no_grad():
        old = policy()
    gradient = trpo.flat_gradient(
        kl_divergence(old, policy()).mean(), moving(agent), create_graph=True
    )
    product = partial(trpo.fisher_vector_product, gradient, moving(agent), damping)
    return product, partial(trpo.fisher_vector_difference, policy, old, moving(agent), damping)


@pytest.mark.parametrize("actions", SPACES)
def test_fisher_vector_product_is_the_hessian_of_the_mean_kl(actions):
    agent = agent_of(actions)
    rollout = batch(agent)[0]
    valid = ~rollout["final"]
    for chosen in valid, trpo.sub_sample(valid, 3):
        hessian = hessian_of_the_mean_kl(agent, rollout, chosen)
        for length in 1.0, 1e-6, 1e6:
            v = torch.randn(len(hessian), dtype=torch.float64) * length
            expected = hessian @ v
            for ours in products(agent, rollout, chosen):
                assert (ours(v) - expected).norm() <= 1e-8 * expected.norm()
            for damped in products(agent, rollout, chosen, 0.3):
                assert (damped(v) - expected - 0.3 * v).norm() <= 1e-8 * (expected + 0.3 * v).norm()


@pytest.mark.parametrize("actions", SPACES)
def test_product_through_the_fused_lstm_is_the_loop_differentiated_twice(actions, monkeypatch):
    """float32 and fused, against float64, a cell a step, autograd of autograd."""
    agent = agent_of(actions, torch.float32, memory="lstm")
    rollout, _, _ = batch(agent)
    v, before = torch.randn(len(flat(agent))), flat(agent)
    valid = ~rollout["final"]
    _, difference = products(agent, rollout, valid)
    ours = difference(v).double()
    assert torch.equal(flat(agent), before)

    def by_its_definition(self, x, state, final):
        return reference.loop(self.step, x, state, final)[0]

    monkeypatch.setattr(trpo.ResetLSTM, "forward", by_its_definition)
    wide = {k: x if x.dtype == torch.bool else x.double() for k, x in rollout.items()}
    product, _ = products(agent.double(), wide, valid)
    expected = product(v.double())
    assert ours @ expected / ours.norm() / expected.norm() >= 0.9999
    assert (ours - expected).norm() <= 2e-3 * expected.norm()


def test_every_kth_step_of_each_environment_is_in_the_fisher_matrix():
    valid = ~awkward_ends()[2][:-1]
    for k in 1, 2, 5:
        chosen = trpo.sub_sample(valid, k)
        for n in range(valid.shape[1]):
            assert torch.equal(chosen[:, n].nonzero(), valid[:, n].nonzero()[::k])


@pytest.mark.parametrize("actions", SPACES)
def test_kl_is_the_joint_one(actions):
    """The sum over an action's components, not sb3-contrib's mean; old before new."""
    agent = agent_of(actions)
    rollout, taken, advantage = batch(agent)
    valid = ~rollout["final"]
    network = reference.Network("trpo", agent.args, dict(agent.named_parameters()))

    def features():
        h, _, _ = network.unroll(rollout["obs"], network.state(6), rollout["final"])
        return h[valid]

    with torch.no_grad():
        p, h = agent(**rollout, chosen=valid), features()
        old = reference.dense(network.w, "actor", h), network.deviation(h) if agent.box else None
        for parameter in moving(agent):
            parameter.add_(0.2 * torch.randn_like(parameter))
        q = agent(**rollout, chosen=valid)
        expected = network.kl(features(), old).mean().item()
    kl, improvement = trpo.kl_and_improvement(q, p, taken, advantage)
    assert kl == pytest.approx(expected, rel=1e-10) and kl > 0.01
    gain = ((q.log_prob(taken) - p.log_prob(taken)).exp() - 1) * advantage
    assert improvement == pytest.approx(gain.mean().item(), rel=1e-10)


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
    """No gradient, a singular matrix, one that isn't positive, NaN and infinity: no step."""
    b, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert torch.equal(trpo.conjugate_gradient(lambda v: v, zero, 10), zero)
    assert torch.equal(trpo.conjugate_gradient(torch.zeros_like, b, 10), zero)
    assert torch.equal(trpo.conjugate_gradient(lambda v: -v, b, 10), zero)
    for bad in float("nan"), float("inf"):
        assert torch.equal(trpo.conjugate_gradient(lambda v, bad=bad: v * bad, b, 10), zero)
        assert torch.equal(trpo.conjugate_gradient(lambda v: v, b * bad, 10), zero)
    half = torch.diag(torch.tensor([2.0, 0.0]))  # singular, but b is in its range
    x = trpo.conjugate_gradient(lambda v: half @ v, torch.tensor([3.0, 0.0]), 10)
    assert torch.equal(x, torch.tensor([1.5, 0]))


@pytest.mark.parametrize(
    "case", ["no gradient", "nan advantages", "nan KL", "infinite KL", "too far"]
)
def test_parameters_are_as_before_where_no_step_is_accepted(case, monkeypatch):
    agent = agent_of("box", memory="lstm", line_search_max_iter=1 if case == "too far" else 10)
    rollout, taken, advantage = batch(agent)
    advantage = {"no gradient": 0.0, "nan advantages": np.nan}.get(case, 1.0) * advantage
    value = {"nan KL": np.nan, "infinite KL": np.inf, "too far": 0.0101}.get(case)
    if value:
        real = trpo.kl_divergence  # keep the graph
        monkeypatch.setattr(trpo, "kl_divergence", lambda old, new: real(old, new) * 0 + value)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    kl, improvement, expected, fraction, entropy = trpo.trpo_step(
        agent, agent.args, rollout, taken, advantage
    )
    assert kl == improvement == fraction == 0.0 and (expected == 0.0 or case == "nan advantages")
    assert np.isfinite(entropy)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())


def test_the_line_search_tries_the_whole_step_first_and_refuses_an_infinite_gain():
    """A fraction of 0.5**i of the step until the KL is small enough and the gain a number."""
    theta = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    args = trpo.Args(target_kl=0.01, line_search_shrinking_factor=0.5)
    tried = []

    def search(gains):
        tried.clear()

        def kl_and_improvement(*_):
            tried.append(theta.item())
            return theta.item() / 100, gains[len(tried) - 1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trpo, "kl_and_improvement", kl_and_improvement)
            step = torch.tensor([4.0], dtype=torch.float64)
            result = trpo.line_search(lambda: None, None, [theta], args, None, None, step)
        moved = theta.item()
        torch.nn.init.zeros_(theta)
        return result, moved

    assert search([1, 1, 1, 1]) == ((0.005, 1, 0.125), 0.5) and tried == [4.0, 2.0, 1.0, 0.5]
    assert search([1, 1, 1, np.inf, 0, 2]) == ((0.00125, 2, 0.03125), 0.125)
    assert search([0] * 10) == ((0.0, 0.0, 0.0), 0.0)


def test_a_singular_fisher_matrix_without_damping():
    """An input that is always 0 and units without effect: F has a null space; the step is good."""
    agent = agent_of("discrete", torch.float32, cg_damping=0.0)
    rollout, taken, advantage = batch(agent)
    rollout["obs"][..., 1] = 0.0
    with torch.no_grad():
        agent.actor.weight[:, :4] = 0.0
    kl, improvement, _, fraction, _ = trpo.trpo_step(agent, agent.args, rollout, taken, advantage)
    assert fraction > 0 and 0 < kl < 0.01 and improvement > 0
    assert all(p.isfinite().all() for p in agent.parameters())


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_final_steps_count_for_nothing(memory):
    """Not even where the ratio of their probabilities overflows."""
    thetas = []
    for noise in 0.0, 1e6:
        agent = agent_of("box", torch.float32, memory=memory)
        rollout, taken, advantage = batch(agent)
        rollout["obs"] += noise * torch.randn_like(rollout["obs"]) * rollout["final"][..., None]
        trpo.trpo_step(agent, agent.args, rollout, taken, advantage)
        thetas.append(flat(agent))
    assert thetas[0].isfinite().all() and (thetas[0] - thetas[1]).norm() <= 1e-5 * thetas[0].norm()
