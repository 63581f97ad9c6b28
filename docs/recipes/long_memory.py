"""An LSTM that remembers dozens of steps before it has learned anything: chrono initialisation.

    python docs/recipes/long_memory.py --env-id popgym:popgym-RepeatPreviousMedium-v0

A forget gate with a bias of 1 keeps .73 of what a cell holds at each step, and as much of the
gradient that flows back through it. Of 31 steps little gets through, and little teaches the LSTM to
keep what it saw so long ago. Here every unit draws a number of steps n, up to --longest, and begins
with a forget gate of 1 - 1 / (n + 1) (Tallec & Ollivier 2018, arXiv:1804.11188). On average half of
the gradient gets through 31 steps then. It shortens the wait; results.md has figures. POPGym's
tasks need pip install ".[popgym]".
"""

from dataclasses import dataclass

import torch
import use as driver


def use(script):
    script.check(hasattr(script, "ResetLSTM"), "long_memory: a GRU has no forget gate")
    script.check("feedforward" not in driver.applied(script), "long_memory: not with feedforward")

    class LongLSTM(script.ResetLSTM):
        longest = 128

        def __init__(self, input_size, hidden_size):
            super().__init__(input_size, hidden_size)
            n = torch.empty(hidden_size).uniform_(1, LongLSTM.longest - 1)
            input_gate, forget_gate, _, _ = self.cell.bias_ih.data.chunk(4)
            forget_gate.copy_(n.log())  # sigmoid(log n) = 1 - 1 / (n + 1)
            input_gate.copy_(-n.log())

    @dataclass
    class Args(script.Args):
        longest: int = LongLSTM.longest  # steps; at least as many as the task asks to remember

    class LongAgent(script.Agent):
        def __init__(self, envs, args):
            script.check(args.longest > 2, f"--longest {args.longest}: must be at least 3")
            LongLSTM.longest = args.longest
            super().__init__(envs, args)
            script.check(driver.memories(self), "long_memory: needs --memory lstm")

    script.Args = Args
    script.Agent = LongAgent
    script.ResetLSTM = LongLSTM


if __name__ == "__main__":
    driver.main("long_memory")
