"""Evaluation: N first episodes, side by side, are those of N single environments in turn."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES, having, toy
from gymnasium import spaces

VECTORS = having("evaluate", "VELOCITIES")
MASKED = having("evaluate", "legal_choices")


def agent_for(script: str, env_id: str, **flags):
    """An agent whose biases are away from 0, so that its actions depend on what it saw."""
    module = MODULES[script]
    memory = {"memory": "lstm"} if hasattr(module.Args, "memory") else {}
    args = module.Args(env_id=env_id, encoder_size=8, hidden_size=8, **memory, **flags)
    envs = module.make_envs(args, 2)
    torch.manual_seed(7)
    agent = module.Agent(envs, args)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(torch.randn_like(parameter))
    return agent, args


def episode(agent, env_id: str, seed: int) -> tuple[float, int]:
    """The return and the length of one deterministic episode in a single environment."""
    env = gym.make(env_id)
    obs, info = env.reset(seed=seed)
    state, total, length, done = None, 0.0, 0, False
    while not done:
        masks = {key: [value] for key, value in info.items() if key == "action_mask"}
        obs = np.float32(obs)[None]
        action, state = agent.predict(obs, masks, state)
        obs, reward, terminated, truncated, info = env.step(action[0])
        total += reward
        length += 1
        done = terminated or truncated
    return total, length


class Echo(gym.Env):
    """The reward is the action, plus 1, times the number seen at the episode's first step."""

    observation_space = spaces.Box(-3, 3, (2,), np.float32)

    def __init__(self, box: bool = False):
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = self.np_random.normal(size=2).astype(np.float32)
        self.t, self.length = 0, self.np_random.integers(3, 30)
        return self.cue, {}

    def step(self, action):
        self.t += 1
        reward = float((np.sum(action) + 1) * self.cue[0])
        noise = self.np_random.normal(size=2).astype(np.float32)
        return noise, reward, False, bool(self.t == self.length), {}


gym.register("Echo-v0", Echo)
gym.register("EchoBox-v0", Echo, kwargs={"box": True})


@pytest.mark.parametrize("script", VECTORS)
def test_evaluation_is_the_first_episode_of_each_environment(script):
    env_id = "Echo-v0" if script in MASKED else "EchoBox-v0"
    agent, args = agent_for(script, env_id)
    expected = [episode(agent, env_id, 5 + i) for i in range(6)]
    returns = MODULES[script].evaluate(agent, MODULES[script].make_envs(args, 6), 5)
    assert returns == pytest.approx([x for x, _ in expected], abs=1e-4)
    assert len({round(x, 4) for x in returns}) == 6  # other seeds, other episodes
    lengths = [length for _, length in expected]
    assert max(lengths) >= 3 * min(lengths)  # some environments play several episodes meanwhile


@pytest.mark.parametrize("script", MASKED)
def test_evaluation_obeys_masks_past_the_end_of_an_episode(script):
    """The toy refuses illegal choices, and allows none at an episode's last step."""
    env_id = toy(masks="always", action_space=spaces.MultiDiscrete([2, 3]))
    agent, args = agent_for(script, env_id)
    expected = [episode(agent, env_id, 3 + i)[0] for i in range(8)]
    returns = MODULES[script].evaluate(agent, MODULES[script].make_envs(args, 8), 3)
    assert returns == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("script", VECTORS)
def test_sampled_evaluation(script):
    """Samples differ from the most probable actions, and are the same again with the same seed."""
    env_id = "Echo-v0" if script in MASKED else "EchoBox-v0"
    agent, args = agent_for(script, env_id)
    module, found = MODULES[script], []
    for deterministic, seed in (True, 1), (True, 2), (False, 1), (False, 1), (False, 2):
        torch.manual_seed(seed)
        found.append(module.evaluate(agent, module.make_envs(args, 5), 1, deterministic))
    assert found[0] == found[1] != found[2] == found[3] != found[4]


@pytest.mark.parametrize("script", VECTORS)
def test_an_evaluation_changes_nothing_that_training_needs(script):
    """Weights, statistics and torch's generator stay as they are."""
    env_id = "Echo-v0" if script in MASKED else "EchoBox-v0"
    agent, args = agent_for(script, env_id)
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    random = torch.get_rng_state()
    MODULES[script].evaluate(agent, MODULES[script].make_envs(args, 3), 1)
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
