"""A step limit for evaluations: an episode that is cut counts with the return it has by then.

    python docs/recipes/use.py rppo_lstm eval_limit --eval-steps 1000 --env-id my_module:Endless-v0

An evaluation waits for its episodes' ends, which an environment without a time limit may never
reach. Give it a limit where you register it, if you can: then training sees it, too.
"""

from dataclasses import dataclass

import numpy as np
import use as driver


class Limit(driver.Wrapper):
    """For the first episode of each environment."""

    def __init__(self, envs, limit):
        super().__init__(envs)
        self.limit = limit

    def reset(self, **options):
        self.steps = 0
        return self.env.reset(**options)

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.steps += 1
        cut = (self.steps == self.limit) & ~(terminated | truncated)
        if cut.any():
            inner = info.get("run_statistics", {}).get("r", np.zeros(self.num_envs))
            info["run_statistics"] = {"r": np.where(cut, self.env.episode_returns, inner)}
        return obs, rewards, terminated, truncated | cut, info


def use(script):
    evaluate = script.evaluate

    @dataclass
    class Args(script.Args):
        eval_steps: int = 0  # steps after which an evaluation's episode is cut; 0: never

    def for_evaluation(envs, args):  # also where use.open_run opens a run
        return Limit(envs, args.eval_steps) if args.eval_steps else envs

    def limited(agent, envs, *others, **options):
        return evaluate(agent, for_evaluation(envs, agent.args), *others, **options)

    script.Args = Args
    script.for_evaluation = for_evaluation
    script.evaluate = limited
