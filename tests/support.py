"""What the tests share: the scripts as modules and as processes, one family of toy environments, and
the recorder of a training."""

import importlib
import io
import json
import os
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.optim.optimizer import register_optimizer_step_pre_hook

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"]

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
torch.set_num_threads(1)
sys.path[:0] = [str(ROOT), str(ROOT / "docs/tools")]
MODULES = {name: importlib.import_module(name) for name in SCRIPTS}


def awkward_ends(T: int = 24, N: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """terminated (T, N), truncated (T, N) and final (T + 1, N) of a rollout with every awkward end.

    Environment 0: no end at all. 1: the first step is final, and so is step T, the next rollout's
    first. 2: the last step is final. 3: both flags in one step. 4: episodes of one step, one after
    the other. 5: as 1, by termination. All but 0 end at once in step T // 2.
    final[t + 1] = terminated[t] | truncated[t], a final step ends nothing itself, and
    final[T] = final[0], so that the rollout can follow itself.
    """
    terminated, truncated = torch.zeros(2, T, N, dtype=torch.bool)
    final = torch.zeros(T + 1, N, dtype=torch.bool)
    final[0, 1] = final[0, 5] = True
    terminated[5, 1] = truncated[T - 1, 1] = True
    truncated[T - 2, 2] = True  # so that step T - 1 is final
    terminated[7, 3] = truncated[7, 3] = True
    terminated[1:9:2, 4] = True
    truncated[T // 2, 1:] = True
    terminated[T - 1, 5] = True
    for t in range(T):
        terminated[t] &= ~final[t]
        truncated[t] &= ~final[t]
        final[t + 1] = terminated[t] | truncated[t]
    assert torch.equal(final[T], final[0])
    return terminated, truncated, final


# --- Toy environments: --env-id support:Toy-v0 --env-kwargs '{"actions": "box"}' --------------------

ACTIONS = {
    "discrete": spaces.Discrete(3),
    "from -1": spaces.Discrete(3, start=-1),
    "box": spaces.Box(-1, 1, (2,)),
    "matrix": spaces.Box(-0.5, 0.75, (2, 2)),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,)),
}


class Toy(gym.Env):
    """Random observations and rewards, in eighths. Episodes end at random, and in all ways, or have
    `length` steps; an illegal action is an error.

    clock: observations tell the time whatever the seed, and the reward falls with the action's
    distance from 0 and 1 in turn. pixels: frames and lives, as a game has them. fault: what happens
    in step `at` of the environment's life.
    """

    def __init__(self, actions="discrete", length=0, clock=False, pixels=False, fault="", at=40):
        self.action_space = ACTIONS[actions]
        self.observation_space = spaces.Box(-2, 2, (3,), np.float32)
        if pixels:
            self.observation_space = spaces.Box(0, 255, (1, 84, 84), np.uint8)
        self.length, self.clock, self.pixels, self.fault, self.at = length, clock, pixels, fault, at
        self.life = 0
        if fault == "init":
            raise RuntimeError("the simulator exploded")

    def observation(self):
        if self.pixels:
            return self.np_random.integers(0, 256, (1, 84, 84), np.uint8)
        if self.clock:
            return np.array([np.sin(self.t), self.t / self.length, 0.5], np.float32)
        return (self.np_random.integers(-16, 17, 3) / 8).astype(np.float32)

    def info(self):
        return {"lives": self.lives} if self.pixels else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.lives = 0, 3
        return self.observation(), self.info()

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        self.life += 1
        terminated, truncated = self.np_random.random(2) < (0.0 if self.length else 0.2)
        truncated |= self.t == self.length
        self.lives -= self.np_random.random() < 0.1
        reward = -abs(float(np.mean(action)) - self.t % 2)
        if not self.clock:
            reward = np.round(8 * self.np_random.normal()) / 8
        obs = self.observation()
        if self.life == self.at:
            if self.fault == "raise":
                raise RuntimeError("the simulator exploded")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "obs":
                obs[1] = np.nan
            reward = {"reward": np.nan, "infinite": np.inf, "huge": 1e30}.get(self.fault, reward)
        return obs, reward, bool(terminated), bool(truncated), self.info()


class Vector(VectorEnv):
    """Episodes of 5, 6, 7, 5, ... steps; environment i gets i + 1 in each step.

    flags: the type of terminated and truncated. at_reset: a reward that a step without an action
    sends. one: a single environment, whatever was asked. same_info: one dictionary for all steps.
    same_step: episodes that begin in the step that ends the last.
    """

    def __init__(self, num_envs=4, flags="bool", at_reset=0.0, one=False, same_info=False,
                 same_step=False):  # fmt: skip
        mode = AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = n = 1 if one else num_envs
        self.single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, n)
        self.action_space = batch_space(self.single_action_space, n)
        self.flags, self.at_reset, self.same_info = np.dtype(flags), at_reset, same_info
        self.length, self.kept = 5 + np.arange(n) % 3, {}

    def observation(self):
        place = np.arange(self.num_envs) / 10
        return np.stack([self.t / 10, place, self.done], 1).astype(np.float32)

    def info(self):
        return self.kept if self.same_info else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.done = np.zeros(self.num_envs, int), np.zeros(self.num_envs, bool)
        return self.observation(), self.info()

    def step(self, actions):
        fresh = self.done
        self.t = np.where(fresh, 0, self.t + 1)
        self.done = ~fresh & (self.t >= self.length)
        reward = np.where(fresh, self.at_reset, 1.0 + np.arange(self.num_envs))
        ends = self.done.astype(self.flags), np.zeros(self.num_envs, self.flags)
        return self.observation(), reward, *ends, self.info()


class Cue(gym.Env):
    """A cue in the first of six steps is to be named in the last: 1 with memory, 0.5 without."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        last = self.t == 6
        return (
            np.array([0, self.t == 5], np.float32),
            float(last and action == self.cue),
            last,
            False,
            {},
        )


class Autograd(Toy):
    """Its physics is torch's."""

    def step(self, action):
        x = torch.tensor(float(action), requires_grad=True)
        (x * x).backward()
        assert x.grad == 2 * action
        return super().step(action)


gym.register("Toy-v0", Toy, disable_env_checker=True)
gym.register("Cue-v0", Cue, disable_env_checker=True)
gym.register("Autograd-v0", Autograd, disable_env_checker=True)
gym.register("Vector-v0", vector_entry_point=Vector)


def actions_of(script: str) -> str:
    """The Toy's actions for a script that has only one kind."""
    return "box" if script == "rppo_continuous" else "discrete"


def toy_flags(script: str, **options) -> list[str]:
    """The flags of a short run in a Toy."""
    options = {"actions": actions_of(script), **options}
    return [*SHORT[script], "--env-id", "support:Toy-v0", "--env-kwargs", json.dumps(options)]


SHORT = {  # a run of some seconds
    "rppo_lstm": "--num-envs 4 --num-steps 32 --encoder-size 8 --hidden-size 8 --num-minibatches 2 --update-epochs 2",
    "rppo_continuous": "--num-envs 4 --num-steps 32 --encoder-size 8 --hidden-size 8 --num-minibatches 2 --update-epochs 2 --no-preset",
    "trpo": "--num-envs 4 --num-steps 32 --encoder-size 8 --hidden-size 8 --memory lstm --n-critic-updates 2 --no-preset",
    "ppo1_mpi": "--num-envs 4 --num-steps 32 --encoder-size 8 --hidden-size 8 --memory lstm --num-minibatches 2 --update-epochs 2 --no-preset",
}
SHORT = {script: f"{flags} --total-timesteps 300 --eval-episodes 2".split() for script, flags in SHORT.items()}  # fmt: skip


# --- The recorder ----------------------------------------------------------------------------------


def record(
    script: str, folder, toy=None, comm=None, run_name="recorded", **flags
) -> SimpleNamespace:
    """Trains a script in float64 in a Toy, which `toy` configures -> what train got and did:

    reset     the first observations and lives; rng: torch's generator there
    first     the weights there, whose biases have been moved away from 0
    steps     of each time step: the action, obs, rewards, terminated, truncated, lives
    updates   before each step of the optimiser: learning rate, weights, gradients
    logs      of each iteration: the steps so far, rows as in METRICS, explained variance
    args, agent, and result, what result.json holds
    """
    module = MODULES[script]
    seen = SimpleNamespace(steps=[], updates=[], logs=[])
    toy = {"actions": actions_of(script), "pixels": script == "rppo_gru_atari", **(toy or {})}
    small = dict(num_envs=6, num_steps=24, total_timesteps=300, eval_episodes=0, gamma=0.9,
                 gae_lambda=0.8, hidden_size=6, encoder_size=8, num_minibatches=3, update_epochs=2)  # fmt: skip
    small = {name: value for name, value in small.items() if hasattr(module.Args, name)}
    args = module.Args(env_id="Toy-v0", env_kwargs=json.dumps(toy), runs_dir=str(folder),
                       run_name=run_name, **{**small, **flags})  # fmt: skip
    seen.args = module.Args(**vars(args))

    class Agent(module.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            seen.agent = self
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))

        def normalize(self, obs):  # float32, as environments return them
            return super().normalize(obs.double())

    def weights():
        return {name: p.detach().clone() for name, p in seen.agent.named_parameters()}

    make_envs = module.make_envs
    if script == "rppo_gru_atari":

        def make_envs(args, num_envs, *_):
            envs = gym.make_vec(args.env_id, num_envs, **json.loads(args.env_kwargs))
            return RecordEpisodeStatistics(envs, stats_key="run_statistics")

    def make(*inputs):
        envs = make_envs(*inputs)
        reset, step = envs.reset, envs.step

        def recorded_reset(**options):
            obs, info = reset(**options)
            seen.reset = obs.copy(), info.get("lives", np.zeros(len(obs)))
            seen.rng, seen.first, seen.seed = torch.get_rng_state(), weights(), options["seed"]
            return obs, info

        def recorded_step(action):
            sent = np.copy(action)
            obs, *others, info = step(action)
            arrays = obs, *others, info.get("lives", np.zeros(len(obs)))
            seen.steps.append((sent, *(np.copy(x) for x in arrays)))
            return obs, *others, info

        envs.reset, envs.step = recorded_reset, recorded_step
        return envs

    def before_step(optimizer, *_):
        gradients = {
            k: p.grad.clone() for k, p in seen.agent.named_parameters() if p.grad is not None
        }
        seen.updates.append((optimizer.param_groups[0]["lr"], weights(), gradients))

    log = module.Run.log

    def recorded_log(run, metrics, explained_variance):
        seen.logs.append((run.step, torch.stack(metrics).tolist(), explained_variance))
        log(run, metrics, explained_variance)

    hook = register_optimizer_step_pre_hook(before_step)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Agent", Agent)
            patch.setattr(module, "make_envs", make)
            patch.setattr(module.Run, "log", recorded_log)
            if comm is not None:
                patch.setattr(module, "world", lambda: comm)
            module.train(args)
    finally:
        torch.set_default_dtype(default)
        hook.remove()
    seen.last = weights()
    seen.buffers = {name: x.clone() for name, x in seen.agent.named_buffers()}
    result = Path(folder, run_name, "result.json")
    seen.result = json.loads(result.read_text()) if result.exists() else None
    assert vars(args) == vars(seen.args)  # Args are what the user asked for, and stay that
    return seen


# --- Runs, and what they leave -----------------------------------------------------------


def shown(stderr: str) -> list[str]:
    """The lines of standard error, without the progress bars."""
    text = re.sub(r"[^\n\r]*(?:step|episode)/s[^\]\n]*\]", "", stderr).replace("\r", "\n")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def main(folder, script: str, *flags):
    """main() with these flags in the folder -> exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    words: list[str] = []
    for flag in flags:
        words += [flag] if flag.startswith("{") else flag.split()  # JSON may have blanks
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [f"{script}.py", *words])
        MODULES[script].Run.latest = None  # as in a new process
        try:
            MODULES[script].main()
        except SystemExit as stop:
            return stop.code, out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def trained(folder, script: str, *flags) -> dict:
    """A run to its end -> what its agent.pt holds."""
    code, out, err = main(folder, script, *flags)
    assert code == 0, err
    return read(out.splitlines()[-1].split(": return")[0])


def read(run_dir) -> dict:
    return torch.load(f"{run_dir}/agent.pt", weights_only=True)


def assert_same(a, b) -> None:
    """Bit for bit, through dictionaries and lists."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def scalars(run_dir) -> dict:
    """TensorBoard's scalars: {tag: {step: value}}. No step may come twice or out of order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), {"scalars": 0}).Reload()
    found = {
        tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert all(sorted(dict(points)) == [step for step, _ in points] for points in found.values())
    return {tag: dict(points) for tag, points in found.items()}
