"""EnvPool: Gymnasium's tasks in C++, all environments in one call.

    pip install -c constraints.txt ".[envpool]"  # some 700 MB
    python docs/recipes/use.py rppo_continuous envpool_tasks --env-id Pendulum-v1
    python docs/recipes/use.py trpo envpool_tasks --env-id HalfCheetah-v5

Weng et al. 2022, arXiv:2206.10558. Tasks have Gymnasium's names; --env-kwargs are EnvPool's, such as
'{"num_threads": 4}'. Since version 1.2 it resets as Gymnasium does: an episode's last observation is
a time step of its own. --play in a window or into a video plays in Gymnasium, without them. Most of
a training's time goes into learning: on one core rppo_continuous became 1.16 times as fast on
Pendulum and 1.17 times on HalfCheetah, rppo_lstm with minigrid_memory 1.57 times
(benchmarks/memories.py speed).

minigrid_memory cuts its 3 x 3 cells out of EnvPool's 7 x 7. Don't ask for agent_view_size=3: it writes
where it mustn't, and crashes later.
"""

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
from gymnasium.vector.utils import batch_space


class Pool(gym.vector.VectorWrapper):
    """Seeds are fixed when a pool is made, so reset makes a new one."""

    def __init__(self, make, num_envs, **options):
        self.make = partial(make, num_envs=num_envs, **{"num_threads": 1, **options})
        super().__init__(self.make())
        # What EnvPool calls the space of all environments is that of one.
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.env.close()
            self.env = self.make(seed=seed)
        return self.env.reset(options=options)


def use(script):
    script.check(script.kind != "rppo_gru_atari", "envpool_tasks: ale_py's games are C++, too")
    import envpool

    def make_vec(env_id, num_envs, mode=None, **options):
        if "render_mode" in options:
            return gym.make_vec(env_id, num_envs, mode, render_mode=options["render_mode"])
        known = env_id in envpool.list_all_envs()
        script.check(known, f"--env-id {env_id}: EnvPool has no such task")
        return Pool(partial(envpool.make_gymnasium, env_id), num_envs, **options)

    script.gym = SimpleNamespace(**{**vars(gym), "make_vec": make_vec})  # what make_envs calls
