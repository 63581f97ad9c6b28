"""sb3-contrib's RecurrentPPO: python docs/probes/probe_sb3_contrib.py [SEED]"""

import sys

import gymnasium as gym
import torch
from probes import ALL, check
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import DummyVecEnv


def train(env_id, steps, seed):
    envs = DummyVecEnv([lambda: gym.make(env_id)] * 64)
    networks = dict(lstm_hidden_size=32, net_arch=[32])
    model = RecurrentPPO(
        "MlpLstmPolicy", envs, learning_rate=lambda left: 4e-3 * left, n_steps=16, batch_size=256,
        n_epochs=4, seed=seed, policy_kwargs=networks, device="cpu",
    )  # fmt: skip
    model.learn(steps)
    state = ended = None  # ended: whose last observation was final, so that this one is a first

    def act(obs, final):
        nonlocal state, ended
        actions, state = model.predict(obs, state, ended, deterministic=True)
        ended = final
        return actions

    return act


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    check(train, ALL, int((sys.argv[1:] or ["1"])[0]))
