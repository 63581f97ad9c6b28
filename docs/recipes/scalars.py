"""What is logged, and how often: scalars every n iterations, and in a CSV file, too.

    python docs/recipes/scalars.py --csv --log-every 10 --env-id CartPole-v1
    mpiexec -n 2 python docs/recipes/scalars.py ppo1_mpi --csv

The file is runs/RUN/progress.csv. It has each step once, even where a run was killed and resumed.
The recipe callbacks brings this one along.
"""

import csv
from dataclasses import dataclass

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
        if not self.silent or name == "charts/eval_return":  # of the recipe keep_best
            self.scalars[name] = float(scalar)
            self.writer.add_scalar(name, scalar, step)


def use(script):
    @dataclass
    class Args(script.Args):
        log_every: int = 1  # iterations from one row of scalars to the next
        csv: bool = False  # the scalars go into RUN/progress.csv, too

    class Logged(script.Run):
        def __init__(self, args, *inputs):
            super().__init__(args, *inputs)
            if driver.is_first(script):
                self.writer = Row(self.writer)
                self.purge(self.dir / "progress.csv")

        def log(self, *inputs):
            first = driver.is_first(script)
            if first:
                self.writer.silent = (len(self.timed) + 1) % self.args.log_every > 0
                self.writer.scalars.clear()
            super().log(*inputs)
            if first and self.args.csv and self.writer.scalars:
                self.write()

        def purge(self, file):
            """Drops rows of steps that a killed run had played since agent.pt was saved."""
            if file.exists() and file.stat().st_size:
                header, *rows = file.read_text().splitlines(keepends=True)
                rows = [x for x in rows if x.endswith("\n") and int(x.split(",")[0]) <= self.step]
                file.write_text("".join([header, *rows]))

        def write(self):
            losses = *script.LOSSES, "explained_variance", "clipfrac"  # of the recipe diagnostics
            charts = "learning_rate", "SPS", "episodic_return", "episodic_length", "eval_return"
            columns = [f"losses/{name}" for name in losses] + [f"charts/{name}" for name in charts]
            with open(self.dir / "progress.csv", "a") as file:
                rows = csv.DictWriter(
                    file, ["step", *columns], "", extrasaction="ignore", lineterminator="\n"
                )
                if file.tell() == 0:
                    rows.writeheader()
                rows.writerow({"step": self.step, **self.writer.scalars})

    script.Args = Args
    script.Run = Logged


if __name__ == "__main__":
    driver.main("scalars")
