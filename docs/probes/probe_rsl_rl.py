"""rsl_rl's PPO with its RNNModel, on the Box probes: python docs/probes/probe_rsl_rl.py [SEED]"""

import sys

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from probes import BOX, check
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

N, T = 64, 16


class Envs(VecEnv):
    """Same-step autoreset and flags time_outs, as in the simulators that rsl_rl is made for."""

    num_envs, num_actions, device, cfg, max_episode_length = N, 1, "cpu", {}, 100

    def __init__(self, env_id: str, seed: int):
        mode = dict(autoreset_mode=AutoresetMode.SAME_STEP)
        self.envs = gym.make_vec(env_id, N, "sync", vector_kwargs=mode)
        self.obs, _ = self.envs.reset(seed=seed)
        self.scale = 20 if "Final" in env_id else 1  # of the largest reward
        self.episode_length_buf = torch.zeros(N, dtype=torch.long)

    def get_observations(self):
        return TensorDict(policy=torch.tensor(self.obs), batch_size=N)

    def step(self, actions):
        actions = actions.clamp(-1, 1).numpy()
        self.obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        rewards = torch.tensor(rewards / self.scale, dtype=torch.float32)
        extras = dict(time_outs=torch.tensor(truncated))
        return self.get_observations(), rewards, torch.tensor(terminated | truncated), extras


def train(env_id, steps, seed):
    torch.manual_seed(seed)
    network = dict(class_name="RNNModel", hidden_dims=[32], rnn_hidden_dim=32)
    actor = network | dict(distribution_cfg=dict(class_name="GaussianDistribution", init_std=1.0))
    algorithm = dict(class_name="PPO", num_learning_epochs=4, learning_rate=4e-3, schedule="fixed")
    cfg = dict(
        num_steps_per_env=T, save_interval=1000, obs_groups=dict(actor=["policy"], critic=["policy"]),
        actor=actor, critic=network, algorithm=algorithm,
    )  # fmt: skip
    runner = OnPolicyRunner(Envs(env_id, seed), cfg)
    updates = steps // (N * T)
    for update in range(updates):
        runner.alg.optimizer.param_groups[0]["lr"] = 4e-3 * (1 - update / updates)
        runner.learn(1)
    policy = runner.get_inference_policy()
    policy.reset()

    def act(obs, final):
        with torch.inference_mode():
            actions = policy(TensorDict(policy=torch.tensor(obs), batch_size=len(obs)))
            if final is not None:
                policy.reset(torch.tensor(final))
        return actions.clamp(-1, 1).numpy()

    return act


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    check(train, BOX, int((sys.argv[1:] or ["1"])[0]))
