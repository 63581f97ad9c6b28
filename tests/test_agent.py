"""The agent: acting and replay are one function; masks, spaces, predict."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CATEGORICAL, MODULES, SCRIPTS, awkward_ends, having, toy, toy_for
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical

DISCRETE = CATEGORICAL
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "from -1": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "from 1": spaces.MultiDiscrete([2, 3], start=[1, -4]),
    "matrix": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multibinary": spaces.MultiBinary(3),
    "binary matrix": spaces.MultiBinary((2, 2)),
}
OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (3,)),
    "float64 matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "discrete": spaces.Discrete(5, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(4),
    "dict": spaces.Dict(place=spaces.Discrete(3), speed=spaces.Box(-1, 1, (2,))),
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Dict(a=spaces.Box(-1, 1, (1,))))),
}
FLAGS = [{}, {"separate_critic": True}, {"ablate_memory": True},
         {"ablate_memory": True, "separate_critic": True}]  # fmt: skip


def build(script, actions="discrete", observations="vector", masks="", **flags):
    module = MODULES[script]
    env_id = toy(
        observation_space=OBSERVATIONS[observations], action_space=ACTIONS[actions], masks=masks
    )
    args = module.Args(env_id=env_id, encoder_size=5, hidden_size=6, **flags)
    envs = module.make_envs(args, 4)
    torch.manual_seed(3)
    agent = module.Agent(envs, args)
    with torch.no_grad():  # biases are 0 at first, and the actor's weights nearly so
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return agent, envs


def play(agent, final, masked=False):
    """Random observations and masks through Agent.step, as `train` does it."""
    T, N = final.shape
    obs, exists = torch.rand(T, N, 3).to(agent.actor.weight) * 2 - 1, torch.from_numpy(agent.exists)
    legal = exists.expand(T, N, *exists.shape)
    if masked:  # in half of the steps; the first choice stays
        legal = legal & (torch.rand(legal.shape) < 0.4 + (torch.rand(T, N, 1, 1) < 0.5).int())
        legal[..., 0] = True
    state, stored = agent.initial_state(N), []
    if not agent.args.ablate_memory:
        state = state + torch.randn_like(state)
    for t in range(T):
        before = state
        logp, value, state = agent.step(obs[t], legal[t], state)
        actions = MODULES[agent.__module__].sample(logp)
        stored.append((before, logp, actions, value))
        state = state.where(~final[t][:, None], 0.0)
    return obs, legal, *(torch.stack(x) for x in zip(*stored))


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("masked", [False, True], ids=["all legal", "masked"])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_replay_repeats_acting(script, actions, masked, flags):
    final = awkward_ends()[2][:-1]
    T, N = final.shape
    agent, _ = build(script, actions, **flags)
    with torch.no_grad():
        obs, legal, states, logp, taken, value = play(agent, final, masked)
    L = 1 if flags.get("ablate_memory") else T  # the state that is stored is then always zero
    steps = [x.unflatten(0, (T // L, L)).transpose(0, 1).flatten(1, 2) for x in
             (obs, legal, final, taken, logp, value)]  # fmt: skip
    obs, legal, final, taken, logp, value = steps
    state = states[::L].transpose(0, 1).flatten(1, 2)
    assert state.any() == (not flags.get("ablate_memory"))
    new_logprob, entropy, new_value = agent.evaluate_actions(obs, legal, state, final, taken)
    logprob = logp.gather(-1, taken[..., None]).sum((-2, -1))
    assert len(new_value) == (~final).sum() > 0
    assert (new_logprob - logprob[~final]).abs().max() <= 1e-5
    assert (new_value - value[~final]).abs().max() <= 1e-5 < value.std()
    assert legal.gather(-1, taken[..., None]).all()
    assert (logp.exp()[~legal] == 0).all() and logp.exp().sum(-1).sub(1).abs().max() <= 1e-6
    (new_logprob + entropy + new_value).sum().backward()
    for name, parameter in agent.named_parameters():  # without memory nothing reaches weight_hh
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any() == (L > 1 or not name.endswith("weight_hh")), name


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("masked", [False, True], ids=["all legal", "masked"])
@pytest.mark.parametrize("actions", ACTIONS)
def test_log_probability_and_entropy_are_torchs(script, actions, masked):
    agent, _ = build(script, actions)
    agent.double()
    final = awkward_ends()[2][:-1]
    with torch.no_grad():
        obs, legal, states, logp, taken, _ = play(agent, final, masked)
        logprob, entropy, _ = agent.evaluate_actions(obs, legal, states[0], final, taken)
        x = agent.encoder(agent.normalize(obs))
        logits = agent.actor(agent.lstm(x, states[0], final))
    logits = logits.unflatten(-1, agent.exists.shape)
    if isinstance(agent.action_space, spaces.MultiBinary) and not masked:
        torchs = Bernoulli(logits=logits[..., 1] - logits[..., 0])
        reference = torchs.log_prob(taken.double()).sum(-1), torchs.entropy().sum(-1)
    else:
        parts = zip(logits.unbind(-2), legal.unbind(-2), agent.exists.sum(1))
        torchs = [Categorical(logits=x.masked_fill(~m, -torch.inf)[..., :n]) for x, m, n in parts]
        reference = (
            sum(d.log_prob(a) for d, a in zip(torchs, taken.unbind(-1))),
            sum(d.entropy() for d in torchs),
        )
    for ours, theirs in zip((logprob, entropy), reference):
        assert (ours - theirs[~final]).abs().max() <= 1e-12
    acted = logp.gather(-1, taken[..., None]).sum((-2, -1))
    assert (acted - reference[0])[~final].abs().max() <= 1e-12


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("separate", [False, True])
def test_what_a_final_step_shows_never_changes_a_gradient(script, separate):
    final = awkward_ends()[2][:-1]
    agent, _ = build(script, separate_critic=separate)
    obs, legal, states, _, taken, _ = (x.detach() for x in play(agent, final, masked=True))
    gradients = []
    for noise in 0.0, 1e3, 1e30:
        agent.zero_grad()
        seen, chosen = obs.clone(), taken.clone()
        seen[final] += noise * torch.randn(seen[final].shape)
        chosen[final] = chosen[final] if noise == 0 else 0
        outputs = agent.evaluate_actions(seen, legal, states[0], final, chosen)
        sum(x.square().sum() for x in outputs).backward()
        gradients.append([parameter.grad.clone() for parameter in agent.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) and a.any() for a, b in zip(gradients[0], others))


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("flags", FLAGS[:3], ids=str)
@pytest.mark.parametrize("actions", ACTIONS)
def test_predict_threads_the_state(script, actions, flags):
    """Deterministic actions are the most probable ones, others are drawn; both from all of obs."""
    agent, envs = build(script, actions, **flags)
    module, obs = MODULES[script], np.random.default_rng(0).uniform(-1, 1, (6, 4, 3))
    obs, legal = obs.astype(np.float32), torch.from_numpy(agent.exists).expand(4, -1, -1)
    for deterministic in True, False:
        state, expected = None, agent.initial_state(4)
        for t in range(6):
            with torch.no_grad():
                logp, _, expected = agent.step(torch.from_numpy(obs[t]), legal, expected)
            torch.manual_seed(t)
            choices = logp.argmax(-1) if deterministic else module.sample(logp)
            torch.manual_seed(t)
            action, state = agent.predict(obs[t], {}, state, None, deterministic)
            assert torch.equal(state, expected) and state.any() != agent.args.ablate_memory
            assert envs.action_space.contains(action.astype(envs.action_space.dtype))
            start = getattr(agent.action_space, "start", 0)
            assert np.array_equal((action - start).reshape(4, -1), choices)


TYPED = [
    spaces.Discrete(3, start=-1), spaces.Discrete(3, start=-1, dtype=np.int32),
    spaces.MultiDiscrete([[2, 3]], dtype=np.int32), spaces.MultiBinary(2),
    spaces.MultiDiscrete([2, 3], dtype=np.int8, start=[1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("script", [name for name in MODULES if name != "rppo_continuous"])
@pytest.mark.parametrize("space", TYPED, ids=str)
def test_actions_have_their_spaces_type(script, space):
    """Environments that assert their action_space.contains(action) are content."""
    choices = torch.ones(4, int(np.prod(space.shape)), dtype=torch.long)
    actions = MODULES[script].to_env(choices, space)
    assert len(actions) == 4 and all(space.contains(action) for action in actions)
    assert (actions - getattr(space, "start", 0) == 1).all()


@pytest.mark.parametrize("script", ["rppo_lstm", "trpo", "ppo1_mpi"])
def test_many_choices_of_a_small_type(script, monkeypatch):
    """2 x 120 is no int8."""
    space = spaces.MultiDiscrete([120, 3], dtype=np.int8)
    monkeypatch.setitem(ACTIONS, "small", space)
    agent, _ = build(script, "small")
    assert agent.actor.out_features == 240
    assert agent.predict(np.zeros((4, 3), np.float32), {}, None)[0].shape == (4, 2)


@pytest.mark.parametrize("script", DISCRETE)
def test_predict_resets_the_state_after_final_steps(script):
    """An environment whose observation is an episode's last needs no legal action, and its state
    is zero afterwards: a loop over autoreset environments needs no line for the reset."""
    agent, _ = build(script)
    obs = np.random.default_rng(0).uniform(-1, 1, (3, 4, 3)).astype(np.float32)
    _, state = agent.predict(obs[0])
    final = np.array([False, True, False, True])
    info = {"action_mask": np.where(final[:, None], 0, np.ones((4, 3)))}
    _, after = agent.predict(obs[1], info, state, final)
    assert not after[:, final].any() and after[:, ~final].any()
    _, kept = agent.predict(obs[1], None, state)
    assert torch.equal(kept[:, ~final], after[:, ~final])
    alone, _ = agent.predict(obs[2])
    together, _ = agent.predict(obs[2], None, after)
    assert np.array_equal(alone[final], together[final])


@pytest.mark.parametrize("script", having("check_inputs", "VELOCITIES"))
def test_predict_says_what_it_needs(script):
    """One observation without its first axis, a Dict, a wrong size, a state of another number."""
    module = MODULES[script]
    args = module.Args(env_id=toy_for(script))
    envs = module.make_envs(args, 4)
    agent = module.Agent(envs, args)
    obs = np.zeros((4, 3), np.float32)
    for wrong in obs[0], {"x": obs}, obs[:, :2], obs[..., None], list(obs), np.float32(0):
        with pytest.raises(
            ValueError, match=r"obs must be \(N, 3\): take obs\[None\].*spaces.flatten"
        ):
            agent.predict(wrong)
    _, state = agent.predict(obs)
    if state.numel():
        with pytest.raises(ValueError, match="state is .* must have the shape"):
            agent.predict(obs[:3], None, state)
    with pytest.raises(ValueError, match=r"final is .* must have the shape \(4,\)"):
        agent.predict(obs, final=np.zeros(3, bool))
    assert len(agent.predict(torch.from_numpy(obs[:1]))[0]) == 1  # any number of environments


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("actions", ["discrete", "from -1", "multidiscrete"])
def test_predict_obeys_masks(script, actions):
    """What it chose without a mask is forbidden in three of four environments."""
    agent, _ = build(script, actions)
    obs = np.random.default_rng(0).uniform(-1, 1, (4, 3)).astype(np.float32)
    start = getattr(agent.action_space, "start", 0)
    for deterministic in True, False:
        torch.manual_seed(0)
        free = (agent.predict(obs, deterministic=deterministic)[0] - start).reshape(4, -1)
        mask = np.stack([agent.exists] * 4)
        np.put_along_axis(mask, free[..., None], False, -1)
        info = {"action_mask": mask[:, agent.exists], "_action_mask": np.array([1, 0, 1, 1], bool)}
        torch.manual_seed(0)
        masked = (agent.predict(obs, info, deterministic=deterministic)[0] - start).reshape(4, -1)
        assert (masked[[0, 2, 3]] != free[[0, 2, 3]]).all() and (masked[1] == free[1]).all()
        assert agent.exists[np.arange(len(agent.exists)), masked].all()


@pytest.mark.parametrize("script", DISCRETE)  # make_envs is one text in most scripts
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_observations_are_vectors(script, observations):
    agent, envs = build(script, "multidiscrete", observations)
    space = OBSERVATIONS[observations]
    plain = [gym.make(agent.args.env_id) for _ in range(4)]
    obs, _ = envs.reset(seed=7)
    expected = [env.reset(seed=7 + n)[0] for n, env in enumerate(plain)]
    for _ in range(4):
        assert obs.shape == (4, spaces.flatdim(space))
        flat = np.stack([spaces.flatten(space, x) for x in expected]).astype(np.float32)
        assert np.array_equal(np.float32(obs), flat) and flat.std() > 0
        actions = np.zeros((4, 3), int)
        obs, _, terminated, truncated, _ = envs.step(actions)
        if (terminated | truncated).any():
            break
        expected = [env.step(np.zeros(3, int))[0] for env in plain]
    assert agent.predict(obs, {}, None)[0].shape == (4, 3)


@pytest.mark.parametrize("script", having("make_envs", "VELOCITIES"))
@pytest.mark.parametrize("space", [
    spaces.Sequence(spaces.Discrete(2)), spaces.Graph(spaces.Box(-1, 1, (2,)), None),
], ids=lambda space: type(space).__name__)  # fmt: skip
def test_what_is_no_vector_is_refused(script, space):
    module = MODULES[script]
    with pytest.raises(module.ArgumentError, match="no fixed size"):
        module.make_envs(module.Args(env_id=toy(observation_space=space)), 2)


@pytest.mark.parametrize("script", DISCRETE)
def test_continuous_actions_are_refused(script):
    module = MODULES[script]
    envs = module.make_envs(module.Args(env_id=toy(action_space=spaces.Box(-1, 1, (2,)))), 2)
    with pytest.raises(module.ArgumentError, match="rppo_continuous.py"):
        module.Agent(envs, module.Args())


@pytest.mark.parametrize("script", having("legal_choices"))
def test_legal_choices(script):
    module = MODULES[script]
    exists = np.array([[True, True, False], [True, True, True]])  # of MultiDiscrete([2, 3])
    nobody, everybody = np.zeros(2, bool), np.ones(2, bool)
    free = np.broadcast_to(exists, (2, 2, 3))
    assert np.array_equal(module.legal_choices(exists, {}, nobody), free)
    sent = np.empty(2, object)
    sent[0] = np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8)  # as SyncVectorEnv stores it
    mask = np.array([[False, True, False], [True, False, True]])
    info = {"action_mask": sent, "_action_mask": np.array([True, False])}
    expected = np.stack([mask, exists])
    assert np.array_equal(module.legal_choices(exists, info, nobody), expected)
    flat = {"action_mask": np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])}  # of all environments
    assert np.array_equal(module.legal_choices(exists, flat, nobody), expected)
    final = np.array([True, False])  # what a final step's mask says does not matter
    assert np.array_equal(module.legal_choices(exists, flat, final), free)
    one_component = np.array([[0, 0, 1, 0, 1], [1, 1, 1, 1, 1]])
    for empty in np.zeros((2, 5)), one_component:
        with pytest.raises(ValueError, match="leaves no choice"):
            module.legal_choices(exists, {"action_mask": empty}, nobody)
    zeros = {"action_mask": np.zeros((2, 5))}
    assert np.array_equal(module.legal_choices(exists, zeros, everybody), free)
    for size in 1, 4, 6:
        with pytest.raises(ValueError, match=rf"action_mask is \({size},\), .* shape \(5,\)"):
            module.legal_choices(exists, {"action_mask": np.ones((2, size))}, nobody)


@pytest.mark.parametrize("script", having("VELOCITIES"))
def test_mask_velocity_hides_exactly_the_velocities(script):
    module = MODULES[script]
    velocities = {  # from Gymnasium's tables of observations
        "CartPole-v1": (4, [1, 3]), "MountainCar-v0": (2, [1]),
        "MountainCarContinuous-v0": (2, [1]), "Pendulum-v1": (3, [2]),
        "LunarLander-v3": (8, [2, 3, 5]),
    }  # fmt: skip
    assert {re.split("C?o?n?t?i?n?u?o?u?s?-", env_id)[0] for env_id in velocities} == {
        *module.VELOCITIES
    }
    for env_id, (size, hidden) in velocities.items():
        if env_id.startswith("Lunar"):
            pytest.importorskip("Box2D")
        plain, masked = (
            module.make_envs(module.Args(env_id=env_id, mask_velocity=mask), 2)
            for mask in (False, True)
        )
        visible = [i for i in range(size) if i not in hidden]
        a, b = plain.reset(seed=1)[0], masked.reset(seed=1)[0]
        for _ in range(30):
            assert np.array_equal(a[:, visible], b[:, visible]) and not b[:, hidden].any()
            action = plain.action_space.sample()
            a, b = plain.step(action)[0], masked.step(action)[0]
        assert a[:, hidden].any()
    with pytest.raises(module.ArgumentError, match="Acrobot is not one of"):
        module.make_envs(module.Args(env_id="Acrobot-v1", mask_velocity=True), 2)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("memory", [True, False])
def test_the_first_weights_are_orthogonal(script, memory):
    """Their rows or columns have the length sqrt(2) in encoders, 0.01 in the actor, so that all
    actions are about as probable, 1 in the critic's last layer; each gate's U is a part of one
    matrix with orthogonal columns. Biases are 0, but 1 for the forget gates."""
    module = MODULES[script]
    if script == "rppo_gru_atari":
        pytest.importorskip("ale_py")
    if "memory" not in vars(module.Args):
        flags = {"separate_critic": memory}
    else:
        flags = {"memory": "lstm" if memory else "none"}
    env_id = "ALE/Pong-v5" if script == "rppo_gru_atari" else toy_for(script)
    args = module.Args(env_id=env_id, hidden_size=16, **flags)
    envs = module.make_envs(args, 1)
    torch.manual_seed(1)
    agent, seen = module.Agent(envs, args), []
    for name, parameter in agent.named_parameters():
        layer = name.split(".")[0]
        if name.endswith("cell.bias_ih") and script != "rppo_gru_atari":
            assert parameter.view(4, -1).mean(1).tolist() == [0, 1, 0, 0], name
            assert parameter.view(4, -1).std(1).tolist() == [0, 0, 0, 0], name
            continue
        if "bias" in name or name == "log_std":
            assert not parameter.any(), name
            continue
        W = parameter.flatten(1)
        rows = W @ W.T if W.shape[0] < W.shape[1] else W.T @ W
        last = layer == "critic" and len(W) == 1
        std = 0.01 if layer == "actor" else 1.0 if last or "cell" in name else 2**0.5
        assert (rows / std**2 - torch.eye(len(rows))).abs().max() <= 1e-4, name
        seen.append(std)
    assert {0.01, 1.0, 2**0.5} == set(seen)
