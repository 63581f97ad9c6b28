"""Builds the site: python docs/build.py. While writing: python docs/build.py --serve

The pages of docs/ go to build/docs/, with these filled in from the repository, so that no page can
say what is not so, and from there to site/:

    {{ source SCRIPT.NAME }}    that class, function or method (SCRIPT.CLASS.NAME) of SCRIPT.py
    {{ file PATH }}             a file of the repository
    {{ flags SCRIPT }}          every flag with its default and help
    {{ results NAME NAME }}     rows of benchmarks/results/learning.csv: tasks, or SCRIPT.py's tasks
    {{ throughput SECTION }}    rows of benchmarks/results/throughput.csv
    {{ exercise NAME }}         what benchmarks/results/exercises.csv has of an exercise
    {{ figures }}               README's table
    {{ recipes }}               a table of docs/recipes/*.py, each of which gets a page

A fenced block named eq holds equations, a line each: delta_t = r_t + gamma V_{t+1} - V_t.

docs/reading/SCRIPT.md has the notes beside a script's text, under headings that are a block's name
or, in backquotes, words of one line of the source. rppo_lstm.py is shown whole, the others as what differs
from the script that they extend. A block of the lesson without a note, a note without its block, a
name that does not exist, a link to nowhere: each ends the build with exit code 1.
"""

import argparse
import ast
import difflib
import html
import json
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs/exercises")]
import learning  # noqa: E402
import plot  # noqa: E402
import run as exercises  # noqa: E402
import throughput as speed  # noqa: E402

PARENTS = {
    "rppo_lstm": None, "rppo_continuous": "rppo_lstm", "rppo_gru_atari": "rppo_lstm",
    "trpo": "rppo_continuous", "ppo1_mpi": "rppo_continuous",
}  # fmt: skip
SPLIT = "ResetLSTM", "Agent", "Run"  # classes whose methods are blocks of their own
CONTEXT = 3  # unchanged lines around a changed one


class BuildError(Exception):
    """What a page asks for and the repository does not have."""


class Block(NamedTuple):
    first: int  # lines, counted from 1, both included
    last: int


class Row(NamedTuple):
    kind: str  # same, add or del
    number: int  # of the line in its file
    code: str  # HTML


# --- The scripts
@cache
def text(script: str) -> list[str]:
    path = ROOT / f"{script}.py"
    if not path.exists():
        raise BuildError(f"there is no {script}.py")
    return path.read_text().splitlines()


@cache
def blocks(script: str) -> dict[str, Block]:
    """The blocks of a script, in order, which together are all of it: docstring, imports, Args,
    constants, each function and class, and each method of those in SPLIT."""
    lines = text(script)
    starts = {"docstring": 1}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            starts.setdefault("imports", node.lineno)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "Args" in starts:
            starts.setdefault("constants", node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts[node.name] = first_line(node, lines)
            for method in node.body if node.name in SPLIT else ():
                if isinstance(method, ast.FunctionDef):
                    starts[f"{node.name}.{method.name}"] = first_line(method, lines)
    found = {}
    for name, first, after in zip(
        starts, starts.values(), [*starts.values()][1:] + [len(lines) + 1]
    ):
        last = after - 1
        while not lines[last - 1].strip():
            last -= 1
        found[name] = Block(first, last)
    return found


def first_line(node, lines: list[str]) -> int:
    """Decorators and comments directly above belong to a block."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    while lines[first - 2].strip().startswith("# "):
        first -= 1
    return first


@cache
def highlighted(script: str) -> list[str]:
    """The lines of a script as HTML."""
    whole = highlight(
        "\n".join(text(script)), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    )
    return whole.split("\n")


# --- The pages of docs/reading
def notes(script: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Of docs/reading/SCRIPT.md: what stands above the first note, and for each heading the former
    name of its block, `## NAME (was FORMER)`, and the note."""
    markdown = fill((ROOT / f"docs/reading/{script}.md").read_text())
    intro, *parts = re.split(r"^## +(.+)\n", markdown, flags=re.M)
    found: dict[str, tuple[str, str]] = {}
    for heading, body in zip(parts[::2], parts[1::2]):
        match = re.fullmatch(r"(`.+`|[\w.]+)(?: \(was ([\w.]+)\))?", heading.strip())
        if match is None or match[1] in found:
            raise BuildError(f"a note's heading is no name, or there twice: {heading}")
        found[match[1]] = (match[2] or match[1], body.strip())
    return intro, found


def position(script: str, key: str) -> int:
    """The line at which a note begins."""
    if not key.startswith("`"):
        if key not in blocks(script):
            raise BuildError(f"{script}.py has no block {key}")
        return blocks(script)[key].first
    at = [i for i, line in enumerate(text(script), 1) if key.strip("`") in line]
    if len(at) != 1:
        raise BuildError(f"{script}.py has {len(at)} lines with {key}")
    return at[0]


def check_complete(script: str, found: dict, shown: list[str]) -> None:
    """Raises BuildError for a note that is not in the source's order, and for a shown block of the
    lesson without one (imports and methods may do without)."""
    positions = [position(script, key) for key in found]
    for key, before, here in zip([*found][1:], positions, positions[1:]):
        if here <= before:
            raise BuildError(f"the note {key} stands after one of a later line")
    end = blocks(script)["train"].last
    for name in shown:
        lesson = blocks(script)[name].first <= end
        if (
            name not in found
            and "." not in name
            and name != "imports"
            and (lesson or not PARENTS[script])
        ):
            raise BuildError(f"docs/reading/{script}.md has no note {name}")


def pair(rows: list[str], title: str, note: str) -> str:
    """The text on the left, the note on the right."""
    code = f'<div class="code highlight"><pre><code>{"".join(rows)}</code></pre></div>'
    anchor = re.sub(r"[\W_]+", "-", title).strip("-")
    heading = f"### `{title.strip('`')}` {{#{anchor}}}\n\n" if title else ""
    return f'<div class="pair" markdown="1">\n{code}\n<div class="note" markdown="1">\n\n{heading}{note}\n\n</div>\n</div>\n'


def line(row: Row) -> str:
    sign = {"same": "", "add": "+", "del": "-"}[row.kind]
    name = "" if row.kind == "del" else f' id="L{row.number}"'
    link = f' href="#L{row.number}"' if name else ""
    number = "" if row.kind == "del" else row.number
    return f'<span class="line {row.kind}"{name}><a{link} data-line="{number}" data-sign="{sign}"></a>{row.code}\n</span>'


def reading(script: str) -> str:
    """A whole script beside its notes."""
    intro, found = notes(script)
    check_complete(script, found, [*blocks(script)])
    starts = [position(script, key) for key in found]
    if not starts or starts[0] != 1:
        raise BuildError("the first note must be docstring")
    page = [intro]
    for (key, (_, note)), first, after in zip(
        found.items(), starts, starts[1:] + [len(text(script)) + 1]
    ):
        rows = [Row("same", n, highlighted(script)[n - 1]) for n in range(first, after)]
        while not text(script)[rows[-1].number - 1].strip():
            rows.pop()
        page.append(pair([line(row) for row in rows], key, note))
    return "\n".join(page)


def quote(script: str, name: str) -> list[str] | None:
    block = blocks(script).get(name)
    return text(script)[block.first - 1 : block.last] if block else None


def ancestors(script: str) -> list[str]:
    parent = PARENTS[script]
    return [parent, *ancestors(parent)] if parent else []


def difference(script: str, name: str, former: str) -> list[Row]:
    """A block beside the parent's: every line of it, and those of the parent's that it lacks."""
    parent = PARENTS[script]
    assert parent is not None
    new, old = blocks(script)[name], blocks(parent).get(former, Block(1, 0))
    if name not in SPLIT:  # a whole class beside a whole class
        ends = [
            block.last for other, block in blocks(parent).items() if other.startswith(f"{former}.")
        ]
        old = Block(old.first, max([old.last, *ends]))
    ours, theirs = text(script)[new.first - 1 : new.last], text(parent)[old.first - 1 : old.last]
    rows = []
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            rows += [
                Row("del", old.first + i, highlighted(parent)[old.first + i - 1])
                for i in range(i1, i2)
            ]
        kind = "same" if tag == "equal" else "add"
        rows += [
            Row(kind, new.first + j, highlighted(script)[new.first + j - 1]) for j in range(j1, j2)
        ]
    return rows


def shorten(rows: list[Row], keep: set[int], parent: str) -> list[str]:
    """The rows as HTML; unchanged ones further than CONTEXT from a change, and not in keep, are
    left out, unless it would be one alone."""
    changed = [i for i, row in enumerate(rows) if row.kind != "same" or row.number in keep]
    near = {j for i in changed for j in range(i - CONTEXT, i + CONTEXT + 1)} | {-1, len(rows)}
    near |= {i for i in range(len(rows)) if {i - 1, i + 1} <= near}
    page, left_out = [], 0
    for i, row in enumerate([*rows, None]):
        if row is not None and i not in near:
            left_out += 1
            continue
        if left_out:
            page.append(f'<span class="gap">{left_out} lines as in {parent}.py\n</span>')
            left_out = 0
        if row is not None:
            page.append(line(row))
    return page


def reading_diff(script: str) -> str:
    """What differs from the parent, block by block, beside its notes."""
    parent = PARENTS[script]
    assert parent is not None
    intro, found = notes(script)
    page, same = [intro], dict[str, list[str]]()
    renamed = {former for key, (former, _) in found.items() if former != key}
    shown = []
    for name, block in blocks(script).items():
        former, note = found.get(name, (name, ""))
        rows = difference(script, name, former)
        anchors = {position(script, key): key for key in found if key.startswith("`")}
        anchors = {n: key for n, key in anchors.items() if block.first <= n <= block.last}
        origin = next((p for p in ancestors(script) if quote(p, name) == quote(script, name)), None)
        if origin:
            if name in found or anchors:
                raise BuildError(f"{name} is as in {origin}.py, and has a note")
            same.setdefault(origin, []).append(name)
            continue
        shown.append(name)
        cuts = [0]
        for i, row in enumerate(rows):
            if row.kind != "del" and row.number in anchors:
                while rows[i - 1].kind == "del":  # what the line takes the place of
                    i -= 1
                cuts.append(i)
        keys = [name, *(anchors[n] for n in sorted(anchors))]
        texts = [note, *(found[key][1] for key in keys[1:])]
        for key, note, start, end in zip(keys, texts, cuts, [*cuts[1:], len(rows)]):
            page.append(pair(shorten(rows[start:end], {*anchors}, parent), key, note))
    check_complete(script, found, shown)
    gone = [name for name in blocks(parent) if name not in blocks(script) and name not in renamed]
    ends = {f"The same text as in {origin}.py": names for origin, names in same.items()}
    for what, names in {**ends, f"Only in {parent}.py": gone}.items():
        page.append(f"\n{what}: {', '.join(f'`{name}`' for name in names)}.\n" if names else "")
    return "\n".join(page)


# --- What stands between {{ }}
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
    presets = re.search(r"^(ZOO.*?\n)?PRESETS.*?^}[^\n]*", "\n".join(lines), re.M | re.S)
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
    parts = [plot.table(there)] if there else []
    return "\n\n".join([*parts, *([f"Not measured yet: {command}."] if missing else [])])


def throughput(section: str) -> str:
    """The latest rows of a section, with the ratio to the peer's."""
    if section not in {name for name, *_ in speed.SYSTEMS}:
        raise BuildError(f"benchmarks/throughput.py has no section {section}")
    works = plot.speeds(section)
    if not works:
        return f"Not measured yet: `python benchmarks/throughput.py {section}`."
    names = [peer["system"] for systems in works.values() for peer in plot.peers_of(systems)[:1]]
    table = [
        "| work | system | steps a second: median (min, max) "
        f"| times {names[0] if names else 'a peer'} | machine | commit |",
        "|---|---|---|---|---|---|",
    ]
    for (_, work), systems in works.items():
        [peer] = plot.peers_of(systems)[:1] or [None]
        for system, row in systems.items():
            ratio = f"{float(row['median']) / float(peer['median']):.1f}" if peer else "-"
            median, low, high = (f"{float(row[name]):,.0f}" for name in ("median", "min", "max"))
            table.append(
                f"| {work} | {system} | {median} ({low}, {high}) | {ratio} | {row['machine']} | {row['commit']} |"
            )
    if any("old" in system for systems in works.values() for system in systems):
        table += [
            "",
            "*Old* is the version of the commit in that row, from before the scripts were written anew to be read.",
        ]
    return "\n".join(table)


def exercise(name: str) -> str:
    if name not in exercises.EXERCISES:
        raise BuildError(f"docs/exercises has no {name}")
    return exercises.table(name)


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
    "exercise": exercise, "figures": lambda _: plot.figures(), "recipes": recipes,
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


# --- The site
def render(out: Path) -> None:
    """Writes the pages to out/docs and the configuration to out/zensical.toml."""
    for cached in text, blocks, highlighted:
        cached.cache_clear()
    pages: dict[str, str | bytes] = {}
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        try:
            if path.suffix != ".md":
                pages[name] = path.read_bytes()
            elif path.parent.name == "reading":
                markdown = (
                    reading(path.stem) if PARENTS[path.stem] is None else reading_diff(path.stem)
                )
                pages[name] = markdown
            else:
                pages[name] = fill(path.read_text())
        except (BuildError, ValueError, SyntaxError) as error:
            raise BuildError(f"docs/{name}: {error}") from error
    for path in all_recipes():
        pages[f"recipes/{path.stem}.md"] = recipe_page(path)
    for name, page in pages.items():
        page = page.encode() if isinstance(page, str) else page
        target = out / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != page:  # zensical serve sees what changed
            target.write_bytes(page)
    for path in (out / "docs").rglob("*"):
        if path.is_file() and path.relative_to(out / "docs").as_posix() not in pages:
            path.unlink()
    (out / "zensical.toml").write_text(configuration(pages))


def configuration(pages) -> str:
    """zensical.toml with the recipes' and exercises' pages in their places, and with pages that it
    does not list at the end."""
    config = (ROOT / "zensical.toml").read_text()
    listed = re.findall(r'= "([\w/.-]+\.md)"', config)
    for name in listed:
        if name not in pages:
            raise BuildError(f"zensical.toml lists {name}, which does not exist")
    entries: dict[str, str] = {}
    for name in sorted(name for name in pages if name.endswith(".md") and name not in listed):
        title = str(pages[name]).split("\n")[0].removeprefix("# ").replace("`", "")
        title = f"{Path(name).stem}.py" if name.startswith("recipes/") else title
        folder = name.split("/")[0] if name.startswith(("recipes/", "exercises/")) else "else"
        entries[folder] = (
            entries.get(folder, "") + f"        {{ {json.dumps(title)} = {json.dumps(name)} }},\n"
        )
    for folder in "recipes", "exercises", "else":
        config = config.replace(f"        # pages of {folder}\n", entries.get(folder, ""))
    return config


def zensical(command: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "zensical", command, "-f", str(out / "zensical.toml")]


def build(out: Path, site: Path) -> None:
    render(out)
    shutil.rmtree(out / "site", ignore_errors=True)
    command = [*zensical("build", out), "--strict", "--clean"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.stdout.split("Traceback")[0].rstrip()
    print(said if sys.stdout.isatty() else re.sub(r"\x1b\[[\d;]*m", "", said))
    if done.returncode != 0:
        raise BuildError("zensical refuses the pages of build/docs")
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(out / "site", site)


def serve(out: Path) -> None:
    """Serves the site, and renders its pages again whenever a file changes, until Ctrl-C."""
    render(out)
    server = subprocess.Popen(zensical("serve", out))
    try:
        before = None
        while server.poll() is None:
            watched = [*ROOT.glob("*.py"), *(ROOT / "docs").rglob("*"), ROOT / "zensical.toml"]
            now = [(path, path.stat().st_mtime) for path in [*watched, *plot.RESULTS.glob("*")]]
            if before not in (None, now):
                try:
                    render(out)
                except BuildError as error:
                    print(f"error: {error}", file=sys.stderr)
            before = now
            time.sleep(0.5)
    finally:
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve the site at localhost:8000")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="where it goes")
    options = parser.parse_args()
    out = ROOT / "build"
    out.mkdir(exist_ok=True)
    try:
        serve(out) if options.serve else build(out, options.site.resolve())
    except BuildError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
