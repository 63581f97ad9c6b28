"""TRPO: the Fisher-vector product, conjugate gradient, the line search, and one whole step as sb3-contrib takes it."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    CONTINUOUS_ACTIONS,
    DISCRETE_ACTIONS,
    MODULES,
    OBSERVATION_SPACES,
    awkward_ends,
    load_script,
)
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

trpo = MODULES.get("trpo") or load_script("trpo")
ACTIONS = DISCRETE_ACTIONS | CONTINUOUS_ACTIONS
# Every distribution: the action space, and the flags of Gaussians.
DISTRIBUTIONS = {name: (space, {}) for name, space in ACTIONS.items()} | {
    "gSDE": (CONTINUOUS_ACTIONS["box"], {"use_sde": True, "log_std_init": -1.0}),
    "gSDE, one deviation a feature": (CONTINUOUS_ACTIONS["box"], {"use_sde": True, "sde_full_std": False}),
    "gSDE, expln": (CONTINUOUS_ACTIONS["box"], {"use_sde": True, "sde_expln": True}),
    "squashed": (CONTINUOUS_ACTIONS["box"], {"squash_output": True}),
}


def build(actions=DISCRETE_ACTIONS["discrete"], observations=OBSERVATION_SPACES["vector"], dtype=torch.float32, **flags):
    torch.manual_seed(3)
    args = trpo.Args(**{"encoder_sizes": (8,), "hidden_size": 6, **flags})
    agent = trpo.Agent(observations, actions, args).to(dtype)
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            scale = 0.0 if "cnns" in name else 0.1 if name == "log_std" else 0.4
            parameter.add_(torch.randn_like(parameter) * scale)
    return agent


def batch(agent, ends=None, dtype=torch.float32, T=24):
    """A rollout of made-up rows: obs, state, final, action, advantages, weight, as trpo_step takes them."""
    final = awkward_ends(T)[2][:-1] if ends is None else ends
    torch.manual_seed(5)
    obs = [torch.randn(*final.shape, 3, dtype=dtype)]
    state = torch.randn_like(agent.initial_state(final.shape[1]))
    with torch.no_grad():
        dist = agent(obs, state, final)
    action = dist[0] + dist[1] * torch.randn_like(dist[0]) if agent.box else dist[0].argmax(-1)
    if not agent.box:
        action = (dist[0].exp() / torch.empty_like(dist[0]).exponential_()).argmax(-1)
    weight = (~final).to(dtype)
    advantages = trpo.normalize(torch.randn(final.shape, dtype=dtype), weight)
    return obs, state, final, action, advantages, weight


def flat(agent):
    return torch.nn.utils.parameters_to_vector(agent.policy_parameters().values()).detach().clone()


def hessian_of_the_mean_kl(agent, obs, state, final, weight):
    """The definition: the mean KL from the distribution at theta, differentiated twice at theta."""
    theta = flat(agent)
    policy = partial(agent.policy, obs=obs, state=state, final=final)
    old = tuple(x.detach() for x in policy(theta))

    def mean_kl(parameters):
        return (trpo.kl_divergence(old, policy(parameters)) * weight).sum() / weight.sum()

    return torch.autograd.functional.hessian(mean_kl, theta)


def product_of(agent, obs, state, final, weight, damping=0.0):
    theta = flat(agent).requires_grad_()
    policy = partial(agent.policy, obs=obs, state=state, final=final)
    return partial(trpo.fisher_vector_product, policy, theta, policy(theta), weight, damping)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_fisher_vector_product_is_the_hessian_of_the_mean_kl(name):
    space, flags = DISTRIBUTIONS[name]
    agent = build(space, dtype=torch.float64, **flags)
    obs, state, final, _, _, weight = batch(agent, dtype=torch.float64)
    hessian = hessian_of_the_mean_kl(agent, obs, state, final, weight)
    product = product_of(agent, obs, state, final, weight)
    for length in 1.0, 1e-6, 1e6:  # the difference is as long, whatever the length of v
        v = torch.randn(len(hessian), dtype=torch.float64) * length
        expected = hessian @ v
        assert (product(v) - expected).norm() <= 1e-8 * expected.norm(), float(expected.norm())
    damped = product_of(agent, obs, state, final, weight, 0.3)
    assert (damped(v) - expected - 0.3 * v).norm() <= 1e-8 * expected.norm()


@pytest.mark.parametrize("name", ["box", "discrete", "multibinary", "gSDE"])
@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_product_through_the_fused_lstm_is_the_loop_differentiated_twice(name, layers, monkeypatch):
    """float32 and fused, against float64, a cell call a row, and autograd of autograd; with resets everywhere."""
    space, flags = DISTRIBUTIONS[name]
    flags = {**flags, "memory": "lstm", "hidden_size": 64, "encoder_sizes": (64,), "num_layers": layers}
    torch.manual_seed(0)
    agent = trpo.Agent(OBSERVATION_SPACES["vector"], space, trpo.Args(**flags))  # as training starts
    with torch.no_grad():
        agent.actor[-1].weight.mul_(30)
    obs, state, final, _, _, weight = batch(agent, T=48)
    v = torch.randn(len(flat(agent)))
    ours = product_of(agent, obs, state, final, weight)(v).double()

    def loop(self, x, state, final):
        rows = []
        for t in range(len(x)):
            row, state = self.step(x[t], state)
            rows.append(row)
            state = state.where(~final[t][:, None], 0.0)
        return torch.stack(rows)

    monkeypatch.setattr(trpo.ResetLSTM, "forward", loop)
    agent = agent.double()
    theta = flat(agent).requires_grad_()
    policy = partial(agent.policy, obs=[obs[0].double()], state=state.double(), final=final)
    new = policy(theta)
    old = tuple(x.detach() for x in new)
    mean_kl = (trpo.kl_divergence(old, new) * weight).sum() / weight.sum()
    gradient = torch.autograd.grad(mean_kl, theta, create_graph=True)[0]
    expected = torch.autograd.grad(gradient @ v.double(), theta)[0]
    assert ours @ expected / ours.norm() / expected.norm() >= 0.9999
    assert (ours - expected).norm() <= 1e-3 * expected.norm()


def reference(agent, dist):
    """torch.distributions, one for each component."""
    if agent.box:
        return torch.distributions.Normal(*dist)
    if agent.binary:
        return torch.distributions.Bernoulli(logits=dist[0][..., 1] - dist[0][..., 0])
    return None


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_kl_log_prob_and_entropy_are_those_of_torch_distributions_summed_over_components(name):
    space, flags = DISTRIBUTIONS[name]
    agent, other = (build(space, dtype=torch.float64, **flags) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    obs, state, final, action, _, _ = batch(agent, dtype=torch.float64)
    old, new = agent(obs, state, final), other(obs, state, final)
    ours = trpo.kl_divergence(old, new), trpo.log_prob(old, action), trpo.entropy(old)
    p, q = reference(agent, old), reference(agent, new)
    if p is None:
        parts = [
            [torch.distributions.Categorical(logits=x[0][..., k, :n]) for x in (old, new)]
            for k, n in enumerate(agent.exists.sum(1))
        ]
        theirs = (
            sum(torch.distributions.kl_divergence(a, b) for a, b in parts),
            sum(a.log_prob(action[..., k]) for k, (a, _) in enumerate(parts)), sum(a.entropy() for a, _ in parts),
        )  # fmt: skip
    else:
        theirs = (
            torch.distributions.kl_divergence(p, q).sum(-1), p.log_prob(action.double()).sum(-1), p.entropy().sum(-1)
        )  # fmt: skip
    for a, b in zip(ours, (x.detach() for x in theirs)):
        assert (a - b).abs().max() <= 1e-12 * max(1, float(b.abs().max()))
    assert ours[0].min() >= 0 and trpo.kl_divergence(old, old).abs().max() <= 1e-15


@pytest.mark.parametrize("name", ["discrete", "box"])
def test_surrogate_gradient_is_the_policy_gradient_and_ppos(name):
    agent = build(DISTRIBUTIONS[name][0], dtype=torch.float64)
    obs, state, final, action, advantages, weight = batch(agent, dtype=torch.float64)
    dist = agent(obs, state, final)
    old = tuple(x.detach() for x in dist)
    logprob = trpo.log_prob(dist, action)
    objective = trpo.surrogate(dist, old, action, advantages, weight)
    ppo_loss = MODULES["rppo_lstm"].ppo_loss(logprob, logprob.detach(), advantages, weight, 0.2)[0]
    reinforce = (logprob * advantages * weight).sum() / weight.sum()
    parameters = list(agent.policy_parameters().values())
    gradients = [torch.autograd.grad(x, parameters, retain_graph=True) for x in (objective, -ppo_loss, reinforce)]
    for ours, ppo, plain in zip(*gradients):
        assert (ours - ppo).abs().max() <= 1e-15 and (ours - plain).abs().max() <= 1e-15


@pytest.mark.parametrize("n", [1, 5, 40])
def test_conjugate_gradient_is_a_dense_solve(n):
    torch.manual_seed(n)
    root = torch.randn(n, n, dtype=torch.float64)
    matrix, b = root @ root.T + 0.5 * torch.eye(n), torch.randn(n, dtype=torch.float64)
    solution = torch.linalg.solve(matrix, b)
    x = trpo.conjugate_gradient(lambda v: matrix @ v, b, 4 * n, tolerance=0.0)
    assert (x - solution).norm() <= 1e-8 * solution.norm()
    # After k steps it is the best in the Krylov space of k dimensions; k + 1 products are never needed.
    calls = []
    trpo.conjugate_gradient(lambda v: calls.append(1) or matrix @ v, b, 3)
    assert len(calls) <= 3


def test_conjugate_gradient_is_safe():
    b, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert torch.equal(trpo.conjugate_gradient(lambda v: v, zero, 10), zero)  # no gradient: no step, and no product
    assert torch.equal(trpo.conjugate_gradient(torch.zeros_like, b, 10), zero)  # a singular matrix
    assert torch.equal(trpo.conjugate_gradient(lambda v: -v, b, 10), zero)  # not positive
    for bad in float("nan"), float("inf"):
        assert torch.equal(trpo.conjugate_gradient(lambda v, bad=bad: v * bad, b, 10), zero)
        assert torch.equal(trpo.conjugate_gradient(lambda v: v, b * bad, 10).nan_to_num(0.0, 0.0, 0.0), zero)
    half = torch.diag(torch.tensor([2.0, 0.0]))  # singular, but b is in its range
    assert torch.equal(trpo.conjugate_gradient(lambda v: half @ v, torch.tensor([3.0, 0.0]), 10), torch.tensor([1.5, 0]))


def test_line_search_takes_the_first_fraction_that_improves_within_the_region():
    nan = float("nan")

    def search(table, start=1.0, max_iter=4):
        """measure reads (surrogate, KL) of the fractions in turn; theta is the fraction itself."""
        values = {0.0: (start, 0.0)} | {0.5**i: row for i, row in enumerate(table)}

        def measure(theta):
            return tuple(torch.tensor(x) for x in values[float(theta)])

        return trpo.line_search(measure, torch.tensor(0.0), torch.tensor(1.0), 0.01, 0.5, max_iter)

    assert search([(2.0, 0.005)]) == (1.0, 1.0, pytest.approx(0.005))
    assert search([(2.0, 0.02), (1.5, 0.009)]) == (0.5, 0.5, pytest.approx(0.009))  # too far first
    assert search([(0.5, 0.001), (1.25, 0.001)])[0] == 0.5  # worse first
    assert search([(2.0, nan), (nan, 0.001), (float("inf"), 0.001), (2.0, 0.001)])[0] == 0.125
    assert search([(1.0, 0.0)] * 4) == (0.0, 0.0, 0.0)  # no better is no improvement
    assert search([(2.0, 0.02)] * 4) == (0.0, 0.0, 0.0)
    assert search([(2.0, 0.02), (2.0, 0.001)], max_iter=1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("name", ["discrete", "box"])
def test_the_step_is_the_natural_gradient_as_long_as_the_trust_region(name, factor):
    """Against F^-1 g by a dense solve; factor: every third row is in F, but all are in g."""
    flags = {"cg_max_steps": 400, "cg_damping": 0.1, "target_kl": 1e-3, "sub_sampling_factor": factor}
    agent = build(DISTRIBUTIONS[name][0], dtype=torch.float64, encoder_sizes=(4,), **flags)
    obs, state, final, action, advantages, weight = batch(agent, dtype=torch.float64)
    few = slice(None, None, factor)
    damped = hessian_of_the_mean_kl(agent, [obs[0][few]], state, final[few], weight[few])
    damped = damped + 0.1 * torch.eye(len(damped))
    theta = flat(agent)
    logprob = trpo.log_prob(agent(obs, state, final), action)
    reinforce = (logprob * advantages * weight).sum() / weight.sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(reinforce, agent.policy_parameters().values())])
    direction = torch.linalg.solve(damped, gradient)
    full = (2e-3 / (direction @ damped @ direction)).sqrt() * direction
    logs = trpo.trpo_step(agent, agent.args, obs, state, final, action, advantages, weight)
    assert logs["line_search_success"] == 1.0
    moved = flat(agent) - theta
    # Conjugate gradient stops at a residual of 1e-5, which is what the tolerance here is.
    assert (moved - logs["step_fraction"] * full).norm() <= 1e-3 * moved.norm()
    assert logs["expected_improvement"] == pytest.approx(float(gradient @ moved), rel=1e-9)


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_step_improves_within_the_region_and_moves_the_policy_alone(name, memory):
    space, flags = DISTRIBUTIONS[name]
    agent = build(space, memory=memory, **flags)
    obs, state, final, action, advantages, weight = data = batch(agent)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    old = tuple(x.detach() for x in agent(obs, state, final))
    logs = trpo.trpo_step(agent, agent.args, *data)
    new = tuple(x.detach() for x in agent(obs, state, final))
    valid = ~final
    kl = trpo.kl_divergence(old, new)[valid].mean()
    ratio = (trpo.log_prob(new, action) - trpo.log_prob(old, action)).exp()
    gain = ((ratio - 1) * advantages)[valid].mean()
    assert logs["line_search_success"] == 1.0 and 0.1 * 0.01 < kl < 0.01
    assert logs["kl"] == pytest.approx(float(kl), abs=1e-6) and 0 < gain == pytest.approx(logs["improvement"], abs=1e-5)
    assert 0.5 < logs["improvement"] / logs["expected_improvement"] < 1.5
    moved = {k for k, v in agent.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == agent.policy_parameters().keys()  # every one of the policy's, and nothing else


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_final_rows_count_for_nothing(memory):
    agents = []
    for noise in 0.0, 1e3:
        agent = build(CONTINUOUS_ACTIONS["box"], memory=memory)
        obs, state, final, action, advantages, weight = batch(agent)
        obs = [obs[0] + noise * torch.randn_like(obs[0]) * final[..., None]]
        action = action + noise / 1e3 * torch.randn_like(action) * final[..., None]
        trpo.trpo_step(agent, agent.args, obs, state, final, action, advantages + noise * final, weight)
        agents.append(flat(agent))
    assert (agents[0] - agents[1]).norm() <= 1e-5 * agents[0].norm()


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("case", ["no gradient", "nan advantages", "nan KL", "infinite KL", "nothing is near enough"])
def test_parameters_are_as_before_where_no_step_is_accepted(case, memory, monkeypatch):
    agent = build(CONTINUOUS_ACTIONS["box"], memory=memory)
    obs, state, final, action, advantages, weight = batch(agent)
    advantages = {"no gradient": 0.0, "nan advantages": float("nan")}.get(case, 1.0) * advantages
    if "KL" in case:
        value = float("nan") if case == "nan KL" else float("inf")
        monkeypatch.setattr(trpo, "kl_divergence", lambda old, new: torch.full_like(weight, value))
    if case == "nothing is near enough":
        agent.args.line_search_max_iter = 1
        monkeypatch.setattr(trpo, "kl_divergence", lambda old, new: torch.full_like(weight, 0.0101))
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    logs = trpo.trpo_step(agent, agent.args, obs, state, final, action, advantages, weight)
    assert logs["line_search_success"] == logs["step_fraction"] == logs["kl"] == logs["improvement"] == 0.0
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())


def test_a_singular_fisher_matrix_without_damping():
    """Inputs that are always 0 and units without effect: F has a null space, and the step is still a good one."""
    agent = build(DISCRETE_ACTIONS["multidiscrete"], cg_damping=0.0)
    obs, state, final, action, advantages, weight = batch(agent)
    obs[0][..., 1] = 0.0
    with torch.no_grad():
        agent.actor[-1].weight[:, :4] = 0.0
    logs = trpo.trpo_step(agent, agent.args, obs, state, final, action, advantages, weight)
    assert logs["line_search_success"] == 1.0 and 0 < logs["kl"] < 0.01 and logs["improvement"] > 0
    assert all(p.isfinite().all() for p in agent.parameters())
    zero = product_of(agent, obs, state, final, weight)(torch.zeros(len(flat(agent))))
    assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_fit_critic_moves_the_critic_alone_towards_the_returns(memory):
    agent = build(memory=memory, n_critic_updates=60, batch_size=32)
    obs, state, final, *_ = batch(agent)
    with torch.no_grad():
        latent = agent.latent(obs, state, final)[~final]
    rows, returns = [obs[0][~final]], obs[0][~final].sum(-1).sin()
    parameters = [p for name, p in agent.named_parameters() if name.startswith("critic")]
    before = {k: v.clone() for k, v in agent.named_parameters()}
    error = (agent.value(rows, latent) - returns).square().mean().item()
    optimizer = torch.optim.Adam(parameters, 1e-2, eps=1e-5)
    mean = trpo.fit_critic(agent, agent.args, optimizer, rows, latent, returns)
    after = (agent.value(rows, latent) - returns).square().mean().item()
    assert after < 0.05 * error and after < mean < error
    moved = {k for k, v in agent.named_parameters() if not torch.equal(v, before[k])}
    assert moved == {k for k in before if k.startswith("critic")}


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATION_SPACES)
def test_acting_and_replay_agree_in_every_space(observations, actions, memory):
    final = awkward_ends(10)[2][:-1]
    agent = build(ACTIONS[actions], OBSERVATION_SPACES[observations], memory=memory)
    space = batch_space(agent.observation_space, final.shape[1])
    space.seed(0)
    initial = state = torch.randn_like(agent.initial_state(final.shape[1]))
    rows, stored = [], []
    for t in range(len(final)):
        rows.append([torch.from_numpy(np.array(x)) for x in agent.observe(space.sample(), {})])
        with torch.no_grad():
            *out, state = agent.act(rows[-1], state)
            assert torch.allclose(agent.get_value(rows[-1], state) if memory == "none" else out[2], out[2])
        stored.append(out)
        state = agent.next_state(state, final[t])
    obs = [torch.stack(leaf) for leaf in zip(*rows)]
    action, logprob, value = (torch.stack(x) for x in zip(*stored))
    new_logprob, entropy, new_value = agent.evaluate_actions(obs, initial, final, action)
    assert ((new_logprob - logprob)[~final].exp() - 1).abs().max() <= 1e-5
    assert (new_value - value)[~final].abs().max() <= 1e-5 * value.abs().max() and entropy.shape == final.shape
    assert batch_space(agent.action_space, 6).contains(agent.to_env(action[0]))
    single, _ = agent.predict(agent.observation_space.sample(), None, deterministic=True)
    assert agent.action_space.contains(single)


@pytest.mark.parametrize("flags", [{}, {"activation": "relu"}, {"encoder_sizes": ()}, {"norm_obs": False}], ids=str)
@pytest.mark.parametrize("actions", ["multidiscrete", "box"])
def test_the_policy_in_numpy_is_the_policy(actions, flags):
    agent = build(ACTIONS[actions], **flags)
    agent.obs_stats.update(torch.randn(50, 3) * 3 + 2)
    x = torch.randn(6, 3) * 4
    latent, logits = trpo.RowPolicy(agent)(x.numpy())
    expected, _ = agent.recall([x], agent.initial_state(6))
    assert latent.dtype == logits.dtype == torch.float32
    assert (latent - expected).abs().max() <= 1e-5 and (logits - agent.actor(expected)).abs().max() <= 1e-5


def test_flags_that_no_action_space_allows_are_refused():
    for flags, space in ({"use_sde": True}, "discrete"), ({"squash_output": True}, "unbounded"):
        with pytest.raises(trpo.ArgumentError, match="--" + next(iter(flags)).replace("_", "-")):
            build(ACTIONS[space], **flags)
    with pytest.raises(trpo.ArgumentError, match="unsupported"):
        build(spaces.Box(0, 9, (2,), np.int64))


class Toy(gym.Env):
    """Random walks whose reward depends on the action, in episodes of about 20 steps."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action):
        obs = self.np_random.normal(size=3).astype(np.float32)
        return obs, float(np.sum(np.asarray(action) * obs[0]) + obs[1]), self.np_random.random() < 0.05, False, {}


@pytest.mark.parametrize("actions", ["discrete", "multidiscrete", "multibinary", "box"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_one_whole_step_is_sb3_contribs(actions, num_envs, monkeypatch):
    """From the same weights and rollout: the policy's step and ten passes of the critic give the same parameters.

    sb3-contrib averages the KL of Box and MultiBinary over the components, so its target_kl and damping are ours
    divided by their number. It starts conjugate gradient from noise of 1e-4, which is set to zero here.
    """
    sb3 = pytest.importorskip("sb3_contrib")
    from stable_baselines3.common.vec_env import DummyVecEnv

    space, T = ACTIONS[actions], 512
    averaged = int(np.prod(space.shape)) if actions in ("box", "multibinary") else 1
    env = DummyVecEnv([lambda: Toy(space)] * num_envs)
    peer = sb3.TRPO("MlpPolicy", env, n_steps=T, seed=1, device="cpu", target_kl=0.01 / averaged, cg_damping=0.1 / averaged)
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * num_envs)  # fills the buffer
    buffer, theirs = peer.rollout_buffer, peer.policy
    args = trpo.Args(norm_obs=False, norm_reward=False, target_kl=0.01, cg_damping=0.1)
    agent = trpo.Agent(Toy.observation_space, space, args)
    pairs = {
        "encoder.mlp.0": theirs.mlp_extractor.policy_net[0], "encoder.mlp.2": theirs.mlp_extractor.policy_net[2],
        "actor.0": theirs.action_net, "critic.0": theirs.value_net,
        "critic_encoder.mlp.0": theirs.mlp_extractor.value_net[0],
        "critic_encoder.mlp.2": theirs.mlp_extractor.value_net[2],
    }  # fmt: skip
    names = {f"{name}.{kind}": getattr(layer, kind) for name, layer in pairs.items() for kind in ("weight", "bias")}
    if actions == "box":
        names["log_std"] = theirs.log_std
    parameters = dict(agent.named_parameters())
    assert parameters.keys() == names.keys()
    # Ours has logits for choices that a component lacks, which do nothing; the peer's are the rest of ours.
    used = {name: torch.ones(len(p), dtype=torch.bool) for name, p in parameters.items()}
    if actions == "multidiscrete":
        used |= {name: torch.from_numpy(agent.exists.ravel()) for name in ("actor.0.weight", "actor.0.bias")}
    with torch.no_grad():
        for name, parameter in names.items():
            parameters[name][used[name]] = parameter
    first = {name: parameter.detach().clone() for name, parameter in names.items()}
    obs, action = torch.from_numpy(buffer.observations), torch.from_numpy(buffer.actions).view(T, num_envs, -1)
    action = action if actions == "box" else action.long()
    advantages, returns = torch.from_numpy(buffer.advantages), torch.from_numpy(buffer.returns)

    np.random.seed(0)
    orders = [np.random.permutation(T * num_envs) for _ in range(1 + args.n_critic_updates)][1:]
    np.random.seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)
        peer.train()
    logged = peer.logger.name_to_value
    assert logged["train/is_line_search_success"] == 1.0

    final, weight = torch.zeros(T, num_envs, dtype=torch.bool), torch.ones(T, num_envs)
    state = agent.initial_state(num_envs)
    logs = trpo.trpo_step(agent, args, [obs], state, final, action, trpo.normalize(advantages, weight), weight)
    assert logs["line_search_success"] == 1.0
    optimizer = torch.optim.Adam(
        [p for name, p in parameters.items() if name.startswith("critic")], args.learning_rate, eps=1e-5, fused=True
    )
    with torch.no_grad():
        latent = agent.latent([obs], state, final)
    sequence = iter(orders)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(next(sequence)))
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (obs, latent, returns)]  # in the order of its buffer
    v_loss = trpo.fit_critic(agent, args, optimizer, [rows[0]], rows[1], rows[2])
    assert v_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
    for name, parameter in names.items():
        error, step = (parameters[name][used[name]] - parameter).norm(), (parameter - first[name]).norm()
        assert error <= 1e-4 * parameter.norm() and error <= 1e-2 * step and step > 0, name


def test_a_feed_forward_run_goes_on_bit_for_bit_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--env-id Pendulum-v1 --preset none --num-envs 2 --num-steps 64 --n-critic-updates 2 --cg-max-steps 3"
    trpo.main([*flags.split(), *"--total-timesteps 1000 --checkpoint-every 3 --use-sde --run-name a".split()])
    whole = torch.load("runs/a/agent.pt", weights_only=True)["agent"]
    middle = torch.load("runs/a/checkpoint.pt", weights_only=True)
    assert middle["run"]["iteration"] == 6
    assert not torch.equal(middle["agent"]["actor.0.weight"], whole["actor.0.weight"])
    trpo.main(["--resume", "runs/a"])
    again = torch.load("runs/a/agent.pt", weights_only=True)["agent"]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
