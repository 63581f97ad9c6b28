"""The fused recurrence with resets against the loop over time that is its definition."""

import pytest
import torch
from conftest import MODULES, awkward_ends, having
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS = {"ResetLSTM": 2, "ResetGRU": 1}  # of the state: h and c, or h
CELLS = [(script, name) for name in ROWS for script in having(name)]
pytestmark = pytest.mark.parametrize("script,cell", CELLS)


def loop(memory, x, state, final):
    outputs = []
    for t in range(len(x)):
        state = memory.step(x[t], state)
        outputs.append(state[0])
        state = state.where(~final[t][:, None], 0.0)
    return torch.stack(outputs), state


def build(script, cell, dtype=torch.float64, size=5, hidden=7):
    """Biases are 0 at first, which would hide an error in them."""
    torch.manual_seed(0)
    memory = getattr(MODULES[script], cell)(size, hidden).to(dtype)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return memory


def check_against_loop(memory, rows, final):
    T, N = final.shape
    x = torch.randn(T, N, 5, dtype=torch.float64, requires_grad=True)
    state = torch.randn(rows, N, 7, dtype=torch.float64, requires_grad=True)
    counts = ~final[..., None]  # no loss reads a final step
    weight = torch.randn(T, N, 7, dtype=torch.float64) * counts
    fused, looped = memory(x, state, final), loop(memory, x, state, final)[0]
    assert ((fused - looped) * counts).abs().max() <= 1e-12
    inputs = [x, state, *memory.parameters()]
    gradients = [torch.autograd.grad((h * weight).sum(), inputs) for h in (fused, looped)]
    for ours, theirs in zip(*gradients):
        assert (ours - theirs).abs().max() <= 1e-10
    assert not gradients[0][0][final].any()  # a final step's input moves nothing
    return gradients[0]


def test_outputs_and_gradients_are_the_loops(script, cell):
    final = awkward_ends()[2][:-1].clone()
    final[3, 0] = final[4, 0] = True  # two final steps in a row
    gradients = check_against_loop(build(script, cell), ROWS[cell], final)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.floats(0, 1))
def test_any_pattern_of_final_steps(script, cell, seed, T, N, share):
    memory = build(script, cell)
    torch.manual_seed(seed)
    check_against_loop(memory, ROWS[cell], torch.rand(T, N) < share)


@pytest.mark.parametrize("last_input", [0.0, 1e7, 1e30, -1e30, torch.inf, torch.nan])
def test_after_a_final_step_the_state_is_exactly_zero_and_no_gradient_passes(
    script, cell, last_input
):
    """16 units fill 64 bytes: the last bits of a product can depend on where its rows lie."""
    memory, rows = build(script, cell, torch.float32, hidden=16), ROWS[cell]
    final = torch.zeros(5, 3, dtype=torch.bool)
    final[1] = True
    x = torch.randn(5, 3, 5)
    x[1] = last_input
    x.requires_grad_()
    state = torch.randn(rows, 3, 16, requires_grad=True)
    h = memory(x, state, final)
    assert torch.equal(h[1], torch.zeros(3, 16))
    assert torch.equal(h[2:], memory(x[2:], torch.zeros(rows, 3, 16), final[2:]))
    inputs = [x, state, *memory.parameters()]
    x_gradient, state_gradient, *others = torch.autograd.grad(h[2:].sum(), inputs)
    assert not x_gradient[:2].any() and not state_gradient.any() and x_gradient[2:].all()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in others)
    stopped = loop(memory, x[:2].nan_to_num(), state, final[:2])[1]
    assert torch.equal(stopped, torch.zeros(rows, 3, 16))


def test_a_sequence_cut_in_two_with_its_state_is_the_sequence(script, cell):
    memory, final = build(script, cell), awkward_ends()[2][:-1]
    x = torch.randn(*final.shape, 5, dtype=torch.float64)
    state = torch.randn(ROWS[cell], final.shape[1], 7, dtype=torch.float64)
    for cut in 1, 10, 13, 23:
        middle = loop(memory, x[:cut], state, final[:cut])[1]
        parts = memory(x[:cut], state, final[:cut]), memory(x[cut:], middle, final[cut:])
        assert (memory(x, state, final) - torch.cat(parts))[~final].abs().max() <= 1e-12


def test_gradcheck(script, cell):
    memory = build(script, cell, size=2, hidden=3)
    final = torch.tensor([[False, True], [True, False], [False, False]])
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    state = torch.randn(ROWS[cell], 2, 3, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*memory.named_parameters())

    def outputs(x, state, *weights):
        h = torch.func.functional_call(memory, dict(zip(names, weights)), (x, state, final))
        return h * ~final[..., None]

    assert torch.autograd.gradcheck(outputs, (x, state, *parameters))


def test_parameters_are_those_of_the_ordinary_cell(script, cell):
    """The reset adds none, so that no optimiser can move it, and files hold nothing of it."""
    memory = build(script, cell)
    names = {"cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh"}
    assert memory.state_dict().keys() == dict(memory.named_parameters()).keys() == names
