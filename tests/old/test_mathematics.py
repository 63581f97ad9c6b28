"""The functions that the papers name, against their definitions."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, awkward_ends, having
from hypothesis import given, settings
from hypothesis import strategies as st


def gae_by_definition(rewards, values, terminated, done, gamma, lam):
    """The O(T^2) sum of Schulman et al. 2016, eq. 16: A_t = sum_l (gamma lambda)^l delta_{t+l}, to the episode's end."""
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
    terminated, truncated, _ = awkward_ends()
    torch.manual_seed(0)
    rewards, values = torch.randn(24, 6).double(), torch.randn(25, 6).double()
    done = terminated | truncated
    ours = MODULES[script].compute_gae(rewards, values, terminated, done, gamma, lam)
    theirs = gae_by_definition(*(x.numpy() for x in (rewards, values, terminated, done)), gamma, lam)
    assert np.abs(ours.numpy() - theirs).max() <= 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.floats(0, 1))
def test_gae_property(seed, T, N, gamma, lam):
    generator = np.random.default_rng(seed)
    rewards, values = generator.normal(size=(T, N)), generator.normal(size=(T + 1, N))
    terminated, truncated = generator.random((2, T, N)) < 0.3
    theirs = gae_by_definition(rewards, values, terminated, terminated | truncated, gamma, lam)
    tensors = [torch.from_numpy(x) for x in (rewards, values, terminated, terminated | truncated)]
    permutation = torch.randperm(N)
    for script in having("compute_gae"):
        ours = MODULES[script].compute_gae(*tensors, gamma, lam)
        assert np.abs(ours.numpy() - theirs).max() <= 1e-10
        permuted = MODULES[script].compute_gae(*(x[:, permutation] for x in tensors), gamma, lam)
        assert torch.equal(permuted, ours[:, permutation])


@pytest.mark.parametrize("script", having("compute_gae"))
def test_gae_ignores_a_nan_behind_a_termination(script):
    """`(1 - done) * x` would keep it alive."""
    values = torch.zeros(3, 1)
    values[1] = float("nan")
    terminated = torch.tensor([[True], [False]])
    advantages = MODULES[script].compute_gae(torch.ones(2, 1), values, terminated, terminated, 0.9, 0.9)
    assert advantages[0].item() == 1.0


@pytest.mark.parametrize("script", having("discounted_sums", "RunningMeanStd"))
def test_return_statistics_are_those_of_a_plain_loop(script):
    module = MODULES[script]
    terminated, truncated, final = awkward_ends()
    done, valid = terminated | truncated, ~final[:-1]
    generator = torch.Generator().manual_seed(1)
    stats, carried, expected = module.RunningMeanStd(()), torch.zeros(6), []
    running = np.zeros(6)
    for _ in range(3):  # the accumulator is carried over rollouts
        rewards = torch.randn(24, 6, generator=generator) * valid
        sums, carried = module.discounted_sums(rewards, done, carried, 0.9)
        stats.update(sums[valid])
        for t in range(24):
            for n in range(6):
                if valid[t, n]:
                    running[n] = 0.9 * running[n] + rewards[t, n].item()
                    expected.append(running[n])
                if done[t, n]:
                    running[n] = 0.0
        assert abs(stats.count.item() - len(expected)) == 0
        assert abs(stats.mean.item() - np.mean(expected)) <= 1e-6  # the sums are float32, as rewards are
        assert abs(stats.var.item() - np.var(expected)) <= 1e-6


@pytest.mark.parametrize("script", having("RunningMeanStd"))
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_running_mean_std_is_numpys(script, shape):
    stats = MODULES[script].RunningMeanStd(shape)
    generator = np.random.default_rng(0)
    batches = [generator.normal(100, 3, (n, *shape)) for n in (1, 7, 0, 100, 2)]
    for batch in batches:
        stats.update(torch.from_numpy(batch))
    rows = np.concatenate(batches)
    assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9
    assert np.abs(stats.var.numpy() - rows.var(0)).max() <= 1e-9
    assert set(stats.state_dict()) == {"mean", "var", "count"}


@pytest.mark.parametrize("script", having("ppo_loss"))
def test_gradient_at_ratio_one_is_the_policy_gradient(script):
    torch.manual_seed(0)
    module = MODULES[script]
    logits = torch.randn(9, 4, 3, dtype=torch.float64, requires_grad=True)
    action, advantages = torch.randint(3, (9, 4)), torch.randn(9, 4, dtype=torch.float64)
    weight = (torch.rand(9, 4) > 0.3).double()
    logprob = logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
    loss, approx_kl, clipped = module.ppo_loss(logprob, logprob.detach(), advantages, weight, 0.2)
    reference = -(logprob * advantages * weight).sum() / weight.sum()
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, reference))
    assert (ours - theirs).abs().max() <= 1e-15
    assert approx_kl.item() == 0.0 and clipped.item() == 0.0


@pytest.mark.parametrize("script", having("ppo_loss"))
def test_ppo_loss_is_equation_7(script):
    """Row by row, in plain Python; rows of weight 0 never count."""
    torch.manual_seed(1)
    logprob, old, advantages = torch.randn(3, 6, 5, dtype=torch.float64)
    weight = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)[torch.randint(3, (6, 5))]
    total = kl = clipped = 0.0
    for lp, lo, a, w in zip(*(x.flatten().tolist() for x in (logprob, old, advantages, weight))):
        r = np.exp(lp - lo)
        total -= w * min(r * a, min(max(r, 0.8), 1.2) * a)
        kl += w * ((r - 1) - np.log(r))
        clipped += w * (abs(r - 1) > 0.2)
    expected = np.array([total, kl, clipped]) / weight.sum().item()
    ours = [x.item() for x in MODULES[script].ppo_loss(logprob, old, advantages, weight, 0.2)]
    assert np.abs(np.array(ours) - expected).max() <= 1e-12
    logprob = logprob.masked_fill(weight == 0, -50.0)
    assert MODULES[script].ppo_loss(logprob, old, advantages, weight, 0.2)[0].item() == pytest.approx(ours[0], abs=1e-12)


@pytest.mark.parametrize("script", having("value_loss"))
def test_value_loss(script):
    value, old, returns, weight = torch.tensor([[0.0, 2.0, 9.0], [0.0, 0.0, 0.0], [1.0, 1.0, 5.0], [1.0, 1.0, 0.0]])
    function = MODULES[script].value_loss
    assert function(value, old, returns, weight, None).item() == pytest.approx(0.5 * (1 + 1) / 2)
    # The second is clipped to 0.5: errors (0 - 1)^2 = 1 and max((2 - 1)^2, (0.5 - 1)^2) = 1; the first stays.
    assert function(value, old, returns, weight, 0.5).item() == pytest.approx(0.5 * (1 + 1) / 2)
    # With a return of 3 the clipped prediction is the worse one: (0.5 - 3)^2 = 6.25 and not (2 - 3)^2 = 1.
    returns = torch.tensor([1.0, 3.0, 5.0])
    assert function(value, old, returns, weight, 0.5).item() == pytest.approx(0.5 * (1 + 6.25) / 2)


@pytest.mark.parametrize("script", having("normalize"))
def test_normalize_uses_valid_rows_only_and_survives_one(script):
    function = MODULES[script].normalize
    advantages, weight = torch.tensor([1.0, 3.0, 1e6]), torch.tensor([1.0, 1.0, 0.0])
    assert torch.allclose(function(advantages, weight)[:2], torch.tensor([-1.0, 1.0]))
    assert function(torch.tensor([5.0]), torch.tensor([1.0])).item() == 0.0


@pytest.mark.parametrize("script", having("anneal"))
def test_anneal(script):
    function = MODULES[script].anneal
    assert function(1.0, None, 0.7, 2.0) == 1.0
    assert function(1.0, 0.2, 0.0, 1.0) == 1.0
    assert function(1.0, 0.2, 0.25, 1.0) == pytest.approx(0.8)
    assert function(1.0, 0.2, 0.5, 2.0) == pytest.approx(0.4)
    assert function(1.0, 0.2, 1.0, 2.0) == function(1.0, 0.2, 1.7, 2.0) == 0.2


@pytest.mark.parametrize("script", having("sequence_starts"))
@settings(max_examples=100, deadline=None)
@given(seq_len=st.integers(1, 9), chunks=st.integers(1, 6), stride=st.integers(0, 12))
def test_sequences_leave_no_row_out(script, seq_len, chunks, stride):
    T = seq_len * chunks
    starts = MODULES[script].sequence_starts(T, seq_len, min(stride, seq_len))
    assert starts == sorted(set(starts)) and starts[0] == 0
    assert {t for start in starts for t in range(start, start + seq_len)} == set(range(T))
    assert MODULES[script].sequence_starts(T, 0, 0) == [0]
    if stride == 0:
        assert len(starts) == chunks  # neither overlap nor gap


def test_tanh_exp_and_log_are_right_to_the_last_bit_with_the_branch_of_mkl_that_scripts_choose():
    """Scripts tell MKL to take AVX2's vector functions; another number, 9, was as fast and right to 13 bits of 24."""
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.logspace(-30, 1, 100_001)])
    for function, at in (torch.tanh, x), (torch.exp, x), (torch.log, x.abs().clamp(min=1e-30)):
        exact = function(at.double())
        ulp = torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()
        assert ((function(at).double() - exact).abs() / ulp).max() <= 1.1


@pytest.mark.parametrize("chosen", [None, "0"])
def test_the_branch_of_mkl_can_be_chosen(chosen):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MKL_VML")}
    env |= {"MKL_VML_DEBUG_CPU_TYPE": chosen} if chosen else {}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import trpo, os, torch; " \
           "print(os.environ.get('MKL_VML_DEBUG_CPU_TYPE'), torch.backends.cpu.get_cpu_capability()[:3] == 'AVX')"
    branch, avx = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.split()
    assert branch == (chosen or ("5" if avx == "True" else "None"))
