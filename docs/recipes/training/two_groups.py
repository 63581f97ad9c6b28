"""Two groups of games: while one plays on the CPU's cores, the agent acts in the other on the GPU.

    python docs/recipes/use.py rppo_gru_atari two_groups --env-id ALE/Pong-v5 --num-envs 64 --cuda

    games     group 0, step t    group 1, step t        group 0, step t + 1
    agent     group 1, step t    group 0, step t + 1    group 1, step t + 1

As Sample Factory's double-buffered sampling (Petrenko et al. 2020, arXiv:2006.11751), but no data are
older than without it: both groups play all T steps before the agent learns. Only the order differs in
which random numbers become actions. Where the same cores play and act there's nothing to gain; with a
GPU it isn't measured yet.
"""

from weakref import proxy

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import batch_space


def join(parts) -> tuple:
    """Of both groups what reset or step returns -> the same of all games."""
    *arrays, infos = zip(*parts)
    info = {name: np.concatenate([each[name] for each in infos]) for name in infos[0]}
    return *(np.concatenate(each) for each in arrays), info


class TwoGroups(gym.vector.VectorEnv):
    """Two vector environments of ale_py as one. An agent sends each group its actions itself."""

    def __init__(self, groups, num_steps: int):
        self.groups, self.num_steps = groups, num_steps
        self.size, self.num_envs = groups[0].num_envs, 2 * groups[0].num_envs
        self.metadata = groups[0].metadata
        self.single_observation_space = groups[0].single_observation_space
        self.single_action_space = groups[0].single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed=None, options=None):
        """Game i gets the seed plus i, as in one group."""
        self.t = 0
        self.final = np.zeros(self.num_envs, bool)
        return join([self.groups[i].reset(seed=seed + i * self.size) for i in range(2)])

    def step(self, actions):
        """While group 1 still plays, the agent acts in group 0, for the next step."""
        self.t += 1
        first = self.groups[0].recv()
        if self.t < self.num_steps:  # or it learns first
            self.act_in_first(first[0])
        obs, rewards, terminated, truncated, info = join([first, self.groups[1].recv()])
        self.final = terminated | truncated
        return obs, rewards, terminated, truncated, info


def use(script):
    script.check(script.kind == "rppo_gru_atari", "two_groups: only for ale_py's games")
    script.check("cuda_graphs" not in script.recipes, "two_groups: not with cuda_graphs")
    make_envs, sample = script.make_envs, script.sample

    def make_groups(args, num_envs, *options):
        if options or num_envs != args.num_envs:  # not for training
            return make_envs(args, num_envs, *options)
        script.check(num_envs % 2 == 0, f"--num-envs {num_envs}: must be even, for two groups")
        groups = [make_envs(args, num_envs // 2).unwrapped for _ in range(2)]
        envs = TwoGroups(groups, args.num_steps)
        return script.wrappers.RecordEpisodeStatistics(envs, stats_key="run_statistics")

    class Agent(script.Agent):
        def __init__(self, envs, args):
            super().__init__(envs, args)
            self.envs = None  # where all act at once
            if isinstance(envs.unwrapped, TwoGroups):
                self.envs = proxy(envs.unwrapped)  # train's, and freed with it
                self.envs.act_in_first = self.act_in_first

        def act(self, i, obs, state):
            """Acts in group i, which then plays on -> what step returns, and the actions."""
            log_pi, value, next_state = super().step(obs, state)
            actions = sample(log_pi)
            self.envs.groups[i].send(script.to_env(actions, self.action_space))
            return log_pi, value, next_state, actions

        @torch.inference_mode()
        def act_in_first(self, obs):
            obs = torch.as_tensor(obs, device=self.actor.weight.device)
            state = script.reset_state(self.first[2], self.envs.final[: self.envs.size])
            self.first = self.act(0, obs, state)

        def step(self, obs, state):
            envs = self.envs
            if envs is None:
                return super().step(obs, state)
            if envs.t == envs.num_steps:  # the value after the rollout; the next begins
                envs.t = 0
                return super().step(obs, state)
            n = envs.size
            if envs.t == 0:
                self.first = self.act(0, obs[:n], state[:, :n])
            both = zip(self.first, self.act(1, obs[n:], state[:, n:]))
            log_pi, value, next_state, actions = both
            log_pi = torch.cat(log_pi)
            log_pi.drawn = torch.cat(actions)  # for train's call of sample
            return log_pi, torch.cat(value), torch.cat(next_state, 1)

        def predict(self, *inputs, **options):
            envs, self.envs = self.envs, None
            try:
                return super().predict(*inputs, **options)
            finally:
                self.envs = envs

    script.make_envs, script.Agent = make_groups, Agent
    script.sample = lambda log_pi: log_pi.drawn if hasattr(log_pi, "drawn") else sample(log_pi)
