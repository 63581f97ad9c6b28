"""Environments: the built-in memory task, masks, and a registry of misbehaving ones for the fault tests."""

import os

import gymnasium as gym
import numpy as np
import pytest
from conftest import MODULES, having
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env


class Faulty(gym.Env):
    """Episodes of 10 steps of reward 1; at step FAULT_AT of its life it misbehaves in the given way."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how="", render_mode=None):
        self.how, self.at, self.life, self.steps = how, int(os.environ.get("FAULT_AT", 150)), 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.life, self.steps = self.life + 1, self.steps + 1
        obs, reward = self.np_random.uniform(-1, 1, 2).astype(np.float32), 1.0
        if self.life >= self.at:
            if self.how == "raise":
                raise ValueError("the simulator\nexploded")
            if self.how == "exit":
                os._exit(7)
            obs = obs * np.nan if self.how == "nan observation" else obs
            reward = float("nan") if self.how == "nan reward" else reward
        return obs, reward, False, self.steps == 10, {}


class BoxFaulty(Faulty):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


for name in "raise", "exit", "nan observation", "nan reward":
    gym.register(f"Faulty{name.title().replace(' ', '')}-v0", Faulty, kwargs={"how": name})
    gym.register(f"BoxFaulty{name.title().replace(' ', '')}-v0", BoxFaulty, kwargs={"how": name})
gym.register("TenSteps-v0", Faulty)
gym.register("BoxTenSteps-v0", BoxFaulty)


@pytest.mark.parametrize("script", having("PocMemoryEnv"))
def test_poc_memory(script):
    env = MODULES[script].PocMemoryEnv()
    returns, starts, sides = [], set(), set()
    for seed in range(400):
        obs, _ = env.reset(seed=seed)
        goals = obs[[0, 2]]
        starts.add(round(float(obs[1]), 1))
        sides.add(tuple(goals))
        assert sorted(goals) == [-1, 1]
        total, steps, done = 0.0, 0, False
        position = obs[1]
        while not done:
            obs, reward, done, truncated, _ = env.step(int(goals[1] > 0))
            total, steps = total + reward, steps + 1
            assert not truncated
            if steps <= 2:  # frozen, visible, free
                assert reward == 0.0 and obs[1] == position and np.array_equal(obs[[0, 2]], goals)
            elif not done:
                assert reward == pytest.approx(-0.1) and np.array_equal(obs[[0, 2]], [0, 0])
        assert reward == pytest.approx(1.6) and abs(obs[1]) == 1.0
        returns.append((total, steps))
    assert starts == {-0.4, -0.2, 0.0, 0.2, 0.4} and len(sides) == 2
    means = np.mean(returns, 0)
    assert means[0] == pytest.approx(1.2, abs=0.03) and means[1] == pytest.approx(7, abs=0.3)
    env.reset(seed=0)
    env.goals, env.fifths = np.array([1, -1]), 4
    assert [env.step(1)[1] for _ in range(3)] == [0.0, 0.0, pytest.approx(-1.6)]
    check_env(MODULES[script].PocMemoryEnv(), skip_render_check=True)
    assert np.array_equal(env.reset(seed=5)[0], env.reset(seed=5)[0])


@pytest.mark.parametrize("script", having("VELOCITIES"))
def test_mask_velocity_hides_exactly_the_velocities(script):
    module = MODULES[script]
    velocities = {  # from Gymnasium's tables of observations
        "CartPole-v1": (4, [1, 3]), "MountainCar-v0": (2, [1]), "MountainCarContinuous-v0": (2, [1]), "Pendulum-v1": (3, [2]),
        "LunarLander-v3": (8, [2, 3, 5]), "LunarLanderContinuous-v3": (8, [2, 3, 5]),
    }  # fmt: skip
    assert {env_id.split("-")[0] for env_id in velocities} == module.VELOCITIES.keys()
    for env_id, (size, hidden) in velocities.items():
        try:
            plain = module.make_envs(module.Args(env_id=env_id), 2)
            masked = module.make_envs(module.Args(env_id=env_id, mask_velocity=True), 2)
        except module.ArgumentError as error:
            assert "ox2" in str(error)  # Box2D is an extra
            continue
        visible = [i for i in range(size) if i not in hidden]
        a, b = plain.reset(seed=1)[0], masked.reset(seed=1)[0]
        for _ in range(30):
            assert np.array_equal(a[:, visible], b[:, visible]) and not b[:, hidden].any()
            action = plain.action_space.sample()
            a, b = plain.step(action)[0], masked.step(action)[0]
        assert a[:, hidden].any()


@pytest.mark.parametrize("script", having("make_envs"))
def test_vectorization(script):
    module = MODULES[script]
    env_id, native = ("ALE/Pong-v5", "AtariVectorEnv") if "atari" in script else ("CartPole-v1", "CartPoleVectorEnv")
    kinds = {}
    for vectorization in "auto", "sync", "async":
        envs = module.make_envs(module.Args(env_id=env_id, vectorization=vectorization), 2)
        kinds[vectorization] = type(envs).__name__
        assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
        envs.close()
    assert kinds == {"auto": native, "sync": "SyncVectorEnv", "async": "AsyncVectorEnv"}
