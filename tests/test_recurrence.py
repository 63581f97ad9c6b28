"""The fused reset-aware recurrence against the naive loop over time, which is its definition."""

import pytest
import torch
from conftest import MODULES, awkward_ends, having

RECURRENT = having("ResetLSTM") + having("ResetGRU")


def naive_loop(memory, x, state, final):
    """One cell call a row and layer; the state is zeroed after a final row."""
    outputs = []
    for t in range(len(x)):
        output, state = memory.step(x[t], state)
        outputs.append(output)
        state = state.where(~final[t][:, None], 0.0)
    return torch.stack(outputs), state


def build(script, layers, dtype=torch.float64, size=5, hidden=7):
    torch.manual_seed(layers)
    module = MODULES[script]
    memory = getattr(module, "ResetLSTM", None) or module.ResetGRU
    memory = memory(size, hidden, layers).to(dtype)
    with torch.no_grad():  # biases are 0 at first, which would hide an error in them
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return memory


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("script", RECURRENT)
def test_fused_equals_loop_in_outputs_and_gradients(script, layers):
    memory = build(script, layers)
    final = awkward_ends()[2][:-1]  # first and last rows final, neighbours final, everything between
    final[3, 0] = final[4, 0] = True  # two final rows in a row, which an episode of no steps would give
    T, N = final.shape
    x = torch.randn(T, N, 5, dtype=torch.float64, requires_grad=True)
    state = torch.randn(memory.state_rows, N, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(T, N, 7, dtype=torch.float64) * ~final[..., None]  # no loss reads a final row
    inputs = [x, state, *memory.parameters()]

    fused = memory(x, state, final)
    loop, _ = naive_loop(memory, x, state, final)
    assert (fused - loop)[~final].abs().max() <= 1e-12
    fused_gradients = torch.autograd.grad((fused * weight).sum(), inputs)
    loop_gradients = torch.autograd.grad((loop * weight).sum(), inputs)
    for a, b in zip(fused_gradients, loop_gradients):
        assert (a - b).abs().max() <= 1e-10
    assert fused_gradients[0][final].abs().max() == 0.0  # a final row's observation moves nothing


@pytest.mark.parametrize("script", RECURRENT)
def test_state_after_a_final_row_is_exactly_zero(script):
    memory = build(script, 2, torch.float32)
    final = torch.zeros(4, 3, dtype=torch.bool)
    final[1] = True
    x = torch.randn(4, 3, 5)
    x[1] *= 1e7  # however large a last observation is, it opens no gate
    outputs = memory(x, torch.randn(memory.state_rows, 3, 7), final)
    fresh = memory(x[2:], torch.zeros(memory.state_rows, 3, 7), final[2:])
    assert torch.equal(outputs[1], torch.zeros(3, 7))
    assert torch.equal(outputs[2:], fresh)


@pytest.mark.parametrize("script", RECURRENT)
def test_parameters_are_those_of_the_ordinary_cell(script):
    """The reset token adds no parameter, so no optimiser, weight decay included, can move it."""
    memory = build(script, 2)
    assert sorted(memory.state_dict()) == sorted(name for name, _ in memory.named_parameters())
    names = {name.split(".")[-1] for name, _ in memory.named_parameters()}
    assert names == {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}


@pytest.mark.parametrize("script", RECURRENT)
def test_splitting_a_sequence_with_the_carried_state_changes_nothing(script):
    memory, final = build(script, 2), awkward_ends()[2][:-1]
    x = torch.randn(*final.shape, 5, dtype=torch.float64)
    state = torch.randn(memory.state_rows, final.shape[1], 7, dtype=torch.float64)
    _, middle = naive_loop(memory, x[:10], state, final[:10])
    whole = memory(x, state, final)
    parts = torch.cat([memory(x[:10], state, final[:10]), memory(x[10:], middle, final[10:])])
    assert (whole - parts)[~final].abs().max() <= 1e-12
