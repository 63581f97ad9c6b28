"""The functions that the papers name, against their definitions."""

import numpy as np
import pytest
import torch
from conftest import MODULES, awkward_ends, having
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 10**6)


def gae_by_definition(rewards, values, terminated, done, gamma, lam):
    """Schulman et al. 2016, eq. 16: A_t = sum_l (gamma lambda)^l delta_{t+l} within an episode."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k, n] else values[k + 1, n]
                delta = rewards[k, n] + gamma * bootstrap - values[k, n]
                advantages[t, n] += (gamma * lam) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


@pytest.mark.parametrize("script", having("compute_gae"))
@pytest.mark.parametrize("gamma,lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_its_definition(script, gamma, lam):
    terminated, truncated, _ = (x.numpy() for x in awkward_ends())
    generator = np.random.default_rng(0)
    rewards, values = generator.normal(size=(24, 6)), generator.normal(size=(25, 6))
    inputs = rewards, values, terminated, terminated | truncated, gamma, lam
    assert np.abs(MODULES[script].compute_gae(*inputs) - gae_by_definition(*inputs)).max() <= 1e-12


@pytest.mark.parametrize("script", having("compute_gae"))
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_gae_of_any_rollout(script, seed, T, N, gamma, lam):
    generator, function = np.random.default_rng(seed), MODULES[script].compute_gae
    rewards, values = generator.normal(size=(T, N)), generator.normal(size=(T + 1, N))
    terminated, truncated = generator.random((2, T, N)) < 0.3
    arrays = rewards, values, terminated, terminated | truncated
    ours = function(*arrays, gamma, lam)
    assert np.abs(ours - gae_by_definition(*arrays, gamma, lam)).max() <= 1e-12
    order = generator.permutation(N)  # environments do not mix
    assert np.array_equal(function(*(x[:, order] for x in arrays), gamma, lam), ours[:, order])


@pytest.mark.parametrize("script", having("compute_gae"))
def test_gae_ignores_a_nan_behind_a_termination(script):
    """`(1 - terminated) * x` would keep it alive."""
    values, terminated = np.array([[0.0], [np.nan], [0.0]]), np.array([[True], [False]])
    inputs = np.ones((2, 1)), values, terminated, terminated, 0.9, 0.9
    assert MODULES[script].compute_gae(*inputs)[0, 0] == 1.0


@pytest.mark.parametrize("script", having("compute_gae"))
@pytest.mark.parametrize("gamma,times", [(0.99, 8.66), (0.5, 1.29)])
def test_later_rewards_add_variance_to_an_advantage(script, gamma, times):
    """docs/concepts/gae.md: 1 / (1 - (gamma lambda)^2) times, if the deltas are independent."""
    rewards = np.random.default_rng(0).normal(size=(20_000, 50))
    never = np.zeros(rewards.shape, bool)
    values = np.zeros((20_001, 50))
    advantages = MODULES[script].compute_gae(rewards, values, never, never, gamma, 0.95)
    assert advantages[:-200].var() / rewards.var() == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("script", having("discounted_sums"))
@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 12), st.integers(1, 4), st.floats(0, 1), st.integers(1, 11))
def test_discounted_sums_are_a_plain_loops_also_cut_in_two(script, seed, T, N, gamma, cut):
    function, generator = MODULES[script].discounted_sums, np.random.default_rng(seed)
    rewards, done = generator.normal(size=(T, N)), generator.random((T, N)) < 0.3
    first_carried, expected = generator.normal(size=N), np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            ends = [k for k in range(t) if done[k, n]]
            start = ends[-1] + 1 if ends else 0
            expected[t, n] = sum(gamma ** (t - k) * rewards[k, n] for k in range(start, t + 1))
            expected[t, n] += 0 if ends else gamma**t * first_carried[n]
    whole_carried, cut_carried = first_carried.copy(), first_carried.copy()
    whole = function(rewards, done, whole_carried, gamma)
    parts = [function(rewards[x], done[x], cut_carried, gamma) for x in (slice(cut), slice(cut, T))]
    assert np.abs(whole - expected).max() <= 1e-9
    assert np.array_equal(whole, np.concatenate(parts)[:T])
    assert np.array_equal(whole_carried, cut_carried) and not whole_carried[done[-1]].any()


@pytest.mark.parametrize("script", having("RunningMeanStd"))
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@settings(max_examples=20, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_running_mean_std_is_numpys_however_rows_are_cut(script, shape, seed, sizes, scale):
    stats = MODULES[script].RunningMeanStd(shape)
    rows = np.random.default_rng(seed).normal(100, scale, (sum(sizes), *shape))
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(torch.from_numpy(batch))
    assert (stats.count == len(rows)).all() and set(stats.state_dict()) == {"mean", "var", "count"}
    assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9 * (100 + scale)
    assert np.abs(stats.var.numpy() - rows.var(0)).max() <= 1e-9 * (100 + scale**2)


@pytest.mark.parametrize("script", having("ppo_loss"))
def test_ppo_loss_is_equation_7(script):
    """Row by row, in plain Python."""
    torch.manual_seed(1)
    logprob, old, advantage = torch.randn(3, 60, dtype=torch.float64)
    total = kl = 0.0
    for new, before, a in zip(logprob.tolist(), old.tolist(), advantage.tolist()):
        r = np.exp(new - before)
        total -= min(r * a, min(max(r, 0.8), 1.2) * a) / 60
        kl += (r - 1 - np.log(r)) / 60
    ours = [x.item() for x in MODULES[script].ppo_loss(logprob, old, advantage, 0.2)]
    assert np.abs(np.array(ours) - [total, kl]).max() <= 1e-12


@pytest.mark.parametrize("script", having("ppo_loss"))
def test_gradient_at_ratio_one_is_the_policy_gradient(script):
    torch.manual_seed(0)
    logits = torch.randn(36, 3, dtype=torch.float64, requires_grad=True)
    actions, advantage = torch.randint(3, (36, 1)), torch.randn(36, dtype=torch.float64)
    logprob = logits.log_softmax(-1).gather(-1, actions)[:, 0]
    loss, kl = MODULES[script].ppo_loss(logprob, logprob.detach(), advantage, 0.2)
    losses = loss, -(logprob * advantage).mean()
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in losses)
    assert (ours - theirs).abs().max() <= 1e-15 < theirs.abs().max()
    assert kl.item() == 0.0 and not kl.requires_grad


@pytest.mark.parametrize("script", having("sample", "num_choices"))
def test_sample_draws_the_distribution_and_never_what_has_no_probability(script):
    torch.manual_seed(0)
    draws, p = 200_000, torch.tensor([[0.5, 0.2, 0.0, 0.3], [0.001, 0.0, 0.999, 0.0]])
    logits = p.log().clamp(min=-1e9)
    choices = MODULES[script].sample(logits.log_softmax(-1).expand(draws, 2, 4))
    assert choices.shape == (draws, 2)
    for k in range(2):
        frequencies = torch.bincount(choices[:, k], minlength=4) / draws
        standard_errors = (p[k] * (1 - p[k]) / draws).sqrt()
        assert ((frequencies - p[k]).abs() <= 4.5 * standard_errors).all()
    together = (
        ((choices[:, 0] == 0) & (choices[:, 1] == 2)).float().mean()
    )  # independent components
    assert abs(together - 0.5 * 0.999) <= 4.5 * (0.25 / draws) ** 0.5
