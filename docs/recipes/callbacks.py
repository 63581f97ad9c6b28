"""What happens after an iteration: stop at a return, numbered checkpoints, histograms, silence.

    python docs/recipes/callbacks.py --stop-at-return 475 --csv --env-id CartPole-v1
    mpiexec -n 2 python docs/recipes/callbacks.py ppo1_mpi --checkpoint-every 50000
    torchrun --nproc-per-node 2 docs/recipes/callbacks.py rppo_gru_atari --log-every 10 --quiet

A subclass of Run is this project's callback: `log` is called at the end of each iteration, in every
process. A decision to stop must be the same in all of them, so the first one decides. A numbered
checkpoint can be played or resumed like a run: --play runs/RUN/checkpoints/50176. The recipe
scalars comes along, with --csv and --log-every.
"""

import shutil
from dataclasses import dataclass

import numpy as np
import use as driver


def use(script):
    driver.add(script, "scalars")
    bar, evaluate = script.tqdm, script.evaluate

    @dataclass
    class Args(script.Args):
        stop_at_return: float = -np.inf  # mean return of 100 episodes at which to stop; -inf: never
        checkpoint_every: int = 0  # steps from one numbered checkpoint to the next; 0: none
        histograms_every: int = 0  # steps from one histogram of all weights to the next; 0: none
        quiet: bool = False  # no progress bars

    def no_bar(*inputs, **options):
        return bar(*inputs, **{**options, "disable": True})

    def quietly(agent, *inputs, **options):
        script.tqdm = no_bar if agent.args.quiet else bar
        return evaluate(agent, *inputs, **options)

    class Watched(script.Run):
        def __init__(self, args, *inputs):
            script.tqdm = no_bar if args.quiet else bar
            super().__init__(args, *inputs)

        def log(self, *inputs):
            before = self.step
            super().log(*inputs)
            first = driver.is_first(script)
            if first and self.passed(before, self.args.checkpoint_every):
                self.save()
                folder = self.dir / "checkpoints" / str(self.step)
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.dir / "agent.pt", folder)
            if first and self.passed(before, self.args.histograms_every):
                for name, weights in self.agent.named_parameters():
                    self.writer.add_histogram(name, weights.detach(), self.step)
            full = len(self.returns) == 100 and self.args.stop_at_return > -np.inf
            reached = full and np.mean(self.returns) >= self.args.stop_at_return
            if driver.of_first(script, bool(reached)):
                self.args.total_timesteps = self.step

        def passed(self, before, every):
            """Is there a multiple of it since the step before?"""
            return every > 0 and self.step // every > before // every

    script.Args = Args
    script.Run = Watched
    script.evaluate = quietly


if __name__ == "__main__":
    driver.main("callbacks")
