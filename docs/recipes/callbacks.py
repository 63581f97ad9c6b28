"""What happens after an iteration: stop at a return, checkpoints, a CSV file, histograms, silence.

    python docs/recipes/callbacks.py --stop-at-return 475 --csv --env-id CartPole-v1
    mpiexec -n 2 python docs/recipes/callbacks.py ppo1_mpi --checkpoint-every 50000
    torchrun --nproc-per-node 2 docs/recipes/callbacks.py rppo_gru_atari --log-every 10 --quiet

A subclass of Run is this project's callback: `log` is called at the end of each iteration, in every
process. Whatever decides there must decide alike in all of them, as the first one does. A
checkpoint is a run of its own to --play or to --resume: runs/RUN/checkpoints/50176.
"""

import csv
import shutil
from dataclasses import dataclass

import numpy as np
import use as driver


class Row:
    """A SummaryWriter that remembers the last scalars, and is silent where log_every says so."""

    def __init__(self, writer):
        self.writer = writer
        self.scalars: dict[str, float] = {}
        self.silent = False

    def __getattr__(self, name):
        return getattr(self.writer, name)

    def add_scalar(self, name, scalar, step):
        if not self.silent:
            self.scalars[name] = float(scalar)
            self.writer.add_scalar(name, scalar, step)


def use(script):
    bar = script.tqdm

    @dataclass
    class Args(script.Args):
        stop_at_return: float = -np.inf  # end where the mean of 100 episodes is so high; -inf: no
        checkpoint_every: int = 0  # steps from one numbered checkpoint to the next; 0: none
        histograms_every: int = 0  # steps from one histogram of all weights to the next; 0: none
        log_every: int = 1  # iterations from one row of scalars to the next
        csv: bool = False  # the scalars go into RUN/progress.csv, too
        quiet: bool = False  # no progress bars

    def no_bar(*inputs, **options):
        return bar(*inputs, **{**options, "disable": True})

    class Watched(script.Run):
        def __init__(self, args, *inputs):
            script.tqdm = no_bar if args.quiet else bar
            super().__init__(args, *inputs)
            if driver.is_first(script):
                self.writer = Row(self.writer)

        def log(self, *inputs):
            before = self.step
            first = driver.is_first(script)
            if first:
                self.writer.silent = (len(self.timed) + 1) % self.args.log_every > 0
                self.writer.scalars.clear()
            super().log(*inputs)
            if first and self.passed(before, self.args.checkpoint_every):
                self.save()
                folder = self.dir / "checkpoints" / str(self.step)
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.dir / "agent.pt", folder)
            if first and self.passed(before, self.args.histograms_every):
                for name, weights in self.agent.named_parameters():
                    self.writer.add_histogram(name, weights.detach(), self.step)
            if first and self.args.csv and self.writer.scalars:
                self.write()
            full = len(self.returns) == 100 and self.args.stop_at_return > -np.inf
            reached = full and np.mean(self.returns) >= self.args.stop_at_return
            if driver.of_first(script, bool(reached)):
                self.args.total_timesteps = self.step

        def passed(self, before, every):
            """Is there a multiple of it since the step before?"""
            return every > 0 and self.step // every > before // every

        def write(self):
            losses = *script.LOSSES, "explained_variance", "clipfrac"  # of the recipe diagnostics
            charts = "learning_rate", "SPS", "episodic_return", "episodic_length", "eval_return"
            columns = [f"losses/{name}" for name in losses] + [f"charts/{name}" for name in charts]
            with open(self.dir / "progress.csv", "a", newline="") as file:
                rows = csv.DictWriter(file, ["step", *columns], restval="", extrasaction="ignore")
                if file.tell() == 0:
                    rows.writeheader()
                rows.writerow({"step": self.step, **self.writer.scalars})

    script.Args = Args
    script.Run = Watched


if __name__ == "__main__":
    driver.main("callbacks")
