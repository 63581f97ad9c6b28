"""Each script's `train` against the algorithm written out by hand (reference.py), in float64.

What was played is recorded; actions, gradients, weights, statistics and logged figures must follow
from it and from the first weights and random numbers. Masks of final steps, states, gSDE's noise,
learning rates and early stops are all in there.
"""

import json

import numpy as np
import pytest
import reference
import torch
from support import MODULES, SCRIPTS, main

EXACT = dict(norm_reward=False)  # rewards and their sums are float32 in the scripts: 1e-6, not 1e-9
PPO = dict(learning_rate=0.03, ent_coef=0.02, vf_coef=0.7, clip_coef=0.1, seq_len=8)
TINY = dict(encoder_size=4, hidden_size=3, batch_size=32, n_critic_updates=3)
CASES = {
    "lstm": ("rppo_lstm", dict(PPO, max_grad_norm=0.05, **EXACT)),
    "lstm, one sequence": ("rppo_lstm", dict(PPO, seq_len=0, max_grad_norm=1e9, **EXACT)),
    "lstm, one step a sequence": ("rppo_lstm", dict(PPO, seq_len=1, num_minibatches=4, **EXACT)),
    "lstm, normalised": ("rppo_lstm", dict(PPO, norm_obs=True, max_grad_norm=1e9)),
    "lstm, the control": ("rppo_lstm", dict(PPO, ablate_memory=True, **EXACT)),
    "lstm, stopped early": (
        "rppo_lstm", dict(PPO, target_kl=0.004, update_epochs=9, anneal_lr=False, **EXACT)
    ),
    "lstm, one environment": (
        "rppo_lstm", dict(PPO, num_envs=1, num_steps=2, seq_len=1, num_minibatches=1,
                          total_timesteps=60, **EXACT)
    ),
    "gaussian": ("rppo_continuous", dict(PPO, norm_obs=False, **EXACT)),
    "gaussian, normalised": ("rppo_continuous", dict(PPO, max_grad_norm=0.05)),
    "gsde": ("rppo_continuous", dict(PPO, use_sde=True, log_std_init=-1.0, **EXACT)),
    "gsde, new noise": (
        "rppo_continuous", dict(PPO, use_sde=True, sde_sample_freq=5, max_grad_norm=1e9, **EXACT)
    ),
    "gru": ("rppo_gru_atari", dict(PPO, num_envs=4, num_steps=8, seq_len=4, num_minibatches=2,
                                   total_timesteps=40)),
    "gru, lives and scores": (
        "rppo_gru_atari", dict(PPO, num_envs=4, num_steps=8, seq_len=4, num_minibatches=2,
                               total_timesteps=40, terminal_on_life_loss=True, clip_rewards=False)
    ),
    "trpo": ("trpo", dict(TINY, norm_obs=False, **EXACT)),
    "trpo, normalised": ("trpo", dict(TINY, sub_sampling_factor=3)),
    "trpo, lstm": (
        "trpo", dict(TINY, memory="lstm", num_envs=4, num_steps=16, total_timesteps=90,
                     sub_sampling_factor=2, **EXACT)
    ),
    "ppo1": ("ppo1_mpi", dict(PPO, num_minibatches=4, num_steps=32)),
    "ppo1, lstm": ("ppo1_mpi", dict(PPO, memory="lstm", norm_obs=False)),
    "ppo1, the control": ("ppo1_mpi", dict(PPO, memory="lstm", ablate_memory=True, num_minibatches=4)),
    "ppo1, stopped early": (
        "ppo1_mpi", dict(PPO, memory="lstm", target_kl=0.004, update_epochs=9, anneal_lr=False)
    ),
}  # fmt: skip
BOTH = "trpo", "ppo1_mpi"  # have discrete and real-valued actions
CASES |= {f"{name}, box": case for name, case in CASES.items() if case[0] in BOTH}


def agree(script: str, ranks: list, tolerance: float):
    """Compares what one or several processes did with the oracle, which is returned."""
    expected = reference.train(script, ranks)
    for seen, player, log in zip(ranks, expected.actions, expected.logs):
        space = seen.agent.action_space
        actions = torch.cat(player.acted).numpy()
        if player.sent.dtype.kind == "f":
            actions = actions.reshape(player.sent.shape).clip(space.low, space.high)
            assert np.abs(player.sent - actions).max() <= max(tolerance, 1e-6)
        else:
            assert np.array_equal(player.sent, actions + space.start)
        assert len(seen.updates) == len(expected.updates) > 0
        for number, (ours, theirs) in enumerate(zip(seen.updates, expected.updates)):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-12, abs=1e-15), number
            for a, b in zip(ours[1:], theirs[1:]):  # weights before the step, and gradients
                for name in b:
                    error = (a[name].double() - b[name]).abs().max()
                    assert error <= tolerance, (number, name, error.item())
        for name, weight in expected.w.items():
            assert (seen.last[name] - weight).abs().max() <= tolerance, name
        counted = [entry for entry in log if entry[1]]  # an iteration of final steps logs nothing
        assert len(seen.logs) == len(counted)
        for (step, rows, explained), (its_step, its_rows, its_explained) in zip(seen.logs, counted):
            assert step == its_step and len(rows) == len(its_rows)
            assert np.abs(np.array(rows) - np.array(its_rows)).max() <= 100 * tolerance
            assert np.abs(explained - its_explained) <= 1e-4 or np.isnan(its_explained)
        if hasattr(seen.args, "norm_obs") and seen.args.norm_obs:
            everything = np.concatenate(expected.rows)
            assert seen.buffers["obs_stats.count"] == len(everything) == expected.step
            assert np.abs(seen.buffers["obs_stats.mean"] - everything.mean(0)).max() <= 1e-9
            assert np.abs(seen.buffers["obs_stats.var"] - everything.var(0)).max() <= 1e-9
        if expected.sums:
            assert seen.buffers["return_stats.count"] == len(expected.sums) == expected.step
            assert abs(seen.buffers["return_stats.var"] - np.var(expected.sums)) <= 1e-5
        if seen.result:
            assert seen.result["global_step"] == expected.step
    return expected


@pytest.mark.parametrize("case", CASES)
def test_train_is_the_algorithm_written_out(case, record):
    script, flags = CASES[case]
    toy = {"actions": "box"} if case.endswith(", box") else {}
    seen = record(script, toy=toy, **flags)
    exact = not hasattr(seen.args, "norm_reward") or not seen.args.norm_reward
    expected = agree(script, [seen], 1e-6 if script == "trpo" or not exact else 1e-9)
    if script != "trpo" and "one environment" not in case:
        orders = [order.tolist() for [order] in expected.epochs]
        assert len({str(order) for order in orders}) == len(orders)  # each epoch in another order
        for ratio in expected.ratios:  # acting and replay are one policy
            assert (ratio - 1).abs().max() <= 1e-9
    if "early" in case:
        stopped = [len(rows) for _, rows, _ in seen.logs]
        assert any(n < 9 * seen.args.num_minibatches for n in stopped)
    if script == "trpo":
        assert all(row[0][3] > 0 for _, row, _ in seen.logs)  # a step was taken


def test_the_toys_rollouts_have_every_awkward_end(record):
    """Else the comparison would not show much."""
    seen = record("rppo_lstm")
    terminated, truncated = (np.stack([step[i] for step in seen.steps]) for i in (3, 4))
    T, final = 24, np.concatenate([np.zeros((1, 6), bool), terminated | truncated])
    assert final[T::T].any() and final[T - 1 :: T].any()  # first and last steps of rollouts
    assert (final[:-2] & final[2:]).any()  # episodes of one step
    for ends in terminated & truncated, terminated & ~truncated, truncated & ~terminated:
        assert ends.sum() >= 3
    assert not (final[:-1] & final[1:]).any()


@pytest.mark.parametrize("script,actions", [
    ("rppo_lstm", "from -1"), ("trpo", "from -1"), ("ppo1_mpi", "from -1"),
    ("rppo_continuous", "matrix"), ("trpo", "matrix"), ("ppo1_mpi", "matrix"),
    ("rppo_continuous", "unbounded"),
])  # fmt: skip
def test_actions_are_those_of_their_space(script, actions, record):
    """The toy refuses others; the scripts count choices from 0, and clip numbers on their way."""
    seen = record(script, toy={"actions": actions})
    sent = np.stack([step[0] for step in seen.steps])
    if actions == "from -1":
        assert np.unique(sent).tolist() == [-1, 0, 1]
    elif actions == "matrix":
        assert sent.min() == -0.5 and sent.max() == 0.75 and sent.shape[2:] == (2, 2)
        assert len(np.unique(sent[:, 0, 0])) > 20
    else:
        assert np.abs(sent).max() > 1.5


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "rppo_gru_atari"])
def test_one_environment_of_one_step_trains(script, tmp_path):
    """A rollout may be nothing but a final step: it changes nothing, and NaN nowhere."""
    module = MODULES[script]
    if script == "trpo":
        flags = dict(n_critic_updates=2)
    else:
        flags = dict(num_minibatches=1, seq_len=1)
    spaces = {"length": 1, "actions": "box" if script == "rppo_continuous" else "discrete"}
    args = module.Args(env_id="Toy-v0", env_kwargs=json.dumps(spaces), num_envs=3, num_steps=1,
                       total_timesteps=40, eval_episodes=0, runs_dir=str(tmp_path), **flags)  # fmt: skip
    agent = module.train(args)
    assert all(p.isfinite().all() for p in agent.state_dict().values())


def test_a_nan_in_the_state_does_not_survive_an_episodes_end(tmp_path, monkeypatch):
    """`(1 - final) * state` would keep it alive."""
    module, states = MODULES["rppo_lstm"], []

    class Poisoned(module.Agent):
        def step(self, obs, lstm_state):
            states.append(lstm_state.clone())
            log_pi, value, lstm_state = super().step(obs, lstm_state)
            return log_pi, value, lstm_state * (np.nan if len(states) == 6 else 1)

    monkeypatch.setattr(module, "Agent", Poisoned)
    module.train(module.Args(env_id="Toy-v0", env_kwargs='{"length": 5}', num_steps=24, num_envs=4,
                             total_timesteps=90, eval_episodes=0, runs_dir=str(tmp_path)))  # fmt: skip
    assert states[5].isfinite().all() and states[5].any()  # step 5 is final in all environments
    assert not states[6].any() and states[7].isfinite().all()


def test_memory_is_learned_and_the_control_shows_that_it_was_needed(tmp_path):
    """A cue of the first step, asked for in the last: 1 with memory, 0.5 without."""
    returns = []
    for control in "--no-ablate-memory", "--ablate-memory":
        code, out, err = main(
            tmp_path, "rppo_lstm", f"--env-id support:Cue-v0 --total-timesteps 8000 {control}",
            "--num-steps 49 --num-minibatches 1 --gamma 1 --learning-rate 0.01 --hidden-size 16",
            f"--eval-episodes 100 --run-name run{control}",
        )  # fmt: skip
        assert code == 0, err
        returns.append(float(out.split("return ")[1].split(",")[0]))
    assert returns[0] >= 0.98 and returns[1] <= 0.7
