"""Short trainings with a known answer."""

import json

import numpy as np
import pytest
import torch
from conftest import MODULES, toy

VALUE_RUN = {
    "rppo_lstm": dict(num_envs=8, num_steps=64, num_minibatches=4, hidden_size=16,
                      norm_reward=False, vf_coef=1.0, separate_critic=True, learning_rate=1e-2,
                      max_grad_norm=10.0, update_epochs=8, total_timesteps=12_000),
}  # fmt: skip


@pytest.mark.parametrize("script", VALUE_RUN)
def test_truncation_is_bootstrapped_so_the_value_of_ever_is_ten(script, tmp_path):
    """Reward 1, truncated every 10 steps, gamma 0.9: the value is 1 / (1 - 0.9) = 10. If truncation
    were termination, it would be the mean of (1 - 0.9^k) / 0.1 over k = 1..10, which is 4.1."""
    module = MODULES[script]
    flags = dict(
        env_id=toy(length=10, reward=1.0), gamma=0.9, eval_episodes=0, runs_dir=str(tmp_path)
    )
    agent = module.train(module.Args(**flags, **VALUE_RUN[script]))
    generator, state, values = torch.Generator().manual_seed(0), agent.initial_state(50), []
    legal = torch.from_numpy(agent.exists).expand(50, -1, -1)
    with torch.no_grad():
        for _ in range(10):
            obs = torch.rand(50, 3, generator=generator) * 2 - 1
            _, value, state = agent.step(obs, legal, state)
            values.append(value)
    values = torch.stack(values)
    assert 9.8 < values.mean() < 10.2, values.mean()
    assert 8.5 < values.min() and values.max() < 11.5, (values.min(), values.max())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_masked_cartpole_needs_memory(seed, run_script, tmp_path):
    returns = {}
    for name, flags in ("memory", []), ("ablated", ["--ablate-memory"]):
        run_script("rppo_lstm", "--env-id", "CartPole-v1", "--mask-velocity", "--seed", seed,
                   "--eval-episodes", 20, "--run-name", name, *flags, timeout=600)  # fmt: skip
        result = json.loads((tmp_path / "runs" / name / "result.json").read_text())
        returns[name] = np.mean(result["evaluation"])
    assert returns["memory"] >= 475 and returns["ablated"] < 250, returns
