"""Callbacks, after an iteration: stop at a return, checkpoints, histograms, films, silence.

    python docs/recipes/use.py rppo_lstm callbacks --stop-at-return 475 --env-id CartPole-v1
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi callbacks --checkpoint-every 50000
    python docs/recipes/use.py rppo_lstm callbacks --film-every 20000 --quiet

A subclass of Run is this project's callback: `log` is called at the end of each iteration, in every
process. A decision to stop must be the same in all of them, so the first one decides. A numbered
checkpoint can be played or resumed like a run: --play runs/RUN/checkpoints/50176. --stop-at-return
looks at the training episodes; the recipe keep_best can stop by evaluations.
"""

import shutil
from dataclasses import dataclass
from functools import partial

import numpy as np
import use as driver
from gymnasium.wrappers.vector import RecordVideo


def use(script):
    driver.knobs(script)
    bar = script.tqdm

    @dataclass
    class Args(script.Args):
        stop_at_return: float = np.inf  # training ends at this mean return of 100 episodes
        checkpoint_every: int = 0  # steps from one numbered checkpoint to the next; 0: none
        histograms_every: int = 0  # steps from one histogram of all weights to the next; 0: none
        film_every: int = 0  # steps from one film of an episode, in RUN/films, to the next; 0: none
        quiet: bool = False  # no progress bar

    class Watched(script.Run):
        def __init__(self, args, *inputs):
            script.tqdm = partial(bar, disable=True) if args.quiet else bar
            super().__init__(args, *inputs)
            self.before = self.step

        def log(self, *inputs):
            super().log(*inputs)
            if driver.is_first(script):
                self.watch()
            full = len(self.returns) == 100
            reached = full and np.mean(self.returns) >= self.args.stop_at_return
            if driver.of_first(script, bool(reached)):
                driver.stop(script, self, "--stop-at-return", self.args.stop_at_return)
            self.before = self.step

        def passed(self, every):
            """Is there a multiple of it since the last iteration?"""
            return every > 0 and self.step // every > self.before // every

        def watch(self):
            if self.passed(self.args.checkpoint_every):
                self.save()
                folder = self.dir / "checkpoints" / str(self.step)
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.dir / "agent.pt", folder)
            if self.passed(self.args.histograms_every):
                for name, weights in self.agent.named_parameters():
                    self.writer.add_histogram(name, weights.detach(), self.step)
            if self.passed(self.args.film_every):
                with driver.same_random_numbers():
                    envs = driver.evaluation_envs(script, self.args, 1, "rgb_array")
                    films = RecordVideo(envs, str(self.dir / "films" / str(self.step)))
                    seed = script.env_seed(self.args.seed, script.EVALUATION, self.step)
                    script.evaluate(self.agent, films, seed, self.args.deterministic)

    script.Args = Args
    script.Run = Watched
