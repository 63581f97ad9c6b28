"""What build.py makes of a page: a script beside notes, and the parts between braces filled in.

    {{ source SCRIPT.NAME }}    that class, function or method (SCRIPT.CLASS.NAME) of SCRIPT.py
    {{ flags SCRIPT }}          every flag with its default and help
    {{ notes SCRIPT }}          SCRIPT.py, beside the notes that follow, to {{ end }} or to the end
    {{ results NAME NAME }}, {{ throughput SECTION }}, {{ gpu SECTION }}, {{ detail NAME; NAME }},
    {{ exercise NAME }}, {{ memory WHAT }}      tables of benchmarks/report.py
    {{ recall STEPS DISTRACTION }}, {{ memories }}      tables of benchmarks/memories.py

Notes stand under headings that are a block's name or, in backquotes, words of one line of the source.
rppo_lstm.py is shown whole, the others as what differs from the script that they extend. A fenced
block named eq holds equations, a line each: delta_t = r_t + gamma V_{t+1} - V_t.
"""

import ast
import difflib
import html
import re
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from blocks import blocks, text_of
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import memories  # noqa: E402
import report  # noqa: E402

PARENTS = {
    "rppo_lstm": "", "rppo_continuous": "rppo_lstm", "rppo_gru_atari": "rppo_lstm",
    "trpo": "rppo_continuous", "ppo1_mpi": "rppo_continuous",
}  # fmt: skip
SPLIT = "ResetLSTM", "Agent", "Run"  # classes whose methods have notes of their own
CONTEXT = 3  # unchanged lines around a changed one


class Row(NamedTuple):
    kind: str  # same, add or del
    number: int  # of the line in its file
    code: str  # HTML


class Script:
    """A script's lines, plain and as HTML, and the sections that together are all of it."""

    def __init__(self, name: str):
        self.name = name
        self.source = (ROOT / f"{name}.py").read_text()
        self.lines = self.source.splitlines()
        as_html = highlight(self.source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        self.html = as_html.split("\n")
        self.sections: dict[str, range] = {}
        starts = {"docstring": 0}
        for block, where in blocks(self.source).items():
            outer, _, method = block.partition(".")
            constant = block.isupper()
            if constant and not ("Args" in starts and "constants" not in starts):
                continue  # belongs to what is above
            if not method or outer in SPLIT:
                starts["constants" if constant else block] = where.start
        for block, first, after in zip(starts, starts.values(), [*starts.values()][1:] + [None]):
            last = len(self.lines) if after is None else after
            while not self.lines[last - 1].strip():
                last -= 1
            self.sections[block] = range(first, last)

    def rows(self, kind: str, where) -> list[Row]:
        return [Row(kind, i + 1, self.html[i]) for i in where]

    def quote(self, block: str) -> list[str]:
        return [self.lines[i] for i in self.sections.get(block, ())]

    def position(self, key: str) -> int:
        """The line, counted from 0, at which a note begins."""
        if not key.startswith("`"):
            if key not in self.sections:
                raise ValueError(f"{self.name}.py has no block {key}")
            return self.sections[key].start
        at = [i for i, line in enumerate(self.lines) if key.strip("`") in line]
        if len(at) != 1:
            raise ValueError(f"{self.name}.py has {len(at)} lines with {key}")
        return at[0]


read = cache(Script)  # build.py clears it when a file has changed


def notes(name: str, markdown: str) -> str:
    """A script, or its differences, beside the notes under the page's headings `## BLOCK`, or
    `## BLOCK (was FORMER)` where the parent calls it otherwise."""
    script = read(name)
    intro, *parts = re.split(r"^## +(.+)\n", markdown, flags=re.M)
    found: dict[str, str] = {}
    former: dict[str, str] = {}
    for heading, body in zip(parts[::2], parts[1::2]):
        match = re.fullmatch(r"(`.+`|[\w.]+)(?: \(was ([\w.]+)\))?", heading.strip())
        if match is None or match[1] in found:
            raise ValueError(f"a note's heading is no name, or there twice: {heading}")
        found[match[1]] = body.strip()
        former[match[1]] = match[2] or match[1]
    places = {key: script.position(key) for key in found}
    for key, before, here in zip([*found][1:], places.values(), [*places.values()][1:]):
        if here <= before:
            raise ValueError(f"the note {key} comes after a note on a later line")
    shown: list[tuple[str, str]] = []  # title, pair
    same: dict[str, list[str]] = {}
    for block, where in script.sections.items():
        origin = next((p for p in ancestors(name) if p.quote(block) == script.quote(block)), None)
        keys = [key for key in found if places[key] in where]
        if origin and not keys:
            same.setdefault(origin.name, []).append(block)
            continue
        rows = script.rows("same", where)
        if PARENTS[name]:
            rows = difference(script, read(PARENTS[name]), block, former.get(block, block))
        if block not in keys:
            keys.insert(0, block)
        cuts = [0]
        for key in keys[1:]:
            number = places[key] + 1
            at = next(i for i, r in enumerate(rows) if r.number == number and r.kind != "del")
            while rows[at - 1].kind == "del":  # what the line takes the place of
                at -= 1
            cuts.append(at)
        for key, first, after in zip(keys, cuts, [*cuts[1:], len(rows)]):
            keep = {places[k] + 1 for k in keys[1:]}
            code = shorten(rows[first:after], keep, PARENTS[name])
            shown.append((key, pair(code, key, found.get(key, ""))))
    blocks_shown = [title for title, _ in shown if title in script.sections and "." not in title]
    links = [f"[{title}](#{anchor(title)})" for title in blocks_shown]
    menu = f'<nav class="jump" markdown="1">\n\n{" · ".join(links)}\n\n</nav>\n'
    ends = [f"The same text as in {origin}.py: {quoted(names)}." for origin, names in same.items()]
    if parent := PARENTS[name]:
        others = {*script.sections, *former.values()}
        gone = [block for block in read(parent).sections if block not in others]
        ends += [f"Only in {parent}.py: {quoted(gone)}."] if gone else []
    return "\n\n".join([intro, menu, *(text for _, text in shown), *ends, ""])


def quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def ancestors(name: str) -> list[Script]:
    parent = PARENTS[name]
    return [read(parent), *ancestors(parent)] if parent else []


def anchor(title: str) -> str:
    return re.sub(r"[\W_]+", "-", title).strip("-")


def pair(code: list[str], title: str, note: str) -> str:
    """The text on the left, the note on the right."""
    left = f'<div class="code highlight"><pre><code>{"".join(code)}</code></pre></div>'
    head = f"### `{title.strip('`')}` {{#{anchor(title)}-note}}\n\n"
    right = f'<div class="note" markdown="1">\n\n{head}{note}\n\n</div>'
    return f'<div class="pair" id="{anchor(title)}" markdown="1">\n{left}\n{right}\n</div>\n'


def line(row: Row) -> str:
    sign = {"same": "", "add": "+", "del": "-"}[row.kind]
    name = "" if row.kind == "del" else f' id="L{row.number}"'
    link = f' href="#L{row.number}"' if name else ""
    number = "" if row.kind == "del" else row.number
    code = row.code or " "  # else a copied text loses its blank lines
    return f'<span class="line {row.kind}"{name}><a{link} data-line="{number}" data-sign="{sign}"></a>{code}</span>\n'


def difference(script: Script, parent: Script, block: str, former: str) -> list[Row]:
    """A block beside the parent's: every line of it, and those of the parent's that it lacks."""
    new, old = script.sections[block], parent.sections.get(former, range(0))
    if block not in SPLIT and former in SPLIT:  # a whole class beside a whole class
        whole = blocks(parent.source)[former]
        old = range(whole.start, whole.stop)
    ours, theirs = [script.lines[i] for i in new], [parent.lines[i] for i in old]
    rows = []
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            rows += parent.rows("del", old[i1:i2])
        rows += script.rows("same" if tag == "equal" else "add", new[j1:j2])
    return rows


def shorten(rows: list[Row], keep: set[int], parent: str) -> list[str]:
    """The rows as HTML. Beside a parent, unchanged ones further than CONTEXT from a change, and not
    in keep, are left out, unless it would be one alone."""
    if not parent:
        return [line(row) for row in rows]
    changed = [i for i, row in enumerate(rows) if row.kind != "same" or row.number in keep]
    near = {j for i in changed for j in range(i - CONTEXT, i + CONTEXT + 1)} | {-1, len(rows)}
    near |= {i for i in range(len(rows)) if {i - 1, i + 1} <= near}
    shown = []
    for is_near, group in groupby(range(len(rows)), key=near.__contains__):
        if is_near:
            shown += [line(rows[i]) for i in group]
        else:
            left_out = len([*group])
            shown.append(f'<span class="gap">{left_out} lines as in {parent}.py</span>\n')
    return shown


# --- The parts between braces ---
def source(path: str) -> str:
    name, _, block = path.partition(".")
    text = (ROOT / f"{name}.py").read_text()
    first = text_of(text, block) and blocks(text)[block].start + 1
    return f'```python title="{name}.py, line {first}"\n{text_of(text, block).rstrip()}\n```'


def flags(name: str) -> str:
    text = (ROOT / f"{name}.py").read_text()
    lines = text.splitlines()
    rows = []
    args = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "Args")
    for field in args.body:
        assert isinstance(field, ast.AnnAssign) and field.value is not None
        said = lines[field.end_lineno - 1].split("  # ", 1)[1].replace("|", "\\|")
        default = ast.unparse(field.value).strip("'").replace("np.inf", "inf")
        flag = ast.unparse(field.target).replace("_", "-")
        rows.append(f"| `--{flag}` | `{default}` | {said} |")
    parts = ["\n".join(["| flag | default | |", "|---|---|---|", *rows])]
    parts.append("A flag that is `True` is switched off with `--no-`, as in `--no-anneal-lr`.")
    if "PRESETS" in blocks(text):
        presets = text_of(text, "PRESETS").rstrip().removesuffix("  # fmt: skip")
        parts.append(f"Tasks with other defaults:\n\n```python\n{presets}\n```")
    return "\n\n".join(parts)


FOLDERS = "networks", "memory", "inputs", "tasks", "training", "logging", "after", "recipes"


def all_recipes() -> list[Path]:
    """Folder by folder. Each gets a page."""
    found = (ROOT / "docs/recipes").rglob("*.py")
    return sorted(found, key=lambda path: (FOLDERS.index(path.parent.name), path.stem))


def fenced(indented: str) -> str:
    lines = [line[4:] for line in indented.rstrip().split("\n")]
    command = re.match(r"(python|pip|mpiexec|[A-Z_]+=\S+) ", lines[0])
    return "\n".join([f"```{'bash' if command else 'text'}", *lines, "```\n"])


def recipe_page(path: Path) -> str:
    """The first sentence of its docstring, the rest as Markdown, and the code below it."""
    text = path.read_text()
    module = ast.parse(text)
    title, _, rest = (ast.get_docstring(module) or path.stem).partition("\n\n")
    title = " ".join(title.split()).rstrip(".")
    rest = re.sub(r"(?m)^(?:    .*\n?)+", lambda m: fenced(m[0]), rest)
    code = "\n".join(text.splitlines()[module.body[0].end_lineno :]).strip("\n")
    where = path.relative_to(ROOT)
    return f'# {path.stem}\n\n{title}.\n\n{rest}\n\n```python title="{where}"\n{code}\n```\n'


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
    "source": source, "flags": flags, "results": report.results,
    "throughput": report.throughput, "gpu": report.gpu, "detail": report.detail,
    "exercise": report.exercise, "memory": report.memory, "recall": memories.recall,
    "memories": memories.compared,
}  # fmt: skip


def fill(markdown: str) -> str:
    """A page of docs/ with everything between braces filled in. ValueError for what is not there."""

    def replace(match) -> str:
        kind, _, rest = match[1].partition(" ")
        if kind not in KINDS:
            raise ValueError(f"there is no {{{{ {kind} }}}}")
        return KINDS[kind](rest.strip())

    parts = re.split(r"(?ms)^\{\{ notes (\w+) \}\}$(.*?)(?:^\{\{ end \}\}$|\Z)", markdown)
    for i, part in enumerate(parts):  # text, script, notes, text, ...
        if i % 3 == 1:
            continue
        part = re.sub(r"(?s)\{\{ (.+?) \}\}", replace, part)
        # A flag and its value are not broken in two.
        part = re.sub(r"(?<!`)`--[\w-]+(?: \w+)?`(?![`{])", r"\g<0>{.flag}", part)
        part = re.sub(r"(?ms)^```eq\n(.*?)^```$", lambda m: equations(m[1]), part)
        parts[i] = notes(parts[i - 1], part) if i % 3 == 2 else part
    return "".join(part for i, part in enumerate(parts) if i % 3 != 1)
