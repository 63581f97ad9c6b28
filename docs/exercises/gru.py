"""Exercise 6. Fill in fused_gru, then: python docs/exercises/gru.py"""

import torch
import torch.nn as nn


def fused_gru(cell: nn.GRUCell, x, h, final):
    """x (L, B, F), the state before it h (B, H), final (L, B) -> outputs (L, B, H), as of a loop that
    sets the state to zero after final steps. What it returns at final steps is yours to choose."""
    weight_ih, bias_ih = cell.weight_ih, cell.bias_ih  # (3 H, F), (3 H,): gates r, z and n
    # YOUR CODE HERE: give x one feature more, or two, and weight_ih as many columns
    outputs, _ = torch.gru(
        x, h.unsqueeze(0), [weight_ih, cell.weight_hh, bias_ih, cell.bias_hh], has_biases=True,
        num_layers=1, dropout=0.0, train=cell.training, bidirectional=False, batch_first=False,
    )  # fmt: skip
    return outputs


def check(fused_gru) -> list[str]:
    """What is wrong with it, compared with the loop; nothing, if all is right."""
    torch.manual_seed(1)
    L, B, F, H = 9, 5, 3, 4
    cell = nn.GRUCell(F, H).double()
    for parameter in cell.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(L, B, F).double().requires_grad_()
    h = torch.randn(B, H).double()
    for what, final in [
        ("where nothing is final", torch.zeros(L, B, dtype=torch.bool)),
        ("after a final step", (torch.rand(L, B) < 0.3)),
    ]:
        state, loop = h, []
        for t in range(L):
            state = cell(x[t], state)
            loop.append(state)
            state = state.where(~final[t][:, None], 0.0)
        expected, found = torch.stack(loop)[~final], fused_gru(cell, x, h, final)[~final]
        if not torch.allclose(found, expected):
            return [f"{what} the outputs are off by up to {(found - expected).abs().max():.2g}"]
        weights = torch.randn_like(expected)
        inputs = [x, *cell.parameters()]
        gradients = [torch.autograd.grad((y * weights).sum(), inputs) for y in (expected, found)]
        names = ["x", *(name for name, _ in cell.named_parameters())]
        wrong = [n for n, a, b in zip(names, *gradients) if not torch.allclose(a, b, atol=1e-10)]
        if wrong:
            return [f"{what} the gradients of {', '.join(wrong)} differ"]
    return []


if __name__ == "__main__":
    print("\n".join(check(fused_gru)) or "right")
