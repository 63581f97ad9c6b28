"""Evaluating during training, and keeping the best agent.

    python docs/recipes/keep_best.py --env-id CartPole-v1 --mask-velocity --eval-every 20000
    mpiexec -n 2 python docs/recipes/keep_best.py ppo1_mpi --env-id CartPole-v1
    torchrun --nproc-per-node 2 docs/recipes/keep_best.py rppo_gru_atari
    python docs/recipes/use.py --play runs/RUN/best --render video

Every --eval-every environment steps the agent plays --eval-episodes episodes, whose mean return
goes to TensorBoard as charts/eval_return. The best agent is kept in the run's directory under
best/. Of several processes the first does so, and the others wait for it. Learning is not touched:
the run ends with the same weights as one without this recipe.
"""

import os
import shutil
import time
from dataclasses import dataclass

import numpy as np
import torch
import use as driver


def do_nothing():
    pass


def use(script):
    @dataclass
    class Args(script.Args):
        eval_every: int = 20_000  # environment steps from one evaluation to the next

    class KeepBest(script.Run):
        def __init__(self, args, *inputs):
            script.check(args.eval_episodes > 0, "--eval-episodes 0: no return to choose by")
            super().__init__(args, *inputs)
            self.eval_envs = None

        def log(self, *inputs):
            before = self.step // self.args.eval_every
            super().log(*inputs)
            if self.step // self.args.eval_every == before:
                return
            if driver.is_first(script):
                self.save()
                self.keep(self.dir / "best" / "return.txt")
            self.logged = time.time()  # so that charts/SPS is of training

        def keep(self, file):
            """Evaluates, and keeps the best so far, that of a resumed run included."""
            if self.eval_envs is None:
                more = [None, script.EVAL_FRAMES] if hasattr(script, "EVAL_FRAMES") else []
                self.eval_envs = script.make_envs(self.args, self.args.eval_episodes, *more)
                # None is ever closed: closing one may end pygame for a whole process.
                self.eval_envs.close = do_nothing
                for env in getattr(self.eval_envs.unwrapped, "envs", []):
                    env.close = do_nothing
            inputs = self.agent, self.eval_envs, self.args.seed, self.args.deterministic
            with torch.random.fork_rng(devices=[]):  # sampled actions take none of training's draws
                score = np.mean(script.evaluate(*inputs))
            self.writer.add_scalar("charts/eval_return", score, self.step)
            best = file.read_text() if file.exists() else ""
            if score > float(best or "-inf"):
                file.parent.mkdir(exist_ok=True)
                shutil.copy(self.dir / "agent.pt", file.with_name("agent.tmp"))
                os.replace(file.with_name("agent.tmp"), file.with_name("agent.pt"))
                file.write_text(str(score))

    script.Args = Args
    script.Run = KeepBest


if __name__ == "__main__":
    driver.main("keep_best")
