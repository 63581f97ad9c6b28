"""Memories with resets against the loop over time that defines them.

`pytest tests/test_recurrence.py --memory my_module:MyMemory` tests a class of your own, whose state
may have any shape (rows, N, ...): MyMemory(input_size, hidden_size), or a function that makes one.
"""

import importlib
import os
import sys

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MODULES, awkward_ends
from torch import nn

F, H = 5, 7


class Window(nn.Module):
    """Attention over the last inputs, whose state is (1, N, 31, F + 1): the last column says which
    rows are there."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.query, self.value = nn.Linear(inputs, inputs), nn.Linear(inputs, hidden)

    def initial_state(self, num_envs: int):
        return self.query.weight.new_zeros(1, num_envs, 31, self.query.in_features + 1)

    def step(self, x, state):
        row = torch.cat([x, torch.ones_like(x[:, :1])], -1)
        state = torch.cat([state[:, :, 1:], row[None, :, None]], 2)
        rows, there = state[0, ..., :-1], state[0, ..., -1]
        score = torch.einsum("nf,nkf->nk", self.query(x), rows)
        weight = score.masked_fill(there == 0, -1e9).softmax(-1)
        return torch.einsum("nk,nkh->nh", weight, self.value(rows)), state

    def forward(self, x, state, final):
        return reference.loop(self.step, x, state, final)[0]


KINDS = {
    "ResetLSTM": MODULES["rppo_lstm"].ResetLSTM,
    "ResetGRU": MODULES["rppo_gru_atari"].ResetGRU,
    "Window": Window,
}


def pytest_generate_tests(metafunc):
    given_class = metafunc.config.getoption("--memory")
    if given_class:
        sys.path.insert(0, os.getcwd())
        module, _, name = given_class.partition(":")
        kinds = {given_class: getattr(importlib.import_module(module), name)}
    else:
        kinds = KINDS
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", kinds.values(), ids=kinds.keys())


def build(kind, dtype=torch.float64, hidden=H):
    """Biases are 0 at first, which would hide an error in them."""
    torch.manual_seed(0)
    memory = kind(F, hidden).to(dtype)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return memory


def begin(memory, N):
    """A state that a sequence might begin with: that after some steps, with gradients."""
    state = memory.initial_state(N)
    with torch.no_grad():
        for _ in range(3):
            _, state = memory.step(torch.randn(N, F).to(state), state)
    return state.clone().requires_grad_()


def compare(memory, final):
    T, N = final.shape
    dtype = memory.initial_state(1).dtype
    x = torch.randn(T, N, F).to(dtype).requires_grad_()
    state = begin(memory, N)
    counts = ~final[..., None]  # no loss reads a final step
    fused, looped = memory(x, state, final), reference.loop(memory.step, x, state, final)[0]
    weight = torch.randn_like(fused) * counts
    assert ((fused - looped) * counts).abs().max() <= 1e-12
    inputs = [x, state, *memory.parameters()]
    gradients = [torch.autograd.grad((h * weight).sum(), inputs) for h in (fused, looped)]
    for ours, theirs in zip(*gradients):
        assert (ours - theirs).abs().max() <= 1e-10
    assert not gradients[0][0][final].any()  # a final step's input moves nothing
    return gradients[0]


def test_outputs_and_gradients_are_the_loops(kind):
    final = awkward_ends()[2][:-1].clone()
    final[3, 0] = final[4, 0] = True  # two final steps in a row
    gradients = compare(build(kind), final)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.floats(0, 1))
def test_any_pattern_of_final_steps(kind, seed, T, N, share):
    memory = build(kind)
    torch.manual_seed(seed)
    compare(memory, torch.rand(T, N) < share)


@pytest.mark.parametrize("name", ["ResetLSTM", "ResetGRU"])
@pytest.mark.parametrize("last_input", [0.0, 1e7, -1e30, torch.inf, torch.nan])
def test_after_a_final_step_the_state_is_exactly_zero_and_no_gradient_passes(name, last_input):
    """16 units fill 64 bytes: the last bits of a product can depend on where its rows lie."""
    memory = build(KINDS[name], torch.float32, hidden=16)
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


def test_a_sequence_cut_in_two_with_its_state_is_the_sequence(kind):
    memory, final = build(kind), awkward_ends()[2][:-1]
    x = torch.randn(*final.shape, F, dtype=torch.float64)
    state = begin(memory, final.shape[1])
    for cut in 1, 13:
        middle = reference.loop(memory.step, x[:cut], state, final[:cut])[1]
        parts = memory(x[:cut], state, final[:cut]), memory(x[cut:], middle, final[cut:])
        assert (memory(x, state, final) - torch.cat(parts))[~final].abs().max() <= 1e-12


@pytest.mark.parametrize(
    "name,cell", [("ResetLSTM", reference.lstm_cell), ("ResetGRU", reference.gru_cell)]
)
def test_a_step_is_the_cell_of_the_paper(name, cell):
    """And the parameters are the cell's alone: no optimiser can move the reset, no file has it."""
    memory = build(KINDS[name])
    x, state = torch.randn(4, F, dtype=torch.float64), begin(memory, 4)
    h, following = memory.step(x, state)
    expected = cell(dict(memory.named_parameters()), "cell", x, state)
    assert (following - expected).abs().max() <= 1e-12 and torch.equal(h, following[0])
    names = {"cell.weight_ih", "cell.weight_hh", "cell.bias_ih", "cell.bias_hh"}
    assert memory.state_dict().keys() == dict(memory.named_parameters()).keys() == names


@pytest.mark.parametrize("name", ["ResetLSTM", "ResetGRU"])
def test_shapes_that_would_broadcast_or_crash_are_refused(name):
    memory, final = build(KINDS[name]), torch.zeros(6, 3, dtype=torch.bool)
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
    assert reset_state(state, torch.zeros(5, dtype=torch.bool)) is state


@pytest.mark.parametrize("script", ["rppo_lstm", "rppo_continuous", "rppo_gru_atari"])
def test_an_agent_takes_a_memory_of_another_shape(script, monkeypatch, tmp_path):
    """By its class alone: no method of Agent knows the state's shape."""
    module = MODULES[script]
    monkeypatch.setattr(module, "ResetGRU" if script == "rppo_gru_atari" else "ResetLSTM", Window)
    if script == "rppo_gru_atari":
        from test_numbers import build as agent_of

        assert agent_of(script).initial_state(3).shape == (1, 3, 31, 513)
        return
    box = '{"actions": "box"}' if script == "rppo_continuous" else "{}"
    args = module.Args(env_id="Toy-v0", env_kwargs=box, num_envs=4, num_steps=16, seq_len=8,
                       total_timesteps=100, eval_episodes=2, runs_dir=str(tmp_path))  # fmt: skip
    agent = module.train(args)
    assert agent.initial_state(3).shape == (1, 3, 31, args.encoder_size + 1)
