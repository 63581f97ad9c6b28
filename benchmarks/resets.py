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
        of such pairs. over_no_resets compares a way with itself at reset rate 0 (the fused reset:
        in pairs).
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
ROLES = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
OURS = {"lstm": ResetLSTM, "gru": ResetGRU}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
FUSED = {"lstm": nn.LSTM, "gru": nn.GRU}
FIELDS = """date commit processor torch cell batch hidden rate way source repeats ms over_ours
    over_no_resets error_h64 error_grad64""".split()


class LoopOfCells(nn.Module):
    """The definition: state = cell(x[t], state), then state = 0 if final[t]."""

    def __init__(self, kind: str, hidden: int, features: int = F):
        super().__init__()
        self.kind = kind
        self.cell = CELLS[kind](features, hidden)

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        """x (T, B, F), state (2, B, H) of the LSTM or (1, B, H), final (T, B) -> h (T, B, H)."""
        outputs = []
        for x_t, final_t in zip(x, final):
            if self.kind == "lstm":
                state = torch.stack(self.cell(x_t, (state[0], state[1])))
            else:
                state = self.cell(x_t, state[0]).unsqueeze(0)
            outputs.append(state[0])
            state = state.masked_fill(final_t.unsqueeze(-1), 0.0)
        return torch.stack(outputs)


class Fused(nn.Module):
    """Resets ignored: one call of nn.LSTM or nn.GRU, which is as fast as a replay can be here.

    The other ways inherit its weights, and its translation of a state.
    """

    def __init__(self, kind: str, hidden: int, features: int = F):
        super().__init__()
        self.rnn = FUSED[kind](features, hidden)

    def unpacked(self, state: Tensor):
        """(2, B, H) -> h and c, each (1, B, H), as nn.LSTM has it; nn.GRU has (1, B, H)."""
        if len(state) == 2:
            return state[:1].contiguous(), state[1:].contiguous()
        return state

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        return self.rnn(x, self.unpacked(state))[0]


def starts(final: Tensor) -> Tensor:
    """final (T, B) -> start (T, B): the step before was final."""
    return torch.cat([torch.zeros_like(final[:1]), final[:-1]])


def masked(state, mask: Tensor):
    """A state times a mask (B,), as the libraries reset it."""
    if isinstance(state, tuple):
        return tuple(part * mask.view(1, -1, 1) for part in state)
    return state * mask.view(1, -1, 1)


class LoopOfCalls(Fused):
    """A call of nn.LSTM for every step, as in CleanRL's ppo_atari_lstm.py."""

    def forward(self, x, state, final):
        state = self.unpacked(state)
        outputs = []
        for x_t, start in zip(x, starts(final).to(x.dtype)):
            h, state = self.rnn(x_t.unsqueeze(0), masked(state, 1.0 - start))
            outputs.append(h)
        return torch.cat(outputs)


class Segments(Fused):
    """A call for each run of steps in which no sequence of the batch starts an episode, as in
    ikostrikov's pytorch-a2c-ppo-acktr-gail and in skrl's examples."""

    def forward(self, x, state, final):
        start = starts(final)
        cuts = start.any(1).nonzero().flatten().tolist()
        state = self.unpacked(state)
        outputs = []
        for begin, end in zip([0, *cuts], [*cuts, len(x)]):
            state = masked(state, (~start[begin]).to(x.dtype))
            h, state = self.rnn(x[begin:end], state)
            outputs.append(h)
        return torch.cat(outputs)


class RlGames(Fused):
    """rl_games' LSTMWithDones and GRUWithDones, which call nn.LSTM and nn.GRU for segments, too."""

    def __init__(self, kind, hidden, features=F):
        nn.Module.__init__(self)
        from rl_games.common.layers import recurrent

        layers = {"lstm": recurrent.LSTMWithDones, "gru": recurrent.GRUWithDones}
        self.rnn = layers[kind](features, hidden)

    def forward(self, x, state, final):
        done_masks = starts(final).to(x.dtype).unsqueeze(-1)
        return self.rnn(x, self.unpacked(state), done_masks)[0]


def episodes(final: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts sequences, one after the other, into episodes, and where a sequence ends.

    final (T, B), state (rows, B, H) -> the lengths of the E episodes (E,), and the states before
    them (rows, E, H): 0, but for the first of each sequence.
    """
    steps = len(final)
    ends = final.clone()
    ends[-1] = True
    last = ends.T.flatten().nonzero().flatten()  # among the B T steps, sequence by sequence
    lengths = last.diff(prepend=last.new_tensor([-1]))
    continues = (last - lengths + 1) % steps == 0
    initial = state.new_zeros(len(state), len(lengths), state.shape[-1])
    initial[:, continues] = state
    return lengths, initial


def in_order(h: Tensor, steps: int) -> Tensor:
    """(B T, H), sequence by sequence -> (T, B, H)."""
    return h.unflatten(0, (-1, steps)).transpose(0, 1)


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


class Padded(Fused):
    """Episodes padded to the longest and replayed side by side, as in
    recurrent-ppo-truncated-bptt with sequences as long as episodes."""

    def forward(self, x, state, final):
        lengths, initial = episodes(final, state)
        padded, valid = pad(x.transpose(0, 1).flatten(0, 1), lengths)
        h, _ = self.rnn(padded.transpose(0, 1), self.unpacked(initial))  # (longest, E, H)
        return in_order(h.transpose(0, 1)[valid], len(x))


class RslRl(Fused):
    """rsl_rl's RNN module and its functions that pad: to T steps, however short episodes are."""

    def __init__(self, kind, hidden, features=F):
        nn.Module.__init__(self)
        from rsl_rl.modules.rnn import RNN

        self.rnn = RNN(features, hidden, type=kind)

    def forward(self, x, state, final):
        from rsl_rl.utils import split_and_pad_trajectories

        _, initial = episodes(final, state)
        index = torch.arange(final.numel(), dtype=x.dtype, device=x.device).view(*final.shape, 1)
        padded, masks = split_and_pad_trajectories(index, final)  # as pad() says, not x itself
        rows = x.flatten(0, 1)[padded.squeeze(-1).long()] * masks.unsqueeze(-1)
        return self.rnn(rows, masks, self.unpacked(initial))


class Packed(Fused):
    """One call for a PackedSequence of episodes, longest first, as in Sample Factory: at step t it
    has the rows of the episodes that are longer than t."""

    def forward(self, x, state, final):
        lengths, initial = episodes(final, state)
        count = len(lengths)
        by_length = lengths.argsort(descending=True, stable=True)
        rank = by_length.argsort()
        episode = torch.arange(count, device=x.device).repeat_interleave(lengths)  # (B T,)
        first = lengths.cumsum(0) - lengths
        step = torch.arange(len(episode), device=x.device) - first[episode]
        order = (step * count + rank[episode]).argsort()
        rows = x.transpose(0, 1).flatten(0, 1)[order]
        packed = PackedSequence(rows, step.bincount().cpu(), by_length, rank)
        h, _ = self.rnn(packed, self.unpacked(initial))
        return in_order(h.data[order.argsort()], len(x))


class Contrib(Fused):
    """sb3-contrib's RecurrentActorCriticPolicy._process_sequence on what its buffer gives it in
    training: episodes padded to the longest. Their first steps are starts, so it calls nn.LSTM for
    every step."""

    def forward(self, x, state, final):
        from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

        replay = RecurrentActorCriticPolicy._process_sequence
        lengths, initial = episodes(final, state)
        padded, valid = pad(x.transpose(0, 1).flatten(0, 1), lengths)
        start, _ = pad(starts(final).T.flatten().unsqueeze(-1), lengths)
        start = start.flatten().to(x.dtype)
        h, _ = replay(padded.flatten(0, 1), self.unpacked(initial), start, self.rnn)
        return in_order(h[valid.flatten()], len(x))


class TorchRL(nn.Module):
    """TorchRL's LSTMModule or GRUModule, whose backend `pad` packs episodes."""

    def __init__(self, kind: str, hidden: int, features: int = F):
        super().__init__()
        from torchrl.modules import GRUModule, LSTMModule

        modules = {"lstm": LSTMModule, "gru": GRUModule}
        self.keys = {"lstm": ["h", "c"], "gru": ["h"]}[kind]
        self.module = modules[kind](
            features,
            hidden,
            in_keys=["x", *self.keys],
            out_keys=["y", *(("next", key) for key in self.keys)],
            recurrent_backend="pad",
            default_recurrent_mode=True,
        )

    def forward(self, x: Tensor, state: Tensor, final: Tensor) -> Tensor:
        from tensordict import TensorDict

        steps, batch = final.shape
        data = {"x": x.transpose(0, 1), "is_init": starts(final).T.unsqueeze(-1)}
        for key, part in zip(self.keys, state):  # a rollout stores the state before every step
            data[key] = part.new_zeros(batch, steps, 1, part.shape[-1])
            data[key][:, 0, 0] = part
        return self.module(TensorDict(data, [batch, steps]))["y"].transpose(0, 1)


class Way(NamedTuple):
    """name, what makes it of a kind of cell and H, the package that it needs, else whose it is."""

    name: str
    make: Callable[[str, int], nn.Module]
    package: str = ""
    whose: str = ""
    exact: bool = True
    kinds: tuple[str, ...] = ("lstm", "gru")

    @property
    def source(self) -> str:
        if self.package:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        return self.whose


def ours(kind: str, hidden: int, features: int = F) -> nn.Module:
    return OURS[kind](features, hidden)


WAYS = [
    Way("ours", ours, whose="ours"),
    Way("no resets", Fused, whose="torch", exact=False),
    Way("loop of cells", LoopOfCells, whose="the definition"),
    Way("loop of calls", LoopOfCalls, whose="after CleanRL"),
    Way("segments", Segments, whose="after ikostrikov and skrl"),
    Way("rl_games", RlGames, "rl-games"),
    Way("padded", Padded, whose="after recurrent-ppo-truncated-bptt"),
    Way("rsl_rl", RslRl, "rsl-rl-lib"),
    Way("packed", Packed, whose="after Sample Factory"),
    Way("sb3-contrib, padded", Contrib, "sb3-contrib", kinds=("lstm",)),
    Way("TorchRL, pad", TorchRL, "torchrl"),
]
LOOP = next(way for way in WAYS if way.make is LoopOfCells)


class Data(NamedTuple):
    """Of one minibatch; the gradient is that of h. weights has the four of ROLES."""

    x: Tensor  # (T, B, F)
    state: Tensor  # (2, B, H) or (1, B, H)
    final: Tensor  # (T, B)
    gradient: Tensor  # (T, B, H)
    weights: dict[str, Tensor]

    def to(self, dtype: torch.dtype, device: str) -> "Data":
        x = self.x.detach().to(device, dtype).requires_grad_()
        state = self.state.to(device, dtype)
        gradient = self.gradient.to(device, dtype)
        return Data(x, state, self.final.to(device), gradient, self.weights)


def role_of(name: str) -> str:
    """Of a parameter's name in any of the libraries: which of the four weights it is."""
    return next(role for role in ROLES if role in name)


def make_data(kind: str, final: Tensor, hidden: int, features: int = F) -> Data:
    """Random numbers in float64. The weights are our initial ones with biases that are not 0."""
    torch.manual_seed(1)
    steps, batch = final.shape
    module = ours(kind, hidden, features).double()
    weights = {}
    for name, parameter in module.named_parameters():
        noise = 0.1 * torch.randn_like(parameter)
        weights[role_of(name)] = (parameter + noise).detach()
    double = {"dtype": torch.float64}
    x = torch.randn(steps, batch, features, **double)
    state = 0.5 * torch.randn({"lstm": 2, "gru": 1}[kind], batch, hidden, **double)
    gradient = torch.randn(steps, batch, hidden, **double)
    gradient = gradient.masked_fill(final.unsqueeze(-1), 0.0)
    return Data(x, state, final, gradient, weights)


def random_final(batch: int, rate: float, steps: int = T) -> Tensor:
    """final (T, B): the reset rate's share of all steps, anywhere; one step, if it is not 0."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(steps * batch, generator=generator)
    count = math.ceil(rate * steps * batch)
    return (order < count).unflatten(0, (steps, batch))


def loaded(way: Way, kind: str, data: Data) -> nn.Module:
    """A way's module with the weights of the data, and their dtype and device."""
    module = way.make(kind, data.gradient.shape[-1], data.x.shape[-1])
    module.to(data.x.device, data.x.dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(data.weights[role_of(name)])
    return module


def replay(module: nn.Module, data: Data) -> Tensor:
    """Forward and backward; leaves gradients in data.x and in the module's weights."""
    data.x.grad = None
    module.zero_grad()
    h = module(data.x, data.state, data.final)
    h.backward(data.gradient)
    return h


def results(module: nn.Module, data: Data) -> dict[str, Tensor]:
    """h where a loss reads it, and all gradients, in float64."""
    h = replay(module, data).detach()
    found = {"h": h.masked_fill(data.final.unsqueeze(-1), 0.0), "x": data.x.grad}
    for name, parameter in module.named_parameters():
        found[role_of(name)] = parameter.grad
    return {name: tensor.double().cpu() for name, tensor in found.items()}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """The relative errors of h and of the gradients, as the docstring of this file defines them."""
    error = {}
    for name, tensor in expected.items():
        error[name] = ((found[name] - tensor).abs().max() / tensor.abs().max()).item()
    return error.pop("h"), max(error.values())


def timed(module: nn.Module, data: Data) -> float:
    """Milliseconds of a forward and a backward pass."""
    if not data.x.is_cuda:
        began = time.process_time()
        replay(module, data)
        return 1000 * (time.process_time() - began)
    torch.cuda.synchronize()
    began = time.perf_counter()
    replay(module, data)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def missing(way: Way) -> str:
    """Why a way can't run here; empty if it can."""
    try:
        importlib.metadata.version(way.package or "torch")
    except importlib.metadata.PackageNotFoundError:
        return f"needs the package {way.package}"
    return ""


def group(kind: str, batch: int, hidden: int, options: argparse.Namespace) -> list[dict]:
    """Rows of all ways and rates of one kind of cell, B and H, measured in turn."""
    inputs = {}
    error = {}
    ways = [way for way in options.ways if kind in way.kinds]
    modules = {}
    for rate in options.rates:
        final = random_final(batch, rate, options.steps)
        data = make_data(kind, final, hidden, options.features)
        inputs[rate] = data.to(torch.float32, options.device)
        double = data.to(torch.float64, options.device)
        expected = results(loaded(LOOP, kind, double), double)
        for way in ways:
            error[rate, way.name] = errors(results(loaded(way, kind, double), double), expected)
            modules[way.name] = loaded(way, kind, inputs[rate])
            replay(modules[way.name], inputs[rate])  # warms up
    times: dict[tuple[float, str], list[float]] = {}
    ratios: dict[tuple[float, str], list[float]] = {}
    for i in range(options.rounds):
        for rate in options.rates:
            for way in ways:
                key = rate, way.name
                base = (0.0 if way.name == "ours" else rate), "ours"
                if key == base or (i >= 3 and median(times[key]) > 1000):  # slow ways: 3 rounds
                    continue
                took = {}
                for of, name in [key, base] if i % 2 else [base, key]:
                    took[of, name] = timed(modules[name], inputs[of])
                    times.setdefault((of, name), []).append(took[of, name])
                ratios.setdefault(key, []).append(took[key] / took[base])
    rows = []
    for rate in options.rates:
        for way in ways:
            key = rate, way.name
            over_ours, over_no_resets = 1.0, 1.0
            if way.name != "ours":
                over_ours = median(ratios[key])
                over_no_resets = median(times[key]) / median(times[0.0, way.name])
            elif rate > 0:
                over_no_resets = median(ratios[key])
            row = {"rate": rate, "way": way.name, "source": way.source, "repeats": len(times[key])}
            row |= {"ms": f"{median(times[key]):.4g}", "over_ours": f"{over_ours:.3f}"}
            row |= {"over_no_resets": f"{over_no_resets:.3f}"}
            row |= dict(zip(("error_h64", "error_grad64"), (f"{x:.1e}" for x in error[key])))
            rows.append(row)
    return rows


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{machine()}, {torch.backends.cpu.get_cpu_capability()}"


def measure(options: argparse.Namespace) -> None:
    """Appends the rows of each group of which the CSV file has none."""
    path = options.results / "resets.csv"
    for kind, batch, hidden in product(options.cells, options.batches, options.hidden):
        about = {"processor": processor(options.device), "torch": torch.__version__}
        about |= {"cell": kind, "batch": str(batch), "hidden": str(hidden)}
        if any(about.items() <= row.items() for row in read(path)):
            print(f"{kind}, B {batch}, H {hidden}: has its rows", flush=True)
            continue
        rows = group(kind, batch, hidden, options)
        where = commit(ROOT, "rppo_lstm.py", "rppo_gru_atari.py", "benchmarks/resets.py")
        dated = {"date": time.strftime("%Y-%m-%d"), "commit": where, **about}
        append(path, FIELDS, [dated | row for row in rows])
        for row in rows:
            print(
                f"{kind:4} B {batch:<3} H {hidden:<3} rate {row['rate']:<5} {row['way']:20}"
                f"{row['ms']:>7} ms {row['over_ours']:>7} x fused  "
                f"float64 {row['error_h64']} {row['error_grad64']}",
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--hidden", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--steps", type=int, default=T)
    parser.add_argument("--features", type=int, default=F)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the CSV file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    torch.set_num_threads(1)
    options.ways = [way for way in WAYS if not missing(way)]
    for way in WAYS:
        if reason := missing(way):
            print(f"left out: {way.name} ({reason})")
    measure(options)
    if wrong := failures(read(options.results / "resets.csv")):
        raise SystemExit("not exact: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
