"""What train does between the environments and the update, watched from outside."""

import json

import pytest
import test_envs  # noqa: F401  (registers TenSteps-v0)
import torch
from conftest import MODULES

ENVS = {"rppo_lstm": "TenSteps-v0", "rppo_continuous": "BoxTenSteps-v0"}


@pytest.mark.parametrize("script", [script for script in ENVS if script in MODULES])
def test_rows_states_and_values_of_a_rollout(script, tmp_path, monkeypatch):
    """Episodes of ten steps: rows 10, 21, 32, ... are final. There the state is still the carried one, behind them it
    is zero; their values are what compute_gae gets; they are no environment steps."""
    module, rows, gae = MODULES[script], [], []

    class Watched(module.Agent):
        def act(self, obs, state):
            action, logprob, value, new = super().act(obs, state)
            rows.append((state.clone(), value.clone(), new.clone()))
            return action, logprob, value, new

        def get_value(self, obs, state):
            rows.append((state.clone(), super().get_value(obs, state).clone(), None))
            return rows[-1][1]

    def watched_gae(rewards, values, terminated, done, *rest):
        gae.append((rewards.clone(), values.clone(), terminated.clone(), done.clone()))
        return real_gae(rewards, values, terminated, done, *rest)

    real_gae = module.compute_gae
    monkeypatch.setattr(module, "Agent", Watched)
    monkeypatch.setattr(module, "compute_gae", watched_gae)
    args = module.Args(env_id=ENVS[script], num_envs=3, num_steps=40, num_minibatches=1, hidden_size=8, norm_reward=False,
                       total_timesteps=100, runs_dir=str(tmp_path), run_name="a")  # fmt: skip
    module.train(args)
    assert len(gae) == 1 and len(rows) == 41
    rewards, values, terminated, done = gae[0]
    final = [t for t in range(41) if t % 11 == 10]
    assert torch.equal(values, torch.stack([value for _, value, _ in rows]))
    assert not terminated.any() and done.nonzero()[:, 0].unique().tolist() == [t - 1 for t in final]
    for t in range(1, 41):
        state, (_, _, before) = rows[t][0], rows[t - 1]
        if t - 1 in final:
            assert not state.any(), f"row {t} follows a final one"
        else:
            assert torch.equal(state, before), f"row {t} carries the state of row {t - 1}"
            assert state.any() or t % 11 == 1  # the first observation of an episode is 0, and biases are at first
        if t < 40:
            assert (rewards[t] == (0.0 if t in final else 1.0)).all()
    valid = 3 * (40 - len([t for t in final if t < 40]))
    assert json.loads((tmp_path / "a" / "result.json").read_text())["global_step"] == valid


@pytest.mark.parametrize("script", [script for script in ENVS if script in MODULES])
def test_the_update_sees_final_rows_with_weight_zero_and_what_the_rollout_computed(script, tmp_path, monkeypatch):
    """In the first minibatch, before anything has moved: old log-probabilities and values are those of the same rows."""
    module, seen = MODULES[script], {}
    real_policy, real_value = module.ppo_loss, module.value_loss

    def watched_policy(logprob, old_logprob, advantages, weight, clip_coef):
        seen.setdefault("policy", [x.detach() for x in (logprob, old_logprob, advantages, weight)])
        return real_policy(logprob, old_logprob, advantages, weight, clip_coef)

    def watched_value(value, old_value, returns, weight, clip_coef):
        seen.setdefault("value", [x.detach() for x in (value, old_value, returns)])
        return real_value(value, old_value, returns, weight, clip_coef)

    monkeypatch.setattr(module, "ppo_loss", watched_policy)
    monkeypatch.setattr(module, "value_loss", watched_value)
    args = module.Args(env_id=ENVS[script], num_envs=4, num_steps=44, num_minibatches=1, hidden_size=8, seq_len=11,
                       norm_adv="none", total_timesteps=100, runs_dir=str(tmp_path), run_name="a")  # fmt: skip
    module.train(args)
    (logprob, old_logprob, advantages, weight), (value, old_value, returns) = seen["policy"], seen["value"]
    assert weight.shape == (11, 16)
    assert (weight[10] == 0).all() and (weight[:10] == 1).all()
    counts = weight > 0
    assert (logprob - old_logprob)[counts].abs().max() <= 1e-5  # across resets and stored states
    assert (value - old_value)[counts].abs().max() <= 1e-5 < old_value[counts].std()
    assert (returns - old_value - advantages)[counts].abs().max() <= 1e-5 < advantages[counts].std()


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("script", ["ppo1_mpi"])
def test_old_log_probabilities_are_the_behaviour_policys(script, memory, tmp_path, monkeypatch):
    """ppo1_mpi may compute them behind the rollout: with the statistics that acting had, not with this rollout's."""
    module, acted, old = MODULES[script], [], {}

    class Watched(module.Agent):
        def sample(self, distribution):
            action = super().sample(distribution)
            acted.append(self.log_prob(distribution, action))
            return action

    real, calls = module.compute_gae, []

    def watched_loss(logprob, old_logprob, advantages, weight, clip_coef):
        old.setdefault(len(calls), old_logprob)
        return real_loss(logprob, old_logprob, advantages, weight, clip_coef)

    def watched_gae(*inputs):
        calls.append(None)
        return real(*inputs)

    real_loss = module.ppo_loss
    monkeypatch.setattr(module, "Agent", Watched)
    monkeypatch.setattr(module, "ppo_loss", watched_loss)
    monkeypatch.setattr(module, "compute_gae", watched_gae)
    args = module.Args(env_id="BoxTenSteps-v0", num_envs=3, num_steps=32, num_minibatches=1, update_epochs=1, memory=memory,
                       hidden_size=8, total_timesteps=250, runs_dir=str(tmp_path), run_name="a")  # fmt: skip
    module.train(args)
    acted = torch.stack(acted).view(-1, 32 * 3)
    assert len(acted) == len(old) == 3
    for number, rows in old.items():  # of a minibatch of all rows, in another order
        assert (rows.flatten().sort()[0] - acted[number - 1].sort()[0]).abs().max() <= 1e-5
