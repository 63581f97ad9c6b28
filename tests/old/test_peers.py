"""The same weights and data through stable-baselines3, sb3-contrib and ours (extra `peers`)."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, awkward_ends, having
from gymnasium import spaces

pytest.importorskip("sb3_contrib")
from sb3_contrib import RecurrentPPO  # noqa: E402
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy  # noqa: E402
from sb3_contrib.common.recurrent.type_aliases import RNNStates  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.buffers import RolloutBuffer  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

OBS, LSTM_SCRIPTS = spaces.Box(-1, 1, (3,), np.float32), ["rppo_lstm"]
ACTIONS = {"rppo_lstm": spaces.Discrete(4)}


def pair(script, critic, layers):
    """Ours and sb3-contrib's policy with the same random weights: obs -> LSTM -> heads (8,) -> outputs."""
    torch.manual_seed(layers)
    args = MODULES[script].Args(encoder_sizes=(), hidden_size=6, head_sizes=(8,), num_layers=layers, critic=critic)
    ours = MODULES[script].Agent(OBS, ACTIONS[script], args)
    theirs = RecurrentActorCriticPolicy(
        OBS, ACTIONS[script], lambda _: 1e-3, net_arch=[8], lstm_hidden_size=6, n_lstm_layers=layers,
        shared_lstm=critic == "detached", enable_critic_lstm=critic == "separate",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        memories = [(ours.memory, theirs.lstm_actor)]
        memories += [(ours.critic_memory, theirs.lstm_critic)] if critic == "separate" else []
        for mine, lstm in memories:
            for layer, cell in enumerate(mine.cells):
                for name, parameter in cell.named_parameters():
                    getattr(lstm, f"{name}_l{layer}").copy_(parameter)
        for mine, other in (
            (ours.actor[0], theirs.mlp_extractor.policy_net[0]), (ours.critic[0], theirs.mlp_extractor.value_net[0]),
            (ours.actor[-1], theirs.action_net), (ours.critic[-1], theirs.value_net),
        ):  # fmt: skip
            other.load_state_dict(mine.state_dict())
    return ours, theirs


@pytest.mark.parametrize("script", LSTM_SCRIPTS)
@pytest.mark.parametrize("critic", ["separate", "detached"])
@pytest.mark.parametrize("layers", [1, 2])
def test_recurrent_policy_agrees_with_sb3_contrib(script, critic, layers):
    """Log-probabilities, values, entropies over sequences with resets, and the next states of acting."""
    ours, theirs = pair(script, critic, layers)
    final = awkward_ends()[2][:-1]
    T, N = final.shape
    obs, action = torch.rand(T, N, 3) * 2 - 1, torch.randint(4, (T, N, 1))
    state = torch.randn_like(ours.initial_state(N))
    logprob, entropy, value = ours.evaluate_actions([obs], state, final, action)

    h, c = state[: 2 * layers : 2], state[1 : 2 * layers : 2]
    rows = state[2 * layers :] if critic == "separate" else state
    states = RNNStates((h, c), (rows[0::2], rows[1::2]))
    starts = torch.cat([torch.zeros(1, N), final[:-1].float()])  # an episode starts in the row after a final one
    flat = [x.transpose(0, 1).reshape(T * N, *x.shape[2:]) for x in (obs, action[..., 0], starts)]  # theirs is (N, T)
    values, logprobs, entropies = theirs.evaluate_actions(*flat[:2], states, flat[2])
    for a, b in (logprob, logprobs), (value, values), (entropy, entropies):
        assert (a - b.reshape(N, T).T)[~final].abs().max() <= 1e-5

    _, _, new = ours.step([obs[0]], state)
    with torch.no_grad():
        _, _, _, new_states = theirs.forward(obs[0], states, torch.zeros(N), deterministic=True)
    assert (new[: 2 * layers : 2] - new_states.pi[0]).abs().max() <= 1e-6
    assert (new[1 : 2 * layers : 2] - new_states.pi[1]).abs().max() <= 1e-6
    if critic == "separate":
        assert (new[2 * layers :: 2] - new_states.vf[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("script", having("compute_gae"))
def test_gae_agrees_with_stable_baselines3(script):
    """On terminations; at a truncation sb3 adds gamma V(final observation) to the reward, which is the same."""
    T, N, gamma, lam = 40, 5, 0.97, 0.9
    generator = np.random.default_rng(0)
    rewards, values = generator.normal(size=(T, N)).astype(np.float32), generator.normal(size=(T + 1, N)).astype(np.float32)
    terminated = generator.random((T, N)) < 0.2
    buffer = RolloutBuffer(T, OBS, spaces.Discrete(2), gae_lambda=lam, gamma=gamma, n_envs=N)
    for t in range(T):
        start = terminated[t - 1] if t else np.zeros(N)
        buffer.add(np.zeros((N, 3)), np.zeros((N, 1)), rewards[t], start, torch.from_numpy(values[t]), torch.zeros(N))
    buffer.compute_returns_and_advantage(torch.from_numpy(values[T]), terminated[T - 1])
    ours = MODULES[script].compute_gae(
        *(torch.from_numpy(x) for x in (rewards, values, terminated, terminated)), gamma, lam
    )
    assert np.abs(ours.numpy() - buffer.advantages).max() <= 1e-5


class TenRows(gym.Env):
    """Episodes of ten steps whose observations and rewards are random."""

    observation_space = OBS

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return obs, float(self.np_random.normal()), self.steps == 10, False, {}


@pytest.mark.parametrize("script,space", [
    ("rppo_lstm", spaces.Discrete(4)), ("rppo_continuous", spaces.Box(-1, 1, (2,), np.float32)),
    ("ppo1_mpi", spaces.Discrete(4)), ("ppo1_mpi", spaces.Box(-1, 1, (2,), np.float32)),
], ids=str)  # fmt: skip
def test_the_losss_gradient_is_that_of_their_train(script, space, monkeypatch):
    """One update by stable-baselines3's PPO.train, or sb3-contrib's RecurrentPPO.train with its padded sequences, on a
    rollout of 3 x 30 rows with two resets in it, far enough from the old policy for many ratios to be clipped."""
    module, recurrent, T, N = MODULES[script], script != "ppo1_mpi", 30, 3
    net = {"net_arch": [8], "lstm_hidden_size": 6} if recurrent else {"net_arch": [8]}
    # Their value loss has no 1/2, nor has ppo1_mpi's.
    coefficients = {"ent_coef": 0.01, "vf_coef": 0.5}
    peer = (RecurrentPPO if recurrent else PPO)(
        "MlpLstmPolicy" if recurrent else "MlpPolicy", DummyVecEnv([lambda: TenRows(space)] * N), n_steps=T, seed=1,
        batch_size=T * N, n_epochs=1, normalize_advantage=False, max_grad_norm=1e9, policy_kwargs=net, device="cpu",
        **coefficients,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(peer, "train", lambda: None)
        peer.learn(T * N)  # fills the buffer
    buffer, theirs = peer.rollout_buffer, peer.policy
    if recurrent:
        flags = {"encoder_sizes": (), "head_sizes": (8,), "hidden_size": 6, "critic": "separate"}
    else:
        flags = {"encoder_sizes": (8,)}
    flags |= {"norm_obs": False} if "norm_obs" in module.Args.__dataclass_fields__ else {}
    ours = module.Agent(OBS, space, module.Args(**flags))
    policy, value = theirs.mlp_extractor.policy_net[0], theirs.mlp_extractor.value_net[0]
    if recurrent:
        pairs = {"actor.0": policy, "actor.2": theirs.action_net, "critic.0": value, "critic.2": theirs.value_net}
    else:
        pairs = {"encoders.0.mlp.0": policy, "actor.0": theirs.action_net, "encoders.1.mlp.0": value,
                 "critic.0": theirs.value_net}  # fmt: skip
    names = {f"{name}.{kind}": getattr(layer, kind) for name, layer in pairs.items() for kind in ("weight", "bias")}
    for memory, lstm in [("memory", "lstm_actor"), ("critic_memory", "lstm_critic")] if recurrent else []:
        lstm = getattr(theirs, lstm)
        names |= {f"{memory}.cells.0.{name.removesuffix('_l0')}": p for name, p in lstm.named_parameters()}
    if isinstance(space, spaces.Box):
        names["log_std"] = theirs.log_std
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == names.keys()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.add_(0.4 * torch.randn_like(parameter))
            parameters[name].copy_(parameter)

    # Their rows, and ours: with an episode's last observation, which theirs has not, in front of the next one's first.
    last = [10, 21] if recurrent else []
    rows = [t for t in range(T + len(last)) if t not in last]
    final = torch.zeros(T + len(last), N, dtype=torch.bool)
    final[last] = True
    columns = []
    for name in "observations", "actions", "advantages", "returns", "log_probs":
        x = torch.from_numpy(getattr(buffer, name).copy())
        columns.append(x.new_full((len(final), *x.shape[1:]), 0.5))
        columns[-1][rows] = x
    obs, action, advantages, returns, old_logprob = columns
    action = action.view(*final.shape, -1)
    assert np.flatnonzero(buffer.episode_starts[:, 0]).tolist() == [0, 10, 20]
    monkeypatch.setattr(np.random, "randint", lambda *_: 0)  # where RecurrentPPO cuts one sequence in two
    peer.train()
    assert 0.2 < peer.logger.name_to_value["train/clip_fraction"] < 0.9

    action = action if isinstance(space, spaces.Box) else action.long()
    logprob, entropy, value = ours.evaluate_actions([obs], ours.initial_state(N), final, action)
    weight = (~final).float()
    policy_loss = module.ppo_loss(logprob, old_logprob, advantages, weight, 0.2)[0]
    if recurrent:
        v_loss = 2 * module.value_loss(value, value.detach(), returns, weight, None)
    else:
        v_loss = module.weighted_mean((value - returns) ** 2, weight)
    mean_entropy = module.weighted_mean(entropy, weight)
    (policy_loss + coefficients["vf_coef"] * v_loss - coefficients["ent_coef"] * mean_entropy).backward()
    assert policy_loss.item() == pytest.approx(peer.logger.name_to_value["train/policy_gradient_loss"], abs=1e-6)
    assert v_loss.item() == pytest.approx(peer.logger.name_to_value["train/value_loss"], rel=1e-5)
    for name, parameter in names.items():
        assert parameter.grad.abs().max() > 1e-4
        assert (parameters[name].grad - parameter.grad).abs().max() <= 1e-6 * max(1.0, parameter.grad.abs().max()), name
