"""Chrono initialisation: an LSTM that remembers dozens of steps before it has learned anything.

    python docs/recipes/use.py rppo_lstm long_memory --env-id popgym:popgym-RepeatPreviousMedium-v0

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
    script.check("feedforward" not in script.recipes, "long_memory: not with feedforward")
    lstm = script.ResetLSTM

    @dataclass
    class Args(script.Args):
        longest: int = 128  # steps; at least as many as the task asks to remember

    def make(args, inputs, units):
        script.check(args.longest > 2, f"--longest {args.longest}: must be at least 3")
        memory = lstm(inputs, units)
        n = torch.empty(units).uniform_(1, args.longest - 1)
        input_gate, forget_gate, _, _ = memory.cell.bias_ih.data.chunk(4)
        forget_gate.copy_(n.log())  # sigmoid(log n) = 1 - 1 / (n + 1)
        input_gate.copy_(-n.log())
        return memory

    script.Args = Args
    driver.replace_memory(script, make)
