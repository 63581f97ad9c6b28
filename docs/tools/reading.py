"""The reading pages: a script's text on the left, notes on the right.

docs/reading/SCRIPT.md has the notes, under headings that are a block's name or, in backquotes,
words of one line of the source. rppo_lstm.py is shown whole, the others as what differs from the
script that they extend. A block of the lesson without a note and a note without its block end the
build.
"""

import difflib
import re
from typing import NamedTuple

from fill import fill
from scripts import (
    PARENTS,
    ROOT,
    SPLIT,
    Block,
    BuildError,
    ancestors,
    blocks,
    highlighted,
    quote,
    text,
)

CONTEXT = 3  # unchanged lines around a changed one


class Row(NamedTuple):
    kind: str  # same, add or del
    number: int  # of the line in its file
    code: str  # HTML


def page(script: str) -> str:
    """docs/reading/SCRIPT.md as a page: the notes beside the script, or beside its differences."""
    return whole(script) if PARENTS[script] is None else differences(script)


def siblings(script: str) -> str:
    """Links to the reading pages of all five scripts."""
    links = [f"**{name}.py**" if name == script else f"[{name}.py]({name}.md)" for name in PARENTS]
    return f"{' · '.join(links)}\n{{.siblings}}\n"


def notes(script: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Of docs/reading/SCRIPT.md: the text above the first note, and for each heading the former
    name of its block, `## NAME (was FORMER)`, and the note."""
    markdown = fill((ROOT / f"docs/reading/{script}.md").read_text())
    markdown = re.sub(r"\A---\n.*?^---\n", "", markdown, flags=re.M | re.S)  # no front matter
    markdown = re.sub(r"(?m)^# .+\n", rf"\g<0>\n{siblings(script)}", markdown, count=1)
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
            raise BuildError(f"the note {key} comes after a note on a later line")
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
    code = row.code or " "  # else a copied text loses its blank lines
    return f'<span class="line {row.kind}"{name}><a{link} data-line="{number}" data-sign="{sign}"></a>{code}</span>\n'


def whole(script: str) -> str:
    """A whole script beside its notes."""
    intro, found = notes(script)
    check_complete(script, found, [*blocks(script)])
    starts = [position(script, key) for key in found]
    if not starts or starts[0] != 1:
        raise BuildError("the first note must be docstring")
    pairs = [intro]
    for (key, (_, note)), first, after in zip(
        found.items(), starts, starts[1:] + [len(text(script)) + 1]
    ):
        rows = [Row("same", n, highlighted(script)[n - 1]) for n in range(first, after)]
        while not text(script)[rows[-1].number - 1].strip():
            rows.pop()
        pairs.append(pair([line(row) for row in rows], key, note))
    return "\n".join(pairs)


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
    shown = []
    left_out = 0
    for i, row in enumerate([*rows, None]):
        if row is not None and i not in near:
            left_out += 1
            continue
        if left_out:
            shown.append(f'<span class="gap">{left_out} lines as in {parent}.py</span>\n')
            left_out = 0
        if row is not None:
            shown.append(line(row))
    return shown


def differences(script: str) -> str:
    """What differs from the parent, block by block, beside its notes."""
    parent = PARENTS[script]
    assert parent is not None
    intro, found = notes(script)
    pairs = [intro]
    same: dict[str, list[str]] = {}
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
            pairs.append(pair(shorten(rows[start:end], {*anchors}, parent), key, note))
    check_complete(script, found, shown)
    gone = [name for name in blocks(parent) if name not in blocks(script) and name not in renamed]
    ends = {f"The same text as in {origin}.py": names for origin, names in same.items()}
    for what, names in {**ends, f"Only in {parent}.py": gone}.items():
        pairs.append(f"\n{what}: {', '.join(f'`{name}`' for name in names)}.\n" if names else "")
    return "\n".join(pairs)
