"""Every snippet of docs/paste.md, run in order, and its numbers beside the loop over time."""

import re

import numpy as np
import pytest
import reference
import torch
from support import ROOT

SNIPPETS = dict(
    re.findall(r'(?ms)^```python title="([^"]+)"\n(.*?)^```', (ROOT / "docs/paste.md").read_text())
)
T, B, F, H = 20, 5, 64, 128


@pytest.fixture
def page():
    """The names that the page's snippets define; an LSTM in float64."""
    torch.manual_seed(1)
    names: dict = {}
    for snippet in SNIPPETS.values():
        exec(snippet, names)
    names["lstm"].double()
    for parameter in names["lstm"].parameters():  # biases are not zero
        torch.nn.init.uniform_(parameter, -0.3, 0.3)
    return names


def data(dtype=torch.float64):
    """x, a state, and ends in every awkward place: first, last, side by side, everywhere, never."""
    torch.manual_seed(2)
    ends = torch.rand(T, B) < 0.2
    ends[0, 0] = ends[-1, 1] = True
    ends[3:6, 1] = True
    ends[:, 2] = True
    ends[:, 3] = False
    return torch.randn(T, B, F, dtype=dtype), torch.randn(2, B, H, dtype=dtype), ends


def looped(lstm, x, state, ends):
    """(T, B, H): the definition."""
    return reference.loop(lstm.step, x, state, ends)[0]


def assert_same(one, other, lstm, counts):
    """Outputs and gradients of the steps that count."""
    torch.testing.assert_close(one[counts], other[counts], atol=1e-12, rtol=0)
    weights = torch.randn_like(one) * counts[..., None]
    gradients = [
        torch.autograd.grad((x * weights).sum(), [*lstm.parameters()]) for x in (one, other)
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)


def test_the_contract(page):
    """ "setup", "acting": final as it is meant; the output at a final step is 0."""
    lstm = page["lstm"]
    x, state, final = data()
    replayed = lstm(x, state, final)
    outputs = []
    for t in range(T):
        h, state = page["act"](lstm, x[t], state, final[t])
        outputs.append(h)
    assert_same(replayed, torch.stack(outputs), lstm, ~final)
    assert replayed[final].abs().max() == 0


def test_done_needs_spare_rows(page):
    """ "spare rows": exact at every step, also those at which done is set; done as final is not."""
    lstm = page["lstm"]
    x, state, done = data()
    everything = torch.ones_like(done)
    expected = looped(lstm, x, state, done)
    assert_same(page["replay"](lstm, x, done, state), expected, lstm, everything)
    assert (lstm(x, state, done) - expected).abs().max() > 0.1
    longer, final, at = page["with_spare_rows"](x, done)
    assert len(longer) == T + done.sum(0).max() and (final.sum(0) == len(longer) - T).all()
    never = torch.zeros_like(done)
    assert torch.equal(page["with_spare_rows"](x, never)[0], x)


def test_episode_starts(page):
    """ "episode starts": the state is zero before such a step, the first one too."""
    lstm = page["lstm"]
    x, state, starts = data()
    replayed = page["replay_from_starts"](lstm, x, starts, state)
    assert starts[0].any()
    ends = starts.roll(-1, 0)  # a start is where the step before was an end
    expected = looped(lstm, x, state.where(~starts[0][:, None], 0.0), ends)
    assert_same(replayed, expected, lstm, torch.ones_like(starts))


def test_same_step_advantages(page):
    """ "same-step advantages": the sum by its definition, where values[t + 1] is another episode's."""
    rng = np.random.default_rng(1)
    rewards, last_values = rng.normal(size=(2, T, B))
    values = rng.normal(size=(T + 1, B))
    terminated, truncated = rng.random((2, T, B)) < 0.2
    assert (terminated & truncated).any()
    expected, following = np.zeros((T, B)), np.zeros(B)
    for t in reversed(range(T)):
        done = terminated[t] | truncated[t]
        after = np.where(terminated[t], 0, np.where(truncated[t], last_values[t], values[t + 1]))
        following = rewards[t] + 0.9 * after - values[t] + 0.9 * 0.8 * np.where(done, 0, following)
        expected[t] = following
    ends = terminated, truncated
    found = page["same_step_gae"](rewards, values, *ends, last_values, 0.9, 0.8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_batch_first(page):
    """ "batch first" """
    lstm = page["lstm"]
    x, state, final = data()
    found = page["batch_first"](lstm, x.transpose(0, 1), state, final.T)
    assert torch.equal(found.transpose(0, 1), lstm(x, state, final))


def test_weights_of_torch(page):
    """ "weights": to nn.LSTM and back, and the same outputs where no episode ends."""
    lstm, old = page["lstm"], torch.nn.LSTM(F, H).double()
    assert page["to_torch"](lstm.state_dict()).keys() == old.state_dict().keys()
    lstm.load_state_dict(page["from_torch"](old.state_dict()))
    x, state, final = data()
    never = torch.zeros_like(final)
    outputs, _ = old(x, (state[:1], state[1:]))
    torch.testing.assert_close(lstm(x, state, never), outputs, atol=1e-12, rtol=0)
    for name, tensor in page["to_torch"](lstm.state_dict()).items():
        assert torch.equal(tensor, old.state_dict()[name])


def test_two_layers(page):
    """ "two layers": replay is acting, layer by layer."""
    stack = page["Stack"](F, H).double()
    x, _, final = data()
    state = torch.randn(4, B, H).double()
    assert_same(stack(x, state, final), looped(stack, x, state, final), stack, ~final)


def test_compile(page):
    """ "compile": traced by dynamo, which leaves the LSTM alone; no compiler of C++ is needed."""
    torch._dynamo.reset()
    network = page["Network"]()
    _, state, final = data(torch.float32)
    obs = torch.randn(T, B, 8)
    compiled = torch.compile(network, backend="aot_eager")
    losses = [net(obs, state, final)[~final].pow(2).sum() for net in (network, compiled)]
    torch.testing.assert_close(*losses)
    one, other = (torch.autograd.grad(loss, [*network.parameters()]) for loss in losses)
    torch.testing.assert_close(one, other)
