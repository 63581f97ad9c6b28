"""Other libraries' algorithms, for run.py and speed.py. Settings are those of tasks.toml, [peers.NAME]."""

import copy
import time

import gymnasium as gym
import numpy as np
import rows
import torch
from torch import nn


def train(name: str, env_id: str, steps: int, seed: int) -> dict:
    """Trains and evaluates stable-baselines3's or sb3-contrib's algorithm -> results, as run.py
    has them of a script."""
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    settings = rows.PEERS[name]
    model = make(settings, env_id, seed)
    curve = [(done, x) for done, x, _ in learn(model, steps) if not np.isnan(x)]
    fresh = make_envs(settings, env_id, 1, 1_000_000 * seed)
    if trained := model.get_vec_normalize_env():
        norm_obs = trained.norm_obs
        fresh = VecNormalize(fresh, training=False, norm_obs=norm_obs, norm_reward=False)
        if norm_obs:
            fresh.obs_rms = trained.obs_rms
    result = {"global_step": model.num_timesteps, "curve": curve}
    result["returns"] = [episode["r"] for episode in model.ep_info_buffer]
    for kind, deterministic in ("evaluation", True), ("sampled", False):
        result[kind], _ = evaluate_policy(
            model, fresh, rows.EPISODES, deterministic, return_episode_rewards=True
        )
    return result


def speed(name: str, env_id: str, steps: int) -> float:
    """Environment steps a second, without the first iteration."""
    ends = learn(make(rows.PEERS[name], env_id, 1), steps)
    return (ends[-1][0] - ends[0][0]) / (ends[-1][2] - ends[0][2])


def make(settings: dict, env_id: str, seed: int):
    """A model. settings are its constructor's, and num_envs, normalize (running statistics of
    rewards and, unless it is "rewards", of real-valued observations), linear (what falls to 0),
    visible (the components that are not masked), encoder (the units of a layer before the LSTM)
    and activation (a class of torch.nn)."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.torch_layers import FlattenExtractor
    from stable_baselines3.common.vec_env import VecNormalize

    class Encoder(FlattenExtractor):
        def __init__(self, space, units):
            super().__init__(space)
            self.net = nn.Sequential(nn.Linear(self.features_dim, units), nn.Tanh())
            self._features_dim = units

        def forward(self, obs):
            return self.net(obs)

    torch.set_num_threads(1)
    kwargs = copy.deepcopy(settings)
    algorithm = kwargs.pop("algorithm")
    names = "num_envs", "normalize", "linear", "visible", "encoder", "activation"
    num_envs, normalize, linear, _, encoder, activation = (kwargs.pop(x, None) for x in names)
    if activation:
        kwargs["policy_kwargs"]["activation_fn"] = getattr(nn, activation)
    if encoder:
        kwargs["policy_kwargs"]["features_extractor_class"] = Encoder
        kwargs["policy_kwargs"]["features_extractor_kwargs"] = {"units": encoder}
    envs = make_envs(settings, env_id, num_envs or 1, seed)
    if normalize:
        real = normalize != "rewards" and envs.observation_space.dtype.kind == "f"
        envs = VecNormalize(envs, norm_obs=real, gamma=kwargs.get("gamma", 0.99))
    for name in linear or ():
        kwargs[name] = lambda remaining, first=kwargs[name]: remaining * first
    policy = ("Cnn" if env_id.startswith("ALE/") else "Mlp") + "LstmPolicy"
    if not algorithm.startswith("Recurrent"):
        policy = "MlpPolicy"
    library = stable_baselines3 if hasattr(stable_baselines3, algorithm) else sb3_contrib
    return getattr(library, algorithm)(policy, envs, seed=seed, device="cpu", **kwargs)


def make_envs(settings: dict, env_id: str, num_envs: int, seed: int):
    from gymnasium.wrappers import FlattenObservation, TransformObservation
    from stable_baselines3.common.env_util import make_vec_env

    def wrap(env):
        if visible := settings.get("visible"):
            return TransformObservation(env, lambda obs: obs * np.float32(visible), None)
        plain = isinstance(env.observation_space, gym.spaces.Box | gym.spaces.Discrete)
        return env if plain else FlattenObservation(env)  # sb3 knows no tuples

    rows.use()  # whose tasks are imported by name
    if env_id == "ALE/Breakout-v5":
        return make_games(num_envs)
    return make_vec_env(env_id, num_envs, seed, wrapper_class=wrap)


def make_games(num_envs: int):
    """Our vector environment of ale_py for stable-baselines3, whose own wrappers are slower."""
    from ale_py import AtariVectorEnv
    from stable_baselines3.common.vec_env import VecEnv

    class Games(VecEnv):
        close = env_method = set_attr = env_is_wrapped = None  # not called

        def __init__(self):
            mode = dict(stack_num=1, num_threads=1, autoreset_mode="SameStep")
            self.envs = AtariVectorEnv("breakout", num_envs, **mode)
            spaces = self.envs.single_observation_space, self.envs.single_action_space
            super().__init__(num_envs, *spaces)

        def get_attr(self, name, indices=None):
            return [None] * num_envs

        def reset(self):
            return self.envs.reset(seed=1)[0]

        def step_async(self, actions):
            self.result = self.envs.step(actions)

        def step_wait(self):
            obs, rewards, terminated, truncated, info = self.result
            infos = [{"TimeLimit.truncated": not x} for x in terminated]
            for n in np.flatnonzero(terminated | truncated):
                infos[n]["terminal_observation"] = info["final_obs"][n]
            return obs, np.sign(rewards).astype(np.float32), terminated | truncated, infos

    return Games()


def learn(model, steps: int) -> list[tuple[int, float, float]]:
    """Trains a model -> at the end of each rollout: steps, mean return of the last 100 episodes,
    time."""
    from stable_baselines3.common.callbacks import BaseCallback

    ends = []

    class Watch(BaseCallback):
        def _on_rollout_end(self):
            returns = [episode["r"] for episode in model.ep_info_buffer]
            ends.append(
                (self.num_timesteps, float(np.mean(returns or np.nan)), time.perf_counter())
            )

        def _on_step(self):
            return True

    model.learn(steps, Watch())
    return ends


def skrl_speed(steps: int) -> float:
    """Environment steps a second of skrl's PPO_RNN at CartPole, without its first iteration. The LSTM
    is replayed in pieces, each up to a step at which an episode of the minibatch ends. Values are
    normalised, as our rewards are: without that skrl does not learn here."""
    from skrl import logger
    from skrl.agents.torch.ppo import PPO_RNN
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer

    N, L, F, H = 8, 128, 64, 128  # environments, steps of a sequence, features, units

    class Network(CategoricalMixin, DeterministicMixin, Model):
        def __init__(self, **spaces):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            DeterministicMixin.__init__(self)
            self.encoder = nn.Sequential(nn.Linear(self.num_observations, F), nn.Tanh())
            self.lstm = nn.LSTM(F, H, batch_first=True)
            self.heads = nn.ModuleDict(dict(policy=nn.Linear(H, 2), value=nn.Linear(H, 1)))
            self.shared = None  # what the policy computed, for the critic

        def get_specification(self):
            return {"rnn": {"sequence_length": L, "num_layers": 1, "sizes": [(1, N, H)] * 2}}

        def act(self, inputs, *, role):
            mixin = CategoricalMixin if role == "policy" else DeterministicMixin
            return mixin.act(self, inputs, role=role)

        def compute(self, inputs, role):
            h, state = self.shared or self.replay(inputs)
            self.shared = (h, state) if role == "policy" else None
            return self.heads[role](h), {"rnn": list(state)}

        def replay(self, inputs):
            x, state = self.encoder(inputs["observations"]), inputs["rnn"]
            if not self.training:
                h, state = self.lstm(x.unsqueeze(1), state)
                return h.squeeze(1), state
            x, done = x.view(-1, L, F), inputs["terminated"] | inputs["truncated"]
            done, pieces = done.view(-1, L), []
            state = [rows.view(1, -1, L, H)[:, :, 0].contiguous() for rows in state]
            ends = sorted({*(done.any(0).nonzero().flatten() + 1).tolist(), L})
            for begin, end in zip([0, *ends], ends):
                h, state = self.lstm(x[:, begin:end], tuple(state))
                state = [rows * ~done[:, end - 1, None] for rows in state]
                pieces.append(h)
            return torch.cat(pieces, 1).flatten(0, 1), state

    times = []

    class Agent(PPO_RNN):
        def update(self, **progress):
            super().update(**progress)
            times.append(time.perf_counter())

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    env = wrap_env(gym.make_vec("CartPole-v1", N), verbose=False)
    spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
    network = Network(device="cpu", **spaces)
    agent = Agent(
        models={"policy": network, "value": network},
        memory=RandomMemory(memory_size=L, num_envs=N, device="cpu"),
        device="cpu",
        cfg=dict(
            rollouts=L, learning_epochs=4, mini_batches=4, value_loss_scale=0.5, value_clip=0,
            value_preprocessor=RunningStandardScaler, value_preprocessor_kwargs=dict(size=1),
            experiment=dict(write_interval=0, checkpoint_interval=0),
        ),
        **spaces,
    )  # fmt: skip
    plan = dict(timesteps=steps // N, headless=True, disable_progressbar=True)
    SequentialTrainer(env=env, agents=agent, cfg=plan).train()
    return (len(times) - 1) * L * N / (times[-1] - times[0])
