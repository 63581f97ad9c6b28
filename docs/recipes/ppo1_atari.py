"""PPO1 on Atari games: run_atari of openai/baselines, its preprocessing, CNN and preset.

    mpiexec -n 8 python docs/recipes/ppo1_atari.py --env-id ALE/Pong-v5  # pip install ".[atari]"
    python docs/recipes/ppo1_atari.py trpo --env-id ALE/Pong-v5
    python docs/recipes/use.py --play runs/RUN --render video

Games are those of rppo_gru_atari: ale_py's vector environments do what baselines' wrappers do, with
no-ops at the start, every fourth frame, 84 x 84 pixels in grey. Rewards count by their sign; logs
have the game's score. Two things are different: four frames are an observation (--frame-stack 1 for
baselines' one), and a lost life ends no episode. The CNN is that of the recipe images; policy and
critic share it, as in baselines. trpo trains them apart, so there each has one. The preset is
for ppo1_mpi and the games in GAMES; for others give its flags yourself.
"""

from dataclasses import dataclass

import numpy as np
import use as driver

import rppo_gru_atari

PRESET = dict(
    total_timesteps=10_000_000, num_steps=256, clip_coef=0.2, ent_coef=0.01, update_epochs=4,
    learning_rate=1e-3, num_minibatches=4, gamma=0.99, gae_lambda=0.95, schedule="linear",
)  # fmt: skip
GAMES = "BeamRider", "Breakout", "Enduro", "Pong", "Qbert", "Seaquest", "SpaceInvaders"
LIMIT = 27_000  # frames of a game, four a step, after which it is truncated


class Game(driver.Wrapper):
    """Frames (N, C, 84, 84) become vectors, and rewards their signs; scores are counted inside."""

    def __init__(self, envs):
        super().__init__(envs)
        self.observe(int(np.prod(envs.single_observation_space.shape)))

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return obs.reshape(len(obs), -1), info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        return obs.reshape(len(obs), -1), np.sign(rewards), terminated, truncated, info


def with_one_cnn(agent_class):
    """PPO1's agent, whose policy and critic read the features of one CNN."""

    class OneCNN(agent_class):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            self.cnn = self.encoder.pop(0)
            self.critic_encoder.pop(0)

        def normalize(self, obs):
            return self.cnn(super().normalize(obs))

    return OneCNN


def use(script):
    fits = script.__name__ not in ("rppo_gru_atari", "rppo_continuous")
    script.check(fits, "ppo1_atari: actions of games are discrete, and rppo_gru_atari has its own")

    @dataclass
    class Args(script.Args):
        env_id: str = "ALE/Pong-v5"  # a game of ale_py
        frame_stack: int = 4  # how many of the latest frames are an observation
        sticky_actions: float = 0.0  # probability of repeating an action

    def make_games(args, num_envs, render_mode=None):
        try:
            return Game(rppo_gru_atari.make_envs(args, num_envs, render_mode, LIMIT))
        except rppo_gru_atari.ArgumentError as error:
            raise script.ArgumentError(str(error)) from error

    script.Args = Args
    script.FIXED = (*script.FIXED, "frame_stack")
    script.make_envs = make_games
    driver.add(script, "images")
    if script.__name__ == "ppo1_mpi":
        presets = {(f"ALE/{game}-v5", False): PRESET for game in GAMES}
        script.PRESETS = {**script.PRESETS, **presets}
        script.Agent = with_one_cnn(script.Agent)


if __name__ == "__main__":
    driver.main("ppo1_atari", "ppo1_mpi")
