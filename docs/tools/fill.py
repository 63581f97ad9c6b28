"""What pages ask for between braces, filled in from the repository, and equations.

    {{ source SCRIPT.NAME }}    that class, function or method (SCRIPT.CLASS.NAME) of SCRIPT.py
    {{ file PATH }}             a file of the repository
    {{ flags SCRIPT }}          every flag with its default and help
    {{ results NAME NAME }}     rows of benchmarks/results/learning.csv: tasks, or SCRIPT.py's tasks
    {{ throughput SECTION }}    rows of benchmarks/results/throughput.csv
    {{ gpu SECTION }}           those of benchmarks/gpu.py, or of resets.csv (gpu resets)
    {{ exercise NAME }}         the measurements of an exercise in benchmarks/results/exercises.csv
    {{ detail NAME; NAME }}     mistakes in benchmarks/results/details.csv; without names: all
    {{ memory WHAT }}           rows of benchmarks/results/memory-look.csv
    {{ figures }}               the tables of README.md
    {{ recipes }}               a table of docs/recipes/*.py, each of which gets a page

A fenced block named eq holds equations, a line each: delta_t = r_t + gamma V_{t+1} - V_t.
"""

import ast
import csv
import html
import re
import sys
from pathlib import Path

from scripts import ROOT, BuildError, text

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/exercises")]
import details  # noqa: E402
import learning  # noqa: E402
import plot  # noqa: E402
import throughput as speed  # noqa: E402
import train as exercises  # noqa: E402


def source(path: str) -> str:
    script, *names = path.split(".")
    nodes: list = ast.parse("\n".join(text(script))).body
    for name in names:
        found = [
            n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name
        ]
        if not found:
            raise BuildError(f"{script}.py has no {'.'.join(names)}")
        node, nodes = found[0], found[0].body
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    quoted = "\n".join(text(script)[first - 1 : node.end_lineno])
    return f'```python title="{script}.py, line {first}"\n{quoted}\n```'


def file(path: str) -> str:
    if not (ROOT / path).is_file():
        raise BuildError(f"there is no {path}")
    language = {".py": "python", ".diff": "diff", ".patch": "diff"}.get(Path(path).suffix, "text")
    return f'```{language} title="{path}"\n{(ROOT / path).read_text().rstrip()}\n```'


def flags(script: str) -> str:
    lines = text(script)
    args = next(
        n
        for n in ast.parse("\n".join(lines)).body
        if isinstance(n, ast.ClassDef) and n.name == "Args"
    )
    rows = ["| flag | default | |", "|---|---|---|"]
    for field in args.body:
        assert isinstance(field, ast.AnnAssign) and field.value is not None
        help_text = lines[field.end_lineno - 1].split("  # ", 1)[1]
        following = lines[field.end_lineno].strip()
        help_text += following[1:] if following.startswith("# ") else ""
        name = ast.unparse(field.target).replace("_", "-")
        default = ast.unparse(field.value).strip("'").replace("np.inf", "inf")
        rows.append(f"| `--{name}` | `{default}` | {help_text.replace('|', chr(92) + '|')} |")
    on = next(row for row in rows if "| `True` |" in row).split("`--")[1].split("`")[0]
    rows += ["", f"What is `True` is switched off with `--no-`, as in `--no-{on}`."]
    presets = re.search(
        r"^((?:ZOO|CARTPOLE).*?\n)?PRESETS.*?^}[^\n]*", "\n".join(lines), re.M | re.S
    )
    if presets:
        rows += ["", "Tasks with other defaults:", "", f"```python\n{presets[0]}\n```"]
    return "\n".join(rows)


def results(names: str) -> str:
    """As python benchmarks/plot.py table TASK ... prints them, of the tasks that have been run."""
    tasks: list[str] = []
    for name in names.split():
        of_script = [
            t
            for t, (_, runs) in learning.TASKS.items()
            if any(x.startswith(name) for x in runs.values())
        ]
        tasks += of_script if name.endswith(".py") else [name]
    measured = {row["task"] for row in learning.read(plot.RESULTS / "learning.csv")}
    for task in tasks:
        if task not in {*learning.TASKS, *measured}:
            raise BuildError(f"benchmarks/learning.py has no task {task}")
    missing = [task for task in tasks if task not in measured]
    there = [task for task in tasks if task in measured]
    command = f"`python benchmarks/learning.py {' '.join(missing)}`"
    parts = [narrow(plot.table(there))] if there else []
    return "\n\n".join([*parts, *([f"Not measured yet: {command}."] if missing else [])])


def narrow(table: str) -> str:
    """For phones: long names may break in the middle, an interval may not."""
    table = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "<wbr>", table)
    table = re.sub(r"\[(\S+), (\S+)\]", r"[\1,&nbsp;\2]", table)
    return re.sub(r"(\d) of (\d)", r"\1&nbsp;of&nbsp;\2", table)


def throughput(section: str) -> str:
    """The latest rows of a section, with the ratio to the peer's."""
    if section not in {name for name, *_ in speed.SYSTEMS}:
        raise BuildError(f"benchmarks/throughput.py has no section {section}")
    works = plot.speeds(section)
    if not works:
        return f"Not measured yet: `python benchmarks/throughput.py {section}`."
    names = [peer["system"] for systems in works.values() for peer in plot.peers_of(systems)[:1]]
    peer_name = names[0] if names else "a peer"
    table = [
        f"| work, system | steps a second: median (min, max) | times {peer_name} |",
        "|---|---|---|",
    ]
    measured = set()
    for (_, work), systems in works.items():
        table.append(f"| **{work}** | | |")
        [peer] = plot.peers_of(systems)[:1] or [None]
        for system, row in systems.items():
            ratio = f"{float(row['median']) / float(peer['median']):.1f}" if peer else ""
            median, low, high = (f"{float(row[name]):,.0f}" for name in ("median", "min", "max"))
            name = system.replace("ours", "this project")
            table.append(f"| {name} | {median} ({low}, {high}) | {ratio} |")
            measured.add(row["commit"])
            machine = row["machine"]
    commits = ", ".join(sorted(measured))
    return "\n".join([*table, "", f"Machine: {machine}. Commits: {commits}.", "{.measured}"])


def gpu(section: str) -> str:
    """Medians of benchmarks/gpu.py on the machine that was measured last: a line for each work, or
    for each part of an iteration."""
    if section == "resets":
        return gpu_resets()
    rows = learning.read(plot.RESULTS / "throughput.csv")
    rows = [row for row in rows if row["section"] == f"gpu-{section}"]
    rows = [row for row in rows if row["machine"] == rows[-1]["machine"]]
    down, across, unit = "work", "system", "steps a second"
    if section == "parts":
        down, across, unit = "system", "work", "milliseconds"
    names = list(dict.fromkeys(row[down] for row in rows))
    if section != "parts":
        names.sort(key=lambda name: int(name.split()[0]))  # "8 games" before "64 games"
    columns = list(dict.fromkeys(row[across] for row in rows))
    titles = [column.removeprefix("ours, ") for column in columns]
    figures = {(row[down], row[across]): f"{float(row['median']):,.0f}" for row in rows}
    table = [f"| {unit} | {' | '.join(titles)} |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = [figures.get((name, column), "") for column in columns]
        table.append(f"| {name} | {' | '.join(cells)} |")
    said = f"Machine: {rows[-1]['machine']}. Commit: {rows[-1]['commit']}."
    return "\n".join([*table, "", said, "{.measured}"])


def gpu_resets() -> str:
    """resets.csv on the GPU that was measured last, where one step in a hundred ends an episode: the
    fused reset's time, and that of other ways divided by it."""
    rows = learning.read(plot.RESULTS / "resets.csv")
    rows = [row for row in rows if "cores" not in row["processor"] and row["rate"] == "0.01"]
    rows = [row for row in rows if row["processor"] == rows[-1]["processor"]]
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] != "ours"))
    head = f"| cell, sequences, units | fused reset | {' | '.join(ways)} |"
    table = [head, "|---" * (len(ways) + 2) + "|"]
    for size in dict.fromkeys((row["cell"], row["batch"], row["hidden"]) for row in rows):
        of = {row["way"]: row for row in rows if (row["cell"], row["batch"], row["hidden"]) == size}
        times = [f"{float(of[way]['over_ours']):.1f}" for way in ways]
        cell, batch, hidden = size
        ours = f"{float(of['ours']['ms']):.1f} ms"
        table.append(f"| {cell.upper()}, {batch}, {hidden} | {ours} | {' | '.join(times)} |")
    said = f"Machine: {rows[-1]['processor']}. Commit: {rows[-1]['commit']}."
    return "\n".join([*table, "", said, "{.measured}"])


def exercise(name: str) -> str:
    if name not in exercises.EXERCISES:
        raise BuildError(f"docs/exercises has no {name}")
    return exercises.table(name)


def detail(names: str) -> str:
    chosen = [name.strip() for name in names.split(";")] if names else list(details.MISTAKES)
    for name in chosen:
        if name not in details.MISTAKES:
            raise BuildError(f"benchmarks/details.py has no {name}")
    return narrow(details.table(chosen))


PROBED = {  # what a table shows of memory-look.csv: its columns, by name
    "velocities": {
        "cart's velocity": "R^2, cart's velocity",
        "pole's angular velocity": "R^2, pole's angular velocity",
    },
    "weak traces": {
        "cart's velocity": "R^2, weak traces too, cart's velocity",
        "pole's angular velocity": "R^2, weak traces too, pole's angular velocity",
    },
    "steps back": {
        "now": "share right, 0",
        "1 step back": "share right, 1",
        **{f"{k} steps back": f"share right, {k}" for k in range(2, 7)},
    },
}
AGENTS = {  # agent, and whether it is trained
    "LSTM, trained": ("lstm", True),
    "LSTM, untrained": ("lstm", False),
    "without memory, trained": ("memoryless", True),
}


def memory(what: str) -> str:
    """What was read from agents before and after training: R^2 of each seed, or the share of right
    guesses."""
    if what not in PROBED:
        raise BuildError(f"memory: {', '.join(PROBED)}, not {what!r}")
    with open(plot.RESULTS / "memory-look.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = PROBED[what]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, (agent, trained) in AGENTS.items():
        cells = []
        for probed in columns.values():
            seeds: dict[str, str] = {}  # the row of the most steps is the last of a seed
            for row in rows:
                key = row["what"] if row["at"] == "" else f"{row['what']}, {row['at']}"
                if (row["agent"], key, int(row["steps"] or 0) > 0) == (agent, probed, trained):
                    seeds[row["seed"]] = f"{float(row['value']):.2f}"
            cells.append(", ".join(seeds.values()))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recipe_parts(path: Path) -> tuple[str, str, str]:
    """The first sentence or line of its docstring, the rest as Markdown, and the whole source."""
    whole = path.read_text()
    docstring = ast.get_docstring(ast.parse(whole))
    if not docstring:
        raise BuildError(f"{path.name} has no docstring")
    title, _, rest = docstring.partition("\n\n")
    rest = re.sub(r"(?m)^(?:    .*\n?)+", lambda m: fenced(m[0]), rest)
    return " ".join(title.split()).rstrip("."), rest, whole


def fenced(indented: str) -> str:
    lines = [line[4:] for line in indented.rstrip().split("\n")]
    command = re.match(r"(python|pip|mpiexec|torchrun|[A-Z_]+=\S+) ", lines[0])
    return "\n".join([f"```{'bash' if command else 'text'}", *lines, "```\n"])


def all_recipes() -> list[Path]:
    return sorted((ROOT / "docs/recipes").glob("*.py"))


def recipes(_: str = "") -> str:
    rows = [f"| [{p.name}](recipes/{p.stem}.md) | {recipe_parts(p)[0]} |" for p in all_recipes()]
    return "\n".join(["| program | what it does |", "|---|---|", *rows])


def recipe_page(path: Path) -> str:
    title, rest, whole = recipe_parts(path)
    return f'# {title}\n\n{rest}\n\n```python title="docs/recipes/{path.name}"\n{whole.rstrip()}\n```\n'


SIGNS = {name: chr(0x3B1 + i) for i, name in enumerate(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho final-sigma "
    "sigma tau upsilon phi chi psi omega".split()
)} | {"sum": "Σ", "sqrt": "√", "inf": "∞"}  # fmt: skip


def equations(block: str) -> str:
    """Lines like delta_t = r_t + gamma V_{t+1} - V_t as HTML."""
    signs = {" - ": " − ", "'": "′", "<=": "≤", ">=": "≥", " . ": " · ", "...": "…"}
    for plain, sign in signs.items():
        block = block.replace(plain, sign)
    lines = html.escape(block.strip("\n")).split("\n")
    return f'<div class="eq">{"".join(f"<p>{equation(x)}</p>" for x in lines)}</div>'


def equation(shown: str) -> str:
    def replace(match) -> str:
        if match["script"]:
            tag = "sub" if match["script"] == "_" else "sup"
            return f"<{tag}>{equation(match['braced'] or match['bare'])}</{tag}>"
        word = match["word"] or ""
        return SIGNS.get(word) or (f"<i>{word}</i>" if len(word) == 1 else match[0])

    script = r"(?P<script>[_^])(?:\{(?P<braced>[^}]*)\}|(?P<bare>[A-Za-z]+|\d+))"
    return re.sub(rf"&\w+;|{script}|(?P<word>[A-Za-z]+)", replace, shown)


KINDS = {
    "source": source, "file": file, "flags": flags, "results": results, "throughput": throughput,
    "gpu": gpu, "exercise": exercise, "detail": detail, "memory": memory, "recipes": recipes,
    "figures": lambda _: plot.figures(),
}  # fmt: skip


def fill(markdown: str) -> str:
    """A page with everything between {{ }} filled in."""

    def replace(match) -> str:
        kind, _, rest = match[1].partition(" ")
        if kind not in KINDS:
            raise BuildError(f"there is no {{{{ {kind} }}}}")
        return KINDS[kind](rest.strip())

    markdown = re.sub(r"(?s)\{\{ (.+?) \}\}", replace, markdown)
    # A flag and its value are not broken in two.
    flag = r"(?<!`)`--[\w-]+(?: \w+)?`(?![`{])"
    markdown = re.sub(flag, r"\g<0>{.flag}", markdown)
    return re.sub(r"(?ms)^```eq\n(.*?)^```$", lambda m: equations(m[1]), markdown)
