"""Recipes of networks: layers, memories, critics, CNNs, gSDE."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import awkward_ends
from gymnasium import spaces
from recipe_tools import driver, needs, run
from squash import SquashedBox
from torch.distributions import kl_divergence

OBS = spaces.Box(-9, 9, (3,), np.float32)
CHOICES = spaces.MultiDiscrete([3, 3])
REAL = spaces.Box(-1, 1, (2,), np.float32)


def build(script, space=CHOICES, **flags):
    """An agent with generic weights."""
    torch.manual_seed(3)
    envs = SimpleNamespace(single_action_space=space, single_observation_space=OBS)
    agent = script.Agent(envs, script.Args(**{"encoder_size": 8, "hidden_size": 6, **flags}))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent


def weights_of(*modules):
    return [weight for module in modules for weight in module.parameters()]


# --- Memories
@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_gru_atari"])
@pytest.mark.parametrize("kinds", ["lstm", "gru", "lstm,lstm", "lstm,gru", "gru,lstm", "gru,gru"])
def test_stacked_lstm_is_the_loop_over_all_layers(name, kinds):
    """Whatever ends: replay equals steps, and each layer's steps are its cell's."""
    needs(name)
    script = driver.fresh(name, "stacked_lstm")
    shape = (1, 84, 84) if name == "rppo_gru_atari" else (3,)
    envs = SimpleNamespace(
        single_action_space=spaces.Discrete(3),
        single_observation_space=spaces.Box(0, 255, shape, np.uint8),
    )
    agent = script.Agent(envs, script.Args(hidden_size=5, recurrent_layers=kinds))
    memory = script.ResetLSTM(3, 5) if name == "rppo_lstm" else script.ResetGRU(3, 5)
    memory = memory.double()
    final = awkward_ends()[2][:-1]
    state = torch.zeros_like(agent.initial_state(final.shape[1]), dtype=torch.float64)
    state[0] = torch.randn(state[0].shape)
    x = torch.randn(*final.shape, 3, dtype=torch.float64)
    outputs = memory(x, state, final)
    first, before = memory.layers[0], memory.unpack(state)[0]
    for t in range(len(x)):
        state = memory.step(x[t], state)
        assert (outputs[t] - state[0, :, -5:])[~final[t]].abs().max() <= 1e-12
        before = first.step(x[t], before)
        assert (memory.unpack(state)[0] - before).abs().max() <= 1e-12
        state = state.where(~final[t][:, None], 0.0)
        before = before.where(~final[t][:, None], 0.0)


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_stacked_lstm_replays_what_was_played(name):
    """Acting and replay through the agent's own functions, with a critic of its own and without."""
    needs(name)
    script = driver.fresh(name, "stacked_lstm")
    space = REAL if name == "rppo_continuous" else CHOICES
    own = {"memory": "lstm"} if name in ("trpo", "ppo1_mpi") else {"separate_critic": True}
    agent = build(script, space, recurrent_layers="gru,lstm", norm_obs=False, **own)
    final = awkward_ends()[2][:-1]
    T, N = final.shape
    obs, state = torch.randn(T, N, 3), agent.initial_state(N)
    first, played, values = state, [], []
    legal = [torch.from_numpy(agent.exists)] if hasattr(agent, "exists") else []
    for t in range(T):
        inputs = [obs[t], *(x.expand(N, *x.shape) for x in legal), state]
        inputs = [inputs[0], inputs[-1]] if hasattr(agent, "act") else inputs
        out, *value, state = agent.step(*inputs)
        played.append(out if name == "rppo_lstm" else agent.actor(out))
        values += value
        state = state.where(~final[t][:, None], 0.0)
    played = torch.stack(played)
    inputs = [obs, *(x.expand(T, N, *x.shape) for x in legal), first, final]
    if name == "trpo":
        logits = agent(*inputs).base_dist.logits
        expected = played.unflatten(-1, (2, 3)).log_softmax(-1)[~final]
        assert (logits - expected).abs().max() < 1e-5
        return
    actions = torch.zeros(T, N, 2, dtype=torch.float if space is REAL else torch.long)
    logprob, _, value = agent.evaluate_actions(*inputs, actions)
    assert (value - torch.stack(values)[~final]).abs().max() < 1e-5
    if space is REAL:
        expected = torch.distributions.Normal(played, agent.log_std.exp()).log_prob(actions).sum(-1)
    else:
        logp = played if name == "rppo_lstm" else played.unflatten(-1, (2, 3)).log_softmax(-1)
        expected = logp[..., 0].sum(-1)
    assert (logprob - expected[~final]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "rppo_gru_atari"])
def test_feedforward_has_no_memory(tmp_path, name):
    needs(name)
    script = driver.fresh(name, "feedforward")
    agent, run_dir = run(script, tmp_path)
    script.load(run_dir, agent)
    pixels = name == "rppo_gru_atari"
    obs = (
        torch.randint(256, (5, 1, 84, 84)) if pixels else torch.randn(5, len(agent.obs_stats.mean))
    )
    zeros = agent.initial_state(5)
    legal = [torch.ones(5, *agent.exists.shape, dtype=torch.bool)] if name == "rppo_lstm" else []
    here, there = (agent.step(obs, *legal, s) for s in (zeros, torch.randn_like(zeros)))
    assert all(torch.equal(x, y) for x, y in zip(here[:2], there[:2]))
    assert agent.args.seq_len == 1 and not any("cell" in key for key in agent.state_dict())


def gradient_after(memory, steps):
    """The gradient of the cell with respect to that of so many steps before, a mean over units."""
    start = torch.zeros(2, 1, 128, requires_grad=True)
    state = start
    for x in torch.randn(steps, 1, 64).tanh():
        state = memory.step(x, state)
    return torch.autograd.grad(state[1].sum(), start)[0][1].abs().mean().item()


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous"])
def test_long_memory_lets_gradients_through_dozens_of_steps(name):
    plain, long = driver.fresh(name).ResetLSTM, driver.fresh(name, "long_memory").ResetLSTM
    for seed in range(3):
        torch.manual_seed(seed)
        assert gradient_after(plain(64, 128), 31) < 0.01
        memory = long(64, 128)
        assert 0.4 < gradient_after(memory, 31) < 0.7
        input_gate, forget_gate, *others = memory.cell.bias_ih.detach().chunk(4)
        assert torch.equal(input_gate, -forget_gate) and not torch.stack(others).any()
        steps = forget_gate.exp()
        assert 1 <= steps.min() < 8 and 120 < steps.max() <= 127
        assert steps.mean() == pytest.approx(64, abs=12)


def test_long_memory_learns_what_a_plain_lstm_does_not_begin_to_learn():
    """The symbol of 40 steps ago, one of four: how often it is named in updates 81 to 100."""
    linear = driver.fresh("rppo_lstm").linear

    def named(memory_class):
        torch.manual_seed(1)
        memory, head = memory_class(4, 64), linear(64, 4, std=0.01)
        optimizer = torch.optim.Adam(weights_of(memory, head), 2e-3)
        right = []
        for _ in range(100):
            symbols = torch.randint(4, (80, 16))
            h = memory(torch.eye(4)[symbols], torch.zeros(2, 16, 64), torch.zeros(80, 16).bool())
            logits, target = head(h)[40:].flatten(0, 1), symbols[:-40].flatten()
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, target).backward()
            optimizer.step()
            right.append((logits.argmax(-1) == target).float().mean())
        return torch.stack(right[-20:]).mean().item()

    plain = driver.fresh("rppo_lstm").ResetLSTM
    long = driver.fresh("rppo_lstm", "long_memory").ResetLSTM
    assert named(plain) < 0.28 and named(long) > 0.3


# --- Layers and critics
class PleinesNetwork(nn.Module):
    """recurrent-ppo-truncated-bptt's model.py for vectors: LSTM, hidden layer, two streams, ReLU."""

    def __init__(self, inputs, hidden, choices):
        super().__init__()
        self.recurrent_layer = nn.LSTM(inputs, hidden, batch_first=True)
        self.lin_hidden = nn.Linear(hidden, hidden)
        self.lin_policy = nn.Linear(hidden, hidden)
        self.lin_value = nn.Linear(hidden, hidden)
        self.policy_branches = nn.ModuleList(nn.Linear(hidden, n) for n in choices)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs, h, c):
        x, (h, c) = self.recurrent_layer(obs[:, None], (h[None], c[None]))
        x = torch.relu(self.lin_hidden(x[:, 0]))
        policy, value = torch.relu(self.lin_policy(x)), torch.relu(self.lin_value(x))
        logits = [branch(policy) for branch in self.policy_branches]
        return torch.stack(logits, 1).log_softmax(-1), self.value(value)[:, 0], h[0], c[0]


def test_networks_have_recurrent_ppo_truncated_bptts_layers():
    script = driver.fresh("rppo_lstm", "networks")
    flags = dict(layers_before="none", layers_shared="6", layers_after="6", activation="relu")
    agent = build(script, norm_obs=False, **flags)
    theirs = PleinesNetwork(3, 6, [3, 3])
    shared, _, policy, _, actor = agent.actor
    assert agent.critic[0] is shared
    ours = weights_of(agent.lstm, shared, policy, agent.critic[2], actor, agent.critic[-1])
    others = weights_of(theirs.recurrent_layer, theirs.lin_hidden, theirs.lin_policy,
                        theirs.lin_value)  # fmt: skip
    branches = theirs.policy_branches
    with torch.no_grad():
        for mine, other in zip(ours[: len(others)], others, strict=True):
            other.copy_(mine)
        for k, branch in enumerate(branches):
            branch.weight.copy_(actor.weight[3 * k : 3 * k + 3])
            branch.bias.copy_(actor.bias[3 * k : 3 * k + 3])
        theirs.value.load_state_dict(agent.critic[-1].state_dict())
    h, c = torch.zeros(2, 5, 6)
    state = agent.initial_state(5)
    for obs in torch.randn(10, 5, 3):
        logp, value, state = agent.step(obs, torch.ones(5, 2, 3, dtype=torch.bool), state)
        expected = theirs(obs, h, c)
        h, c = expected[2:]
        for x, y in zip((logp, value, *state), expected, strict=True):
            assert (x - y).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_networks_build_what_the_flags_say(name):
    needs(name)
    script = driver.fresh(name, "networks")
    flags = dict(layers_before="9,7", layers_after="5", critic_layers_after="4", activation="elu")
    agent = build(script, REAL, **flags) if name != "rppo_lstm" else build(script, **flags)
    widths = [x.out_features for x in agent.encoder if isinstance(x, nn.Linear)]
    assert widths == [9, 7] and not any(isinstance(x, nn.Tanh) for x in agent.modules())
    assert sum(isinstance(x, nn.ELU) for x in agent.encoder) == 2
    assert [x.out_features for x in agent.actor if isinstance(x, nn.Linear)][:-1] == [5]
    critic = [x.out_features for x in agent.critic if isinstance(x, nn.Linear)]
    assert critic == ([9, 7, 4, 1] if name == "trpo" else [4, 1])
    if name in ("trpo", "ppo1_mpi"):
        with pytest.raises(script.ArgumentError, match="share nothing"):
            build(script, layers_shared="8")
    else:
        with pytest.raises(script.ArgumentError, match="only in trpo and ppo1_mpi"):
            build(script, CHOICES if name == "rppo_lstm" else REAL, critic_layers_before="8")
    with pytest.raises(
        script.ArgumentError, match="must be positive integers, separated by commas"
    ):
        build(script, CHOICES if name == "rppo_lstm" else REAL, layers_before="wide")
    torch.manual_seed(0)
    plain = script.Agent(agent_envs(name), script.Args(orthogonal=False, layers_before="32,32"))
    weight = plain.encoder[2].weight
    assert not torch.allclose(weight @ weight.T, 2 * torch.eye(32), atol=0.1)
    assert weight.abs().max() <= 32**-0.5  # torch's: uniform, 1 / sqrt(inputs)


def agent_envs(name):
    space = CHOICES if name == "rppo_lstm" else REAL
    return SimpleNamespace(single_action_space=space, single_observation_space=OBS)


@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous"])
@pytest.mark.parametrize("critic", ["shared", "detached", "separate", "memoryless"])
@pytest.mark.parametrize("share", [True, False])
def test_critics_learn_and_remember_what_they_should(name, critic, share):
    """Which gradients the value has, and whether it depends on the past."""
    script = driver.fresh(name, "critics")
    space = CHOICES if name == "rppo_lstm" else REAL
    flags = dict(critic=critic, share_encoder=share, norm_obs=False)
    if not share and critic in ("shared", "detached"):
        with pytest.raises(script.ArgumentError, match="--critic separate"):
            build(script, space, **flags)
        return
    agent = build(script, space, **flags)
    T, N = 6, 4
    obs, state = torch.randn(T, N, 3), agent.initial_state(N)
    final = torch.zeros(T, N, dtype=torch.bool)
    legal = [torch.from_numpy(agent.exists).expand(T, N, 2, 3)] if name == "rppo_lstm" else []
    actions = torch.zeros(T, N, 2, dtype=torch.long if legal else torch.float)

    def value(obs):
        return agent.evaluate_actions(obs, *legal, state, final, actions)[2].view(T, N)

    agent.zero_grad()
    value(obs).sum().backward()
    moved = {key for key, p in agent.named_parameters() if p.grad is not None and p.grad.any()}
    actors = {key for key, _ in agent.named_parameters() if key.startswith(("lstm", "encoder"))}
    encoder = {key for key in actors if "encoder" in key}
    learns = {"shared": actors, "detached": set(), "separate": encoder, "memoryless": encoder}
    assert moved & actors == (learns[critic] if share else set())
    past = obs.clone()
    past[0] += 1
    remembers = (value(obs)[-1] - value(past)[-1]).abs().max() > 1e-6
    assert remembers == (critic != "memoryless")
    following = state
    for t in range(T):
        inputs = [obs[t], *(x[t] for x in legal), following]
        _, played, following = agent.step(*inputs)
        assert (played - value(obs)[t]).abs().max() < 1e-5


# --- Images
@pytest.mark.parametrize("name", ["rppo_lstm", "rppo_continuous", "trpo", "ppo1_mpi"])
def test_images_and_numbers_are_both_read(name):
    """An encoder's features change with each of them, at every place that reads observations."""
    needs(name)
    script = driver.fresh(name, "images")
    env_id = "BoxSigns-v0" if name == "rppo_continuous" else "Signs-v0"
    args = script.Args(env_id=env_id)
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    n = 36 * 40 + 1
    assert envs.entries == [(1, 36, 40), (1,)] and agent.obs_stats.mean.shape == (n,)
    x = torch.rand(2, 3, n) * 255
    own = {"trpo": agent.critic, "ppo1_mpi": getattr(agent, "critic_encoder", None)}
    for network in agent.encoder, own.get(name):
        if network is None:
            continue
        eyes = network[0]
        pixels = x[..., :-1].reshape(6, 1, 36, 40) / 255
        assert torch.equal(eyes(x)[..., :-1].flatten(0, 1), eyes.cnns[0](pixels))
        assert torch.equal(eyes(x)[..., -1], x[..., -1])
        changed = x.clone()
        changed[..., 5] = 255 - changed[..., 5]
        assert not torch.equal(network(x), network(changed))
    own = [network[0] for network in (agent.encoder, own.get(name)) if network is not None]
    assert len({id(eyes) for eyes in own}) == len(own)


def test_the_cnns_of_images_begin_as_that_of_rppo_gru_atari():
    """Orthogonal with a gain of sqrt(2), and no bias."""
    pytest.importorskip("ale_py")
    atari = driver.fresh("rppo_gru_atari")
    theirs = atari.NatureCNN(4, amp=False).cnn
    script = driver.fresh("rppo_lstm", "images")
    args = script.Args()
    ours = sys.modules["images"].Eyes(script, [(4, 84, 84)], args).cnns[0]
    for cnn in ours, theirs:
        for layer in cnn:
            if isinstance(layer, nn.Conv2d):
                rows = layer.weight.flatten(1)
                assert torch.allclose(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-5)
                assert not layer.bias.any()


@pytest.mark.parametrize("orthogonal, norm, apart", [(True, (3.5, 5.0), (0.3, 1.8)),
                                                     (False, (0.2, 0.35), (0.02, 0.15))])  # fmt: skip
def test_features_of_images_are_large_enough_to_tell_them_apart(orthogonal, norm, apart):
    """The figures of docs/not-learning.md, with the CNN of Mnih et al. and the encoder's 64 tanh."""
    pytest.importorskip("minigrid")
    script = driver.fresh("rppo_lstm", "images", "activations")
    args = script.Args(env_id="minigrid_memory:MemoryS9Pixels-v0", orthogonal=orthogonal)
    envs = script.make_envs(args, 32)
    torch.manual_seed(0)
    agent = script.Agent(envs, args)
    if not orthogonal:  # only the CNN's weights are the question
        agent.encoder[1] = script.linear(agent.encoder[1].in_features, 64)
    obs, _ = envs.reset(seed=1)
    features = agent.encoder(torch.from_numpy(obs)).detach()
    distances = torch.cdist(features, features)
    distances = distances[distances > 0.01]  # of images that are not the same
    assert norm[0] < features.norm(dim=1).mean() < norm[1]
    assert apart[0] < distances.min() and distances.max() < apart[1]


def test_pixels_are_not_normalised():
    script = driver.fresh("rppo_lstm", "images")
    args = script.Args(env_id="Signs-v0", norm_obs=True)
    agent = script.Agent(script.make_envs(args, 1), args)
    agent.obs_stats.mean.fill_(3.0)
    x = torch.full((2, 36 * 40 + 1), 5.0)
    assert torch.equal(agent.normalize(x)[:, :-1], x[:, :-1])
    assert torch.allclose(agent.normalize(x)[:, -1], torch.tensor(2.0))
    agent.args = script.Args(env_id="Signs-v0")
    assert agent.normalize(x) is x


BIG = dict(num_envs=16, num_steps=32, num_minibatches=8, update_epochs=6, learning_rate=3e-3)
SIGNS = {
    "rppo_lstm": BIG | dict(total_timesteps=4000, anneal_lr=False, ent_coef=0.003),
    "rppo_continuous": BIG | dict(total_timesteps=8000, anneal_lr=False, log_std_init=-0.5),
    "trpo": dict(
        total_timesteps=3500,
        cg_max_steps=5,
        target_kl=0.05,
        n_critic_updates=3,
        num_envs=16,
        num_steps=16,
    ),
    "ppo1_mpi": BIG | dict(total_timesteps=4000, num_steps=16, learning_rate=1e-3),
}


@pytest.mark.parametrize("name", SIGNS)
def test_images_solve_a_dict_that_needs_both(tmp_path, name):
    """Returns are 8 at most, 6 if one entry is not read."""
    needs(name)
    script = driver.fresh(name, "images")
    env_id = "BoxSigns-v0" if name == "rppo_continuous" else "Signs-v0"
    flags = dict(env_id=env_id, gamma=0.0, hidden_size=16, encoder_size=32, eval_episodes=20)
    cnn = dict(cnn_channels="8", cnn_kernels="8", cnn_strides="8")
    _, run_dir = run(script, tmp_path, **flags, **cnn, **SIGNS[name])
    assert np.mean(json.loads((run_dir / "result.json").read_text())["evaluation"]) > 7.5


def test_fisher_vector_products_go_through_the_cnn():
    """Beside a central difference of the KL's gradient, in float64."""
    script = driver.fresh("trpo", "images")
    args = script.Args(env_id="Colours-v0", encoder_size=8)
    envs = script.make_envs(args, 4)
    agent = script.Agent(envs, args).double()
    obs, _ = envs.reset(seed=0)
    legal = torch.ones(1, 4, 1, 2, dtype=torch.bool)
    x = torch.from_numpy(obs).double()[None]
    rollout = agent.normalize(x), legal, agent.initial_state(4), torch.zeros(1, 4).bool()
    parameters = [p for key, p in agent.named_parameters() if not key.startswith("critic")]
    with torch.no_grad():
        agent.actor.weight.mul_(50)
        old = agent(*rollout)

    def kl_gradient(**options):
        return script.flat_gradient(
            kl_divergence(old, agent(*rollout)).mean(), parameters, **options
        )

    torch.manual_seed(0)
    v = torch.randn(sum(p.numel() for p in parameters), dtype=torch.float64)
    product = script.fisher_vector_product(kl_gradient(create_graph=True), parameters, 0.1, v)
    theta, eps = nn.utils.parameters_to_vector(parameters).detach(), 1e-5
    sides = []
    for sign in 1, -1:
        nn.utils.vector_to_parameters(theta + sign * eps * v, parameters)
        sides.append(kl_gradient())
    expected = (sides[0] - sides[1]) / (2 * eps) + 0.1 * v
    assert (product - expected).norm() <= 1e-3 * expected.norm()
    convolutions = sum(p.numel() for p in agent.encoder[0].parameters())
    assert (product - 0.1 * v)[:convolutions].norm() > 1e-3


def test_images_refuse_what_the_cnn_cannot_read():
    script = driver.fresh("rppo_lstm", "images")
    args = script.Args(env_id="Signs-v0", cnn_kernels="40,4,3")
    with pytest.raises(script.ArgumentError, match="an image is too small"):
        script.Agent(script.make_envs(args, 1), args)
    args = script.Args(env_id="Signs-v0", cnn_kernels="8,4")
    with pytest.raises(script.ArgumentError, match="must be equally many"):
        script.Agent(script.make_envs(args, 1), args)


# --- gSDE
@pytest.mark.parametrize("name", ["rppo_continuous", "trpo"])
@pytest.mark.parametrize("full_std", [True, False])
@pytest.mark.parametrize("use_expln", [True, False])
@pytest.mark.parametrize("squash", [True, False])
def test_sde_has_stable_baselines3s_densities(name, full_std, use_expln, squash):
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    script = driver.fresh(name, "sde", "networks")
    flags = dict(use_sde=True, full_std=full_std, use_expln=use_expln, squash_output=squash)
    agent = build(script, REAL, layers_after="5", layers_before="6", **flags)
    theirs = distributions.StateDependentNoiseDistribution(
        2, full_std=full_std, use_expln=use_expln, squash_output=squash, epsilon=1e-6
    )
    theirs.proba_distribution_net(5, -2.0, 5)
    h, u = torch.randn(7, 6), torch.randn(7, 2)
    latent = agent.features(h)
    theirs.proba_distribution(agent.actor(h), agent.log_std, latent)
    policy = agent.policy(h, None)
    actions = u.tanh() if squash else u
    assert (policy.log_prob(u) - theirs.log_prob(actions)).abs().max() < 1e-4
    assert torch.allclose(agent.std(), theirs.get_std(agent.log_std), atol=1e-6)
    if not squash:
        assert (policy.entropy() - theirs.entropy()).abs().max() < 1e-4
    torch.manual_seed(0)
    noise = agent.sample_noise(20_000)
    spread = (latent[:1, None] @ noise)[:, 0].std(0)
    assert torch.allclose(spread, policy.base_dist.stddev[0], rtol=0.05)
    if squash:
        bounds = SquashedBox(np.float32([-3, 0]), np.float32([1, 5]))
        sent = script.to_env(torch.tensor([[0.0, 20.0], [-20.0, 0.0]]), bounds)
        assert np.allclose(sent, [[-1, 5], [-3, 2.5]])


def test_sde_in_trpo_keeps_its_noise_for_a_rollout(tmp_path):
    script = driver.fresh("trpo", "sde")
    seen = []
    real = script.Agent.act

    def act(self, h, *others):
        seen.append(others[-1])
        return real(self, h, *others)

    script.Agent.act = act
    run(script, tmp_path, env_id="Pendulum-v1", use_sde=True, total_timesteps=128, eval_episodes=0)
    firsts = [i for i in range(1, len(seen)) if seen[i] is not seen[i - 1]]
    assert firsts == [32] and len(seen) == 64
    seen.clear()
    run(script, tmp_path, env_id="Pendulum-v1", use_sde=True, total_timesteps=64, eval_episodes=0,
        sde_sample_freq=8)  # fmt: skip
    assert [i for i in range(1, len(seen)) if seen[i] is not seen[i - 1]] == [8, 16, 24]


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_whole_step_of_trpo_with_sde_is_sb3_contribs(num_envs, monkeypatch):
    """From the same weights, noise and rollout: actions, the policy's step, the critic's passes.

    As in test_trpo, sb3-contrib averages the KL over the two components, and its target_kl and
    damping are half of ours; its conjugate gradient starts from noise, set to zero here.
    """
    sb3 = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.vec_env import DummyVecEnv
    from test_trpo import Toy

    T = 512
    env = DummyVecEnv([lambda: Toy(REAL)] * num_envs)
    peer = sb3.TRPO(
        "MlpPolicy", env, n_steps=T, seed=1, device="cpu", use_sde=True, target_kl=0.005,
        cg_damping=0.05, policy_kwargs=dict(log_std_init=-1.0),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * num_envs)  # fills the buffer
    theirs, buffer = peer.policy, peer.rollout_buffer
    script = driver.fresh("trpo", "sde")
    agent = build(script, REAL, encoder_size=64, use_sde=True, norm_obs=False)
    pi, vf = theirs.mlp_extractor.policy_net, theirs.mlp_extractor.value_net
    pairs = {
        "encoder.0": pi[0], "encoder.2": pi[2], "actor": theirs.action_net,
        "critic.0": vf[0], "critic.2": vf[2], "critic.4": theirs.value_net,
    }  # fmt: skip
    names = {"log_std": theirs.log_std}
    for name, layer in pairs.items():
        names |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
    parameters = dict(agent.named_parameters())
    assert parameters.keys() == names.keys() and agent.log_std.shape == (64, 2)
    with torch.no_grad():
        for name, parameter in names.items():
            parameters[name].copy_(parameter)
    first = {name: parameter.detach().clone() for name, parameter in names.items()}

    obs, actions = (torch.from_numpy(x) for x in (buffer.observations, buffer.actions))
    noise = theirs.action_dist.exploration_matrices
    if num_envs == 1:
        noise = theirs.action_dist.exploration_mat[None]
    state = agent.initial_state(num_envs)
    for t in range(T):  # one matrix for each environment during the whole rollout
        acted = agent.act(agent.step(obs[t], state)[0], None, noise)
        assert (acted - actions[t]).abs().max() < 1e-5

    advantages = torch.from_numpy(buffer.advantages).flatten()
    returns = torch.from_numpy(buffer.returns)
    np.random.seed(0)
    orders = [np.random.permutation(T * num_envs) for _ in range(1 + agent.args.n_critic_updates)]
    np.random.seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)
        peer.train()
    logged = peer.logger.name_to_value
    assert logged["train/is_line_search_success"] == 1.0

    legal = torch.as_tensor(agent.exists).expand(T, num_envs, *agent.exists.shape)
    rollout = obs, legal, state, torch.zeros(T, num_envs, dtype=torch.bool)
    normalized = (advantages - advantages.mean()) / advantages.std()
    *_, fraction, _ = script.trpo_step(
        agent, agent.args, rollout, actions.flatten(0, 1), normalized
    )
    assert fraction > 0
    optimizer = torch.optim.Adam(agent.critic.parameters(), agent.args.learning_rate, eps=1e-5)
    sequence = iter(orders[1:])
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(next(sequence)))
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (obs, returns)]  # in the order of its buffer
    value_loss = script.fit_critic(agent.critic, agent.args, optimizer, *rows)
    assert value_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
    for name, ours in agent.named_parameters():
        error = (ours - names[name]).norm()
        step = (names[name] - first[name]).norm()
        assert error <= 1e-4 * names[name].norm() and error <= 1e-2 * step and step > 0, name


@pytest.mark.parametrize("name", ["rppo_continuous", "trpo"])
def test_squash_alone_has_the_density_of_squashed_actions(name):
    """Over all actions between the bounds it integrates to 1; the entropy is its own estimate."""
    script = driver.fresh(name, "squash")
    one = spaces.Box(-3, 1, (1,), np.float32)
    agent = build(script, one, squash_output=True, norm_obs=False)
    inputs = [torch.randn(1, agent.actor.in_features), None]
    if name == "rppo_continuous":  # has no masks of legal choices
        inputs.pop()
    policy = agent.policy(*inputs)
    u = torch.linspace(-9, 9, 20_001, dtype=torch.float64)  # action tanh(u)
    logprob = policy.log_prob(u[:, None]).double()
    weight = logprob.exp() * (1 - u.tanh() ** 2)  # the density of tanh(u), times d tanh(u) / du
    assert torch.trapezoid(weight, u).item() == pytest.approx(1, abs=2e-3)
    entropy = -torch.trapezoid(weight * logprob, u).item()
    drawn = torch.stack([policy.entropy() for _ in range(4000)])
    assert drawn.mean().item() == pytest.approx(entropy, abs=4 * drawn.std().item() / 4000**0.5)
    bounds = agent.action_space
    assert np.allclose(script.to_env(torch.tensor([[0.0], [9.0]]), bounds), [[-1], [1]], atol=1e-3)
    plain = build(script, one, norm_obs=False)
    assert type(plain.policy(*inputs)) is torch.distributions.Independent
    with pytest.raises(script.ArgumentError, match="--squash-output: actions must have bounds"):
        build(script, spaces.Box(-np.inf, np.inf, (1,), np.float32), squash_output=True)


def test_activations_reach_a_critics_own_encoder():
    """--no-orthogonal and --activation count in the layers that the recipe critics adds, too."""
    script = driver.fresh("rppo_lstm", "critics", "activations")
    flags = dict(critic="separate", share_encoder=False, activation="gelu", encoder_size=32)
    torch.manual_seed(0)
    envs = SimpleNamespace(single_action_space=CHOICES, single_observation_space=OBS)
    agent = script.Agent(envs, script.Args(orthogonal=False, **flags))
    for memory in agent.lstm, agent.critic_lstm:
        layer, activation = memory.encoder
        assert isinstance(activation, nn.GELU) and layer.weight.abs().max() <= 3**-0.5
        assert not torch.allclose(layer.weight.T @ layer.weight, 2 * torch.eye(3), atol=0.1)
