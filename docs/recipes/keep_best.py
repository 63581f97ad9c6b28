"""Evaluating during training, and keeping the best agent: a subclass of Run.

    python docs/recipes/keep_best.py --env-id CartPole-v1 --mask-velocity  # and other flags
    python rppo_lstm.py --play runs/RUN/best --capture-video

Every EVERY environment steps the agent plays --eval-episodes deterministic episodes, whose mean
goes to TensorBoard as charts/eval_return. The best agent is kept in the run's directory under
best/. Learning is not touched: the run ends with the same weights as one without this recipe.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import rppo_lstm

EVERY = 20_000


class KeepBest(rppo_lstm.Run):
    best = -np.inf

    def log(self, steps, names, losses):
        super().log(steps, names, losses)
        if self.step % EVERY < steps:  # a multiple of EVERY has just been passed
            envs = rppo_lstm.make_envs(self.args, 1)
            score = np.mean([*rppo_lstm.evaluate(self.agent, envs, self.args)])
            self.writer.add_scalar("charts/eval_return", score, self.step)
            if score > self.best:
                self.best = score
                self.save()
                (self.dir / "best").mkdir(exist_ok=True)
                shutil.copy(self.dir / "agent.pt", self.dir / "best")


if __name__ == "__main__":
    rppo_lstm.Run = KeepBest
    rppo_lstm.main()
