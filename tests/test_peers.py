"""The same weights and data through stable-baselines3, sb3-contrib and ours (extra `peers`)."""

import numpy as np
import pytest
import torch
from conftest import MODULES, awkward_ends, having
from gymnasium import spaces

pytest.importorskip("sb3_contrib")
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy  # noqa: E402
from sb3_contrib.common.recurrent.type_aliases import RNNStates  # noqa: E402
from stable_baselines3.common.buffers import RolloutBuffer  # noqa: E402

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


@pytest.mark.parametrize("script", having("ppo_loss", "value_loss"))
def test_ppo_loss_agrees_with_stable_baselines3(script):
    """The formulas of stable-baselines3's PPO.train (2.x), on rows that all count."""
    module = MODULES[script]
    torch.manual_seed(0)
    log_prob, old_log_prob, advantages, values, old_values, returns = torch.randn(6, 64)
    ratio = torch.exp(log_prob - old_log_prob)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    reference = -torch.min(policy_loss_1, policy_loss_2).mean()
    log_ratio = log_prob - old_log_prob
    reference_kl = torch.mean((torch.exp(log_ratio) - 1) - log_ratio)
    loss, kl, clipped = module.ppo_loss(log_prob, old_log_prob, advantages, torch.ones(64), 0.2)
    assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
    assert kl.item() == pytest.approx(reference_kl.item(), rel=1e-5)
    assert clipped.item() == pytest.approx((torch.abs(ratio - 1) > 0.2).float().mean().item(), abs=1e-6)
    mse = torch.nn.functional.mse_loss(returns, values)  # sb3 has no 1/2, so its vf_coef 0.5 is our 1.0
    assert module.value_loss(values, old_values, returns, torch.ones(64), None).item() == pytest.approx(0.5 * mse.item(), abs=1e-6)
