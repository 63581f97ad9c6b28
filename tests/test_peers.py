"""The same weights and data through stable-baselines3, sb3-contrib and ours."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from support import ACTIONS, MODULES, Toy, awkward_ends
from test_numbers import build
from torch import nn

pytest.importorskip("sb3_contrib")
from sb3_contrib import TRPO, RecurrentPPO  # noqa: E402
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy  # noqa: E402
from sb3_contrib.common.recurrent.type_aliases import RNNStates  # noqa: E402
from stable_baselines3.common.buffers import RolloutBuffer  # noqa: E402
from stable_baselines3.common.distributions import StateDependentNoiseDistribution  # noqa: E402
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

OBS = gym.spaces.Box(-2, 2, (3,))
LSTM, CONTINUOUS = MODULES["rppo_lstm"], MODULES["rppo_continuous"]


class Encoder(BaseFeaturesExtractor):
    """Ours: one layer and tanh."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh())

    def forward(self, obs):
        return self.layers(obs)


POLICY = {"net_arch": [], "lstm_hidden_size": 6, "features_extractor_class": Encoder,
          "shared_lstm": True, "enable_critic_lstm": False}  # fmt: skip


def named_alike(theirs) -> dict[str, nn.Parameter]:
    """Our names of their parameters."""
    layers = {"encoder.0": theirs.features_extractor.layers[0], "actor": theirs.action_net,
              "critic": theirs.value_net}  # fmt: skip
    names = {
        f"{name}.{k}": p for name, layer in layers.items() for k, p in layer.named_parameters()
    }
    cell = {f"lstm.cell.{k[:-3]}": p for k, p in theirs.lstm_actor.named_parameters()}
    log_std = {"log_std": theirs.log_std} if hasattr(theirs, "log_std") else {}
    return names | cell | log_std


def copy_weights(ours, theirs) -> None:
    parameters, names = dict(ours.named_parameters()), named_alike(theirs)
    assert parameters.keys() == names.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(parameters[name])


@pytest.mark.parametrize("script,actions", [("rppo_lstm", "discrete"), ("rppo_continuous", "box")])
def test_recurrent_policy_agrees_with_sb3_contrib(script, actions):
    """Log-probabilities, values, entropies over sequences with resets; acting's next states."""
    space = ACTIONS[actions]
    flags = {"norm_obs": False} if script == "rppo_continuous" else {}
    ours = build(script, actions, **flags)
    theirs = RecurrentActorCriticPolicy(OBS, space, lambda _: 1e-3, **POLICY)
    copy_weights(ours, theirs)
    final = awkward_ends()[2][:-1]
    T, N = final.shape
    obs = torch.rand(T, N, 3) * 2 - 1
    taken = torch.randint(3, (T, N)) if actions == "discrete" else torch.randn(T, N, 2)
    state = torch.randn_like(ours.initial_state(N))
    logprob, entropy, value = ours.evaluate_actions(obs, state, final, taken)
    states = RNNStates((state[:1], state[1:]), (state[:1], state[1:]))
    starts = torch.cat([torch.zeros(1, N), final[:-1].float()])  # a step after a final one
    flat = [x.transpose(0, 1).flatten(0, 1) for x in (obs, taken, starts)]  # (N, T)
    values, logprobs, entropies = theirs.evaluate_actions(*flat[:2], states, flat[2])
    for a, b in (logprob, logprobs), (value, values), (entropy, entropies):
        assert (a - b.reshape(N, T).T[~final]).abs().max() <= 1e-5
    assert logprob.std() > 1e-3 < value.std()
    step = ours.step(obs[0], state)
    _, their_value, _, new = theirs.forward(obs[0], states, torch.zeros(N))
    assert (step[2] - torch.cat(new.pi)).abs().max() <= 1e-5
    assert (step[1] - their_value[:, 0]).abs().max() <= 1e-5


def test_gae_agrees_with_stable_baselines3():
    """At a truncation theirs adds gamma V(final observation) to the reward, which is the same."""
    T, N, gamma, lam = 40, 5, 0.97, 0.9
    generator = np.random.default_rng(0)
    rewards, values = (generator.normal(size=(n, N)).astype(np.float32) for n in (T, T + 1))
    terminated, truncated = generator.random((2, T, N)) < 0.15
    done = terminated | truncated
    buffer = RolloutBuffer(T, OBS, ACTIONS["discrete"], gae_lambda=lam, gamma=gamma, n_envs=N)
    for t in range(T):
        start, obs = done[t - 1] if t else np.zeros(N), np.zeros((N, 3))
        reward = rewards[t] + gamma * values[t + 1] * (truncated[t] & ~terminated[t])
        value, zeros = torch.from_numpy(values[t]), np.zeros((N, 1))
        buffer.add(obs, zeros, reward, start, value, torch.zeros(N))
    buffer.compute_returns_and_advantage(torch.from_numpy(values[T]), done[T - 1])
    ours = LSTM.compute_gae(rewards, values, terminated, done, gamma, lam)
    assert np.abs(ours - buffer.advantages).max() <= 1e-5 and (done & ~terminated).sum() > 10


def test_gsde_agrees_with_stable_baselines3():
    """Density, entropy, noise of the same matrices, and gradients."""
    agent = build("rppo_continuous", "box", use_sde=True)
    theirs = StateDependentNoiseDistribution(2, learn_features=False)
    theirs.proba_distribution_net(6, -1.0, 6)
    h = torch.randn(9, 6)
    mean, actions = agent.actor(h), torch.randn(9, 2)
    noise = agent.sample_noise(9).detach()
    assert ((agent.act(h, noise) - mean) - torch.bmm(h[:, None], noise)[:, 0]).abs().max() <= 1e-5
    peer = theirs.proba_distribution(mean, agent.log_std, h)
    ours = agent.policy(h)
    assert (ours.log_prob(actions) - peer.log_prob(actions)).abs().max() <= 1e-5
    assert (ours.entropy() - peer.entropy()).abs().max() <= 1e-5
    gradients = [
        torch.autograd.grad(
            x.log_prob(actions).sum(), [agent.log_std, agent.actor.weight], retain_graph=True
        )
        for x in (ours, peer)
    ]
    assert all((a - b).abs().max() <= 1e-4 for a, b in zip(*gradients))


def test_the_gradient_is_that_of_sb3_contribs_own_train(monkeypatch):
    """A rollout of 3 x 30 steps, many of whose ratios are clipped, through RecurrentPPO.train with
    its padded sequences; it never sees an episode's last observation."""
    T, N, kwargs = 30, 3, {"length": 10}
    peer = RecurrentPPO(
        "MlpLstmPolicy", DummyVecEnv([lambda: Toy(**kwargs)] * N), n_steps=T, batch_size=T * N,
        n_epochs=1, normalize_advantage=True, max_grad_norm=1e9, device="cpu", seed=1,
        policy_kwargs=POLICY, clip_range=0.12, ent_coef=0.01, vf_coef=0.5,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * N)  # fills the buffer
    buffer = peer.rollout_buffer
    assert np.flatnonzero(buffer.episode_starts[:, 0]).tolist() == [0, 10, 20]
    ours = build("rppo_lstm")
    copy_weights(ours, peer.policy)
    for name in "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf":
        getattr(buffer, name)[:] = 0
    # Ours: the same steps, and after each tenth a final one.
    steps = np.insert(np.arange(T), [10, 20], [9, 19])
    final = torch.zeros(T + 2, N, dtype=torch.bool)
    final[10] = final[21] = True
    obs, actions = (torch.from_numpy(x[steps]) for x in (buffer.observations, buffer.actions))
    obs[10] = obs[21] = 7.0  # what nobody may see
    valid = ~final
    # What the buffer says the old policy gave; most ratios are away from 1.
    advantage = torch.from_numpy(buffer.advantages[steps])[valid]
    old_logprob = torch.from_numpy(buffer.log_probs[steps])[valid]
    returns = torch.from_numpy(buffer.returns[steps])[valid]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # theirs is unbiased
    logprob, entropy, value = ours.evaluate_actions(
        obs, ours.initial_state(N), final, actions.squeeze(-1).long()
    )
    policy_loss, kl, clipfrac = LSTM.ppo_loss(logprob, old_logprob, advantage, 0.12)
    value_loss = 0.5 * (value - returns).square().mean()
    # The peer's critic reads a shared LSTM's output as data.
    (policy_loss - 0.01 * entropy.mean()).backward(retain_graph=True)
    value_loss.backward(inputs=[*ours.critic.parameters()])
    monkeypatch.setattr(np.random, "randint", lambda *_: 0)  # where it cuts one sequence in two
    peer.train()
    logged = peer.logger.name_to_value
    assert 0.2 < logged["train/clip_fraction"] < 0.95
    assert clipfrac.item() == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    assert policy_loss.item() == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-6)
    assert 2 * value_loss.item() == pytest.approx(logged["train/value_loss"], rel=1e-5)
    assert kl.item() == pytest.approx(logged["train/approx_kl"], abs=1e-6)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, parameter in named_alike(peer.policy).items():
        largest = parameter.grad.abs().max().item()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-6 * max(1.0, largest), name
        assert largest > 1e-4


class Walk(Toy):
    """The reward depends on the action."""

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(np.sum(action) * obs[0] + obs[1]), terminated, truncated, info


@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_one_whole_trpo_step_is_sb3_contribs(actions, monkeypatch):
    """From the same weights and rollout: the policy's step and ten passes of the critic.

    sb3-contrib averages the KL of Box over the components, so its target_kl and damping are ours
    divided by their number. It starts conjugate gradient from noise of 1e-4, set to zero here.
    """
    trpo, T, N = MODULES["trpo"], 256, 2
    parts = 2 if actions == "box" else 1
    env = DummyVecEnv([lambda: Walk(actions)] * N)
    peer = TRPO("MlpPolicy", env, n_steps=T, seed=1, device="cpu", target_kl=0.01 / parts,
                cg_damping=0.1 / parts)  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * N)
    buffer, theirs = peer.rollout_buffer, peer.policy
    agent = build("trpo", actions, encoder_size=64, norm_obs=False)
    policy_net, value_net = theirs.mlp_extractor.policy_net, theirs.mlp_extractor.value_net
    pairs = {"encoder.0": policy_net[0], "encoder.2": policy_net[2], "actor": theirs.action_net,
             "critic.0": value_net[0], "critic.2": value_net[2], "critic.4": theirs.value_net}  # fmt: skip
    names = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in pairs.items()
        for kind in ("weight", "bias")
    }
    names |= {"log_std": theirs.log_std} if actions == "box" else {}
    parameters = dict(agent.named_parameters())
    assert parameters.keys() == names.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameters[name].copy_(parameter)
    first = {name: parameter.detach().clone() for name, parameter in names.items()}
    obs, taken = torch.from_numpy(buffer.observations), torch.from_numpy(buffer.actions)
    taken = taken.view(T * N, -1) if actions == "box" else taken.view(T * N).long()
    advantage, returns = (
        torch.from_numpy(buffer.advantages).flatten(),
        torch.from_numpy(buffer.returns),
    )
    np.random.seed(0)
    orders = [np.random.permutation(T * N) for _ in range(1 + agent.args.n_critic_updates)][1:]
    np.random.seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn_like", torch.zeros_like)
        peer.train()
    logged = peer.logger.name_to_value
    assert logged["train/is_line_search_success"] == 1.0
    rollout = dict(
        obs=obs, lstm_state=agent.initial_state(N), final=torch.zeros(T, N, dtype=torch.bool)
    )
    advantage = trpo.normalize_advantage(advantage)
    assert trpo.trpo_step(agent, agent.args, rollout, taken, advantage)[3] > 0
    optimizer = torch.optim.Adam(agent.critic.parameters(), agent.args.learning_rate, eps=1e-5)
    sequence = iter(orders)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(next(sequence)))
    rows = [x.transpose(0, 1).flatten(0, 1) for x in (obs, returns)]  # in the order of its buffer
    value_loss = trpo.fit_critic(agent.critic, agent.args, optimizer, *rows)
    assert value_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
    for name, parameter in names.items():
        ours = dict(agent.named_parameters())[name]
        error, step = (ours - parameter).norm(), (parameter - first[name]).norm()
        assert error <= 1e-4 * parameter.norm() and error <= 1e-2 * step and step > 0, name
