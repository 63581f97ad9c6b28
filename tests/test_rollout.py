"""What `train` does between the environments and the optimiser, watched from outside."""

import warnings

import numpy as np
import pytest
import torch
from conftest import CATEGORICAL, MODULES, having, toy, toy_for
from gymnasium import spaces
from test_agent import ACTIONS
from test_mathematics import gae_by_definition
from torch.distributions import Categorical, Independent, Normal

DISCRETE = CATEGORICAL
PPO = having("train", "discounted_sums", "ppo_loss")
T, N, GAMMA, LAM = 24, 6, 0.9, 0.8
SIZES = dict(num_steps=T, num_envs=N, gamma=GAMMA, gae_lambda=LAM)


def rollouts(seen):
    """What the environments returned, as a list of a dict of arrays for each rollout."""
    actions, obs, rewards, terminated, truncated, _ = (np.stack(x) for x in zip(*seen.env))
    obs = np.concatenate([seen.resets[0][0][None], obs])
    final = np.concatenate([np.zeros((1, N), bool), terminated | truncated])
    whole = dict(actions=actions, rewards=rewards.astype(np.float32), terminated=terminated,
                 truncated=truncated, done=terminated | truncated)  # fmt: skip
    starts = range(0, len(actions), T)
    shared = [dict(obs=obs[t : t + T + 1], final=final[t : t + T + 1]) for t in starts]
    return [x | {k: v[t : t + T] for k, v in whole.items()} for t, x in zip(starts, shared)]


def discounted_returns(played) -> list[np.ndarray]:
    """For each rollout, discounted sums of rewards at all steps until its end, that count."""
    sums, running, so_far = [], np.zeros(N), []
    for x in played:
        for t in range(T):
            running = GAMMA * running + x["rewards"][t]
            sums.extend(running[~x["final"][t]])
            running[x["done"][t]] = 0
        so_far.append(np.array(sums))
    return so_far


def log_probability(steps, weights, t, n, actions) -> torch.Tensor:
    """Of actions at steps (t, n), from what Agent.step gave there, and the actor's weights."""
    first = torch.stack([outputs[0] for _, outputs in steps])[t, n]
    if actions.dtype == torch.long:  # log-probabilities (..., K, A)
        return first.gather(-1, actions[..., None]).sum((-2, -1))
    mean = first @ weights["actor.weight"].T + weights["actor.bias"]  # of h (..., H)
    return Normal(mean, weights["log_std"].exp()).log_prob(actions).sum(-1)


def places(obs, batch) -> tuple[np.ndarray, np.ndarray]:
    """Time steps and environments of a minibatch's observations, which are all different."""
    index = {obs[t, n].tobytes(): (t, n) for t in range(T) for n in range(N)}
    found = [index[row.tobytes()] for row in batch.numpy().reshape(-1, obs.shape[-1])]
    return tuple(np.array(found).reshape(*batch.shape[:2], 2).transpose(2, 0, 1))


def test_the_toys_rollouts_have_every_awkward_end(watch):
    """Else what follows would not show much."""
    played = rollouts(watch("rppo_lstm", toy(), total_timesteps=400, **SIZES))
    names = "final", "terminated", "truncated"
    final, terminated, truncated = (np.stack([x[name] for x in played]) for name in names)
    assert final[1:, 0].any() and final[:, T - 1].any()  # first and last steps
    assert (final[:, :-2] & final[:, 2:]).any()  # episodes of one step
    for ends in terminated & truncated, terminated & ~truncated, truncated & ~terminated:
        assert ends.sum() >= 3
    assert not (final[:, :-1] & final[:, 1:]).any()


@pytest.mark.parametrize("script", PPO)
@pytest.mark.parametrize("separate", [False, True])
def test_states_and_values_of_a_rollout(script, separate, watch):
    """A final step's value has the state that the LSTM has there; afterwards it is zero."""
    module = MODULES[script]
    seen = watch(
        script,
        toy_for(script),
        total_timesteps=400,
        separate_critic=separate,
        norm_reward=False,
        **SIZES,
    )
    played = rollouts(seen)
    assert len(played) == len(seen.gae) >= 3 and len(seen.steps) == (T + 1) * len(played)
    state = seen.first.initial_state(N)
    with torch.inference_mode():
        for t in range(T + 1):  # by hand, before anything is learned
            inputs, outputs = seen.steps[t]
            assert np.array_equal(inputs[0], played[0]["obs"][t]) and torch.equal(inputs[-1], state)
            *_, value, following = module.Agent.step(seen.first, *inputs[:-1], state)
            assert torch.equal(outputs[-2], value) and state.any() == (t > 0)
            state = following.where(~torch.from_numpy(played[0]["final"][t])[:, None], 0.0)
    for number, (rollout, (inputs, _)) in enumerate(zip(played, seen.gae)):
        steps = seen.steps[number * (T + 1) : (number + 1) * (T + 1)]
        for before, after, final in zip(steps, steps[1:], rollout["final"]):
            assert not after[0][-1][:, final].any()
            assert torch.equal(after[0][-1][:, ~final], before[1][-1][:, ~final])
        if number + 1 < len(played):  # the last step is the next rollout's first
            following = seen.steps[(number + 1) * (T + 1)][0]
            assert all(torch.equal(x, y) for x, y in zip(steps[T][0], following))
        values = torch.stack([outputs[-2] for _, outputs in steps]).numpy()
        expected = rollout["rewards"], values, rollout["terminated"], rollout["done"], GAMMA, LAM
        assert all(np.array_equal(x, y) for x, y in zip(inputs, expected))


@pytest.mark.parametrize("script", PPO)
@pytest.mark.parametrize("seq_len,num_minibatches", [(0, 1), (0, 3), (8, 3), (3, 4), (1, 9)])
@pytest.mark.parametrize("separate", [False, True])
def test_the_update_gets_what_the_rollout_computed(
    script, seq_len, num_minibatches, separate, watch
):
    """Each step once an epoch, with its state, old log-probability and advantage; no final one."""
    discrete = script in DISCRETE
    env_id = toy(action_space=spaces.MultiDiscrete([2, 3])) if discrete else toy_for(script)
    seen = watch(script, env_id, total_timesteps=400, seq_len=seq_len,
                 num_minibatches=num_minibatches, update_epochs=2,
                 separate_critic=separate, **SIZES)  # fmt: skip
    played, L, batches = rollouts(seen), seq_len or T, 2 * num_minibatches
    assert len(seen.replays) == len(seen.losses) == batches * len(played)
    for number, ((inputs, outputs, update), loss) in enumerate(zip(seen.replays, seen.losses)):
        rollout, steps = played[update], seen.steps[update * (T + 1) : (update + 1) * (T + 1)]
        obs, *_, state, final, actions = inputs
        t, n = places(rollout["obs"], obs)
        assert obs.shape[0] == L and (t[0] % L == 0).all()
        assert (np.diff(t, axis=0) == 1).all() and (n == n[0]).all()
        assert np.array_equal(final, rollout["final"][t, n])
        taken = actions if discrete else actions.clamp(-1, 1)
        assert np.array_equal(taken, rollout["actions"][t, n])
        stored = torch.stack([x[-1] for x, _ in steps])
        assert torch.equal(state, stored[t[0], :, n[0]].movedim(0, 1))
        weights = seen.updates[update * batches][1]
        logprob = log_probability(steps, weights, t, n, actions)[~final]
        values = torch.stack([y[-2] for _, y in steps])
        advantage = torch.from_numpy(seen.gae[update][1])[t, n][~final]
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        assert len(loss[0]) == (~final).sum() > 0
        assert (loss[1] - logprob).abs().max() <= 1e-6
        assert (loss[2] - advantage).abs().max() <= 1e-5
        if number % batches == 0:  # nothing has moved yet: the ratio is 1
            epoch = []
            assert (loss[0] - loss[1]).abs().max() <= 1e-5
            assert (outputs[2] - values[t, n][~final]).abs().max() <= 1e-5
            # The returns are the advantages and the values.
            losses, raw = seen.logs[update][1][0], seen.gae[update][1][t, n][~final]
            assert losses["value_loss"] == pytest.approx(0.5 * np.square(raw).mean(), rel=1e-4)
            assert losses["entropy"] == pytest.approx(outputs[1].mean().item(), abs=1e-6)
            assert losses["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        epoch.extend(zip(t.flatten().tolist(), n.flatten().tolist()))
        if number % batches == batches - 1:
            parts = epoch[: T * N], epoch[T * N :]
            for part in parts:
                assert sorted(part) == [(t, n) for t in range(T) for n in range(N)]
            assert parts[0] != parts[1] or num_minibatches == 1  # shuffled anew
        elif number % batches == num_minibatches - 1:
            assert epoch != sorted(epoch) or num_minibatches == 1  # shuffled


@pytest.mark.parametrize("script", PPO)
@pytest.mark.parametrize("separate", [False, True])
def test_the_control_keeps_no_state(script, separate, watch):
    flags = dict(ablate_memory=True, separate_critic=separate)
    seen = watch(script, toy_for(script), total_timesteps=200, **flags, **SIZES)
    assert len(seen.steps) >= 2 * (T + 1) and len(seen.replays) >= 2 * 4
    assert not any(inputs[-1].any() for inputs, _ in seen.steps)
    for (obs, *_, state, final, _), _, _ in seen.replays:
        assert obs.shape[0] == 1 and state.shape[1] == final.shape[1] and not state.any()


@pytest.mark.parametrize("script", PPO)
def test_final_steps_count_in_nothing(script, watch):
    """Neither in steps nor in statistics: rewards are divided by the standard deviation of the
    discounted returns until this rollout's end."""
    seen = watch(script, toy_for(script), total_timesteps=700, **SIZES)
    played = rollouts(seen)
    counted = [(~x["final"][:T]).sum() for x in played]
    assert seen.result["global_step"] == sum(counted) < T * N * len(counted)
    assert [steps for steps, _ in seen.logs] == counted and sum(counted[:-1]) < 700 <= sum(counted)
    returns, stats = discounted_returns(played), seen.agent.return_stats
    for x, sums, (inputs, _) in zip(played, returns, seen.gae):
        assert np.abs(inputs[0] - x["rewards"] / np.sqrt(sums.var() + 1e-8)).max() <= 1e-5
    assert stats.count == sum(counted) == len(sums) and len(played) >= 5
    assert abs(stats.mean - sums.mean()) <= 1e-6 and abs(stats.var - sums.var()) <= 1e-6


@pytest.mark.parametrize("script", PPO)
def test_every_cut_into_sequences_gives_the_same_first_losses(script, watch):
    first, gradients = [], []
    for seq_len in 0, 1, 3, 8, 24:
        seen = watch(script, toy_for(script), total_timesteps=90, seq_len=seq_len, num_minibatches=1,
                     ent_coef=0.01, update_epochs=1, norm_reward=False, max_grad_norm=1e9,
                     **SIZES)  # fmt: skip
        first.append(seen.logs[0][1][0])
        gradients.append(seen.updates[0][2])
    assert first[0]["value_loss"] > 0.1 < first[0]["entropy"]
    for losses, gradient in zip(first[1:], gradients[1:]):
        assert losses == pytest.approx(first[0], rel=0, abs=2e-5)
        for name in "actor.weight", "actor.bias", "critic.weight":  # which are after the memory
            assert (gradient[name] - gradients[0][name]).abs().max() <= 2e-5
    recurrent = torch.stack([gradient["lstm.cell.weight_hh"] for gradient in gradients])
    assert (recurrent[0] - recurrent[1:4]).abs().amax((1, 2)).min() > 1e-4  # gradients stop at cuts
    assert torch.equal(recurrent[0], recurrent[4])


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("masks", ["always", "step", "sometimes"])
@pytest.mark.parametrize("actions", ["discrete", "from -1", "multidiscrete", "from 1"])
def test_masks_come_and_go(script, masks, actions, watch):
    """The toy refuses what is illegal; the update has the masks that acting had, step by step."""
    space = ACTIONS[actions]
    seen = watch(script, toy(action_space=space, masks=masks), total_timesteps=400, update_epochs=1,
                 num_minibatches=2, seq_len=8, **SIZES)  # fmt: skip
    exists, limited = torch.from_numpy(seen.first.exists), 0
    infos = [seen.resets[0][1], *(step[5] for step in seen.env)]  # of the observations in order
    for inputs, _, update in seen.replays:
        obs, legal, _, final, taken = inputs
        for t, n, ends, choices in zip(
            *(x.flatten() for x in places(rollouts(seen)[update]["obs"], obs)),
            final.flatten(), legal.flatten(0, 1),
        ):  # fmt: skip
            expected, info = exists.clone(), infos[update * T + t]
            if info.get("_action_mask", np.zeros(N))[n] and not ends:
                expected[exists] = torch.from_numpy(np.hstack(info["action_mask"][n])).bool()
                limited += 1
            assert torch.equal(choices, expected)
        assert legal.gather(-1, taken[..., None])[~final].all()
    assert limited > 100
    for loss in seen.losses[::2]:  # first minibatches
        assert (loss[0] - loss[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("script", DISCRETE)
@pytest.mark.parametrize("actions", ["matrix", "multibinary", "binary matrix"])
def test_actions_that_environments_get_are_in_their_space(script, actions, watch):
    seen = watch(script, toy(action_space=ACTIONS[actions]), total_timesteps=200, **SIZES)
    most = seen.first.exists.sum(1).max()
    assert np.unique([env[0] for env in seen.env]).tolist() == [*range(most)]


@pytest.mark.parametrize("script", PPO)
def test_one_step_of_one_environment_trains_without_a_warning(script, watch):
    """Some rollouts are nothing but a final step: they change no weight."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        seen = watch(script, toy_for(script), total_timesteps=60, num_envs=1, num_steps=1,
                     num_minibatches=1)  # fmt: skip
    assert [str(warning.message) for warning in raised] == []
    assert all(parameter.isfinite().all() for parameter in seen.agent.parameters())
    final = [False] + [bool(env[3] | env[4]) for env in seen.env][:-1]
    assert 3 < sum(final) == len(final) - 60 and len(seen.updates) == 60 * seen.args.update_epochs
    assert seen.result["global_step"] == 60


@pytest.mark.parametrize("script", PPO)
@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly_with_the_steps_that_are_left(script, anneal, watch):
    flags = dict(total_timesteps=500, learning_rate=0.01, anneal_lr=anneal, **SIZES)
    seen = watch(script, toy_for(script), **flags)
    before = np.cumsum([0] + [steps for steps, _ in seen.logs])[:-1]
    rates = np.array([lr for lr, *_ in seen.updates]).reshape(len(before), -1)
    expected = 0.01 * (1 - before / 500) if anneal else np.full(len(before), 0.01)
    assert np.abs(rates - expected[:, None]).max() <= 1e-12 and len(before) >= 4


@pytest.mark.parametrize("script", PPO)
def test_target_kl_ends_an_update_before_the_step_that_goes_too_far(script, watch):
    flags = dict(total_timesteps=500, learning_rate=0.05, anneal_lr=False, **SIZES)
    seen = watch(script, toy_for(script), target_kl=0.01, update_epochs=20, **flags)
    ended, steps = 0, 0
    for _, losses in seen.logs:
        *before, last = [loss["approx_kl"] for loss in losses]
        assert all(kl <= 0.015 for kl in before) and (last > 0.015 or len(losses) == 60)
        ended += last > 0.015
        steps += len(losses) - (last > 0.015)
    assert ended == len(seen.logs) >= 4 and steps == len(seen.updates)
    seen = watch(script, toy_for(script), update_epochs=2, **flags)
    assert len(seen.updates) % 6 == 0  # none by default


def replay_by_hand(agent, obs, state, final):
    """One cell call a step -> the actor's inputs, values, and the states before the steps."""
    cells = [agent.lstm.cell] + ([agent.critic_lstm.cell] if hasattr(agent, "critic_lstm") else [])
    hs, values, states = [], [], []
    for x, ends in zip(obs, final):
        states.append(state)
        x = agent.encoder(x)
        state = torch.stack(
            [y for i, cell in enumerate(cells) for y in cell(x, tuple(state[2 * i : 2 * i + 2]))]
        )
        hs.append(state[0])
        values.append(agent.critic(state[-2])[..., 0])
        state = state * ~ends[:, None]
    return torch.stack(hs), torch.stack(values), states + [state]


def policy_by_hand(agent, h):
    """The distribution of actions of a discrete, a Gaussian or a gSDE agent."""
    if not hasattr(agent, "log_std"):
        return Categorical(logits=agent.actor(h))
    variance = agent.log_std.exp() ** 2
    if agent.args.use_sde:
        variance = h.detach() ** 2 @ variance + 1e-6
    return Independent(Normal(agent.actor(h), variance.sqrt()), 1)


@pytest.mark.parametrize(
    "script, flags",
    [
        ("rppo_lstm", {}),
        ("rppo_lstm", {"norm_obs": True}),
        ("rppo_continuous", {}),
        ("rppo_continuous", {"use_sde": True}),
    ],
)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.1, 1e9])
def test_whole_updates_are_a_plain_ppos(script, flags, separate, max_grad_norm, watch):
    """Three rollouts, 18 minibatches, in float64: all gradients and weights are those of the loops
    below, which get from `train` only what was played and which sequences a minibatch has."""
    seen = watch(script, toy_for(script), dtype=torch.float64, total_timesteps=300, seq_len=8,
                 update_epochs=2, num_minibatches=3, ent_coef=0.02, vf_coef=0.7,
                 learning_rate=0.03, clip_coef=0.1,
                 separate_critic=separate, max_grad_norm=max_grad_norm, **SIZES, **flags)  # fmt: skip
    agent, args, played = seen.first, seen.args, rollouts(seen)
    adam = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    state, step, number, clipped, rows = agent.initial_state(N), 0, 0, 0, np.zeros((0, 3))
    assert len(played) == 3 and len(seen.replays) == len(seen.updates) == 18
    for update, (x, sums) in enumerate(zip(played, discounted_returns(played))):
        obs, final = x["obs"].astype(np.float64), torch.from_numpy(x["final"])
        if args.norm_obs and update > 0:  # statistics of the rollouts before
            obs = (obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8)
        rows = np.concatenate([rows, x["obs"][:T][~x["final"][:T]]])
        obs, actions = torch.from_numpy(obs), torch.from_numpy(x["actions"])
        for inputs, *_ in seen.replays[6 * update : 6 * update + 3]:  # not clipped
            t, n = places(x["obs"], inputs[0])
            actions = actions.to(inputs[-1].dtype)
            actions[t, n] = inputs[-1].view(*t.shape, *actions.shape[2:])
        with torch.no_grad():
            h, values, states = replay_by_hand(agent, obs, state, final)
            old = policy_by_hand(agent, h[:T]).log_prob(actions)
        rewards, ends = x["rewards"] / np.sqrt(sums.var() + 1e-8), (x["terminated"], x["done"])
        advantages = gae_by_definition(rewards, values.numpy(), *ends, GAMMA, LAM)
        advantages = torch.from_numpy(advantages)
        returns = advantages + values[:T]
        adam.param_groups[0]["lr"] = 0.03 * (1 - step / 300)
        for inputs, _, of in seen.replays[6 * update : 6 * update + 6]:
            assert of == update
            t, n = places(x["obs"], inputs[0])
            first = torch.stack([states[i][:, j] for i, j in zip(t[0], n[0])], 1)
            counts = ~final[t, n]
            h, value, _ = replay_by_hand(agent, obs[t, n], first, final[t, n])
            distribution = policy_by_hand(agent, h[counts])
            a = advantages[t, n][counts]
            a = (a - a.mean()) / ((a - a.mean()) ** 2).mean().sqrt()
            ratio = (distribution.log_prob(actions[t, n][counts]) - old[t, n][counts]).exp()
            clipped += ((ratio - 1).abs() > 0.1).sum()
            surrogate = torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a).mean()
            error = (value[counts] - returns[t, n][counts]) ** 2
            loss = -surrogate + 0.7 * 0.5 * error.mean() - 0.02 * distribution.entropy().mean()
            adam.zero_grad()
            loss.backward()
            norm = sum(p.grad.square().sum() for p in agent.parameters()).sqrt()
            _, weights, gradients = seen.updates[number]
            for name, parameter in agent.named_parameters():
                parameter.grad *= min(1.0, max_grad_norm / norm.item())
                assert (parameter - weights[name]).abs().max() <= 1e-6, (number, name)
                assert (parameter.grad - gradients[name]).abs().max() <= 1e-6, (number, name)
                assert parameter.grad.any()
            adam.step()
            number += 1
        state, step = states[T], step + (~final[:T]).sum().item()
    assert clipped > 50
    for name, parameter in seen.agent.named_parameters():
        assert (parameter - dict(agent.named_parameters())[name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("script", DISCRETE)
def test_a_nan_in_the_state_does_not_survive_an_episodes_end(script, tmp_path, monkeypatch):
    """`(1 - final) * state` would keep it alive."""
    module, states = MODULES[script], []

    class Poisoned(module.Agent):
        def step(self, obs, legal, state):
            states.append(state.clone())
            logp, value, following = super().step(obs, legal, state)
            return logp, value, following * np.nan if len(states) == 6 else following

    monkeypatch.setattr(module, "Agent", Poisoned)
    args = module.Args(env_id=toy(length=5), total_timesteps=90, eval_episodes=0, norm_reward=False,
                       num_minibatches=1, runs_dir=str(tmp_path), **SIZES)  # fmt: skip
    module.train(args)
    assert states[5].isfinite().all() and states[5].any()  # step 5 is final in all environments
    assert not states[6].any() and states[7].isfinite().all()
