"""The agent: acting and replay are the same function, in every space, with every critic; masks, predict."""

import numpy as np
import pytest
import torch
from conftest import (
    CONTINUOUS_ACTIONS,
    DISCRETE_ACTIONS,
    MODULES,
    OBSERVATION_SPACES,
    act,
    awkward_ends,
    having,
)
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

DISCRETE = ["rppo_lstm", "ppo1_mpi"]
MASKED = ["rppo_lstm"]  # of these, which know action masks
BOX = ["rppo_continuous"]  # for these a test that needs no certain actions takes CONTINUOUS_ACTIONS
FRAMES = ["rppo_gru_atari"]  # obs is one tensor of images, and there are no flags for layers before or after


def build(script, observation_space=OBSERVATION_SPACES["vector"], action_space=None, **flags):
    module = MODULES[script]
    if action_space is None:
        action_space = CONTINUOUS_ACTIONS["box"] if script in BOX else DISCRETE_ACTIONS["discrete"]
    if not flags.keys() <= module.Args.__dataclass_fields__.keys():
        pytest.skip("it has no such flag")
    if "memory" in module.Args.__dataclass_fields__:
        flags.setdefault("memory", "lstm")
    torch.manual_seed(3)
    sizes = {} if script in FRAMES else {"encoder_sizes": (8,)}
    observation_space = OBSERVATION_SPACES["image CHW"] if script in FRAMES else observation_space
    args = module.Args(**{"hidden_size": 6, **sizes, **flags})
    agent = module.Agent(observation_space, action_space, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.02 if script in FRAMES else 0.2))
    return agent


def observe(agent, raw, info):
    """Raw observations as the agent takes them: a list of tensors, or one of frames."""
    if hasattr(agent, "observe"):
        return [torch.from_numpy(np.array(x)) for x in agent.observe(raw, info)]
    return torch.from_numpy(raw)


def rollout(agent, final, masked=False):
    """Random observations through agent.act, row by row, as train does it."""
    T, N = final.shape
    space = batch_space(agent.observation_space, N)
    space.seed(0)
    generator = np.random.default_rng(0)
    state, rows, stored = agent.initial_state(N), [], []
    initial = state = state + torch.randn(state.shape)  # as if the memory held something
    for t in range(T):
        info = {}
        if masked:
            info["action_mask"] = generator.random((N, agent.exists.sum())) < 0.6
            info["action_mask"][:, np.cumsum([0, *agent.exists.sum(1)[:-1]])] = True  # one legal choice at least
        obs = observe(agent, space.sample(), info)
        with torch.no_grad():
            action, logprob, value, state = act(agent, obs, state)
        rows.append(obs)
        stored.append((action, logprob, value))
        state = agent.next_state(state, final[t])
    obs = [torch.stack(leaf) for leaf in zip(*rows)] if isinstance(rows[0], list) else torch.stack(rows)
    return initial, obs, *(torch.stack(x) for x in zip(*stored)), state


@pytest.mark.parametrize("script", having("Agent"))
@pytest.mark.parametrize("flags", [
    {}, {"num_layers": 2}, {"critic": "separate"}, {"critic": "detached"}, {"critic": "none"}, {"reset_state": False},
    {"ablate_memory": True}, {"head_sizes": (5,), "activation": "relu"}, {"encoder_sizes": ()},
    {"critic": "separate", "num_layers": 3, "head_sizes": (4, 4)}, {"ablate_memory": True, "critic": "separate"},
], ids=str)  # fmt: skip
def test_replay_repeats_acting_so_the_first_ratio_is_one(script, flags):
    final = awkward_ends()[2][:-1]
    agent = build(script, **flags)
    initial, obs, action, logprob, value, _ = rollout(agent, final)
    if flags.get("ablate_memory"):
        initial = torch.zeros_like(initial)
    new_logprob, entropy, new_value = agent.evaluate_actions(obs, initial, final, action)
    first = 1 if flags.get("ablate_memory") else 0  # the fixture's made-up first state is no ablated run's
    valid = ~final[first:]
    assert ((new_logprob - logprob)[first:][valid].exp() - 1).abs().max() <= 1e-5
    assert (new_value - value)[first:][valid].abs().max() <= 1e-5
    assert script in BOX or (entropy[~final] >= 0).all()


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("actions", DISCRETE_ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATION_SPACES)
def test_every_space(script, observations, actions):
    final = awkward_ends(10)[2][:-1]
    agent = build(script, OBSERVATION_SPACES[observations], DISCRETE_ACTIONS[actions])
    initial, obs, action, logprob, value, state = rollout(agent, final)
    new_logprob, entropy, new_value = agent.evaluate_actions(obs, initial, final, action)
    assert ((new_logprob - logprob)[~final].exp() - 1).abs().max() <= 1e-5
    # A noisy CNN's features are in the hundreds, and so are the roundings of a batch of another size.
    assert (new_value - value)[~final].abs().max() <= (5e-5 if "image" in observations else 1e-5)
    assert entropy.shape == logprob.shape == final.shape
    assert batch_space(agent.action_space, 6).contains(agent.to_env(action[0]))
    single, _ = agent.predict(agent.observation_space.sample(), None, True)
    assert agent.action_space.contains(single)


@pytest.mark.parametrize("script", MASKED)
@pytest.mark.parametrize("actions", ["discrete", "multidiscrete"])
def test_masks_hold_in_acting_and_update(script, actions):
    final = awkward_ends()[2][:-1]
    agent = build(script, action_space=DISCRETE_ACTIONS[actions])
    initial, obs, action, logprob, _, _ = rollout(agent, final, masked=True)
    mask = obs[-1]
    assert mask.dtype == torch.bool
    assert mask.gather(-1, action[..., None]).all()  # no illegal action was taken
    new_logprob, entropy, _ = agent.evaluate_actions(obs, initial, final, action)
    assert ((new_logprob - logprob)[~final].exp() - 1).abs().max() <= 1e-5
    assert entropy.isfinite().all()
    logprobs = agent.log_probs(torch.randn(*final.shape, 6), obs)
    assert (logprobs.exp()[~mask] == 0).all()  # exactly
    entropy.sum().backward()
    assert all(p.grad.isfinite().all() for p in agent.parameters() if p.grad is not None)


@pytest.mark.parametrize("script", MASKED)
@pytest.mark.parametrize("actions", DISCRETE_ACTIONS)
def test_logprob_and_entropy_are_those_of_torch_distributions(script, actions):
    agent = build(script, action_space=DISCRETE_ACTIONS[actions]).double()
    policy = torch.randn(5, 4, 6, dtype=torch.float64)
    logits = agent.actor(policy)
    logprobs = agent.log_probs(policy, [policy])
    action = torch.stack([(torch.rand(5, 4) * n).long() for n in agent.exists.sum(1)], -1)
    if actions == "multibinary":
        reference = torch.distributions.Independent(torch.distributions.Bernoulli(logits=logits), 1)
        expected = reference.log_prob(action.double()), reference.entropy()
    else:
        parts = logits.unflatten(-1, agent.exists.shape).unbind(-2)
        categoricals = [torch.distributions.Categorical(logits=x[..., :n]) for x, n in zip(parts, agent.exists.sum(1))]
        expected = [
            sum(c.log_prob(a) for c, a in zip(categoricals, action.unbind(-1))), sum(c.entropy() for c in categoricals)
        ]  # fmt: skip
    assert (logprobs.gather(-1, action[..., None]).sum((-2, -1)) - expected[0]).abs().max() <= 1e-12
    assert (-(logprobs.exp() * logprobs).sum((-2, -1)) - expected[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("script", DISCRETE)
def test_the_exponential_race_samples_the_distribution(script):
    agent = build(script, action_space=spaces.Discrete(4))
    obs, n = [torch.zeros(200_000, 3)], 200_000
    torch.manual_seed(0)
    action, logprob, _, _ = agent.act(obs, agent.initial_state(n))
    probabilities = agent.step(obs, agent.initial_state(n))[0][0, 0].exp()
    frequencies = torch.bincount(action[:, 0], minlength=4) / n
    standard_errors = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((frequencies - probabilities).abs() < 4.5 * standard_errors).all()
    assert torch.allclose(logprob.exp(), probabilities[action[:, 0]])


@pytest.mark.parametrize("script", having("Agent"))
def test_detached_and_none_critics_send_no_gradient_into_the_memory(script):
    final = awkward_ends()[2][:-1]
    for critic, reaches in ("shared", True), ("detached", False), ("none", False), ("separate", False):
        agent = build(script, critic=critic)
        initial, obs, action, *_ = rollout(agent, final)
        agent.evaluate_actions(obs, initial, final, action)[2][~final].sum().backward()
        gradient = agent.memory.cells[0].weight_hh.grad
        assert (gradient is not None and bool(gradient.abs().max() > 0)) == reaches, critic


@pytest.mark.parametrize("script", having("Agent"))
def test_predict_threads_the_state_and_resets_it(script):
    agent = build(script)
    space = batch_space(batch_space(agent.observation_space, 4), 5)
    space.seed(0)
    obs = space.sample()
    state, actions = None, []
    for row in obs:
        action, state = agent.predict(row, state, deterministic=True)
        actions.append(action)
    # One environment at a time gives the same, without the batch axis.
    single = None
    for t in range(5):
        action, single = agent.predict(obs[t, 2], single, deterministic=True)
        assert np.allclose(action, actions[t][2], atol=1e-6)
    assert torch.allclose(single[:, 0], state[:, 2], atol=1e-6)
    # episode_start forgets what was before, where it is set and nowhere else.
    start = np.array([True, False, False, True])
    _, reset = agent.predict(obs[0], state, start, deterministic=True)
    _, fresh = agent.predict(obs[0], None, deterministic=True)
    _, carried = agent.predict(obs[0], state, deterministic=True)
    assert torch.equal(reset[:, start], fresh[:, start]) and torch.equal(reset[:, ~start], carried[:, ~start])
    assert not torch.allclose(carried[:, start], fresh[:, start])


@pytest.mark.parametrize("script", having("Agent"))
def test_a_final_row_never_changes_a_gradient(script):
    final = awkward_ends()[2][:-1]
    agent = build(script)
    initial, obs, action, *_ = rollout(agent, final)
    gradients = []
    for noise in 0.0, 1e3:
        agent.zero_grad()
        changed = (obs if script in FRAMES else obs[0]).clone()
        changed[final] += (noise * torch.randn(changed[final].shape)).to(torch.int64).to(changed.dtype)
        changed = changed if script in FRAMES else [changed]
        logprob, entropy, value = agent.evaluate_actions(changed, initial, final, action)
        ((logprob + entropy + value) * ~final).sum().backward()
        gradients.append([p.grad.clone() for p in agent.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("script", having("Agent"))
def test_a_state_of_nan_does_not_survive_a_reset(script):
    """`(1 - final) * state` would keep it."""
    agent = build(script)
    final = torch.tensor([True, False])
    state = agent.next_state(torch.full_like(agent.initial_state(2), float("nan")), final)
    assert (state[:, 0] == 0).all() and state[:, 1].isnan().all() and len(state) >= 1
