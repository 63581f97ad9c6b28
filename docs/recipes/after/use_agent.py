"""A trained agent in your own program: actions, distributions, values, its memory.

    python docs/recipes/after/use_agent.py runs/RUN  # plays an episode

RUN is a run of any script, with its recipes. In your program:

    sys.path.append("docs/recipes/after")
    from use_agent import Policy
    policy = Policy("runs/RUN")
    action = policy.act(obs, info)  # deterministic=False samples
    policy.probabilities(obs)       # (N, A); of real numbers means and standard deviations
    policy.density(obs, action), policy.value(obs)  # these three leave the memory as it is
    policy.agent.state_dict(), policy.state         # all weights by name; the memory

obs is what your environment returns, a Dict or an image, too: one observation, or a batch. info is
what came with it, and matters if it has an action mask. The agent remembers from call to call;
`reset` empties its memory, and so does `final` after an observation that is an episode's last.
Environments of policy.script.make_envs return rows (N, n), already flat and transformed: those are
for policy.agent.predict, and for `look`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from torch.distributions import Categorical, Independent, Normal

sys.path.append(str(Path(__file__).resolve().parent.parent))
import use as driver


def flattened(space, obs) -> tuple[np.ndarray, bool]:
    """An observation of a space, or a batch, or a list -> rows (N, n), and whether it was one."""
    if isinstance(space, spaces.Box):
        obs = np.asarray(obs)
        return obs.reshape(-1, spaces.flatdim(space)), obs.shape == space.shape
    one = space.contains(obs)
    many = [obs] if one else obs
    if not isinstance(many, list):
        leaf = obs
        while isinstance(leaf, (dict, tuple)):
            leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
        batch = batch_space(space, len(leaf) if np.ndim(leaf) else 1)
        if not batch.contains(obs):
            raise ValueError(f"obs is neither an observation of {space} nor a batch of them")
        many = list(iterate(batch, obs))
    return np.stack([spaces.flatten(space, x) for x in many]), one


@torch.inference_mode()
def look(script, agent, obs, state=None):
    """Rows (N, n) as predict takes them, the memory's state -> the distribution of actions, counted
    from 0 or before they are clipped, and the values (N,)."""
    dtype = torch.uint8 if script.kind == "rppo_gru_atari" else torch.float32
    x = torch.as_tensor(obs, dtype=dtype, device=agent.actor.weight.device)
    state = agent.initial_state(len(x)) if state is None else state
    out, *value, _ = agent.step(x, state)
    if not hasattr(agent, "policy"):  # out is log-probabilities, of K components if (N, K, A)
        policy = Categorical(logits=out, validate_args=False)
        return (policy if out.dim() == 2 else Independent(policy, 1)), value[0]
    if script.kind == "ppo1_mpi":
        value = [agent.value(value[0])]
    if script.kind == "trpo":  # the critic reads observations, and h if that is a memory's
        seen = [agent.normalize(x), out][: 2 - (agent.args.memory == "none")]
        value = [agent.critic(torch.cat(seen, -1)).squeeze(-1)]
    return agent.policy(out), value[0]


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

    def rows(self, obs, info=None, final=None):
        """Raw observations -> rows (N, n) as predict takes them, and whether it was one."""
        if self.script.kind == "rppo_gru_atari":
            obs = np.asarray(obs)
            return obs.reshape(-1, *obs.shape[-3:]), obs.ndim == 3
        rows, one = flattened(self.space, obs)
        if getattr(self.args, "mask_velocity", False):
            name = self.args.env_id.split("-")[0].removesuffix("Continuous")
            hidden = np.isin(np.arange(rows.shape[-1]), self.script.VELOCITIES[name])
            rows = np.where(hidden, 0, rows)
        if "images" in self.script.recipes:
            rows = self.envs.transformed(rows)
        if "action_masks" in self.script.recipes:
            info = dict(info or {})
            if one and "action_mask" in info:
                info["action_mask"] = [info["action_mask"]]
            final = np.zeros(len(rows), bool) if final is None else np.asarray(final).reshape(-1)
            rows, _ = self.envs.join(rows, info, final)
        return np.float32(rows), one

    def act(self, obs, info=None, final=None, deterministic=True):
        rows, one = self.rows(obs, info, final)
        final = None if final is None else np.asarray(final).reshape(-1)
        actions, self.state = self.agent.predict(rows, self.state, final, deterministic)
        return actions[0] if one else actions

    def look(self, obs, info=None):
        """The distribution of actions, and the values (N,); the memory is left as it is."""
        return look(self.script, self.agent, self.rows(obs, info)[0], self.state)

    def probabilities(self, obs, info=None):
        """(N, A), or (N, K, A) of K choices; of real numbers the means and the standard deviations,
        (N, K) each, before they are clipped or squashed."""
        policy = self.look(obs, info)[0]
        base = policy.base_dist if isinstance(policy, Independent) else policy
        if isinstance(base, Normal):
            return base.mean.numpy(), base.stddev.numpy()
        return base.probs.numpy()

    def density(self, obs, actions, info=None):
        """(N,): the probability of choices, the density of real numbers."""
        policy, value = self.look(obs, info)
        counted = np.asarray(actions) - getattr(self.action_space, "start", 0)
        taken = value.new_tensor(counted).reshape(-1, *policy.event_shape)
        stretch = 1.0
        if getattr(self.args, "squash_output", False):
            taken = driver.recipe("squash").before_tanh(taken, self.action_space)
            stretch = np.prod((self.action_space.high - self.action_space.low) / 2)
        return policy.log_prob(taken).exp().numpy() / stretch

    def value(self, obs, info=None):
        return self.look(obs, info)[1].numpy()


if __name__ == "__main__":
    with driver.one_line_errors(__doc__):
        script, args, envs, agent, _ = driver.open_run(" ".join(sys.argv[1:]))
    obs, _ = envs.reset(seed=script.env_seed(args.seed, script.EVALUATION))
    state = None
    done = np.zeros(1, bool)
    while not done[0]:
        action, state = agent.predict(obs, state)
        obs, _, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
    policy, value = look(script, agent, obs, state)
    print(f"return {info['run_statistics']['r'][0]:.5g}; of the last observation: {policy}")
