"""What each rank of tests/test_mpi.py's job does: it trains, with a record of all that counts; and
an environment that fails on rank 1."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import envs
import gymnasium as gym
import numpy as np
import torch
from conftest import toy
from gymnasium import spaces

import ppo1_mpi as module

CHOICES, BOX = spaces.MultiDiscrete([3, 2], start=[1, -1]), spaces.Box(-1, 1, (2,))
CASES = {  # actions and length of episodes in Toy; flags
    "choices": (dict(action_space=CHOICES), {}),
    "box": (dict(action_space=BOX), {}),
    "choices lstm": (dict(action_space=CHOICES), dict(memory="lstm")),
    "masks": (dict(action_space=CHOICES, masks="sometimes"), {}),
    "masks lstm": (dict(action_space=CHOICES, masks="sometimes"), dict(memory="lstm", seq_len=6)),
    "ablated": (dict(action_space=CHOICES), dict(memory="lstm", ablate_memory=True)),
    "box lstm": (dict(action_space=BOX), dict(memory="lstm", schedule="constant")),
    # Minibatches of one step, half of which are final: on some ranks nothing counts.
    "nothing counts": (dict(length=1), dict(num_steps=2, total_timesteps=16, num_envs=1)),
}
FLAGS = dict(num_steps=24, num_minibatches=2, update_epochs=2, seq_len=4, encoder_size=8,
             hidden_size=6, eval_episodes=0, ent_coef=0.1)  # fmt: skip


class Rank1(envs.Clock):
    """On rank 1 something happens in the 100th step of its life: FAULT says what."""

    def __init__(self):
        super().__init__()
        self.life = 0

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.life == 100 and os.environ.get("PMI_RANK") == "1":
            Path("fault").touch()
            if os.environ["FAULT"] == "raise":
                raise RuntimeError("the simulator exploded")
            if os.environ["FAULT"] == "leave":
                sys.exit()
            if os.environ["FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            reward = {"nan": np.nan, "overflow": 1e38}.get(os.environ["FAULT"], reward)
        return obs, reward, terminated, truncated, info


gym.register("Rank1-v0", Rank1)


def record(comm, env_id: str, name: str, **flags) -> dict:
    """Trains in float64 on the ranks of comm, and returns what this rank saw."""
    names = "obs states values legal actions acted gae replays losses steps logged saves".split()
    seen = {key: [] for key in names}

    class Watched(module.Agent):
        def normalize(self, obs):
            return super().normalize(obs.double())

        def step(self, obs, state):
            obs = obs.double()
            h, value, next_state = super().step(obs, state)
            seen["obs"].append(obs)
            seen["states"].append(state.clone())
            if self.args.memory == "none":
                assert np.isnan(value)  # nothing waits for it
                seen["values"].append(self.critic(self.critic_encoder(self.normalize(obs)))[:, 0])
            else:
                seen["values"].append(value)
            return h, value, next_state

        def act(self, h, legal, *others):
            seen.setdefault("first", {k: v.clone() for k, v in self.state_dict().items()})
            actions = super().act(h, legal, *others)
            seen["legal"].append(legal.clone())
            seen["actions"].append(actions.clone())
            seen["acted"].append(self.logprob_entropy(h, legal, actions)[0])
            return actions

        def evaluate_actions(self, obs, *others):
            seen["replays"].append([x.clone() for x in (obs.double(), *others)])
            return super().evaluate_actions(obs.double(), *others)

    def gae(*inputs):
        output = compute_gae(*inputs)
        seen["gae"].append([torch.from_numpy(x.copy()) for x in (inputs[1], inputs[3], output)])
        return output

    def loss(*inputs):
        seen["losses"].append([inputs[1].clone(), inputs[2].clone(), inputs[3]])
        return ppo_loss(*inputs)

    def log(run, steps, losses):
        seen["steps"].append(steps)
        seen["logged"] += [dict(zip(module.LOSSES, x.tolist(), strict=True)) for x in losses]
        run_log(run, steps, losses)

    def save(run):
        seen["saves"].append(run.step)
        run_save(run)

    clock = itertools.count(0, 0.01 + 70 * comm.rank)  # fast on all ranks but 0
    compute_gae, ppo_loss, run_log = module.compute_gae, module.ppo_loss, module.Run.log
    patched = dict(Agent=Watched, compute_gae=gae, ppo_loss=loss, world=lambda: comm)
    patched["time"] = SimpleNamespace(time=lambda: next(clock), sleep=time.sleep)
    run_save = module.Run.save
    originals = {key: getattr(module, key) for key in patched}
    torch.set_default_dtype(torch.float64)
    try:
        for key, value in patched.items():
            setattr(module, key, value)
        module.Run.log, module.Run.save = log, save
        args = module.Args(
            env_id=env_id, run_name=name, **{"total_timesteps": 50 * comm.size, **FLAGS, **flags}
        )
        agent = module.train(args)
    finally:
        torch.set_default_dtype(torch.float32)
        module.Run.log, module.Run.save = run_log, run_save
        for key, value in originals.items():
            setattr(module, key, value)
    return seen | {"last": agent.state_dict()}


class Reached(Exception):
    """Run.log goes beyond the comparison of the ranks."""


class Log:
    """As much of a Run as Run.log needs to compare the ranks."""

    def __init__(self, comm, *numbers: float):
        self.comm = comm
        self.agent = torch.nn.ParameterList(torch.tensor(number) for number in numbers)

    @property
    def step(self):
        raise Reached


def out_of_step(comm) -> str:
    """What Run.log says where a weight of rank 1 has another sign of zero."""
    for zero in 0.0, -0.0 if comm.rank == 1 else 0.0:
        try:
            module.Run.log(Log(comm, 1.0, float("nan"), zero), 1, [torch.zeros(4)])
        except RuntimeError as error:
            return str(error)
        except Reached:
            pass
    return "in step"


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = module.world()
    results = {"out of step": out_of_step(world)}
    for case, (environment, flags) in CASES.items():
        env_id = toy(**environment)
        for count in 1, 2, 3:
            comm = world.Split(int(world.rank < count), world.rank)  # the first ranks, the others
            name = f"{case} {count} {world.rank < count}"
            results[f"{case} {count}"] = record(comm, env_id, name, **flags)
    torch.save(results, f"rank{world.rank}.pt")
