"""Draws docs/img/*.svg: python docs/tools/drawings.py

Each is plain SVG, 400 units wide so that it can be read on a phone, with colours for light and for
dark pages in one file. The same text gives the same file, byte for byte.
"""

import csv
import math
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs/img"
RESULTS = ROOT / "benchmarks/results"
WIDTH, SHOWN = 400, 540  # units; pixels on a wide page

LIGHT = {
    "ink": "#1f2937", "soft": "#5b6472", "line": "#94a3b8", "pad": "#f1f5f9",
    "blue": "#dbeafe", "blue-line": "#2563eb", "orange": "#ffe4c7", "orange-line": "#d9580b",
    "green": "#d5f5e0", "green-line": "#15803d", "violet": "#efe3ff", "violet-line": "#8b3fd9",
}  # fmt: skip
DARK = {
    "ink": "#e6e9ee", "soft": "#a3adba", "line": "#64748b", "pad": "#262d38",
    "blue": "#1d3a63", "blue-line": "#6ba8fb", "orange": "#55300f", "orange-line": "#fb9a4b",
    "green": "#16442b", "green-line": "#4ade80", "violet": "#41285f", "violet-line": "#c590ff",
}  # fmt: skip
KINDS = "blue", "orange", "green", "violet"


def style(colours: dict[str, str]) -> str:
    rules = [f"text{{fill:{colours['ink']}}}.soft{{fill:{colours['soft']}}}"]
    rules += [f".pad{{fill:{colours['pad']};stroke:{colours['line']}}}"]
    rules += [f".line{{stroke:{colours['line']}}}.head-line{{fill:{colours['line']}}}"]
    for kind in KINDS:
        line = colours[f"{kind}-line"]
        rules += [f".{kind}{{fill:{colours[kind]};stroke:{line}}}.of-{kind}{{fill:{line}}}"]
        rules += [f".to-{kind}{{stroke:{line}}}.head-{kind}{{fill:{line}}}"]
    return "".join(rules)


class Drawing:
    """Elements in the order in which they are drawn."""

    def __init__(self, name: str, height: int, description: str):
        self.name, self.height, self.description = name, height, description
        self.elements: list[str] = []
        self.heads: set[str] = set()

    def text(
        self,
        x: float,
        y: float,
        words: str,
        kind: str = "",
        size: float = 12,
        anchor: str = "middle",
        bold=False,
    ):
        attributes = f'x="{x:g}" y="{y:g}"'
        if kind:
            attributes += f' class="{kind}"'
        if bold:
            attributes += ' font-weight="600"'
        if size != 12:
            attributes += f' font-size="{size:g}"'
        if anchor != "middle":
            attributes += f' text-anchor="{anchor}"'
        self.elements.append(f"<text {attributes}>{escape(words)}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        words: str = "",
        size: float = 11,
        radius: float = 4,
        dash=False,
        filled=True,
    ):
        attributes = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        attributes += f' class="{kind}"'
        if dash:
            attributes += ' stroke-dasharray="3 3"'
        if not filled:
            attributes += ' fill="none"'
        self.elements.append(f"<rect {attributes}/>")
        lines = words.split("\n")
        for i, line in enumerate(lines if words else []):
            middle = y + height / 2 + 0.36 * size + (i - (len(lines) - 1) / 2) * 1.2 * size
            self.text(x + width / 2, round(middle, 1), line, size=size)

    def circle(self, x: float, y: float, radius: float, kind: str):
        self.elements.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{kind}" stroke-width="2"/>'
        )

    def path(
        self,
        d: str,
        kind: str = "line",
        head=False,
        dash=False,
        width: float = 1.4,
        filled=False,
    ):
        attributes = f'd="{d}" class="{kind}"'
        if not filled:
            attributes += ' fill="none"'
        attributes += f' stroke-width="{width:g}"'
        if dash:
            attributes += ' stroke-dasharray="4 3"'
        if head:
            colour = kind.removeprefix("to-")
            self.heads.add(colour)
            attributes += f' marker-end="url(#{colour})"'
        self.elements.append(f"<path {attributes}/>")

    def svg(self) -> str:
        markers = "".join(
            f'<marker id="{c}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="8" markerHeight="8"'
            f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.6L7.5 4L0 7.4z" class="head-{c}"/></marker>'
            for c in sorted(self.heads)
        )
        size = f'width="{SHOWN}" height="{round(self.height * SHOWN / WIDTH)}" viewBox="0 0 {WIDTH} {self.height}"'
        font = 'font-family="system-ui,-apple-system,Segoe UI,Roboto,Helvetica,Arial,sans-serif" font-size="12"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} text-anchor="middle" role="img">',
            f"<title>{escape(self.description)}</title>",
            f"<style>{style(LIGHT)}@media(prefers-color-scheme:dark){{{style(DARK)}}}</style>",
            f"<defs>{markers}</defs>",
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def time_steps() -> Drawing:
    """The end of an episode: steps 2 to 4, the final step 5, and the next episode."""
    d = Drawing(
        "time-steps",
        312,
        "Time steps at the end of an episode: the final step, truncation and reset",
    )
    left, column, ts = 84, 52, range(2, 8)

    def x(t: float) -> float:
        return left + (t - 2) * column + column / 2

    d.box(left + 3 * column, 8, column, 256, "orange", radius=7, dash=True)
    d.text(4, 26, "time step t", "soft", anchor="start")
    for t in ts:
        d.text(x(t), 26, f"{t}", bold=True)
    rows = [
        ("observation", 38, ["A", "A", "A", "A's\nlast", "B's\nfirst", "B"]),
        ("action", 78, ["played", "played", "played", "ignored", "played", "played"]),
        ("reward", 108, ["r₂", "r₃", "r₄", "0", "r₆", "r₇"]),
    ]
    for name, y, cells in rows:
        height = 34 if name == "observation" else 24
        d.text(4, y + height / 2 + 4, name, "soft", anchor="start")
        for t, words in zip(ts, cells):
            kind = "orange" if t == 5 else "blue" if t < 5 else "green"
            if name == "observation":
                d.box(x(t) - 22, y, 44, height, kind, words)
            else:
                d.text(x(t), y + height / 2 + 4, words, "of-orange" if t == 5 else "", 11.5)
    d.text(4, 150, "truncated", "soft", anchor="start")
    d.text(4, 174, "final", "soft", anchor="start")
    for t in ts:
        d.text(x(t), 150, "yes" if t == 4 else "·", bold=t == 4)
        d.text(x(t), 174, "yes" if t == 5 else "·", "of-orange" if t == 5 else "", bold=t == 5)
    d.text(4, 208, "LSTM state", "soft", anchor="start")
    d.text(4, 222, "before it", "soft", anchor="start")
    for t, height in zip(ts, [14, 22, 28, 34, 0, 10]):
        kind = "blue" if t < 6 else "green"
        if height:
            d.box(x(t) - 13, 226 - height, 26, height, kind, radius=2)
        else:
            d.text(x(t), 223, "zero", size=11.5, bold=True)
    d.path(f"M{left} 226H{left + 6 * column}")
    d.text(4, 252, "in the loss", "soft", anchor="start")
    for t in ts:
        d.text(x(t), 252, "no" if t == 5 else "yes", "of-orange" if t == 5 else "", bold=t == 5)
    d.path(f"M{x(5)} 266C{x(5)} 288 {x(4)} 288 {x(4)} 268", "to-orange", head=True, width=1.8)
    d.text(x(4.5), 302, "its value bootstraps step 4", "of-orange", 11.5)
    return d


ENDS = [[], [5], [3, 9]]  # steps that are final, of three environments
STEPS = 12


def replay() -> Drawing:
    """The same rollout three times: the loop, padding, and the fused reset."""
    d = Drawing(
        "replay",
        428,
        "Three ways to replay a rollout: a loop over time, padding, and the fused reset",
    )
    cell, left = 30, 20

    def kind(n: int, t: int) -> str:
        episode = sum(end < t for end in ENDS[n])
        return ("blue", "green", "violet")[(n + episode) % 3]

    def row(n: int, steps, y: float, at: int = 0, gap: float = 0, mark=True):
        for i, t in enumerate(steps):
            final = t in ENDS[n]
            x = left + (at + i) * cell
            d.box(
                x + 1 + gap,
                y,
                cell - 2 - 2 * gap,
                16,
                "orange" if final else kind(n, t),
                "reset" if final and mark else "",
                8.5,
                3,
            )

    d.text(4, 16, "A loop: 12 calls, one after the other", anchor="start", bold=True)
    for n in range(3):
        row(n, range(STEPS), 28 + 20 * n, gap=2)
    for t in range(STEPS):
        d.box(left + t * cell + 0.5, 24, cell - 1, 64, "line", radius=5, filled=False)
    d.text(4, 116, "Padding: 1 call, but 72 cells for 36 steps", anchor="start", bold=True)
    y = 126
    pieces = 0
    for n, ends in enumerate(ENDS):
        starts = [0, *(end + 1 for end in ends)]
        for first, last in zip(starts, [*ends, STEPS - 1]):
            row(n, range(first, last + 1), y, mark=False)
            for t in range(last + 1 - first, STEPS):
                d.box(left + t * cell + 1, y, cell - 2, 16, "pad", "0", 9, 3, dash=True)
            y += 20
            pieces += 1
    assert pieces * STEPS == 72
    d.box(left - 4, 122, STEPS * cell + 8, 20 * pieces + 4, "line", radius=6, filled=False)
    d.text(4, 278, "Here: 1 call, 36 cells; a final step is the reset", anchor="start", bold=True)
    for n in range(3):
        row(n, range(STEPS), 292 + 20 * n)
    d.box(left - 4, 287, STEPS * cell + 8, 66, "line", radius=6, filled=False)
    d.path(f"M{left} 368H{left + STEPS * cell - 2}", head=True)
    d.text(left + STEPS * cell / 2, 384, "time steps of 3 environments", "soft", 11.5)
    d.text(
        left + STEPS * cell / 2, 402, "The colour changes where a new episode begins.", "soft", 11
    )
    d.text(
        left + STEPS * cell / 2,
        418,
        "Orange: its final step, whose output no loss reads.",
        "soft",
        11,
    )
    return d


def minibatches() -> Drawing:
    """Eight sequences of a rollout of 8 steps and 4 environments, in 4 minibatches."""
    d = Drawing(
        "minibatches",
        350,
        "A rollout cut into sequences, shuffled into minibatches of whole sequences",
    )
    cell, left, batches = 40, 54, [[0, 6], [3, 5], [1, 4], [2, 7]]
    of = {s: KINDS[b] for b, batch in enumerate(batches) for s in batch}

    def sequence(s: int, x: float, y: float, size: float):
        for t in range(4):
            d.box(x + t * size + 1, y, size - 2, 22, of[s], f"{t + 4 * (s % 2)}", 10, 3)
        d.circle(x - 1, y + 11, 4, of[s])

    d.text(4, 18, "8 steps of 4 environments, in sequences of 4", anchor="start", bold=True)
    for n in range(4):
        d.text(4, 48 + 28 * n, f"env {n}", "soft", 11.5, anchor="start")
        for half in range(2):
            sequence(2 * n + half, left + half * (4 * cell + 12), 33 + 28 * n, cell)
    d.text(200, 160, "Circles: the LSTM's state, stored when the sequence began", "soft", 10.5)
    d.path("M36 172V198", head=True, width=1.8)
    d.text(
        48,
        189,
        "shuffle the sequences, keep the order of their steps",
        "soft",
        10.5,
        anchor="start",
    )
    d.text(4, 222, "4 minibatches of 2 whole sequences", anchor="start", bold=True)
    for b, batch in enumerate(batches):
        x, y = 16 + (b % 2) * 196, 236 + (b // 2) * 58
        for i, s in enumerate(batch):
            sequence(s, x, y + 24 * i, 41)
    return d


def ranks() -> Drawing:
    """What three ranks do on their own, and together."""
    d = Drawing(
        "ranks",
        330,
        "Three MPI ranks: rollouts of their own, one averaged gradient, the same weights",
    )
    for r in range(3):
        x, kind = 6 + r * 132, ("blue", "green", "violet")[r]
        d.text(x + 62, 18, f"rank {r}", bold=True)
        d.box(x, 28, 124, 34, kind, "its environments")
        d.path(f"M{x + 62} 62V78", f"to-{kind}", head=True)
        d.box(x, 80, 124, 34, kind, "its rollout")
        d.path(f"M{x + 62} 114V130", f"to-{kind}", head=True)
        d.box(x, 132, 124, 34, kind, f"gradient g{'₀₁₂'[r]}")
        d.path(f"M{x + 62} 166V188", f"to-{kind}", head=True)
        d.path(f"M{x + 62} 228V248", "to-orange", head=True)
        d.box(x, 250, 124, 34, kind, "Adam's step")
    d.box(6, 190, 388, 38, "orange", "allreduce: g = (g₀ + g₁ + g₂) / 3", 13)
    d.text(200, 308, "The same g, the same Adam: the same weights, bit for bit", "soft", 11.5)
    return d


def trust_region() -> Drawing:
    """A Gaussian policy of one action, mean 0 and standard deviation 1: its parameters are m and
    log s. KL(old, new) = log s + (1 + m^2) / (2 s^2) - 1/2, and its Hessian there is diag(1, 2)."""
    d = Drawing(
        "trust-region", 388, "The trust region, the natural gradient's step and the line search"
    )
    target, gradient = 0.2, (0.45, -1.0)

    def kl(m: float, log_s: float) -> float:
        return log_s + (1 + m * m) / (2 * math.exp(2 * log_s)) - 0.5

    def place(m: float, log_s: float) -> tuple[float, float]:
        return 164 + 200 * m, 150 - 225 * log_s

    def outline(radius) -> str:
        points = []
        for i in range(73):
            angle = 2 * math.pi * i / 72
            r = radius(math.cos(angle), math.sin(angle))
            points.append("{:.1f} {:.1f}".format(*place(r * math.cos(angle), r * math.sin(angle))))
        return "M" + "L".join(points) + "z"

    def true_radius(c: float, s: float) -> float:
        low, high = 0.0, 3.0
        for _ in range(60):  # bisection
            middle = (low + high) / 2
            if kl(middle * c, middle * s) < target:
                low = middle
            else:
                high = middle
        return low

    d.path(outline(true_radius), "green", width=1.8, filled=True)
    d.path(
        outline(lambda c, s: math.sqrt(2 * target / (c * c + 2 * s * s))),
        "to-blue",
        dash=True,
        width=1.8,
    )
    natural = gradient[0], gradient[1] / 2  # F^-1 g
    scale = math.sqrt(2 * target / (natural[0] ** 2 + 2 * natural[1] ** 2))
    step = natural[0] * scale, natural[1] * scale
    x0, y0 = place(0, 0)
    gx, gy = place(gradient[0] * 0.3, gradient[1] * 0.3)
    d.path(f"M{x0:g} {y0:g}L{gx:.1f} {gy:.1f}", head=True, width=2)
    d.text(gx - 12, gy - 8, "gradient g", "soft", 11.5, anchor="end")
    fractions = [0.8**i for i in range(10)]
    refused = [f for f in fractions if kl(f * step[0], f * step[1]) >= target]
    taken = fractions[len(refused)]
    ex, ey = place(*step)
    d.path(f"M{x0:g} {y0:g}L{ex:.1f} {ey:.1f}", "to-blue", width=2)
    for f in [*refused, taken]:
        x, y = place(f * step[0], f * step[1])
        kind = "green" if f == taken else "orange"
        d.circle(round(x, 1), round(y, 1), 5.5, kind)
        right, up = 284, y - 22 if f == taken else y + 18
        d.path(f"M{x + 7:.1f} {y:.1f}L{right - 5:g} {up:.1f}", f"to-{kind}", width=1)
        d.text(
            right,
            round(up, 1),
            "whole step" if f == 1 else f"{f:.3g} of the step",
            f"of-{kind}",
            11,
            anchor="start",
            bold=True,
        )
        words = f"KL {kl(f * step[0], f * step[1]):.2f}: {'taken' if f == taken else 'refused'}"
        d.text(right, round(up + 14, 1), words, f"of-{kind}", 11, anchor="start")
    d.circle(x0, y0, 4.5, "pad")
    d.text(x0 - 10, y0 - 8, "old policy", size=11.5, anchor="end")
    d.path("M14 318V12", head=True)
    d.path("M14 318H388", head=True)
    d.text(22, 22, "log standard deviation", "soft", 11, anchor="start")
    d.text(388, 334, "mean of the action", "soft", 11, anchor="end")
    d.path("M16 355H44", "to-blue", dash=True, width=1.8)
    d.text(52, 359, f"Δ′FΔ / 2 = {target:g}: as far as F expects to go", size=11.5, anchor="start")
    d.path("M16 377H44", "to-green", width=1.8)
    d.text(52, 381, f"KL = {target:g}: the trust region", size=11.5, anchor="start")
    return d


def reward_scale() -> Drawing:
    """The gradient steps that benchmarks/reward_scale.py measured: geometric means over seeds."""
    d = Drawing(
        "reward-scale",
        364,
        "Gradients of the policy and of the value after clipping, with rewards divided and with raw rewards",
    )
    with open(RESULTS / "reward-scale.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    last = min(
        max(int(row["iteration"]) for row in rows if row["norm_reward"] == divided)
        for divided in ("True", "False")
    )
    iterations = range(1, last + 1)
    left, right, low, high = 46, 336, -4.0, 0.0

    def place(iteration: float, exponent: float) -> tuple[float, float]:
        x = left + (right - left) * (iteration - 1) / (len(iterations) - 1)
        return x, 30 + 240 * (high - exponent) / (high - low)

    for exponent, label in zip(range(-4, 1), ("0.0001", "0.001", "0.01", "0.1", "1")):
        y = place(1, exponent)[1]
        d.path(f"M{left} {y:g}H{right}", width=0.5)
        d.text(left - 6, y + 4, label, "soft", 10, anchor="end")
    for iteration in 1, 10, 20, 30:
        d.text(place(iteration, 0)[0], 288, f"{iteration}", "soft", 10.5)
    d.text((left + right) / 2, 306, "iteration", "soft", 11.5)
    d.text(
        4,
        16,
        "norm of the gradient in the shared layers, after clipping",
        "soft",
        11.5,
        anchor="start",
    )
    for divided, kind in ("True", "blue"), ("False", "orange"):
        for part in "value", "policy":
            points = []
            for i in iterations:
                found = [
                    r for r in rows if r["norm_reward"] == divided and int(r["iteration"]) == i
                ]
                logs = [math.log10(float(r[part])) for r in found]
                points.append(place(i, sum(logs) / len(logs)))
            d.path(
                "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points),
                f"to-{kind}",
                dash=part == "value",
                width=2 if part == "policy" else 1.4,
            )
            x, y = points[-1]
            shift = {("orange", "value"): -4, ("blue", "policy"): 9}.get((kind, part), 4)
            d.text(x + 8, round(y + shift, 1), part, f"of-{kind}", 11, anchor="start", bold=True)
    legend = [
        ("blue", "rewards divided by the standard deviation of returns"),
        ("orange", "raw rewards (--no-norm-reward)"),
    ]
    for i, (kind, words) in enumerate(legend):
        d.path(f"M16 {330 + 20 * i}H40", f"to-{kind}", width=2.4)
        d.text(48, 334 + 20 * i, words, size=11, anchor="start")
    return d


def looked_at() -> list[dict[str, str]]:
    """What benchmarks/memory_look.py read from memories."""
    with open(RESULTS / "memory-look.csv", newline="") as file:
        return list(csv.DictReader(file))


def chart(d: Drawing, box, xs, ys, x_words: str, y_words: str):
    """Draws axes with these (place, words) on them within the box left, right, top, bottom, whose
    lower left corner is the first of both. Returns a function from numbers to units."""
    left, right, top, bottom = box

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0][0]) / (xs[-1][0] - xs[0][0])
        up = (y - ys[0][0]) / (ys[-1][0] - ys[0][0])
        return left + (right - left) * across, bottom - (bottom - top) * up

    for y, words in ys:
        height = place(xs[0][0], y)[1]
        d.path(f"M{left} {height:.1f}H{right}", width=0.5)
        d.text(left - 6, round(height + 4, 1), words, "soft", 10, anchor="end")
    for x, words in xs:
        d.text(round(place(x, 0)[0], 1), bottom + 16, words, "soft", 10)
    d.text((left + right) / 2, bottom + 32, x_words, "soft", 11)
    d.text(4, top - 14, y_words, "soft", 11.5, anchor="start")
    return place


def curve(d: Drawing, place, points, kind: str, width: float = 1.8, dash=False):
    """A line through (x, y) numbers."""
    places = [place(x, y) for x, y in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    d.path(path, kind, dash=dash, width=width)


def legend(d: Drawing, y: float, entries):
    """Each (x, kind, width, dash, words)."""
    for x, kind, width, dash, words in entries:
        d.path(f"M{x} {y}H{x + 22}", kind, dash=dash, width=width)
        d.text(x + 28, y + 4, words, size=11, anchor="start")


def memory_episode() -> Drawing:
    """The pole's angular velocity in a held-out episode: true, read from the LSTM's h, and from the
    h of an agent without memory."""
    d = Drawing(
        "memory-episode",
        256,
        "The pole's angular velocity, and what is read of it from agents that never see it",
    )
    name = "pole's angular velocity"
    lines = {}
    for agent, what in ("true", name), ("memoryless", f"{name}, read"), ("lstm", f"{name}, read"):
        rows = [r for r in looked_at() if (r["agent"], r["what"], r["seed"]) == (agent, what, "1")]
        lines[agent] = [(int(row["at"]), float(row["value"])) for row in rows]
    most = math.ceil(2 * max(abs(v) for points in lines.values() for _, v in points)) / 2
    ys = [(v, f"{v:g}".replace("-", "−")) for v in (-most, -most / 2, 0, most / 2, most)]
    xs = [(t, f"{t}") for t in range(0, lines["true"][-1][0] + 2, 25)]
    words = "step of a held-out episode", f"{name}, radians a second"
    place = chart(d, (42, 390, 30, 186), xs, ys, *words)
    curve(d, place, lines["true"], "line", 5)
    curve(d, place, lines["memoryless"], "to-orange", 1.4)
    curve(d, place, lines["lstm"], "to-blue", 1.8)
    entries = [
        (8, "line", 5, False, "true"),
        (76, "to-blue", 1.8, False, "read from the LSTM"),
        (226, "to-orange", 1.4, False, "read without memory"),
    ]
    legend(d, 240, entries)
    return d


def memory_training() -> Drawing:
    """R^2 of the hidden velocities over training, and the return as a share of 500: means over
    seeds."""
    d = Drawing(
        "memory-training",
        300,
        "How much of the hidden velocities can be read from the LSTM over training",
    )
    rows = [row for row in looked_at() if row["task"] == "cartpole"]

    def mean(agent: str, what: str, every: int) -> list[tuple[int, float]]:
        """Over the seeds, whose steps differ a little: they are rounded down to so many."""
        values: dict[int, list[float]] = {}
        for row in rows:
            if (row["agent"], row["what"]) == (agent, what):
                n = int(row["steps"]) // every * every
                values.setdefault(n, []).append(float(row["value"]))
        return [(n, sum(x) / len(x)) for n, x in values.items()]

    xs = [(n, f"{n // 1000}k" if n else "0") for n in range(0, 100_001, 20_000)]
    ys = [(v / 4, f"{v / 4:g}") for v in range(5)]
    words = "environment steps of training", "R² on held-out episodes; return / 500"
    place = chart(d, (34, 384, 30, 210), xs, ys, *words)
    returns = [(n, value / 500) for n, value in mean("lstm", "return", 5000)]
    curve(d, place, returns, "to-green", 1.4)
    for velocity, dash in ("pole's angular velocity", False), ("cart's velocity", True):
        curve(d, place, mean("lstm", f"R^2, {velocity}", 10_000), "to-blue", 2, dash)
        [(_, value)] = mean("memoryless", f"R^2, {velocity}", 10_000)
        curve(d, place, [(0, value), (100_000, value)], "to-orange", 1.6, dash)
    entries = [
        (8, "to-blue", 2, False, "pole, LSTM"),
        (128, "to-blue", 2, True, "cart, LSTM"),
        (248, "to-green", 1.4, False, "return, LSTM"),
    ]
    legend(d, 262, entries)
    entries = [
        (8, "to-orange", 1.6, False, "pole, without memory"),
        (188, "to-orange", 1.6, True, "cart, without memory"),
    ]
    legend(d, 282, entries)
    return d


def memory_steps_back() -> Drawing:
    """RepeatPreviousEasy: how often the suit shown k steps before is read rightly."""
    d = Drawing("memory-steps-back", 272, "How many steps back a card can be read from the LSTM")
    rows = [row for row in looked_at() if row["what"] == "share right"]
    xs = [(k, f"{k}") for k in range(12)]
    ys = [(v / 4, f"{25 * v} %") for v in range(5)]
    words = "steps back", "how often the suit is read rightly"
    place = chart(d, (46, 384, 30, 196), xs, ys, *words)
    lines = [("memoryless", True, "orange"), ("lstm", False, "violet"), ("lstm", True, "blue")]
    for agent, trained, kind in lines:
        points = [
            (int(row["at"]), float(row["value"]))
            for row in rows
            if (row["agent"], int(row["steps"]) > 0) == (agent, trained)
        ]
        curve(d, place, points, f"to-{kind}")
        for x, y in points:
            across, up = place(x, y)
            d.circle(round(across, 1), round(up, 1), 3, kind)
    entries = [
        (8, "to-blue", 1.8, False, "trained LSTM"),
        (124, "to-violet", 1.8, False, "untrained LSTM"),
        (254, "to-orange", 1.8, False, "without memory"),
    ]
    legend(d, 250, entries)
    return d


def lstm() -> Drawing:
    """What an LSTM computes in one step."""
    d = Drawing(
        "lstm", 286, "One step of an LSTM: the cell c, its gates f, i and o, and the output h"
    )
    cell, low = 44, 246
    d.path(f"M38 {cell}H362", "to-orange", head=True, width=2.4)
    d.text(24, cell + 4, "c", bold=True)
    d.text(376, cell + 4, "c′", bold=True)
    gates = [(90, "f", "keep"), (162, "i", "write"), (234, "g", "what"), (318, "o", "show")]
    for x, name, words in gates:
        kind = "green" if name == "g" else "blue"
        d.box(x - 27, 176, 54, 40, kind, f"{name}\n{words}", 11.5)
        d.path(f"M{x} {low}V218", head=True)
    d.path(f"M90 176V{cell + 13}", "to-blue", head=True, width=1.6)
    d.path("M162 176V134H185", "to-blue", head=True, width=1.6)
    d.path("M234 176V134H211", "to-green", head=True, width=1.6)
    d.path(f"M198 122V{cell + 13}", "to-green", head=True, width=1.6)
    d.path("M318 176V143", "to-blue", head=True, width=1.6)
    d.path(f"M318 {cell}V70", "to-orange", head=True, width=1.6)
    d.box(295, 72, 46, 24, "pad", "tanh", 11)
    d.path("M318 96V117", "to-orange", head=True, width=1.6)
    d.path("M331 130H362", "to-violet", head=True, width=2.4)
    d.text(376, 134, "h′", bold=True)
    for x, y, sign in (90, cell, "×"), (198, cell, "+"), (198, 134, "×"), (318, 130, "×"):
        d.circle(x, y, 12, "pad")
        d.text(x, y + 5, sign, size=15)
    d.path(f"M38 {low}H318", width=1.8)
    d.text(22, low + 4, "x, h", bold=True)
    d.text(200, 274, "Every gate reads the input x and the last output h.", "soft", 11.5)
    return d


def clip_cases() -> Drawing:
    """PPO's clipped surrogate over the ratio, for a good action and for a bad one."""
    d = Drawing("clip", 214, "The clipped surrogate over the ratio: A above 0 and A below 0")
    epsilon = 0.2
    for left, advantage, words in (14, 1, "A > 0: a good action"), (214, -1, "A < 0: a bad action"):

        def place(ratio: float, surrogate: float, left=left, advantage=advantage):
            middle = 156 if advantage > 0 else 40
            return left + 92 * (ratio - 0.1), middle - 80 * surrogate

        x0, y0 = place(0.1, 0)
        d.path(f"M{x0:g} {y0:g}H{left + 168}", head=True)
        d.text(left + 84, 16, words, bold=True)
        flat = 1 + advantage * epsilon
        ratios = (0.3, flat, 1.8) if advantage > 0 else (0.2, flat, 1.5)
        points = [
            place(r, min(r * advantage, min(max(r, 1 - epsilon), 1 + epsilon) * advantage))
            for r in ratios
        ]
        slope, still = (points[:2], points[1:]) if advantage > 0 else (points[1:], points[:2])
        for kind, (a, b) in ("to-blue", slope), ("to-orange", still):
            d.path("M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*a, *b), kind, width=2.6)
        for r, label in (1, "1"), (flat, f"{flat:g}"):
            x, y = place(r, 0)
            d.path("M{:.1f} {:.1f}L{:.1f} {:.1f}".format(x, y, *place(r, r * advantage)), dash=True)
            up = y + 16 if advantage > 0 else y - 6
            d.text(
                round(x + (10 if (r > 1) or (r == 1 and advantage < 0) else -10), 1),
                up,
                label,
                "soft",
                10.5,
            )
        x, y = place(1, advantage)
        d.circle(round(x, 1), round(y, 1), 4, "blue")
        (ax, ay), (bx, by) = still
        d.text(
            round((ax + bx) / 2, 1),
            round(ay + (-8 if advantage > 0 else 16), 1),
            "no gradient",
            "of-orange",
            11,
        )
    d.text(
        200, 206, "across: the ratio; up: the surrogate. Dot: the policy that acted.", "soft", 11
    )
    return d


DRAWINGS = (
    time_steps, replay, minibatches, ranks, trust_region, reward_scale, memory_episode,
    memory_training, memory_steps_back, lstm, clip_cases,
)  # fmt: skip

if __name__ == "__main__":
    for draw in DRAWINGS:
        drawing = draw()
        (IMAGES / f"{drawing.name}.svg").write_text(drawing.svg())
