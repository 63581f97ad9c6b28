"""What the tests of recipes share: a script with recipes as a module of its own, short runs, and
environments."""

import json
import random
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from support import ROOT

FOLDER = ROOT / "docs/recipes"
sys.path.insert(0, str(FOLDER))
import use as driver  # noqa: E402

SMALL = {
    "rppo_lstm": dict(num_envs=4, num_steps=16, num_minibatches=2, hidden_size=8, encoder_size=8),
    "rppo_gru_atari": dict(
        num_envs=2, num_steps=4, num_minibatches=1, update_epochs=1, hidden_size=8, torch_threads=1
    ),
    "trpo": dict(num_envs=2, num_steps=32, hidden_size=8, encoder_size=8, n_critic_updates=1),
    "ppo1_mpi": dict(num_steps=32, seq_len=8, num_minibatches=2, hidden_size=8, encoder_size=8),
}
SMALL["rppo_continuous"] = SMALL["rppo_lstm"]


def needs(script: str) -> None:
    """Skips a test without the packages of a script."""
    pytest.importorskip({"rppo_gru_atari": "ale_py", "ppo1_mpi": "mpi4py"}.get(script, "torch"))


def run(script, tmp_path, **flags):
    """A short run of a script with recipes -> its agent, its directory."""
    games = script.kind == "rppo_gru_atari"  # which are long
    small = {"total_timesteps": 16 if games else 150, "eval_episodes": 0 if games else 2}
    small |= {"runs_dir": str(tmp_path), "run_name": f"run{len([*tmp_path.iterdir()])}"}
    args = script.Args(**{**small, **SMALL[script.kind], **flags})
    agent = script.train(args)
    return agent, tmp_path / args.run_name


def returns(run_dir) -> list[float]:
    """Of a run's evaluation."""
    return json.loads((run_dir / "result.json").read_text())["returns"]


def reopened(run_dir):
    """A run from its file alone; its agent plays the episodes that it played after training."""
    script, args, envs, agent, saved = driver.open_run(run_dir)
    if args.eval_episodes and script.kind != "rppo_gru_atari":
        played = returns(run_dir)
        envs = script.make_envs(args, len(played))
        seed = script.env_seed(args.seed, script.EVALUATION)
        again = script.evaluate(agent, envs, seed, args.deterministic)
        assert again == pytest.approx(played, rel=1e-5)
    return script, args, agent, saved


def build(script, space, obs=None, **flags):
    """An agent of small networks, for observations of three numbers or as given."""
    obs = spaces.Box(-1, 1, (3,)) if obs is None else obs
    envs = SimpleNamespace(single_action_space=space, single_observation_space=obs)
    small = dict(hidden_size=6, encoder_size=4)
    small = {key: x for key, x in small.items() if hasattr(script.Args, key)}
    return script.Agent(envs, script.Args(**{**small, **flags}))


def first_ratios(script, tmp_path, **flags) -> float:
    """How far the ratios of a run's first minibatch are from 1."""
    seen, loss = [], script.ppo_loss

    def watched(logprob, old_logprob, *others):
        seen.append((logprob - old_logprob).exp().sub(1).abs().max().item())
        return loss(logprob, old_logprob, *others)

    script.ppo_loss = watched
    run(script, tmp_path, **{"eval_episodes": 0, "total_timesteps": 1, **flags})
    return seen[0]


# --- Environments ----------------------------------------------------------------------------------


class Episodes(gym.Env):
    """Episodes of `length` steps (0: endless). Samples are seen, and nothing is paid, unless a subclass
    says otherwise."""

    length = 5
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def see(self):
        return self.observation_space.sample()

    def pay(self, action):
        return 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.see(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        reward = float(self.pay(action))
        self.t += 1
        return self.see(), reward, False, self.t == self.length, {}


class Sampled(Episodes):
    """Of any spaces."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-2, 2, (2,))


class Colours(Sampled):
    """An image, channels last, and a Discrete, in a Tuple."""

    def __init__(self):
        image = spaces.Box(0, 255, (40, 48, 3), np.uint8)
        super().__init__(spaces.Discrete(2), spaces.Tuple([image, spaces.Discrete(3)]))

    def pay(self, action):
        return action


class Signs(Episodes):
    """An image is bright or dark, a number 1 or -1; an action must say both, and is paid up to 1."""

    length = 8
    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (36, 40, 1), np.uint8), vector=spaces.Box(-1, 1, (1,))
    )
    action_space = spaces.MultiDiscrete([2, 2])

    def see(self):
        self.signs = self.np_random.integers(2, size=2)
        image = self.np_random.integers(0, 128, (36, 40, 1)) + 127 * self.signs[0]
        return {"image": np.uint8(image), "vector": np.float32(2 * self.signs[1:] - 1)}

    def pay(self, action):
        return 1 - np.abs(action - self.signs).mean()


class BoxSigns(Signs):
    action_space = spaces.Box(-1, 1, (2,))

    def pay(self, action):
        return super().pay((action + 1) / 2)


class InPlace(Episodes):
    """It pays what was played, and then writes into it."""

    length = 10
    action_space = spaces.Box(-1, 1, (1,))

    def see(self):
        return np.full(2, self.t / 10, np.float32)

    def pay(self, action):
        reward = action[0].item()
        action *= 10
        return reward


class Globals(Episodes):
    """Draws from generators that a whole process shares."""

    length = 10

    def see(self):
        self.obs = np.float32([np.random.uniform(-1, 1), random.uniform(-1, 1)])
        return self.obs

    def pay(self, action):
        return self.obs[0] * np.mean(action)


class BoxGlobals(Globals):
    action_space = spaces.Box(-1, 1, (1,))


class Endless(Episodes):
    length = 0

    def pay(self, action):
        return 1


class Masked(gym.Env):
    """Observations and masks at random, episodes that end at random; an illegal action is an error.

    masks: "always" sends an action_mask at every step, "step" never at a reset, "sometimes" at half
    of the steps, "ones" always one that allows everything. A mask allows one choice of each
    component at least, but none at an episode's last step.
    """

    def __init__(self, masks="always", components=()):
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(3, start=-1)
        if components:
            starts = [*range(len(components))]
            self.action_space = spaces.MultiDiscrete(components, start=starts)
        self.masks = masks
        self.nvec, self.start = driver.choices(self.action_space), self.action_space.start

    def info(self, at_reset: bool, ended: bool) -> dict:
        legal = [self.np_random.random(n) < 0.4 for n in self.nvec]
        for mask in legal:
            mask[self.np_random.integers(len(mask))] = True
            mask[:] = self.masks == "ones" or mask.any() and mask & (not ended)
        sometimes = self.np_random.random() < 0.5
        self.legal = None
        if (self.masks == "step" and at_reset) or (self.masks == "sometimes" and sometimes):
            return {}
        self.legal = legal
        sent = [mask.astype(np.int8) for mask in legal]
        return {"action_mask": sent[0] if len(sent) == 1 else tuple(sent)}

    def observe(self):
        return (self.np_random.integers(-8, 9, 3) / 8).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), self.info(True, False)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.legal is not None:
            chosen = np.ravel(action - self.start)
            assert all(mask[c] for mask, c in zip(self.legal, chosen)), f"{action} is illegal"
        reward = float(self.np_random.integers(-4, 5))
        ended = bool(self.np_random.random() < 0.15)
        return self.observe(), reward, ended, False, self.info(False, ended)


for env in Colours, Signs, BoxSigns, InPlace, Globals, BoxGlobals, Endless, Masked:
    gym.register(f"{env.__name__}-v0", env, disable_env_checker=True)


def sampled(*spaces) -> str:
    """The id of a newly registered Sampled of these spaces."""
    env_id = f"Sampled{sum(name.startswith('Sampled') for name in gym.registry)}-v0"
    gym.register(env_id, lambda: Sampled(*spaces), disable_env_checker=True)
    return env_id
