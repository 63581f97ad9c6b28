"""skrl's PPO_RNN: python docs/probes/probe_skrl.py [bootstrap] [SEED]; the model is of skrl's examples."""

import sys

import gymnasium as gym
import torch
import torch.nn as nn
from gymnasium.vector import AutoresetMode
from probes import ALL, check
from skrl.agents.torch.ppo import PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed

N, L, H = 64, 16, 32


class Recurrent(Model):
    def __init__(self, envs, outputs):
        spaces = dict(observation_space=envs.observation_space, action_space=envs.action_space)
        Model.__init__(self, **spaces, device="cpu")
        self.net = nn.Sequential(nn.Linear(self.num_observations, H), nn.Tanh())
        self.lstm, self.out = nn.LSTM(H, H, batch_first=True), nn.Linear(H, outputs)

    def get_specification(self):
        return {"rnn": {"sequence_length": L, "sizes": [(1, N, H), (1, N, H)]}}

    def compute(self, inputs, role):
        x, state, length = self.net(inputs["observations"]), inputs["rnn"], 1
        ended = torch.zeros(len(x), 1, dtype=torch.bool)
        if "terminated" in inputs:  # replay, from the state before each sequence
            length, ended = L, (inputs["terminated"] | inputs["truncated"]).view(-1, L)
            state = [s.reshape(1, -1, L, H)[:, :, 0].contiguous() for s in state]
        x, hs = x.view(-1, length, H), []
        for t in range(length):
            h, state = self.lstm(x[:, t : t + 1], tuple(state))
            hs.append(h)
            state = [s * ~ended[:, t, None] for s in state]
        return self.out(torch.cat(hs, 1).flatten(0, 1)), {"rnn": list(state)}


class Policy(CategoricalMixin, Recurrent):
    def __init__(self, envs):
        Recurrent.__init__(self, envs, 3)
        CategoricalMixin.__init__(self)


class Value(DeterministicMixin, Recurrent):
    def __init__(self, envs):
        Recurrent.__init__(self, envs, 1)
        DeterministicMixin.__init__(self)


def trainer(bootstrap: bool):
    def train(env_id, steps, seed):
        set_seed(seed)
        mode = dict(autoreset_mode=AutoresetMode.SAME_STEP)  # as in the simulators it is made for
        envs = wrap_env(gym.make_vec(env_id, N, "sync", vector_kwargs=mode), verbose=False)
        models = {"policy": Policy(envs), "value": Value(envs)}
        decay = dict(lr_lambda=lambda epoch: max(0.0, 1 - epoch // 4 * N * L / steps))
        cfg = dict(
            rollouts=L, learning_epochs=4, mini_batches=4, learning_rate=4e-3, value_clip=0.0,
            value_loss_scale=0.5, time_limit_bootstrap=bootstrap,
            rewards_shaper=lambda rewards, *_: rewards / 20 if "Final" in env_id else rewards,
            learning_rate_scheduler=torch.optim.lr_scheduler.LambdaLR,
            learning_rate_scheduler_kwargs=decay,
            experiment=dict(write_interval=0, checkpoint_interval=0),
        )  # fmt: skip
        memory = RandomMemory(memory_size=L, num_envs=N, device="cpu")
        agent = PPO_RNN(
            models=models, memory=memory, observation_space=envs.observation_space,
            action_space=envs.action_space, device="cpu", cfg=cfg,
        )  # fmt: skip
        run = dict(timesteps=steps // N, headless=True, disable_progressbar=True)
        SequentialTrainer(cfg=run, env=envs, agents=agent).train()
        state = None

        def act(obs, final):
            nonlocal state
            state = state or [torch.zeros(1, len(obs), H)] * 2
            with torch.no_grad():
                logits, outputs = models["policy"].compute(
                    {"observations": torch.tensor(obs), "rnn": state}, "policy"
                )
            ended = torch.zeros(len(obs), dtype=torch.bool)
            ended = ended if final is None else torch.tensor(final)
            state = [s * ~ended[:, None] for s in outputs["rnn"]]
            return logits.argmax(-1).numpy()

        return act

    return train


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    flags = sys.argv[1:]
    seed = int(flags[-1]) if flags and flags[-1].isdecimal() else 1
    check(trainer("bootstrap" in flags), ALL, seed)
