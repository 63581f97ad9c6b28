"""Evaluating during training: keep the best agent, or stop when one is good enough.

    python docs/recipes/use.py rppo_lstm keep_best --env-id CartPole-v1 --mask-velocity \\
        --eval-every 20000 --stop-at-eval 475
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi keep_best --env-id CartPole-v1
    python docs/recipes/use.py --play runs/RUN/best --render video

Every --eval-every environment steps the agent plays --eval-episodes episodes, whose mean return
goes to TensorBoard as charts/eval_return. They are the same episodes each time, but not those of
the evaluation at the end. The best agent is kept in the run's directory under best/. Of several
processes the first does so, and the others wait for it. Learning is not touched: the run ends with
the same weights as one without this recipe.
"""

import os
import shutil
import time
from dataclasses import dataclass

import numpy as np
import use as driver


def do_nothing():
    pass


def use(script):
    driver.knobs(script)

    @dataclass
    class Args(script.Args):
        eval_every: int = 20_000  # environment steps from one evaluation to the next
        stop_at_eval: float = np.inf  # training ends at this mean return of an evaluation

    class KeepBest(script.Run):
        def __init__(self, args, *inputs):
            script.check(args.eval_every > 0, "--eval-every: must be positive")
            script.check(args.eval_episodes > 0, "--eval-episodes 0: no return to choose by")
            super().__init__(args, *inputs)
            self.eval_envs = None
            self.evaluated = self.step // args.eval_every

        def log(self, *inputs):
            super().log(*inputs)
            if self.step // self.args.eval_every == self.evaluated:
                return
            self.evaluated = self.step // self.args.eval_every
            began = time.perf_counter()
            score = self.evaluate() if driver.is_first(script) else None
            if driver.of_first(script, score) >= self.args.stop_at_eval:
                driver.stop(script, self, "--stop-at-eval", self.args.stop_at_eval)
            self.began += time.perf_counter() - began  # so that charts/SPS is of training

        def evaluate(self) -> float:
            """The mean return; keeps the best so far, that of a resumed run included."""
            with driver.same_random_numbers():
                if self.eval_envs is None:
                    n = self.args.eval_episodes
                    self.eval_envs = driver.evaluation_envs(script, self.args, n)
                    # None is ever closed: closing one may end pygame for a whole process.
                    self.eval_envs.close = do_nothing
                    for env in getattr(self.eval_envs.unwrapped, "envs", []):
                        env.close = do_nothing
                seed = script.env_seed(self.args.seed, script.EVALUATION, 1)
                inputs = self.agent, self.eval_envs, seed, self.args.deterministic
                score = float(np.mean(script.evaluate(*inputs)))
            self.writer.add_scalar("charts/eval_return", score, self.step)
            self.save()
            file = self.dir / "best" / "return.txt"
            if score > float(file.read_text() if file.exists() else "-inf"):
                file.parent.mkdir(exist_ok=True)
                shutil.copy(self.dir / "agent.pt", file.with_name("agent.tmp"))
                os.replace(file.with_name("agent.tmp"), file.with_name("agent.pt"))
                file.write_text(str(score))
            return score

    script.Args = Args
    script.Run = KeepBest
