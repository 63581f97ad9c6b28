"""Resets inside a sequence: what it costs to replay an LSTM or a GRU over episodes of any length.

    python benchmarks/resets.py                 # both cells; continues where it was stopped
    python benchmarks/resets.py --cells lstm --batches 64 --hidden 128 --device cuda

The task. A minibatch has B sequences of T = 128 steps, with F = 64 features. `final` (T, B) says
which steps are an episode's last: a share of them, the reset rate, anywhere. `state` is the one
before the first step, and is not 0. The fused reset makes the state 0 after a final step. All
others make it 0 before the first step of an episode, so they get start[t] = final[t - 1], and
start[0] = False. That is the same arithmetic, because no loss reads the output of a final step.
All ways get the same rows, final ones included.

The work. A forward pass gives h (T, B, H). A backward pass starts from a random gradient of h, 0
at final steps, and ends in those of the features, as if an encoder came before, and of the four
weights. What a way does to the rows counts: it pads, packs and sorts them, and puts h in order.

time    Milliseconds in float32, a median: of the processor on a CPU, with one torch thread, so
        that other processes hardly matter; of the clock on a GPU. Before or after each run of a
        way comes one of the fused reset on the same data, and over_ours is the median of the ratios
        of such pairs. over_no_resets compares the fused reset with itself at reset rate 0.
error   The largest difference to a loop of cells, in float64, divided by the largest number of that
        tensor: of h where a loss reads it, and of gradients. An exact way is within 1e-12.

Ways come from the libraries that are installed, else they are written from what those do: the
column `source` says which. Rows go to results/resets.csv, and report.py draws them.
"""

import argparse
import importlib.metadata
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rows import RESULTS, ROOT, append, commit, machine, read
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

sys.path.insert(0, str(ROOT))
from rppo_gru_atari import ResetGRU  # noqa: E402
from rppo_lstm import ResetLSTM  # noqa: E402

T, F = 128, 64
RATES = [0.0, 0.001, 0.01, 0.1]
ROUNDS = 10
OURS = {"lstm": ResetLSTM, "gru": ResetGRU}
TORCHS = {"lstm": nn.LSTM, "gru": nn.GRU}
ROLES = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
FIELDS = """date commit processor torch cell batch hidden rate way source repeats ms over_ours
    over_no_resets error_h64 error_grad64""".split()


# --- What ways share ---
def unpacked(state: Tensor):
    """(2, B, H) -> h and c, each (1, B, H), as nn.LSTM has it; nn.GRU has (1, B, H)."""
    if len(state) == 2:
        return state[:1].contiguous(), state[1:].contiguous()
    return state


def masked(state, mask: Tensor):
    """A state of nn.LSTM or nn.GRU times a mask (B,), as the libraries reset it."""
    if isinstance(state, tuple):
        return tuple(part * mask.view(1, -1, 1) for part in state)
    return state * mask.view(1, -1, 1)


def starts(final: Tensor) -> Tensor:
    """final (T, B) -> start (T, B): the step before was final."""
    return torch.cat([torch.zeros_like(final[:1]), final[:-1]])


def episodes(final: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts sequences, one after the other, into episodes, and where a sequence ends.

    final (T, B), state (rows, B, H) -> the lengths of the E episodes (E,), and the states before
    them (rows, E, H): 0, but for the first of each sequence.
    """
    ends = final.clone()
    ends[-1] = True
    last = ends.T.flatten().nonzero().flatten()  # among the B T steps, sequence by sequence
    lengths = last.diff(prepend=last.new_tensor([-1]))
    continues = (last - lengths + 1) % len(final) == 0
    initial = state.new_zeros(len(state), len(lengths), state.shape[-1])
    initial[:, continues] = state
    return lengths, initial


def in_rows(x: Tensor) -> Tensor:
    """(T, B, F) -> (B T, F), sequence by sequence."""
    return x.transpose(0, 1).flatten(0, 1)


def in_order(h: Tensor, final: Tensor) -> Tensor:
    """(B T, H), sequence by sequence -> (T, B, H)."""
    return h.unflatten(0, (-1, len(final))).transpose(0, 1)


def pad(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The rows (B T, F) of E episodes, one after the other, and the episodes' lengths (E,) ->
    padded (E, longest, F), and valid (E, longest), which is where the rows are.

    Libraries pad observations, before the encoder, with pad_sequence. Here the rows need gradients,
    and the gradient of pad_sequence makes a copy of everything for each episode.
    """
    steps = torch.arange(int(lengths.max()), device=rows.device)
    valid = steps < lengths.unsqueeze(1)
    padded = rows.new_zeros(*valid.shape, rows.shape[-1])
    padded[valid] = rows
    return padded, valid


# --- Ways: a module, x (T, B, F), the state before it (2 or 1, B, H), final (T, B) -> h (T, B, H) ---
def fused_reset(memory, x, state, final):
    return memory(x, state, final)


def loop_of_cells(memory, x, state, final):
    """The definition: state = cell(x[t], state), then state = 0 if final[t]."""
    outputs = []
    for x_t, final_t in zip(x, final):
        h, state = memory.step(x_t, state)
        outputs.append(h)
        state = state.masked_fill(final_t.unsqueeze(-1), 0.0)
    return torch.stack(outputs)


def no_resets(rnn, x, state, final):
    """Resets ignored: one call of nn.LSTM or nn.GRU, which is as fast as a replay can be here."""
    return rnn(x, unpacked(state))[0]


def loop_of_calls(rnn, x, state, final):
    """A call of nn.LSTM for every step, as in CleanRL's ppo_atari_lstm.py."""
    state = unpacked(state)
    outputs = []
    for x_t, start in zip(x, starts(final).to(x.dtype)):
        h, state = rnn(x_t.unsqueeze(0), masked(state, 1.0 - start))
        outputs.append(h)
    return torch.cat(outputs)


def segments(rnn, x, state, final):
    """A call for each run of steps in which no sequence of the batch starts an episode, as in
    ikostrikov's pytorch-a2c-ppo-acktr-gail and in skrl's examples."""
    start = starts(final)
    cuts = start.any(1).nonzero().flatten().tolist()
    state = unpacked(state)
    outputs = []
    for begin, end in zip([0, *cuts], [*cuts, len(x)]):
        h, state = rnn(x[begin:end], masked(state, (~start[begin]).to(x.dtype)))
        outputs.append(h)
    return torch.cat(outputs)


def rl_games(rnn, x, state, final):
    """LSTMWithDones and GRUWithDones, which call nn.LSTM and nn.GRU for segments, too."""
    return rnn(x, unpacked(state), starts(final).to(x.dtype).unsqueeze(-1))[0]


def padded(rnn, x, state, final):
    """Episodes padded to the longest and replayed side by side, as in
    recurrent-ppo-truncated-bptt with sequences as long as episodes."""
    lengths, initial = episodes(final, state)
    rows, valid = pad(in_rows(x), lengths)
    h, _ = rnn(rows.transpose(0, 1), unpacked(initial))  # (longest, E, H)
    return in_order(h.transpose(0, 1)[valid], final)


def rsl_rl(rnn, x, state, final):
    """Its RNN module and its functions that pad: to T steps, however short episodes are."""
    from rsl_rl.utils import split_and_pad_trajectories

    _, initial = episodes(final, state)
    index = torch.arange(final.numel(), dtype=x.dtype, device=x.device).view(*final.shape, 1)
    index, masks = split_and_pad_trajectories(index, final)  # as pad() says, not x itself
    rows = x.flatten(0, 1)[index.squeeze(-1).long()] * masks.unsqueeze(-1)
    return rnn(rows, masks, unpacked(initial))


def packed(rnn, x, state, final):
    """One call for a PackedSequence of episodes, longest first, as in Sample Factory: at step t it
    has the rows of the episodes that are longer than t."""
    lengths, initial = episodes(final, state)
    count = len(lengths)
    by_length = lengths.argsort(descending=True, stable=True)
    rank = by_length.argsort()
    episode = torch.arange(count, device=x.device).repeat_interleave(lengths)  # (B T,)
    first = lengths.cumsum(0) - lengths
    step = torch.arange(len(episode), device=x.device) - first[episode]
    order = (step * count + rank[episode]).argsort()
    sequence = PackedSequence(in_rows(x)[order], step.bincount().cpu(), by_length, rank)
    h, _ = rnn(sequence, unpacked(initial))
    return in_order(h.data[order.argsort()], final)


def sb3_contrib(rnn, x, state, final):
    """RecurrentActorCriticPolicy._process_sequence on what its buffer gives it in training: episodes
    padded to the longest. Their first steps are starts, so it calls nn.LSTM for every step."""
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

    lengths, initial = episodes(final, state)
    rows, valid = pad(in_rows(x), lengths)
    start, _ = pad(in_rows(starts(final).unsqueeze(-1)), lengths)
    start = start.flatten().to(x.dtype)
    replay = RecurrentActorCriticPolicy._process_sequence
    h, _ = replay(rows.flatten(0, 1), unpacked(initial), start, rnn)
    return in_order(h[valid.flatten()], final)


def torchrl(module, x, state, final):
    """LSTMModule or GRUModule, whose backend `pad` packs episodes."""
    from tensordict import TensorDict

    T, B = final.shape
    data = {"x": x.transpose(0, 1), "is_init": starts(final).T.unsqueeze(-1)}
    for key, part in zip("hc", state):  # a rollout stores the state before every step
        data[key] = part.new_zeros(B, T, 1, part.shape[-1])
        data[key][:, 0, 0] = part
    return module(TensorDict(data, [B, T]))["y"].transpose(0, 1)


def ours(kind: str, hidden: int) -> nn.Module:
    return OURS[kind](F, hidden)


def torchs(kind: str, hidden: int) -> nn.Module:
    return TORCHS[kind](F, hidden)


def rl_games_module(kind: str, hidden: int) -> nn.Module:
    from rl_games.common.layers import recurrent

    return {"lstm": recurrent.LSTMWithDones, "gru": recurrent.GRUWithDones}[kind](F, hidden)


def rsl_rl_module(kind: str, hidden: int) -> nn.Module:
    from rsl_rl.modules.rnn import RNN

    return RNN(F, hidden, type=kind)


def torchrl_module(kind: str, hidden: int) -> nn.Module:
    from torchrl.modules import GRUModule, LSTMModule

    module, keys = {"lstm": (LSTMModule, "hc"), "gru": (GRUModule, "h")}[kind]
    names = {"in_keys": ["x", *keys], "out_keys": ["y", *(("next", key) for key in keys)]}
    return module(F, hidden, **names, recurrent_backend="pad", default_recurrent_mode=True)


class Way(NamedTuple):
    """make gives the module of a kind of cell and H. whose: where it is from, if no package has it."""

    name: str
    replay: Callable
    make: Callable[[str, int], nn.Module]
    whose: str = ""
    package: str = ""
    exact: bool = True
    kinds: tuple[str, ...] = ("lstm", "gru")

    def source(self) -> str:
        """PackageNotFoundError if it isn't installed."""
        version = importlib.metadata.version
        return f"{self.package} {version(self.package)}" if self.package else self.whose


WAYS = [
    Way("ours", fused_reset, ours, "ours"),
    Way("no resets", no_resets, torchs, "torch", exact=False),
    Way("loop of cells", loop_of_cells, ours, "the definition"),
    Way("loop of calls", loop_of_calls, torchs, "after CleanRL"),
    Way("segments", segments, torchs, "after ikostrikov and skrl"),
    Way("rl_games", rl_games, rl_games_module, package="rl-games"),
    Way("padded", padded, torchs, "after recurrent-ppo-truncated-bptt"),
    Way("rsl_rl", rsl_rl, rsl_rl_module, package="rsl-rl-lib"),
    Way("packed", packed, torchs, "after Sample Factory"),
    Way("sb3-contrib, padded", sb3_contrib, torchs, package="sb3-contrib", kinds=("lstm",)),
    Way("TorchRL, pad", torchrl, torchrl_module, package="torchrl"),
]
LOOP = WAYS[2]


# --- Measuring ---
class Data(NamedTuple):
    """A minibatch, and the gradient of h."""

    x: Tensor  # (T, B, F)
    state: Tensor  # (2, B, H) or (1, B, H)
    final: Tensor  # (T, B)
    gradient: Tensor  # (T, B, H)

    def to(self, dtype: torch.dtype, device: str) -> "Data":
        x, state, gradient = (y.to(device, dtype) for y in (self.x, self.state, self.gradient))
        return Data(x.detach().requires_grad_(), state, self.final.to(device), gradient)


def make_data(kind: str, final: Tensor, hidden: int) -> tuple[Data, dict[str, Tensor]]:
    """Random numbers in float64, and weights by their role: our initial ones, with biases that are
    not 0."""
    torch.manual_seed(1)
    weights = {}
    for name, parameter in ours(kind, hidden).double().named_parameters():
        noise = 0.1 * torch.randn_like(parameter)
        weights[role_of(name)] = (parameter + noise).detach()
    double = {"dtype": torch.float64}
    x = torch.randn(*final.shape, F, **double)
    state = 0.5 * torch.randn({"lstm": 2, "gru": 1}[kind], final.shape[1], hidden, **double)
    gradient = torch.randn(*final.shape, hidden, **double)
    gradient = gradient.masked_fill(final.unsqueeze(-1), 0.0)
    return Data(x, state, final, gradient), weights


def role_of(name: str) -> str:
    """Of a parameter's name in any of the libraries: which of the four weights it is."""
    return next(role for role in ROLES if role in name)


def random_final(batch: int, rate: float, steps: int = T) -> Tensor:
    """final (T, B): the reset rate's share of all steps, anywhere; one step, if it is not 0."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(steps * batch, generator=generator)
    count = math.ceil(rate * steps * batch)
    return (order < count).unflatten(0, (steps, batch))


def loaded(way: Way, kind: str, weights: dict[str, Tensor], like: Tensor) -> nn.Module:
    """A way's module with these weights, of a tensor's dtype and device."""
    module = way.make(kind, weights["weight_hh"].shape[1]).to(like.device, like.dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[role_of(name)])
    return module


def replay(way: Way, module: nn.Module, data: Data) -> Tensor:
    """Forward and backward; leaves gradients in data.x and in the module's weights."""
    data.x.grad = None
    module.zero_grad()
    h = way.replay(module, data.x, data.state, data.final)
    h.backward(data.gradient)
    return h


def results(way: Way, kind: str, data: Data, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """h where a loss reads it, and all gradients."""
    module = loaded(way, kind, weights, data.x)
    h = replay(way, module, data).detach()
    found = {"h": h.masked_fill(data.final.unsqueeze(-1), 0.0), "x": data.x.grad}
    return found | {role_of(name): x.grad for name, x in module.named_parameters()}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """The relative errors of h and of the gradients, as the docstring of this file defines them."""
    error = {}
    for name, tensor in expected.items():
        error[name] = ((found[name] - tensor).abs().max() / tensor.abs().max()).item()
    return error.pop("h"), max(error.values())


def timed(way: Way, module: nn.Module, data: Data) -> float:
    """Milliseconds of a forward and a backward pass."""
    clock = time.perf_counter if data.x.is_cuda else time.process_time
    wait = torch.cuda.synchronize if data.x.is_cuda else lambda: None
    wait()
    began = clock()
    replay(way, module, data)
    wait()
    return 1000 * (clock() - began)


def group(kind: str, batch: int, hidden: int, ways: list[Way], device: str) -> list[dict]:
    """Rows of all ways and rates of one kind of cell, B and H, measured in turn."""
    ways = [way for way in ways if kind in way.kinds]
    inputs, modules, error = {}, {}, {}
    for rate in RATES:
        data, weights = make_data(kind, random_final(batch, rate), hidden)
        inputs[rate] = data.to(torch.float32, device)
        double = data.to(torch.float64, device)
        expected = results(LOOP, kind, double, weights)
        for way in ways:
            error[rate, way] = errors(results(way, kind, double, weights), expected)
            modules[way] = loaded(way, kind, weights, inputs[rate].x)
            replay(way, modules[way], inputs[rate])  # warms up
    fused = ways[0]
    times, ratios = defaultdict(list), defaultdict(list)
    for i in range(ROUNDS):
        for rate, way in product(RATES, ways):
            key, base = (rate, way), (0.0 if way == fused else rate, fused)
            if key == base or (i >= 3 and median(times[key]) > 1000):  # slow ways: 3 rounds
                continue
            for of_rate, of_way in [key, base] if i % 2 else [base, key]:
                took = timed(of_way, modules[of_way], inputs[of_rate])
                times[of_rate, of_way].append(took)
            ratios[key].append(times[key][-1] / times[base][-1])
    rows = []
    for rate, way in product(RATES, ways):
        ratio = f"{median(ratios[rate, way] or [1.0]):.3f}"
        over_ours, over_no_resets = ("1.000", ratio) if way == fused else (ratio, "")
        error_h, error_grad = error[rate, way]
        rows.append({
            "rate": rate, "way": way.name, "source": way.source(),
            "repeats": len(times[rate, way]), "ms": f"{median(times[rate, way]):.4g}",
            "over_ours": over_ours, "over_no_resets": over_no_resets,
            "error_h64": f"{error_h:.1e}", "error_grad64": f"{error_grad:.1e}",
        })  # fmt: skip
    return rows


def measure(options: argparse.Namespace) -> None:
    """Appends the rows of each group of which the CSV file has none."""
    path = options.results / "resets.csv"
    processor = f"{machine()}, {torch.backends.cpu.get_cpu_capability()}"
    if options.device == "cuda":
        processor = torch.cuda.get_device_name()
    for kind, batch, hidden in product(options.cells, options.batches, options.hidden):
        about = {"processor": processor, "torch": torch.__version__}
        about |= {"cell": kind, "batch": str(batch), "hidden": str(hidden)}
        if any(about.items() <= row.items() for row in read(path)):
            print(f"{kind}, B {batch}, H {hidden}: has its rows", flush=True)
            continue
        rows = group(kind, batch, hidden, options.ways, options.device)
        where = commit(ROOT, "rppo_lstm.py", "rppo_gru_atari.py", "benchmarks/resets.py")
        dated = {"date": time.strftime("%Y-%m-%d"), "commit": where, **about}
        append(path, FIELDS, [dated | row for row in rows])
        for row in rows:
            over, worst = row["over_ours"], row["error_grad64"]
            print(
                f"{kind} {batch} {hidden} {row['rate']:<5} {row['way']:20} {over} {worst}",
                flush=True,
            )


def failures(rows: list[dict]) -> list[str]:
    """The ways that are exact and yet differ from the loop by more than 1e-12 in float64."""
    exact = {way.name for way in WAYS if way.exact}
    found = []
    for row in rows:
        worst = max(float(row["error_h64"]), float(row["error_grad64"]))
        if row["way"] in exact and not worst <= 1e-12:
            found.append(f"{row['cell']}, {row['way']}, rate {row['rate']}: {worst}")
    return found


def installed() -> list[Way]:
    ways = []
    for way in WAYS:
        try:
            way.source()
            ways.append(way)
        except importlib.metadata.PackageNotFoundError:
            print(f"left out: {way.name} (needs the package {way.package})")
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--hidden", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.ways = installed()
    measure(options)
    if wrong := failures(read(options.results / "resets.csv")):
        raise SystemExit("not exact: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
