"""Recipes together: each pair trains, is written down, and acts the same when it is opened again;
what makes no sense is refused in one line."""

import pytest
import torch
from recipe_tools import driver, needs, reopened, run

MASKED = {"env_id": "CartPole-v1", "mask_velocity": True}
PENDULUM = {"env_id": "Pendulum-v1"}
SIGNS = {"env_id": "Signs-v0", "num_steps": 8}
TRAIN = {"learning_rate_schedule": "linear", "clip_coef_schedule": "polynomial"}
PAIRS = [
    ("rppo_lstm", "networks stacked_lstm", MASKED | {"layers_after": "8,8", "critic": "separate"}),
    ("rppo_lstm", "networks long_memory", {"layers_before": "none", "activation": "relu"}),
    ("rppo_lstm", "networks feedforward", MASKED | {"layers_shared": "8"}),
    ("rppo_lstm", "networks images", SIGNS | {"layers_before": "8,8", "critic": "memoryless"}),
    ("rppo_lstm", "critics images", SIGNS | {"critic": "separate", "share_encoder": False}),
    ("rppo_lstm", "critics stacked_lstm", {"critic": "memoryless"}),
    ("rppo_lstm", "images previous_action", SIGNS | {"grey": True, "image_size": 40}),
    ("rppo_lstm", "images stacked_lstm", SIGNS | {"image_stack": 2, "recurrent_layers": "gru"}),
    ("rppo_lstm", "images keep_best", SIGNS | {"eval_every": 64}),
    ("rppo_lstm", "frame_stack previous_action", MASKED),
    ("rppo_lstm", "frame_stack networks", MASKED | {"layers_before": "8,8"}),
    ("rppo_lstm", "long_memory stacked_lstm", {"longest": 32}),
    ("rppo_lstm", "previous_action stacked_lstm", MASKED),
    ("rppo_lstm", "poc_memory schedules", {"env_id": "PocMemory-v0", **TRAIN}),
    ("rppo_lstm", "poc_memory frame_stack", {"env_id": "PocMemory-v0"}),
    ("rppo_lstm", "poc_memory previous_action", {"env_id": "PocMemory-v0"}),
    ("rppo_lstm", "schedules callbacks", MASKED | {"csv": True, "quiet": True, **TRAIN}),
    ("rppo_lstm", "callbacks keep_best", {"csv": True, "eval_every": 64, "checkpoint_every": 64}),
    ("rppo_continuous", "sde networks", PENDULUM | {"use_sde": True, "layers_after": "8"}),
    ("rppo_continuous", "sde stacked_lstm", PENDULUM | {"use_sde": True, "full_std": False}),
    ("rppo_continuous", "sde schedules", PENDULUM | {"use_sde": True, "use_expln": True, **TRAIN}),
    ("rppo_continuous", "sde images", {"env_id": "BoxSigns-v0", "squash_output": True}),
    ("rppo_continuous", "squash networks", PENDULUM | {"squash_output": True, "layers_after": "8"}),
    ("rppo_continuous", "frame_stack callbacks", PENDULUM | {"mask_velocity": True, "csv": True}),
    ("rppo_continuous", "previous_action long_memory", PENDULUM),
    ("rppo_continuous", "critics schedules", PENDULUM | {"critic": "detached", **TRAIN}),
    ("trpo", "networks images", SIGNS | {"layers_before": "8", "num_steps": 16}),
    ("trpo", "networks sde", PENDULUM | {"use_sde": True, "layers_before": "8,8"}),
    ("trpo", "stacked_lstm previous_action", MASKED | {"memory": "lstm"}),
    ("trpo", "frame_stack keep_best", MASKED | {"eval_every": 64}),
    ("trpo", "long_memory networks", MASKED | {"memory": "lstm", "layers_after": "8"}),
    ("trpo", "schedules callbacks", {"learning_rate_schedule": "linear", "csv": True}),
    ("ppo1_mpi", "networks images", SIGNS | {"layers_after": "8"}),
    ("ppo1_mpi", "networks activations", {"activation": "silu", "orthogonal": False}),
    ("ppo1_mpi", "images stacked_lstm", SIGNS | {"memory": "lstm", "num_steps": 16}),
    ("ppo1_mpi", "networks stacked_lstm", MASKED | {"memory": "lstm", "layers_before": "8"}),
    ("ppo1_mpi", "ppo1_mujoco schedules", {"reward_scale": 0.1, "clip_coef_schedule": "linear"}),
    ("ppo1_mpi", "frame_stack callbacks", MASKED | {"csv": True}),
    ("rppo_gru_atari", "networks stacked_lstm", {"layers_after": "8", "recurrent_layers": "lstm"}),
    ("rppo_gru_atari", "critics feedforward", None),
    ("rppo_gru_atari", "diagnostics callbacks", {"csv": True}),
    ("rppo_gru_atari", "critics schedules", {"critic": "memoryless", **TRAIN}),
]


def test_there_are_enough_pairs():
    assert len({(pair, script) for script, pair, flags in PAIRS if flags is not None}) >= 25


@pytest.mark.parametrize("name, pair, flags", PAIRS, ids=[f"{s}:{p}" for s, p, _ in PAIRS])
def test_pairs(tmp_path, name, pair, flags):
    needs(name)
    recipes = pair.split()
    if flags is None:
        with pytest.raises(ValueError, match="^critics: not with feedforward$"):
            driver.fresh(name, *recipes)
        return
    script = driver.fresh(name, *recipes)
    agent, run_dir = run(script, tmp_path, **flags)
    _, args, again, saved = reopened(run_dir)
    assert saved["script"].split("+")[0] == name
    assert sorted(saved["script"].split("+")[1:]) == sorted(recipes)
    weights = again.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in agent.state_dict().items())
    assert all(getattr(args, flag) == value for flag, value in flags.items())
    assert all(torch.isfinite(x).all() for x in weights.values())
    plain = driver.fresh(name)
    with pytest.raises(plain.ArgumentError, match=f"wrote it, not {name}"):
        plain.load(run_dir)


REFUSED = {
    ("rppo_lstm", "sde"): "sde: works only with rppo_continuous and trpo",
    (
        "rppo_lstm",
        "feedforward",
        "stacked_lstm",
    ): "stacked_lstm: not with feedforward",
    ("rppo_lstm", "images", "frame_stack"): "frame_stack: with images use --image-stack",
    ("rppo_lstm", "nonsense"): "no recipe 'nonsense'",
    ("rppo_continuous", "poc_memory"): "poc_memory: works only with rppo_lstm, trpo and ppo1_mpi",
    (
        "rppo_continuous",
        "minigrid_memory",
    ): "minigrid_memory: works only with rppo_lstm, trpo and ppo1_mpi",
    ("rppo_continuous", "ppo1_atari"): "ppo1_atari: actions of games are discrete",
    ("rppo_gru_atari", "images"): "images: rppo_gru_atari has a CNN of its own",
    ("rppo_gru_atari", "frame_stack"): "frame_stack: Atari has --frame-stack",
    ("rppo_gru_atari", "previous_action"): "previous_action: Atari frames are not vectors",
    ("rppo_gru_atari", "ppo1_mujoco"): "ppo1_mujoco: rppo_gru_atari learns from the signs",
    ("rppo_lstm", "frame_stack", "long_memory"): "long_memory: not with feedforward",
    ("rppo_lstm", "long_memory", "feedforward"): "long_memory: not with feedforward",
    ("rppo_lstm", "record"): "record is no recipe: it has no use(script)",
    ("rppo_lstm", "networks.py"): "no recipe 'networks.py'",
    ("rppo_gru_atari", "long_memory"): "long_memory: a GRU has no forget gate",
    ("trpo", "feedforward"): "feedforward: the script has no memory unless",
    ("trpo", "critics"): "critics: actor and critic share nothing here",
    ("ppo1_mpi", "critics"): "critics: actor and critic share nothing here",
    ("ppo1_mpi", "sde"): "sde: works only with rppo_continuous and trpo",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_makes_no_sense_is_refused_in_one_line(words):
    with pytest.raises(ValueError) as refused:
        driver.fresh(*words)
    assert type(refused.value).__name__ == "ArgumentError"
    assert str(refused.value).startswith(REFUSED[words]) and "\n" not in str(refused.value)
