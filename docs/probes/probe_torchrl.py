"""TorchRL's LSTMModule, GAE and ClipPPOLoss: python docs/probes/probe_torchrl.py [SEED]"""

import sys

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from probes import ALL, check
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, InitTracker, RewardScaling
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ActorValueOperator, LSTMModule, ProbabilisticActor, ValueOperator
from torchrl.modules import set_recurrent_mode as recurrent
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

N, T, H = 64, 16, 32


def train(env_id, steps, seed):
    torch.manual_seed(seed)
    mode = dict(autoreset_mode=AutoresetMode.SAME_STEP)  # TorchRL takes no other
    envs = GymWrapper(
        gym.make_vec(env_id, N, "sync", vector_kwargs=mode), categorical_action_encoding=True
    )
    envs.set_seed(seed)
    n = envs.observation_spec["observation"].shape[-1]
    out = ["h", ("next", "lstm_h"), ("next", "lstm_c")]
    lstm = LSTMModule(n, H, in_keys=["observation", "lstm_h", "lstm_c"], out_keys=out)
    logits = TensorDictModule(nn.Linear(H, 3), in_keys=["h"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    both = ActorValueOperator(lstm, actor, ValueOperator(nn.Linear(H, 1), in_keys=["h"]))
    policy, critic = both.get_policy_operator(), both.get_value_operator()
    scale = RewardScaling(loc=0.0, scale=1 / 20 if "Final" in env_id else 1.0)
    for transform in InitTracker(), scale, lstm.make_tensordict_primer():
        envs = envs.append_transform(transform)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
    ppo = ClipPPOLoss(policy, critic, entropy_coeff=0.01, normalize_advantage=True)
    optimizer = torch.optim.Adam(both.parameters(), lr=4e-3, eps=1e-5)
    for data in Collector(
        envs, policy, frames_per_batch=N * T, total_frames=steps // (N * T) * N * T
    ):
        with recurrent(True), torch.no_grad():
            gae(data)
        for _ in range(4):
            for batch in torch.randperm(N).view(4, -1):
                with recurrent(True):
                    losses = ppo(data[batch])
                optimizer.zero_grad()
                sum(loss for name, loss in losses.items() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(both.parameters(), 0.5)
                optimizer.step()
        optimizer.param_groups[0]["lr"] -= 4e-3 / (steps // (N * T))
    state, first = None, None

    def act(obs, final):
        nonlocal state, first
        zero = torch.zeros(len(obs), 1, H)
        state = state or dict(lstm_h=zero, lstm_c=zero)
        is_init = torch.zeros(len(obs), 1, dtype=torch.bool) if first is None else first
        data = TensorDict(state | dict(observation=torch.tensor(obs), is_init=is_init), len(obs))
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            data = policy(data)
        state = dict(lstm_h=data["next", "lstm_h"], lstm_c=data["next", "lstm_c"])
        first = None if final is None else torch.tensor(final)[:, None]
        return data["action"].numpy()

    return act


if __name__ == "__main__":
    torch.set_num_threads(1)  # these networks are too small for more
    check(train, ALL, int((sys.argv[1:] or ["1"])[0]))
