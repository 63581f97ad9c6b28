"""What the tests of recipes share: a script with recipes as a module of its own, and short runs."""

import json
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
STEPS = {"rppo_gru_atari": 16}


def needs(script: str) -> None:
    """Skips a test without the packages of a script."""
    pytest.importorskip({"rppo_gru_atari": "ale_py", "ppo1_mpi": "mpi4py"}.get(script, "torch"))


def run(script, tmp_path, **flags):
    """A short run of a script with recipes -> its agent, its directory."""
    name = script.kind
    small = {"total_timesteps": STEPS.get(name, 150), "eval_episodes": 2, **SMALL[name]}
    if name == "rppo_gru_atari":
        small["eval_episodes"] = 0
    small |= {"runs_dir": str(tmp_path), "run_name": f"run{len([*tmp_path.iterdir()])}"}
    args = script.Args(**{**small, **flags})
    agent = script.train(args)
    return agent, tmp_path / args.run_name


def reopened(run_dir):
    """A run from its file alone; its agent plays the episodes that it played after training."""
    script, args, envs, agent, saved = driver.open_run(run_dir)
    if args.eval_episodes and script.kind != "rppo_gru_atari":  # whose games are long
        played = json.loads((run_dir / "result.json").read_text())["returns"]
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


class Signs(gym.Env):
    """An image is bright or dark, a number 1 or -1; an action must say both. Episodes have 8 steps,
    which give up to 1 each."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (36, 40, 1), np.uint8), vector=spaces.Box(-1, 1, (1,))
    )
    action_space, box = spaces.MultiDiscrete([2, 2]), False

    def observe(self):
        self.signs = self.np_random.integers(2, size=2)
        image = self.np_random.integers(0, 128, (36, 40, 1)) + 127 * self.signs[0]
        return {"image": np.uint8(image), "vector": np.float32(2 * self.signs[1:] - 1)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        said = (np.clip(action, -1, 1) + 1) / 2 if self.box else action
        self.steps += 1
        reward = float(1 - np.abs(said - self.signs).mean())
        return self.observe(), reward, False, self.steps == 8, {}


class BoxSigns(Signs):
    action_space, box = spaces.Box(-1, 1, (2,)), True


class Colours(gym.Env):
    """A random image, channels last, and a Discrete, in a Tuple; episodes of 5 steps."""

    observation_space = spaces.Tuple(
        [spaces.Box(0, 255, (40, 48, 3), np.uint8), spaces.Discrete(3)]
    )
    action_space = spaces.Discrete(2)

    def observe(self):
        image = self.np_random.integers(0, 256, (40, 48, 3), np.uint8)
        return image, self.np_random.integers(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), float(action), False, self.steps == 5, {}


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


class InPlace(gym.Env):
    """Ten steps; it pays what was played, and then writes into it."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        reward = float(action[0])
        action *= 10
        self.t += 1
        return np.full(2, self.t / 10, np.float32), reward, False, self.t == 10, {}


class Still(gym.Env):
    """Episodes of five steps in which nothing happens, with actions of any space."""

    def __init__(self, space):
        self.observation_space, self.action_space = spaces.Box(-9, 9, (2,)), space

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return np.zeros(2, np.float32), 0.0, False, self.t == 5, {}


def still(space) -> str:
    """The id of a newly registered Still."""
    env_id = f"Still{sum(name.startswith('Still') for name in gym.registry)}-v0"
    gym.register(env_id, lambda: Still(space), disable_env_checker=True)
    return env_id


ENVS = {
    "Signs": Signs, "BoxSigns": BoxSigns, "Colours": Colours, "Masked": Masked, "InPlace": InPlace,
}  # fmt: skip
for name, env in ENVS.items():
    if f"{name}-v0" not in gym.registry:
        gym.register(f"{name}-v0", env, disable_env_checker=True)
