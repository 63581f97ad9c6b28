"""Short real trainings with a known answer."""

import json

import numpy as np
import pytest
import test_envs  # noqa: F401  (registers TenSteps-v0)
import torch
from conftest import MODULES, having

# The flags that name this family of tests' settings in each script.
VALUE_RUN = {
    "rppo_lstm": {"num_envs": 8, "num_steps": 64, "hidden_size": 16, "norm_reward": False, "vf_coef": 1.0,
                  "critic": "separate", "learning_rate": 1e-2, "max_grad_norm": 10.0, "update_epochs": 8,
                  "total_timesteps": 30_000},
    "trpo": {"num_envs": 8, "num_steps": 64, "hidden_size": 16, "norm_reward": False, "memory": "lstm",
             "cg_max_steps": 3, "n_critic_updates": 20, "learning_rate": 3e-3, "total_timesteps": 15_000},
}  # fmt: skip


@pytest.mark.parametrize("script", list(VALUE_RUN))
def test_truncation_is_bootstrapped_so_the_value_of_ever_is_ten(script, tmp_path):
    """Reward 1, truncated every 10 steps, gamma 0.9: the value is 1 / (1 - 0.9) = 10; as terminations it would be the
    mean of (1 - 0.9^k) / 0.1 over k = 1..10, which is 4.1."""
    module = MODULES[script]
    flags = VALUE_RUN[script] | {"gamma": 0.9, "env_id": "TenSteps-v0", "runs_dir": str(tmp_path), "run_name": "a"}
    agent = module.train(module.Args(**flags))
    obs, state, values = np.random.default_rng(0).uniform(-1, 1, (30, 50, 2)).astype(np.float32), None, []
    state = agent.initial_state(50)
    with torch.no_grad():
        for row in obs[:10]:
            _, _, value, state = agent.act([torch.from_numpy(row)], state)
            values.append(value)
    values = torch.stack(values)
    assert 9.8 < values.mean() < 10.2 and 8.5 < values.min() and values.max() < 11, (values.mean(), values.min(), values.max())


@pytest.mark.slow
@pytest.mark.parametrize("script", having("PocMemoryEnv"))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poc_memory_needs_memory(script, seed, run_script, tmp_path):
    module = MODULES[script]
    success = {}
    for name, flags in ("memory", []), ("ablated", ["--ablate-memory"]):
        run_script(script, "--env-id", "PocMemory-v0", "--seed", seed, "--run-name", name, *flags)
        args = module.Args(**module.load(str(tmp_path / "runs" / name))["args"])
        envs = module.make_envs(args, 8)
        agent = module.Agent(envs.single_observation_space, envs.single_action_space, args)
        module.load(str(tmp_path / "runs" / name), agent)
        success[name] = np.mean(np.array(module.evaluate(agent, envs, 200, 7)) > 0)
    assert success["memory"] >= 0.95 and success["ablated"] <= 0.75


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_masked_cartpole_needs_memory(seed, run_script, tmp_path):
    returns = {}
    for name, flags in ("memory", []), ("ablated", ["--ablate-memory"]):
        run_script("rppo_lstm", "--env-id", "CartPoleNoVel-v1", "--seed", seed, "--eval-episodes", 20, "--run-name",
                   name, *flags)  # fmt: skip
        returns[name] = json.loads((tmp_path / "runs" / name / "result.json").read_text())["eval_mean_return"]
    assert returns["memory"] >= 475 and returns["ablated"] < 250
