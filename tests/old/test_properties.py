"""Properties that hold for every shape and every pattern of ends: hypothesis looks for one where they do not."""

import numpy as np
import pytest
import torch
from conftest import MODULES, having
from hypothesis import given, settings
from hypothesis import strategies as st
from test_agent import build, rollout
from test_recurrence import RECURRENT, naive_loop
from test_recurrence import build as build_memory

SEEDS = st.integers(0, 10**6)


def ends(seed: int, T: int, N: int, share: float) -> torch.Tensor:
    """final (T, N): each row is an episode's last with the given probability."""
    return torch.from_numpy(np.random.default_rng(seed).random((T, N)) < share)


@pytest.mark.parametrize("script", RECURRENT)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, T=st.integers(1, 9), N=st.integers(1, 4), layers=st.integers(1, 3), share=st.floats(0, 1))
def test_the_fused_recurrence_is_the_loop(script, seed, T, N, layers, share):
    """Outputs to 1e-12 and gradients to 1e-10, with ends anywhere, also in neighbouring rows or in all of them."""
    memory, final = build_memory(script, layers), ends(seed, T, N, share)
    torch.manual_seed(seed)
    x = torch.randn(T, N, 5, dtype=torch.float64, requires_grad=True)
    state = torch.randn(memory.state_rows, N, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(T, N, 7, dtype=torch.float64) * ~final[..., None]
    fused, (loop, _) = memory(x, state, final), naive_loop(memory, x, state, final)
    assert ((fused - loop) * ~final[..., None]).abs().max() <= 1e-12
    inputs = [x, state, *memory.parameters()]
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (fused, loop))):
        assert (a - b).abs().max() <= 1e-10


@pytest.mark.parametrize("script", having("Agent"))
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, T=st.integers(2, 8), N=st.integers(1, 4), share=st.floats(0, 0.8), cut=st.integers(1, 7))
def test_a_rollout_cut_in_two_with_the_carried_state_is_the_rollout(script, seed, T, N, share, cut):
    """The state that acting has reached in any row starts a sequence there: log-probabilities and values to 1e-5."""
    final, cut = ends(seed, T, N, share), min(cut, T - 1)
    initial, obs, action, *_ = rollout(build(script), final)
    *_, middle = rollout(build(script), final[:cut])  # the same weights, states, observations and actions
    agent, pieces = build(script), []
    for state, rows in (initial, slice(None)), (initial, slice(cut)), (middle, slice(cut, None)):
        piece = [x[rows] for x in obs] if isinstance(obs, list) else obs[rows]
        pieces.append(agent.evaluate_actions(piece, state, final[rows], action[rows]))
    for whole, first, second in zip(*pieces):
        difference = (whole - torch.cat([first, second])) * ~final
        assert difference.abs().max() <= 1e-5 * max(1.0, whole.abs().max().item())


@pytest.mark.parametrize("script", having("Agent"))
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, T=st.integers(1, 8), N=st.integers(2, 5), share=st.floats(0, 0.8))
def test_permuting_environments_permutes_everything_and_changes_no_gradient(script, seed, T, N, share):
    final, agent = ends(seed, T, N, share), build(script)
    state, obs, action, *_ = rollout(agent, final)
    order, weight = torch.from_numpy(np.random.default_rng(seed).permutation(N)), torch.randn(T, N)
    results = []
    for p in torch.arange(N), order:
        agent.zero_grad()
        permuted = [x[:, p] for x in obs] if isinstance(obs, list) else obs[:, p]
        outputs = agent.evaluate_actions(permuted, state[:, p], final[:, p], action[:, p])
        (sum(outputs) * weight[:, p] * ~final[:, p]).sum().backward()
        results.append((outputs, [q.grad.clone() for q in agent.parameters() if q.grad is not None]))
    for a, b in zip(results[0][0], results[1][0]):
        assert ((a[:, order] - b) * ~final[:, order]).abs().max() <= 1e-5 * max(1.0, a.abs().max().item())
    for a, b in zip(results[0][1], results[1][1]):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("script", having("Agent"))
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, T=st.integers(1, 8), N=st.integers(1, 4), share=st.floats(0.1, 0.9))
def test_what_a_final_row_shows_or_was_answered_never_changes_a_gradient(script, seed, T, N, share):
    """Other observations, actions and advantages there: gradients are equal to the bit."""
    final, agent = ends(seed, T, N, share), build(script)
    state, obs, action, old_logprob, *_ = rollout(agent, final)
    advantages, gradients = torch.randn(T, N), []
    module, weight = MODULES[script], (~final).float()
    for made_up in False, True:
        agent.zero_grad()
        rows, taken, scores = obs if isinstance(obs, list) else [obs], action.clone(), advantages.clone()
        rows = [x.clone() for x in rows]
        if made_up:
            rows[0][final], scores[final] = rows[0][final].flip(-1) + 1, 1e6
            taken[final] = 0
        logprob, entropy, value = agent.evaluate_actions(rows if isinstance(obs, list) else rows[0], state, final, taken)
        ratio = (logprob - old_logprob).exp()
        loss = module.weighted_mean(ratio * scores + entropy + (value - scores) ** 2, weight)
        loss.backward()
        gradients.append([p.grad.clone() for p in agent.parameters() if p.grad is not None])
    assert len(gradients[0]) > 4 and all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("script", having("discounted_sums"))
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, T=st.integers(2, 12), N=st.integers(1, 4), share=st.floats(0, 1), cut=st.integers(1, 11), gamma=st.floats(0, 1))
def test_discounted_sums_of_a_rollout_cut_in_two_are_the_rollouts(script, seed, T, N, share, cut, gamma):
    function, done = MODULES[script].discounted_sums, ends(seed, T, N, share)
    torch.manual_seed(seed)
    rewards, carried, cut = torch.randn(T, N), torch.randn(N), min(cut, T - 1)
    whole, left = function(rewards, done, carried, gamma)
    first, middle = function(rewards[:cut], done[:cut], carried, gamma)
    second, last = function(rewards[cut:], done[cut:], middle, gamma)
    assert torch.equal(whole, torch.cat([first, second])) and torch.equal(left, last)
    assert (left[done[-1]] == 0).all()


@pytest.mark.parametrize("script", having("RunningMeanStd"))
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), scale=st.floats(1e-3, 1e3), mean=st.floats(-1e3, 1e3))
def test_statistics_do_not_depend_on_the_cuts(script, seed, sizes, scale, mean):
    """However rows are cut into batches, empty ones too, they are numpy's of all rows, relative to 1e-9."""
    stats, rows = MODULES[script].RunningMeanStd((2,)), np.random.default_rng(seed).normal(mean, scale, (sum(sizes), 2))
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(torch.from_numpy(batch))
    assert stats.count.unique().item() == len(rows)
    if len(rows):
        assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9 * (abs(mean) + scale)
        assert np.abs(stats.var.numpy() - rows.var(0)).max() <= 1e-9 * (mean**2 + scale**2)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), scale=st.floats(1e-3, 1e3))
def test_ppo1s_statistics_do_not_depend_on_the_cuts(seed, sizes, scale):
    """Sums with a first count of 0.01, and a deviation of 0.1 at least."""
    module, rows = MODULES["ppo1_mpi"], np.random.default_rng(seed).normal(1.0, scale, (sum(sizes), 2))
    stats = module.MpiRunningMeanStd((2,))
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(torch.from_numpy(batch), module.OneRank())
    count = len(rows) + 0.01
    mean = rows.sum(0) / count
    std = np.sqrt(np.maximum((0.01 + (rows**2).sum(0)) / count - mean**2, 0.01))
    assert np.abs(stats.mean.numpy() - mean).max() <= 1e-6 * (1 + scale)
    assert np.abs(stats.std.numpy() / std - 1).max() <= 1e-6


@pytest.mark.parametrize("script", having("normalize"))
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, T=st.integers(1, 9), N=st.integers(1, 5), share=st.floats(0, 0.9))
def test_normalised_advantages_have_mean_0_and_deviation_1_over_rows_that_count(script, seed, T, N, share):
    """Whatever the other rows hold, and with weights 1/k of rows that k sequences have."""
    function, generator = MODULES[script].normalize, np.random.default_rng(seed)
    weight = torch.from_numpy(generator.choice([0.25, 0.5, 1.0], (T, N))) * ~ends(seed, T, N, share)
    advantages = torch.from_numpy(generator.normal(3, 7, (T, N)))
    normal = function(advantages, weight)
    other = function(advantages.where(weight > 0, 1e3), weight)
    counted = (weight > 0).sum()
    assert torch.allclose(normal[weight > 0], other[weight > 0], rtol=0, atol=1e-12)
    if counted:
        w = weight / weight.sum()
        assert (w * normal).sum().abs() <= 1e-9
        assert ((w * normal**2).sum() - (counted > 1).double()).abs() <= 1e-6


@pytest.mark.parametrize("script", having("sde_sigma"))
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, rows=st.integers(1, 5), E=st.integers(1, 6), K=st.integers(1, 3), full=st.booleans(), expln=st.booleans())
def test_gsdes_deviation_is_that_of_features_times_a_matrix_of_noise(script, seed, rows, E, K, full, expln):
    """Raffin et al. 2021, eq. 7 to 9: sigma = exp(x), or log(1 + x) + 1 above 0; variances add up over the features."""
    module = MODULES[script]
    torch.manual_seed(seed)
    features, log_std = torch.randn(rows, E, dtype=torch.float64), torch.randn(E, K if full else 1, dtype=torch.float64)
    sigma = module.sde_sigma(log_std, expln)
    by_hand = [[np.log1p(x) + 1 if expln and x > 0 else np.exp(x) for x in row] for row in log_std.tolist()]
    assert np.abs(sigma.numpy() - by_hand).max() <= 1e-12
    std = module.sde_deviation(features, sigma)
    variances = [[sum(f**2 * s[min(k, len(s) - 1)] ** 2 for f, s in zip(row, sigma.tolist())) for k in range(sigma.shape[1])]
                 for row in features.tolist()]  # fmt: skip
    assert np.abs(std.numpy() ** 2 - np.array(variances) - 1e-6).max() <= 1e-12 * (1 + np.max(variances))


@pytest.mark.parametrize("script", having("anneal"))
@settings(max_examples=60, deadline=None)
@given(a=st.floats(1e-6, 10), b=st.floats(0, 10), p=st.floats(0, 2), q=st.floats(0, 2), power=st.floats(0.1, 4))
def test_annealing_stays_between_its_ends_and_goes_one_way(script, a, b, p, q, power):
    function = MODULES[script].anneal
    first, second = sorted((p, q))
    x, y = function(a, b, first, power), function(a, b, second, power)
    assert min(a, b) - 1e-9 <= x <= max(a, b) + 1e-9 and (y - x) * (b - a) >= -1e-9
    assert function(a, b, 0.0, power) == pytest.approx(a, abs=1e-9) and function(a, b, 1.0, power) == b
    assert function(a, None, p, power) == a


@given(name=st.sampled_from(sorted(MODULES["ppo1_mpi"].SCHEDULES)), p=st.floats(0, 1))
def test_ppo1s_schedules_start_at_1_and_are_no_more(name, p):
    schedule = MODULES["ppo1_mpi"].SCHEDULES[name]
    assert schedule(0.0) == 1.0 and 0.0 <= schedule(p) <= 1.0
