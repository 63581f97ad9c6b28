"""PPO1 as its authors ran it on MuJoCo: run_mujoco and run_humanoid of openai/baselines.

    mpiexec -n 2 python docs/recipes/ppo1_mujoco.py --env-id HalfCheetah-v5  # run_mujoco
    mpiexec -n 8 python docs/recipes/ppo1_mujoco.py --env-id Humanoid-v5     # run_humanoid
    python docs/recipes/ppo1_mujoco.py rppo_continuous --env-id Hopper-v5 --reward-scale 0.1

The presets are ppo1_mpi's. --reward-scale is for every script but rppo_gru_atari, which learns from
the rewards' signs: rewards are multiplied by it for learning, and logs have them as they were.
(Baselines' minibatches have 64 steps: 2048 / 64 = 32.)
"""

from dataclasses import dataclass

import use as driver

MUJOCO = dict(
    total_timesteps=1_000_000, num_steps=2048, clip_coef=0.2, ent_coef=0.0, update_epochs=10,
    learning_rate=3e-4, num_minibatches=32, gamma=0.99, gae_lambda=0.95, schedule="linear",
)  # fmt: skip
HUMANOID = dict(
    MUJOCO, total_timesteps=50_000_000, clip_coef=0.1, learning_rate=1e-4, schedule="constant",
    reward_scale=0.1,
)  # fmt: skip
TASKS = (
    "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5",
    "Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5",
)  # fmt: skip


class ScaledRewards(driver.Wrapper):
    """Outside of what counts returns, so that these are as the environment gives them."""

    def __init__(self, envs, scale):
        super().__init__(envs)
        self.scale = scale

    def step(self, actions):
        obs, rewards, *others = self.env.step(actions)
        return obs, rewards * self.scale, *others


def use(script):
    signs = "ppo1_mujoco: rppo_gru_atari learns from the signs of rewards"
    script.check(script.__name__ != "rppo_gru_atari", signs)
    make_envs = script.make_envs

    @dataclass
    class Args(script.Args):
        reward_scale: float = 1.0  # rewards are multiplied by it for learning

    def make_scaled(args, *inputs, **options):
        return ScaledRewards(make_envs(args, *inputs, **options), args.reward_scale)

    script.Args = Args
    script.make_envs = make_scaled
    if script.__name__ == "ppo1_mpi":
        presets = {(task, False): MUJOCO for task in TASKS}
        script.PRESETS = {**script.PRESETS, **presets, ("Humanoid-v5", False): HUMANOID}


if __name__ == "__main__":
    driver.main("ppo1_mujoco", "ppo1_mpi")
