"""Exercise 2. Fill in replay, then: python docs/exercises/replay.py"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rppo_lstm


def replay(cell, x, h, c, final):
    """What acting computes, step by step. cell: an nn.LSTMCell; x (L, B, F); h and c (B, H), the
    state before the first step; final (L, B) -> the outputs (L, B, H), those of final steps too."""
    outputs = []
    for t in range(len(x)):  # noqa: B007
        # YOUR CODE HERE
        outputs.append(h)
    return torch.stack(outputs)


def check(replay) -> list[str]:
    """What is wrong with it, compared with ResetLSTM's one call; nothing, if all is right."""
    torch.manual_seed(1)
    L, B, F, H = 9, 5, 3, 4
    lstm = rppo_lstm.ResetLSTM(F, H).double()
    x, state = torch.randn(L, B, F).double(), torch.randn(2, B, H).double()
    final = torch.rand(L, B) < 0.3
    final[4] = True

    def outputs(x, final):
        return replay(lstm.cell, x, state[0], state[1], final)

    def differs(x, final):
        return [t for t in range(L) if not torch.allclose(
            outputs(x, final)[t][~final[t]], lstm(x, state, final)[t][~final[t]])]  # fmt: skip

    if places := differs(x, torch.zeros_like(final)):
        return [f"even where nothing is final, from step {places[0]} on"]
    wrong = [f"step {t} differs" for t in differs(x, final)[:1]]
    if (outputs(x, final)[4] == 0).all():
        wrong.append("a final step has an output, from which its value is computed: reset after it")
    observed = x.masked_fill(final.unsqueeze(-1), torch.nan)
    if not wrong and differs(observed, final):
        wrong.append("a NaN that a final step observed survives: 0 * NaN is NaN, try torch.where")
    return wrong


def milliseconds(call) -> float:
    began = time.perf_counter()
    call().sum().backward()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    wrong = check(replay)
    print("\n".join(wrong) or "right")
    if not wrong:
        torch.set_num_threads(1)
        lstm = rppo_lstm.ResetLSTM(64, 128)
        x, state = torch.randn(256, 2, 64), torch.zeros(2, 2, 128)
        final = torch.rand(256, 2) < 0.02
        for _ in range(3):
            loop = milliseconds(lambda: replay(lstm.cell, x, state[0], state[1], final))
            fused = milliseconds(lambda: lstm(x, state, final))
        print(f"256 steps, forward and backward: your loop {loop:.0f} ms, one call {fused:.1f} ms")
