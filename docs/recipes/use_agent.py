"""A trained agent in your own program: actions, probabilities, densities, values, its memory.

    python docs/recipes/use_agent.py runs/RUN  # plays an episode, and says what the agent thinks

RUN is a run of any script, with its recipes. An observation may be one or a batch, as the
environment returns it (a Dict, too) or flat. The agent remembers from call to call; `reset`, or
`final` for those that are an episode's last, empties its memory. In your program:

    from use_agent import Policy
    policy = Policy("runs/RUN")
    action = policy.act(obs)                     # deterministic=False samples
    policy.probabilities(obs)                    # (K, A); of real numbers: means and deviations
    policy.density(obs, action), policy.value(obs)  # these three leave the memory as it is
    policy.agent.state_dict(), policy.state      # all weights by name; the memory
"""

import sys

import numpy as np
import torch
import use as driver
from gymnasium import spaces
from torch.distributions import Categorical, Independent, Normal


class Policy:
    def __init__(self, run_dir):
        self.script, self.args, self.envs, self.agent, _ = driver.open_run(run_dir)
        history = {"frame_stack", "previous_action"} & {*self.script.recipes}
        known = not history and getattr(self.args, "image_stack", 1) == 1
        self.script.check(known, "use_agent: an agent that sees earlier steps, too; use predict")
        self.space = self.envs.unwrapped.single_observation_space
        self.action_space = self.agent.action_space
        self.state = None

    def reset(self):
        self.state = None

    def rows(self, obs):
        """One observation or many, raw or flat -> (N, n) as predict takes them, and whether it
        was one."""
        if self.script.__name__ == "rppo_gru_atari":
            obs = np.asarray(obs)
            return obs.reshape(-1, *obs.shape[-3:]), obs.ndim == 3
        n = spaces.flatdim(self.space)
        if isinstance(obs, list):
            rows, one = np.stack([spaces.flatten(self.space, x) for x in obs]), False
        elif isinstance(obs, (dict, tuple)) or not isinstance(self.space, spaces.Box):
            flat = isinstance(obs, np.ndarray) and obs.shape[-1:] == (n,)
            rows = obs if flat else spaces.flatten(self.space, obs)
            one = np.ndim(rows) == 1
        else:
            one = np.shape(obs) in (self.space.shape, (n,))
            rows = np.asarray(obs)
        rows = np.float32(rows).reshape(-1, n)
        if getattr(self.args, "mask_velocity", False):
            name = self.args.env_id.split("-")[0].removesuffix("Continuous")
            rows = np.where(np.isin(np.arange(n), self.script.VELOCITIES[name]), 0, rows)
        if "image_frames" in self.script.recipes:
            rows = self.envs.flat(rows)
        return np.float32(rows), one

    def act(self, obs, info=None, final=None, deterministic=True):
        rows, one = self.rows(obs)
        actions, self.state = self.agent.predict(rows, info, self.state, final, deterministic)
        return actions[0] if one else actions

    @torch.inference_mode()
    def look(self, obs, info=None):
        """The distribution of actions (N, K) and the values (N,), the memory left as it is."""
        agent, script = self.agent, self.script
        rows, _ = self.rows(obs)
        rows, state, final = script.check_inputs(agent, rows, self.state, None)
        x = torch.as_tensor(rows)
        legal = []
        if hasattr(agent, "exists"):
            legal = [torch.as_tensor(script.legal_choices(agent.exists, info or {}, final))]
        if not hasattr(agent, "act"):
            logp, value, _ = agent.step(x, *legal, state)
            return Independent(Categorical(logits=logp), 1), value
        h, *value, _ = agent.step(x, state)
        if script.__name__ == "trpo":
            seen = [agent.normalize(x), h] if self.args.memory == "lstm" else [agent.normalize(x)]
            value = [agent.critic(torch.cat(seen, -1)).squeeze(-1)]
        elif script.__name__ == "ppo1_mpi" and self.args.memory == "none":
            value = [agent.critic(agent.critic_encoder(agent.normalize(x))).squeeze(-1)]
        if hasattr(agent, "policy"):
            return agent.policy(h, *legal), value[0]
        if agent.box:
            return Independent(Normal(agent.actor(h), agent.log_std.exp()), 1), value[0]
        return Independent(Categorical(logits=agent.log_probs(h, *legal)), 1), value[0]

    def probabilities(self, obs, info=None):
        """(N, K, A) of each choice; of real numbers the means and the standard deviations, (N, K)
        each."""
        base = self.look(obs, info)[0].base_dist
        if isinstance(base, Normal):
            return base.mean.numpy(), base.stddev.numpy()
        return base.probs.numpy()

    def density(self, obs, actions, info=None):
        """(N,): the probability of choices, the density of real numbers."""
        first = getattr(self.action_space, "start", 0)
        distribution, value = self.look(obs, info)
        actions = torch.as_tensor(np.asarray(actions) - first).reshape(len(value), -1)
        return distribution.log_prob(actions).exp().numpy()

    def value(self, obs, info=None):
        return self.look(obs, info)[1].numpy()


def main(run_dir: str) -> None:
    policy = Policy(run_dir)
    env = policy.envs
    obs, info = env.reset(seed=policy.args.seed)
    total = steps = 0
    done = False
    while not done:
        if steps < 5:
            print(f"value {policy.value(obs)[0]:.3f}, probabilities {policy.probabilities(obs)}")
        obs, reward, terminated, truncated, info = env.step(policy.act(obs, info))
        total += reward[0]
        steps += 1
        done = (terminated | truncated)[0]
    print(f"return {total:.5g} in {steps} steps")


if __name__ == "__main__":
    try:
        main(" ".join(sys.argv[1:]))
    except ValueError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
