"""An LSTM that remembers dozens of steps before it has learnt anything: chrono initialisation.

    python docs/recipes/long_memory.py --env-id popgym:popgym-RepeatPreviousMedium-v0

With biases of 0 a forget gate is half open: each step halves what the cell holds, and the gradient
that flows back through it. Of 31 steps little gets through, 9e-8 on average with the path through
h, and nothing teaches the LSTM to keep what it saw so long ago. Here every unit draws a number of
steps n, up to LONGEST, and begins with a forget gate of 1 - 1 / (n + 1): 0.5 gets through (Tallec &
Ollivier 2018, arXiv:1804.11188). POPGym's tasks need pip install ".[popgym]".

It shortens the wait: learning begins after .4M to 1.2M steps, without it after 1.5M or later, or
never. Returns of seeds 1 to 3 at 2M: -.37, -.34, -.35, and without -.51, -.50, -.50; at 5M: -.30,
-.29, -.25, and without -.31, -.50, -.31. On one tuning seed a constant bias of 3 did as well, and
with --separate-critic or --ent-coef .01 nothing was learnt. On AutoencodeEasy one seed was behind
at 1M steps: -.49, and without the recipe -.42.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent / "../.."))
import rppo_lstm

LONGEST = 128  # steps; at least as many as the task asks to remember


class LongLSTM(rppo_lstm.ResetLSTM):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        n = torch.empty(hidden_size).uniform_(1, LONGEST - 1)
        input_gate, forget_gate, _, _ = self.cell.bias_ih.data.chunk(4)
        forget_gate.copy_(n.log())  # sigmoid(log n) = 1 - 1 / (n + 1)
        input_gate.copy_(-n.log())


rppo_lstm.ResetLSTM = LongLSTM

if __name__ == "__main__":
    rppo_lstm.main()
