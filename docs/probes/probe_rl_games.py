"""rl_games' PPO (a2c_discrete) with its LSTM: python docs/probes/probe_rl_games.py [SEED]"""

import contextlib
import io
import sys
import tempfile

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from probes import ALL, check
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner

N, T = 64, 16


class Envs(IVecEnv):
    """Same-step autoreset and flags time_outs, as in the simulators that rl_games is made for."""

    def __init__(self, config_name, num_actors, seed, env_id):
        mode = dict(autoreset_mode=AutoresetMode.SAME_STEP)
        self.envs, self.first = gym.make_vec(env_id, N, "sync", vector_kwargs=mode), seed

    def reset(self):
        return self.envs.reset(seed=self.first)[0]

    def step(self, actions):
        obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        return obs, rewards, terminated | truncated, dict(time_outs=truncated)

    def get_env_info(self):
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        return dict(observation_space=spaces[0], action_space=spaces[1])


vecenv.register("PROBES", lambda *args, **kwargs: Envs(*args, **kwargs))
env_configurations.register("probe", dict(vecenv_type="PROBES", env_creator=None))


def train(env_id, steps, seed):
    network = dict(
        name="actor_critic", separate=False, space=dict(discrete={}),
        mlp=dict(units=[32], activation="tanh", initializer=dict(name="default")),
        rnn=dict(name="lstm", units=32, layers=1),
    )  # fmt: skip
    config = dict(
        name="probe", env_name="probe", env_config=dict(env_id=env_id), device="cpu",
        num_actors=N, horizon_length=T, seq_length=T, minibatch_size=256, mini_epochs=4,
        max_epochs=steps // (N * T), learning_rate=4e-3, lr_schedule="linear", gamma=0.99, tau=0.95,
        e_clip=0.2, clip_value=False, critic_coef=1, entropy_coef=0.01, normalize_advantage=True,
        normalize_input=False, truncate_grads=True, grad_norm=0.5, value_bootstrap=True,
        reward_shaper=dict(scale_value=0.05 if "Final" in env_id else 1), save_best_after=10**6,
    )  # fmt: skip
    params = dict(algo=dict(name="a2c_discrete"), model=dict(name="discrete_a2c"), seed=seed)
    params |= dict(network=network, config=config, torch_threads=1)
    runner = Runner()
    with (
        tempfile.TemporaryDirectory() as config["train_dir"],
        contextlib.redirect_stdout(io.StringIO()),
    ):
        runner.load(dict(params=params))
        agent = runner.algo_factory.create("a2c_discrete", base_name="run", params=runner.params)
        agent.train()
    state = None

    def act(obs, final):
        nonlocal state
        state = state or [torch.zeros(1, len(obs), 32)] * 2
        with torch.no_grad():
            out = agent.model(dict(is_train=False, obs=torch.tensor(obs), rnn_states=state))
        keep = torch.ones(len(obs)) if final is None else torch.tensor(~final).float()
        state = [s * keep[:, None] for s in out["rnn_states"]]
        return out["logits"].argmax(-1).numpy()

    return act


if __name__ == "__main__":
    check(train, ALL, int((sys.argv[1:] or ["1"])[0]))
