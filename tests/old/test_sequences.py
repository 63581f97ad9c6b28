"""Cutting a rollout into sequences changes where gradients stop, and nothing else."""

import numpy as np
import pytest
from conftest import MODULES, having
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTS = [script for script in having("sequence_starts") if script in ("rppo_lstm", "rppo_continuous")]
ENVS = {"rppo_lstm": "CartPole-v1", "rppo_continuous": "Pendulum-v1"}
LOSSES = ["losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/explained_variance"]


def losses_of_first_update(script, folder, name, **flags):
    """The logged losses of one update that sees the whole rollout as one minibatch."""
    module = MODULES[script]
    args = module.Args(env_id=ENVS[script], num_envs=4, num_steps=24, hidden_size=8, num_minibatches=1,
                       update_epochs=1, total_timesteps=90, runs_dir=str(folder), run_name=name, **flags)  # fmt: skip
    module.train(args)
    events = EventAccumulator(str(folder / name)).Reload()
    return np.array([events.Scalars(tag)[0].value for tag in LOSSES])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_cut_gives_the_same_objective(script, tmp_path):
    """Overlapping rows are weighted 1/k, states are stored where sequences start, and no tail is dropped."""
    whole = losses_of_first_update(script, tmp_path, "whole")
    assert np.isfinite(whole).all() and whole[1] > 0
    for number, flags in enumerate([
        {"seq_len": 8}, {"seq_len": 8, "seq_stride": 4}, {"seq_len": 8, "seq_stride": 1}, {"seq_len": 1},
        {"seq_len": 6, "seq_stride": 5}, {"seq_len": 8, "norm_adv": "batch"}, {"num_layers": 1, "seq_len": 3},
    ]):  # fmt: skip
        cut = losses_of_first_update(script, tmp_path, str(number), **flags)
        assert np.abs(cut - whole).max() <= 2e-5, (flags, cut, whole)


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_row_minibatches_of_final_rows_do_no_harm(script, tmp_path):
    """seq_len 1 and as many minibatches as rows: a minibatch may hold a final row only, whose loss is nothing."""
    module = MODULES[script]
    args = module.Args(env_id=ENVS[script], num_envs=2, num_steps=32, seq_len=1, num_minibatches=64, hidden_size=8,
                       update_epochs=1, total_timesteps=200, runs_dir=str(tmp_path), run_name="a")  # fmt: skip
    agent = module.train(args)
    assert all(parameter.isfinite().all() for parameter in agent.parameters())
