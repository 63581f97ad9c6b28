"""A trained agent in your own program: actions, probabilities, densities, values, its memory.

    python docs/recipes/use_agent.py runs/RUN  # plays an episode

RUN is a run of any script, with its recipes. An observation may be one or a batch, as the
environment returns it (a Dict, too) or flat; info is what came with it. The agent remembers from
call to call. `reset` empties its memory, and so does `final` where an observation is an episode's
last. In your program:

    from use_agent import Policy
    policy = Policy("runs/RUN")
    action = policy.act(obs)  # deterministic=False samples
    policy.probabilities(obs)  # (N, K, A); for a Box: means and standard deviations
    policy.density(obs, action), policy.value(obs)  # these three leave the memory as it is
    policy.agent.state_dict(), policy.state  # all weights by name; the memory
"""

import sys

import numpy as np
import use as driver
from distributions import flattened, look
from squash import before_tanh
from torch.distributions import Normal


class Policy:
    def __init__(self, run_dir):
        self.script, self.args, self.envs, self.agent, _ = driver.open_run(run_dir)
        history = {"frame_stack", "previous_action"} & {*self.script.recipes}
        known = not history and getattr(self.args, "image_stack", 1) == 1
        self.script.check(known, "use_agent: this agent also sees earlier steps; use predict")
        self.space = self.envs.unwrapped.single_observation_space
        self.action_space = self.agent.action_space
        self.state = None

    def reset(self):
        self.state = None

    def inputs(self, obs, info):
        """One observation or a batch, raw or flat, or a list of raw ones, and its info -> both as
        predict takes them, obs (N, n), and whether it was one."""
        rows, one = self.rows(obs)
        if one and "action_mask" in (info or {}) and len(info["action_mask"]) > 1:
            info = {"action_mask": [info["action_mask"]]}
        return rows, info, one

    def rows(self, obs):
        """The observations as rows (N, n), and whether there was one."""
        if self.script.__name__ == "rppo_gru_atari":
            obs = np.asarray(obs)
            return obs.reshape(-1, *obs.shape[-3:]), obs.ndim == 3
        rows, one = flattened(self.space, obs)
        n = rows.shape[-1]
        if getattr(self.args, "mask_velocity", False):
            name = self.args.env_id.split("-")[0].removesuffix("Continuous")
            rows = np.where(np.isin(np.arange(n), self.script.VELOCITIES[name]), 0, rows)
        if "image_frames" in self.script.recipes:
            rows = self.envs.flat(rows)
        return np.float32(rows), one

    def act(self, obs, info=None, final=None, deterministic=True):
        rows, info, one = self.inputs(obs, info)
        actions, self.state = self.agent.predict(rows, info, self.state, final, deterministic)
        return actions[0] if one else actions

    def look(self, obs, info=None):
        """The distribution of actions (N, K) and the values (N,), the memory left as it is."""
        rows, info, _ = self.inputs(obs, info)
        return look(self.script, self.agent, rows, info, self.state)

    def probabilities(self, obs, info=None):
        """(N, K, A) of each choice; of real numbers the means and the standard deviations, (N, K)
        each, before they are clipped or squashed."""
        base = self.look(obs, info)[0].base_dist
        if isinstance(base, Normal):
            return base.mean.numpy(), base.stddev.numpy()
        return base.probs.numpy()

    def density(self, obs, actions, info=None):
        """(N,): the probability of choices, the density of real numbers."""
        first = getattr(self.action_space, "start", 0)
        policy, value = self.look(obs, info)
        actions = value.new_tensor(np.asarray(actions) - first).reshape(len(value), -1)
        stretch = 1.0
        if getattr(self.args, "squash_output", False):
            actions = before_tanh(actions, self.action_space)
            stretch = np.prod((self.action_space.high - self.action_space.low) / 2)
        return policy.log_prob(actions).exp().numpy() / stretch

    def value(self, obs, info=None):
        return self.look(obs, info)[1].numpy()


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        policy = Policy(" ".join(sys.argv[1:]))
        obs, info = policy.envs.reset(seed=policy.args.seed)
        done = [False]
        while not done[0]:
            obs, _, terminated, truncated, info = policy.envs.step(policy.act(obs, info))
            done = terminated | truncated
        print(f"return {info['run_statistics']['r'][0]:.5g}")
