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
    memory = build(script, 2, torch.float32, hidden=16)  # 16 units fill 64 bytes: MKL's last bits depend on where rows lie
    final = torch.zeros(4, 3, dtype=torch.bool)
    final[1] = True
    x = torch.randn(4, 3, 5)
    x[1] *= 1e7  # however large a last observation is, it opens no gate
    outputs = memory(x, torch.randn(memory.state_rows, 3, 16), final)
    fresh = memory(x[2:], torch.zeros(memory.state_rows, 3, 16), final[2:])
    assert torch.equal(outputs[1], torch.zeros(3, 16))
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


@pytest.mark.parametrize("L, B", [(1, 1), (1, 3), (12, 1), (12, 4)])
def test_gru_layer_is_torch_gru(L, B):
    """The backward pass that is written out, with respect to all inputs, the first state included."""
    torch.manual_seed(L * B)
    shapes = (L, B, 5), (B, 7), (21, 5), (21, 7), (21,)
    x, h, W, U, c = inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours = MODULES["rppo_gru_atari"].GRULayer.apply(*inputs)
    theirs = torch.gru(x, h[None], [W, U, torch.zeros_like(c), c], True, 1, 0.0, True, False, False)[0]
    assert (ours - theirs).abs().max() <= 1e-12
    weight = torch.randn_like(ours)
    for _ in range(2):  # the backward pass leaves what it saved as it was
        ours_gradients = torch.autograd.grad((ours * weight).sum(), inputs, retain_graph=True)
        theirs_gradients = torch.autograd.grad((theirs * weight).sum(), inputs, retain_graph=True)
        for a, b in zip(ours_gradients, theirs_gradients):
            assert (a - b).abs().max() <= 1e-10
    assert torch.autograd.gradcheck(MODULES["rppo_gru_atari"].GRULayer.apply, inputs)
