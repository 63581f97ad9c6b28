"""Memories with resets against the loop over time that defines them.

pytest tests/test_recurrence.py --memory my_module:MyMemory does so with a class of your own.
"""

import importlib
import os
import sys

import pytest
import reference
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MODULES, awkward_ends

F, H = 5, 7
MEMORIES = {
    "ResetLSTM": MODULES["rppo_lstm"].ResetLSTM,
    "ResetGRU": MODULES["rppo_gru_atari"].ResetGRU,
}
OURS, COMPARED = [*MEMORIES], [*MEMORIES]
if support.given_memory:
    sys.path += [os.getcwd(), str(support.ROOT / "docs/recipes")]  # it may import use
    module, _, name = support.given_memory.partition(":")
    MEMORIES[name] = getattr(importlib.import_module(module), name)
    COMPARED.append(name)


def build(name, dtype=torch.float64, hidden=H):
    """Biases are 0 at first, which would hide an error in them."""
    torch.manual_seed(0)
    memory = MEMORIES[name](F, hidden).to(dtype)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return memory


@pytest.mark.parametrize("name", OURS)
def test_outputs_and_gradients_are_the_loops(name):
    final = awkward_ends()[2][:-1].clone()
    final[3, 0] = final[4, 0] = True  # two final steps in a row
    gradients = reference.assert_is_the_loop(build(name), final)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients)


@pytest.mark.parametrize("name", COMPARED)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.floats(0, 1))
def test_any_pattern_of_final_steps(name, seed, T, N, share):
    memory = build(name)
    torch.manual_seed(seed)
    final = torch.rand(T, N) < share
    final[0, 0] = False  # or nothing would be compared
    reference.assert_is_the_loop(memory, final)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("last_input", [0.0, 1e7, -1e30, torch.inf, torch.nan])
def test_after_a_final_step_the_state_is_exactly_zero_and_no_gradient_passes(name, last_input):
    """16 units fill 64 bytes: the last bits of a product can depend on where its rows lie."""
    memory = build(name, torch.float32, hidden=16)
    final = torch.zeros(5, 3, dtype=torch.bool)
    final[1] = True
    x = torch.randn(5, 3, F)
    x[1] = last_input
    x.requires_grad_()
    state = torch.randn_like(memory.initial_state(3)).requires_grad_()
    h = memory(x, state, final)
    assert torch.equal(h[1], torch.zeros(3, 16))
    assert torch.equal(h[2:], memory(x[2:], memory.initial_state(3), final[2:]))
    inputs = [x, state, *memory.parameters()]
    x_gradient, state_gradient, *others = torch.autograd.grad(h[2:].sum(), inputs)
    assert not x_gradient[:2].any() and not state_gradient.any() and x_gradient[2:].all()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in others)


@pytest.mark.parametrize(
    "name,cell", [("ResetLSTM", reference.lstm_cell), ("ResetGRU", reference.gru_cell)]
)
def test_a_step_is_the_cell_of_the_paper(name, cell):
    """And the parameters are the cell's alone: no optimiser can move the reset, no file has it."""
    memory = build(name)
    x = torch.randn(4, F, dtype=torch.float64)
    state = torch.randn_like(memory.initial_state(4))
    h, following = memory.step(x, state)
    expected = cell(dict(memory.named_parameters()), "cell", x, state)
    assert (following - expected).abs().max() <= 1e-12 and torch.equal(h, following[0])
    names = {"cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh"}
    assert memory.state_dict().keys() == dict(memory.named_parameters()).keys() == names


@pytest.mark.parametrize("name", OURS)
def test_shapes_that_would_broadcast_or_crash_are_refused(name):
    memory, final = build(name), torch.zeros(6, 3, dtype=torch.bool)
    x, state = torch.randn(6, 3, F, dtype=torch.float64), memory.initial_state(3)
    for inputs, of in [
        ((x[..., :4], state, final), "x"),
        ((x, state[:, :1], final), "state"),
        ((x, state[..., :3], final), "state"),
        ((x, state, final[:, :1]), "final"),
    ]:
        with pytest.raises(AssertionError, match=f"{of} is "):
            memory(*inputs)


@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 5, 31, 3), (0, 5)], ids=str)
def test_reset_state_zeroes_final_environments_of_any_state(shape):
    reset_state, state = MODULES["rppo_lstm"].reset_state, torch.ones(shape)
    state[:, 2:3] = torch.nan
    final = torch.tensor([True, False, True, False, False])
    for flags in final, final.numpy():
        after = reset_state(state, flags)
        assert not after[:, final].any() and torch.equal(after[:, ~final], state[:, ~final])
    assert reset_state(state, ~final | final ^ True).shape == state.shape
    assert state.all()  # the caller's is left as it was
    assert reset_state(state, torch.zeros(5, dtype=torch.bool)) is state
