"""The functions that the papers name, against their definitions, and what an agent does with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ACTIONS, MODULES, actions_of, awkward_ends
from torch import nn
from torch.distributions import Categorical

lstm, trpo = MODULES["rppo_lstm"], MODULES["trpo"]
SEEDS = st.integers(0, 10**6)


@pytest.mark.parametrize("gamma,lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_equation_16(gamma, lam):
    terminated, truncated, _ = (x.numpy() for x in awkward_ends())
    generator = np.random.default_rng(0)
    rewards, values = generator.normal(size=(24, 6)), generator.normal(size=(25, 6))
    inputs = rewards, values, terminated, terminated | truncated, gamma, lam
    assert np.abs(lstm.compute_gae(*inputs) - reference.gae(*inputs)).max() <= 1e-12


def test_gae_ignores_a_nan_behind_a_termination():
    """`(1 - terminated) * x` would keep it alive."""
    values, terminated = np.array([[0.0], [np.nan], [0.0]]), np.array([[True], [False]])
    inputs = np.ones((2, 1)), values, terminated, terminated, 0.9, 0.9
    assert lstm.compute_gae(*inputs)[0, 0] == 1.0


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(2, 12), st.floats(0, 1), st.integers(1, 11))
def test_discounted_sums_are_a_plain_loops_also_cut_in_two(seed, T, gamma, cut):
    generator = np.random.default_rng(seed)
    rewards, done = generator.normal(size=(T, 3)), generator.random((T, 3)) < 0.3
    carried, expected = generator.normal(size=3), []
    running = carried.copy()
    for t in range(T):
        running = running + rewards[t]
        expected.append(running)
        running = np.where(done[t], 0.0, gamma * running)
    whole, halves = carried.copy(), carried.copy()
    sums = lstm.discounted_sums(rewards, done, whole, gamma)
    two = slice(cut), slice(cut, T)
    parts = [lstm.discounted_sums(rewards[x], done[x], halves, gamma) for x in two]
    assert np.abs(sums - expected).max() <= 1e-12 and np.abs(whole - running).max() <= 1e-12
    assert np.array_equal(sums, np.concatenate(parts)[:T]) and np.array_equal(whole, halves)


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
@settings(max_examples=20, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 20), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_running_mean_std_is_numpys_however_rows_are_cut(shape, seed, sizes, scale):
    stats = lstm.RunningMeanStd(shape)
    rows = np.random.default_rng(seed).normal(100, scale, (sum(sizes), *shape))
    for batch in np.split(rows, np.cumsum(sizes)[:-1]):
        stats.update(torch.from_numpy(batch))
    assert stats.count == len(rows)
    if len(rows):
        assert np.abs(stats.mean.numpy() - rows.mean(0)).max() <= 1e-9 * (100 + scale)
        assert np.abs(stats.var.numpy() - rows.var(0)).max() <= 1e-9 * (100 + scale**2)


def test_a_large_offset_does_not_hide_a_cue():
    """Sums that begin at 0, as in baselines, made a cue of 1e-5 of what lies 1e5 from 0."""
    stats = lstm.RunningMeanStd((4,))
    rows = torch.randn(1000, 4, dtype=torch.float64) + 1e5
    stats.update(rows)
    ours = (rows - stats.mean) / stats.var.sqrt()
    assert (ours.mean(0).abs() < 1e-6).all() and ((ours.std(0) - 1).abs() < 1e-2).all()


def test_ppo_loss_is_equation_7():
    """Row by row, in plain Python."""
    torch.manual_seed(1)
    logprob, old, advantage = torch.randn(3, 60, dtype=torch.float64)
    total = kl = outside = 0.0
    for new, before, a in zip(logprob.tolist(), old.tolist(), advantage.tolist()):
        r = np.exp(new - before)
        total -= min(r * a, min(max(r, 0.8), 1.2) * a) / 60
        kl += (r - 1 - np.log(r)) / 60
        outside += (not 0.8 <= r <= 1.2) / 60
    ours = [x.item() for x in lstm.ppo_loss(logprob, old, advantage, 0.2)]
    assert np.abs(np.array(ours) - [total, kl, outside]).max() <= 1e-7  # clipfrac is float32


def test_gradient_at_ratio_one_is_the_policy_gradient():
    torch.manual_seed(0)
    logits = torch.randn(36, 3, dtype=torch.float64, requires_grad=True)
    actions, advantage = torch.randint(3, (36,)), torch.randn(36, dtype=torch.float64)
    logprob = lstm.select(logits.log_softmax(-1), actions)
    loss, kl, clipfrac = lstm.ppo_loss(logprob, logprob.detach(), advantage, 0.2)
    reinforce = -(logprob * advantage).mean()
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, reinforce))
    assert (ours - theirs).abs().max() <= 1e-12 < theirs.abs().max()
    assert kl == 0 and clipfrac == 0


def test_normalised_advantages_have_mean_0_and_deviation_1():
    advantage = lstm.normalize_advantage(torch.randn(50, dtype=torch.float64) * 7 + 3)
    assert advantage.mean().abs() <= 1e-12
    assert abs(advantage.std(correction=0) - 1) <= 1e-6
    assert lstm.normalize_advantage(torch.tensor([5.0])).item() == 0.0  # not NaN


def act(log_pi):
    """trpo's and ppo1_mpi's Agent.act with these logits."""
    agent = SimpleNamespace(box=False, actor=nn.Linear(1, log_pi.shape[-1]))
    noise = trpo.Agent.sample_noise(agent, *log_pi.shape[:-1])
    agent.actor = lambda h: h
    return trpo.Agent.act(agent, log_pi, noise)


@pytest.mark.parametrize("sample", [lstm.sample, act])
def test_the_distribution_of_actions(sample):
    """Draws have their probabilities; log-probability and entropy are torch's."""
    torch.manual_seed(0)
    draws, p = 100_000, torch.tensor([[0.5, 0.2, 0.0, 0.3], [0.001, 0.0, 0.999, 0.0]])
    log_pi = p.log().clamp(min=-1e9).log_softmax(-1)
    actions = sample(log_pi.expand(draws, 2, 4))
    for k in range(2):
        frequencies = torch.bincount(actions[:, k], minlength=4) / draws
        assert ((frequencies - p[k]).abs() <= 4.5 * (p[k] * (1 - p[k]) / draws).sqrt()).all()
    together = ((actions[:, 0] == 0) & (actions[:, 1] == 2)).float().mean()
    assert abs(together - 0.5 * 0.999) <= 4.5 * (0.25 / draws) ** 0.5  # rows are independent
    log_pi = torch.randn(7, 3, 4).log_softmax(-1)
    actions, expected = torch.randint(4, (7, 3)), Categorical(logits=log_pi)
    assert (lstm.select(log_pi, actions) - expected.log_prob(actions)).abs().max() <= 1e-6
    assert (lstm.entropy(log_pi) - expected.entropy()).abs().max() <= 1e-6


def test_sequences_are_pieces_of_one_environment():
    rollout = torch.arange(12 * 5).view(12, 5)
    cut = lstm.to_sequences(rollout, 4)
    assert cut.shape == (4, 15)
    for s in range(15):
        chunk, n = divmod(s, 5)
        assert cut[:, s].tolist() == rollout[4 * chunk : 4 * chunk + 4, n].tolist()


@pytest.mark.parametrize("script", ["rppo_lstm", "rppo_gru_atari"])
def test_minibatches_are_shuffled_anew_and_hold_each_sequence_once(script):
    args = MODULES[script].Args(update_epochs=5, num_minibatches=3)
    final = torch.zeros(4, 12, dtype=torch.bool)
    epochs = torch.stack([*MODULES[script].minibatches(final, args)]).view(5, 12).tolist()
    assert all(sorted(epoch) == [*range(12)] for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 5
    final[:, 3] = True
    args.num_minibatches = 12
    found = torch.stack([*MODULES[script].minibatches(final, args)]).flatten().tolist()
    assert 3 not in found and len(found) == 5 * 11  # of final steps alone there is no loss


def build(script: str, actions: str = "discrete", trained=0.3, **flags):
    """An agent, whose weights and biases are moved away from their beginning."""
    module = MODULES[script]
    sizes = {"encoder_size": 8} if hasattr(module.Args, "encoder_size") else {}
    args = module.Args(**{"hidden_size": 6, **sizes, **flags})
    obs = lstm.spaces.Box(-2, 2, (3,))
    if script == "rppo_gru_atari":
        obs = lstm.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    envs = SimpleNamespace(single_observation_space=obs, single_action_space=ACTIONS[actions])
    torch.manual_seed(3)
    agent = module.Agent(envs, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(trained * torch.randn_like(parameter))
    return agent


AGENTS = {
    "lstm": ("rppo_lstm", "from -1", {}),
    "gaussian": ("rppo_continuous", "box", {}),
    "gsde": ("rppo_continuous", "box", dict(use_sde=True)),
    "gru": ("rppo_gru_atari", "discrete", {}),
    "trpo": ("trpo", "box", dict(memory="lstm")),
    "ppo1": ("ppo1_mpi", "from -1", dict(memory="lstm")),
}


@pytest.mark.parametrize("name", AGENTS)
def test_predict_carries_the_state_and_resets_it(name):
    """The most probable actions, of the states that the loop gives; sampled ones vary."""
    script, actions, flags = AGENTS[name]
    agent = build(script, actions, **flags)
    weights = {k: p.detach().double() for k, p in agent.named_parameters()}
    network = reference.Network(script, agent.args, weights)
    generator = np.random.default_rng(0)
    state, expected_state, final = None, network.state(4), None
    for t in range(5):
        obs = generator.normal(size=(4, 3)).astype(np.float32)
        if script == "rppo_gru_atari":
            obs = generator.integers(0, 256, (4, 1, 84, 84), np.uint8)
        final = np.array([t == 1, False, t > 1, False])
        action, state = agent.predict(obs, state, final)
        h, _, expected_state = network.step(torch.from_numpy(obs).double(), expected_state)
        out = reference.dense(weights, "actor", h)
        if actions == "box":
            assert np.abs(action - out.clamp(-1, 1).numpy()).max() <= 1e-5
        else:
            assert np.array_equal(action, out.argmax(-1).numpy() + agent.action_space.start)
        expected_state[:, torch.from_numpy(final)] = 0
        assert (state - expected_state).abs().max() <= 1e-5
        assert not state[:, final].any() and state[:, ~final].any()
    torch.manual_seed(0)
    sampled = [agent.predict(obs, state, None, deterministic=False)[0] for _ in range(30)]
    assert len({x.tobytes() for x in sampled}) > 1
    if name == "gsde":  # new noise at each step
        assert len({x.tobytes() for x in sampled}) == 30


@pytest.mark.parametrize("script", ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "ppo1_mpi"])
def test_the_control_keeps_no_state(script):
    flags = dict(memory="lstm") if script == "ppo1_mpi" else {}
    agent = build(script, actions_of(script), ablate_memory=True, **flags)
    obs = np.zeros((2, 1, 84, 84) if script == "rppo_gru_atari" else (2, 3), np.float32)
    state = agent.predict(obs)[1]
    assert state.numel() and not state.any()


@pytest.mark.parametrize("script", ["rppo_lstm", "rppo_gru_atari"])
def test_first_weights(script):
    """Orthogonal; the policy begins near uniform, and the LSTM's forget gate open."""
    agent = build(script, trained=0)
    for layer, std in (agent.actor, 0.01), (agent.critic, 1.0):
        gram = layer.weight @ layer.weight.T
        assert (gram - std**2 * torch.eye(len(gram))).abs().max() <= 1e-5 and not layer.bias.any()
    if script == "rppo_lstm":
        bias = agent.lstm.cell.bias_ih.view(4, 6)
        assert bias[1].eq(1).all() and not bias[[0, 2, 3]].any()
        assert agent.encoder[0].weight.norm(2, 0).max().item() == pytest.approx(2**0.5, rel=1e-5)


@pytest.mark.parametrize("script", ["rppo_continuous", "trpo"])
def test_the_noise_begins_as_large_as_log_std_init_says(script):
    assert build(script, "box", trained=0, log_std_init=-1.5).log_std.eq(-1.5).all()


def test_observations_are_normalised_and_clipped():
    agent = build("rppo_continuous", "box", norm_obs=True)
    agent.obs_stats.update(torch.tensor([[0.0, 1, 2], [4, 1, 8]]))
    obs = torch.tensor([[2.0, 1, 5], [4, 1, 1e9]])
    assert (agent.normalize(obs) - torch.tensor([[0.0, 0, 0], [1, 0, 10]])).abs().max() <= 1e-6
