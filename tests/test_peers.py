"""The same weights and data through stable-baselines3, sb3-contrib and ours."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CATEGORICAL, MODULES, awkward_ends, having, toy
from gymnasium import spaces
from torch import nn

pytest.importorskip("sb3_contrib")
from sb3_contrib import RecurrentPPO  # noqa: E402
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy  # noqa: E402
from sb3_contrib.common.recurrent.type_aliases import RNNStates  # noqa: E402
from stable_baselines3.common.buffers import RolloutBuffer  # noqa: E402
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

OBS = spaces.Box(-1, 1, (3,))
LSTM = CATEGORICAL


class Encoder(BaseFeaturesExtractor):
    """Ours: one layer and tanh."""

    def __init__(self, space):
        super().__init__(space, 5)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh())

    def forward(self, obs):
        return self.layers(obs)


def policy_flags(separate: bool) -> dict:
    return {"net_arch": [], "lstm_hidden_size": 6, "features_extractor_class": Encoder,
            "shared_lstm": not separate, "enable_critic_lstm": separate}  # fmt: skip


def named_alike(theirs, separate: bool) -> dict[str, nn.Parameter]:
    """Our names of their parameters."""
    layers = {"encoder.0": theirs.features_extractor.layers[0], "actor": theirs.action_net,
              "critic": theirs.value_net}  # fmt: skip
    names = {
        f"{name}.{k}": p for name, layer in layers.items() for k, p in layer.named_parameters()
    }
    memories = {"lstm": theirs.lstm_actor} | (
        {"critic_lstm": theirs.lstm_critic} if separate else {}
    )
    for name, lstm in memories.items():
        names |= {f"{name}.cell.{k.removesuffix('_l0')}": p for k, p in lstm.named_parameters()}
    return names


@pytest.mark.parametrize("script", LSTM)
@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.MultiDiscrete([3, 3])], ids=str)
@pytest.mark.parametrize("separate", [False, True])
def test_recurrent_policy_agrees_with_sb3_contrib(script, space, separate):
    """Log-probabilities, values, entropies over sequences with resets; acting's next states."""
    module = MODULES[script]
    args = module.Args(
        env_id=toy(action_space=space), encoder_size=5, hidden_size=6, separate_critic=separate
    )
    torch.manual_seed(1)
    ours = module.Agent(module.make_envs(args, 2), args)
    theirs = RecurrentActorCriticPolicy(OBS, space, lambda _: 1e-3, **policy_flags(separate))
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == (names := named_alike(theirs, separate)).keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(parameters[name].add_(0.4 * torch.randn_like(parameter)))

    final = awkward_ends()[2][:-1]
    T, N = final.shape
    K, A = ours.exists.shape
    obs, actions = torch.rand(T, N, 3) * 2 - 1, torch.randint(A, (T, N, K))
    legal, state = torch.ones(T, N, K, A, dtype=torch.bool), torch.randn_like(ours.initial_state(N))
    logprob, entropy, value = ours.evaluate_actions(obs, legal, state, final, actions)

    rows = state[:, None]  # (h, c of actor, h, c of critic) of one layer each
    states = RNNStates((rows[0], rows[1]), (rows[-2], rows[-1]))
    starts = torch.cat([torch.zeros(1, N), final[:-1].float()])  # a step after a final one
    flat = [x.transpose(0, 1).flatten(0, 1) for x in (obs, actions.squeeze(-1), starts)]  # (N, T)
    values, logprobs, entropies = theirs.evaluate_actions(*flat[:2], states, flat[2])
    for a, b in (logprob, logprobs), (value, values), (entropy, entropies):
        assert (a - b.reshape(N, T).T[~final]).abs().max() <= 1e-5 < a.std()

    _, v, following = ours.step(obs[0], legal[0], state)
    _, their_v, _, new = theirs.forward(obs[0], states, torch.zeros(N))
    theirs_rows = torch.cat([*new.pi, *(new.vf if separate else ())])
    assert (following - theirs_rows).abs().max() <= 1e-5 and (v - their_v[:, 0]).abs().max() <= 1e-5


@pytest.mark.parametrize("script", having("compute_gae"))
def test_gae_agrees_with_stable_baselines3(script):
    """At a truncation theirs adds gamma V(final observation) to the reward, which is the same."""
    T, N, gamma, lam = 40, 5, 0.97, 0.9
    generator = np.random.default_rng(0)
    rewards, values = (generator.normal(size=(n, N)).astype(np.float32) for n in (T, T + 1))
    terminated, truncated = generator.random((2, T, N)) < 0.15
    done = terminated | truncated
    buffer = RolloutBuffer(T, OBS, spaces.Discrete(2), gae_lambda=lam, gamma=gamma, n_envs=N)
    for t in range(T):
        start, obs = done[t - 1] if t else np.zeros(N), np.zeros((N, 3))
        reward = rewards[t] + gamma * values[t + 1] * (truncated[t] & ~terminated[t])
        buffer.add(
            obs, np.zeros((N, 1)), reward, start, torch.from_numpy(values[t]), torch.zeros(N)
        )
    buffer.compute_returns_and_advantage(torch.from_numpy(values[T]), done[T - 1])
    ours = MODULES[script].compute_gae(rewards, values, terminated, done, gamma, lam)
    assert np.abs(ours - buffer.advantages).max() <= 1e-5 and (done & ~terminated).sum() > 10


@pytest.mark.parametrize("script", LSTM)
def test_the_gradient_in_train_is_that_of_sb3_contribs_train(script, watch, monkeypatch):
    """Our second epoch over a rollout of 3 x 30 steps, many of whose ratios are clipped, by
    RecurrentPPO.train with its padded sequences; it never sees an episode's last observation."""
    T, N, space = 30, 3, spaces.Discrete(4)
    env_id = toy(action_space=space, length=10)  # final are steps 10 and 21
    seen = watch(script, env_id, num_steps=T + 2, num_envs=N, num_minibatches=1, update_epochs=2,
                 learning_rate=0.1, ent_coef=0.01, vf_coef=1.0, clip_coef=0.12, max_grad_norm=1e9,
                 separate_critic=True, encoder_size=5, hidden_size=6,
                 total_timesteps=T * N)  # fmt: skip
    (obs, _, _, final, actions), _, _ = seen.replays[1]
    _, old_logprob, advantages, _ = seen.losses[1]
    assert final.nonzero()[:, 0].unique().tolist() == [10, 21] and len(seen.gae) == 1
    (_, values, *_), raw = seen.gae[0]

    peer = RecurrentPPO(
        "MlpLstmPolicy", DummyVecEnv([lambda: gym.make(env_id)] * N), n_steps=T,
        batch_size=T * N, n_epochs=1, normalize_advantage=False, max_grad_norm=1e9, device="cpu",
        policy_kwargs=policy_flags(True), clip_range=0.12, ent_coef=0.01, vf_coef=0.5,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * N)  # fills the buffer, whose contents are then replaced by ours
    buffer, names = peer.rollout_buffer, named_alike(peer.policy, True)
    kept, order = ~final, np.arange(N)
    environment = [int(np.abs(seen.resets[0][0] - row).sum(1).argmin()) for row in obs[0].numpy()]
    assert sorted(environment) == [*order]  # the minibatch's sequences are shuffled
    returns = torch.from_numpy(raw + values[:-1])[:, environment]
    for name, x in {"observations": obs, "actions": actions, "returns": returns}.items():
        getattr(buffer, name)[:] = x[kept].view(T, N, *x.shape[2:])
    buffer.advantages[:], buffer.log_probs[:] = advantages.view(T, N), old_logprob.view(T, N)
    for name in "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf":
        getattr(buffer, name)[:] = 0
    assert np.flatnonzero(buffer.episode_starts[:, 0]).tolist() == [0, 10, 20]
    _, weights, gradients = seen.updates[1]
    assert weights.keys() == names.keys()
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(weights[name])
    monkeypatch.setattr(np.random, "randint", lambda *_: 0)  # where it cuts one sequence in two
    peer.train()
    logged, losses = peer.logger.name_to_value, seen.logs[0][1][1]
    assert 0.2 < logged["train/clip_fraction"] < 0.95
    assert losses["policy_loss"] == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-6)
    assert 2 * losses["value_loss"] == pytest.approx(logged["train/value_loss"], rel=1e-5)
    assert losses["entropy"] == pytest.approx(-logged["train/entropy_loss"], abs=1e-6)
    assert losses["approx_kl"] == pytest.approx(logged["train/approx_kl"], abs=1e-6)
    for name, parameter in names.items():
        largest = parameter.grad.abs().max().item()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-6 * max(1.0, largest), name
        assert largest > 1e-4
