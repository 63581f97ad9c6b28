"""More scalars, less often, and in other places: CSV, JSON, a table on the screen.

    python docs/recipes/use.py rppo_lstm scalars --csv --log-every 10 --env-id CartPole-v1
    mpiexec -n 2 python docs/recipes/use.py ppo1_mpi scalars --table

The files are runs/RUN/progress.csv and, an object a line, progress.json. They have each step once,
even where a run was killed and resumed.
In TensorBoard are two more scalars: charts/minibatches, how many of them an update had before
--target-kl ended it, and charts/action_std, the mean standard deviation of a Gaussian policy.
"""

import csv
import json
import re
from dataclasses import dataclass

import use as driver


class Row:
    """A SummaryWriter that remembers the last scalars, and is silent when told so."""

    def __init__(self, writer):
        self.writer = writer
        self.scalars: dict[str, float] = {}
        self.silent = False

    def __getattr__(self, name):
        return getattr(self.writer, name)

    def add_scalar(self, name, scalar, step):
        if not self.silent or name.startswith("charts/eval"):  # of few iterations
            self.scalars[name] = float(scalar)
            self.writer.add_scalar(name, scalar, step)


def use(script):
    losses = [f"losses/{name}" for name in (*script.METRICS, "explained_variance")]
    charts = "learning_rate SPS episodic_return episodic_length minibatches action_std eval_return"
    columns = ["step", *losses, *(f"charts/{name}" for name in charts.split())]

    @dataclass
    class Args(script.Args):
        log_every: int = 1  # iterations from one row of scalars to the next
        csv: bool = False  # the scalars go into RUN/progress.csv, too
        json: bool = False  # and into RUN/progress.json
        table: bool = False  # and onto the screen

    class Logged(script.Run):
        logged = 0  # iterations

        def __init__(self, args, *inputs):
            script.check(args.log_every > 0, "--log-every: must be positive")
            super().__init__(args, *inputs)
            if driver.is_first(script):
                self.writer = Row(self.writer)
                for file in self.dir.glob("progress.*"):
                    self.purge(file)

        def log(self, metrics, *inputs):
            self.logged += 1
            if not driver.is_first(script):
                super().log(metrics, *inputs)
                return
            self.writer.silent = self.logged % self.args.log_every > 0
            self.writer.scalars.clear()
            super().log(metrics, *inputs)
            self.writer.add_scalar("charts/minibatches", len(metrics), self.step)
            if hasattr(self.agent, "log_std"):
                std = self.agent.log_std.detach().exp().mean()
                self.writer.add_scalar("charts/action_std", std, self.step)
            if self.writer.scalars and self.args.csv:
                self.write_csv()
            if self.writer.scalars and self.args.json:
                with open(self.dir / "progress.json", "a") as file:
                    file.write(json.dumps({"step": self.step, **self.writer.scalars}) + "\n")
            if self.writer.scalars and self.args.table:
                lines = [f"{name:28} {x:.5g}" for name, x in self.writer.scalars.items()]
                self.bar.write("\n".join([f"{'step':28} {self.step}", *lines, ""]))

        def purge(self, file):
            """Drops rows of steps that a killed run had played since agent.pt was saved."""
            kept = []
            for line in file.read_text().splitlines(keepends=True):
                step, *_ = re.findall(r"\d+", line) or [0]  # a CSV file's header has no number
                if line.endswith("\n") and int(step) <= self.step:
                    kept.append(line)
            file.write_text("".join(kept))

        def write_csv(self):
            with open(self.dir / "progress.csv", "a") as file:
                rows = csv.DictWriter(file, columns, "", extrasaction="ignore", lineterminator="\n")
                if file.tell() == 0:
                    rows.writeheader()
                rows.writerow({"step": self.step, **self.writer.scalars})

    script.Args = Args
    script.Run = Logged
