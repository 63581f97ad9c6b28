"""Whole scripts against each other: with matching coefficients, two of them are one algorithm."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# What makes the others' objective that of ppo1_mpi, which has neither of these flags and no factor 1/2 in the value loss.
MATCHING = {"norm_reward": False, "norm_adv": "batch", "max_grad_norm": 1e9, "vf_coef": 1.0, "critic": "separate",
            "learning_rate_final": 0.0, "clip_coef_final": 0.0}  # fmt: skip
COMMON = {"preset": "none", "num_envs": 2, "num_steps": 48, "num_minibatches": 3, "update_epochs": 2, "gamma": 0.9,
          "hidden_size": 8, "encoder_sizes": (), "learning_rate": 3e-3, "ent_coef": 0.01, "total_timesteps": 240,
          "checkpoint_every": 2, "torch_threads": 1}  # fmt: skip


class Goal(gym.Env):
    """A point moves by its action; episodes are terminated beyond 1.5 and truncated after 12 steps."""

    observation_space = gym.spaces.Box(-9, 9, (3,), np.float32)

    def __init__(self, box=False, render_mode=None):
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32) if box else gym.spaces.Discrete(3)

    def observe(self):
        return np.array([*self.place, self.steps / 12], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1, 1, 2), 0
        return self.observe(), {}

    def step(self, action):
        move = [action - 1, 0.5] if np.ndim(action) == 0 else action
        self.place, self.steps = self.place + 0.3 * np.asarray(move), self.steps + 1
        ended = bool(np.abs(self.place).max() > 1.5)
        return self.observe(), -float(np.abs(self.place).sum()), ended, not ended and self.steps == 12, {}


gym.register("Goal-v0", Goal, kwargs={"box": False})
gym.register("BoxGoal-v0", Goal, kwargs={"box": True})


class NoMemory(nn.Module):
    """In the place of a ResetLSTM: a function of the row alone, by the layers that ppo1_mpi has there."""

    state_rows, token_weight = 0, torch.zeros(0)

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def step(self, x, state):
        return self.layers(x), state

    def forward(self, x, state, final):
        return self.layers(x)


def train(script, folder, prepare, monkeypatch, **flags):
    """A run in float64 of an agent that prepare(agent) has set up -> first and last weights, and first gradients."""
    module, agents, gradients = MODULES[script], [], {}
    preprocess = module.preprocess

    class Prepared(module.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            prepare(self)
            agents.append((self, {name: p.detach().clone() for name, p in self.named_parameters()}))
            torch.manual_seed(inputs[-1].seed)  # whatever the first weights took

    def first_gradients(*_):
        if not gradients:
            gradients.update((name, p.grad.clone()) for name, p in agents[0][0].named_parameters())

    hook = register_optimizer_step_pre_hook(first_gradients)
    with monkeypatch.context() as patch:
        patch.setattr(module, "Agent", Prepared)
        patch.setattr(module, "preprocess", lambda space, obs: [x.astype(np.float64) for x in preprocess(space, obs)])
        torch.set_default_dtype(torch.float64)
        try:
            args = module.Args(**{**COMMON, **flags, "runs_dir": str(folder), "run_name": script})
            last = dict(module.train(args).named_parameters())
        finally:
            torch.set_default_dtype(torch.float32)
            hook.remove()
    return agents[0][1], last, gradients


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("script", ["rppo_continuous", "rppo_lstm"])
def test_ppo1_on_one_rank_is_this_script_with_matching_coefficients(script, memory, tmp_path, monkeypatch):
    """Three rollouts and 18 updates from the same weights: gradients, and all weights at the end, are the same.

    Without memory the layers of ppo1_mpi's two networks stand where the other script has its LSTMs; with it both have
    the same networks. Terminations, truncations and checkpoints, which reset environments, are on the way.
    """
    recurrent, box = memory == "lstm", script == "rppo_continuous"
    flags = {"env_id": "BoxGoal-v0" if box else "Goal-v0", "seq_len": 16 if recurrent else 1}

    def noisy(agent):  # biases are 0 at first, and the actor's weights nearly so, which would hide errors in them
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    own = {"memory": memory, "norm_obs": False, "vf_coef": 0.5, "encoder_sizes": () if recurrent else (8,)}
    first, expected, expected_gradients = train("ppo1_mpi", tmp_path, noisy, monkeypatch, **flags, **own)
    places = {"memories.0": "memory", "memories.1": "critic_memory"} if recurrent else {
        "encoders.0.mlp": "memory.layers", "encoders.1.mlp": "critic_memory.layers"
    }  # fmt: skip

    def name_of(name):
        return next((name.replace(theirs, ours) for theirs, ours in places.items() if name.startswith(theirs)), name)

    def same_weights(agent):
        if not recurrent:
            size = agent.observation_space.shape[0]
            agent.memory, agent.critic_memory = (NoMemory(MODULES[script].mlp([size, 8], "tanh")) for _ in range(2))
        weights = {name_of(name): x for name, x in first.items()}
        assert weights.keys() == dict(agent.named_parameters()).keys()
        agent.load_state_dict({**agent.state_dict(), **weights})

    matching = MATCHING | ({"norm_obs": False} if box else {})
    _, ours, gradients = train(script, tmp_path, same_weights, monkeypatch, **flags, **matching)
    for name, parameter in expected.items():
        assert expected_gradients[name].abs().max() > 1e-4 and (parameter - first[name]).abs().max() > 1e-3, name
        assert (gradients[name_of(name)] - expected_gradients[name]).abs().max() <= 1e-10, name
        assert (ours[name_of(name)] - parameter).abs().max() <= 1e-10, name
    counted = [json.loads((tmp_path / name / "result.json").read_text())["global_step"] for name in (script, "ppo1_mpi")]
    assert counted[0] == counted[1] >= 240
