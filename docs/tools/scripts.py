"""The five scripts as text: their blocks, and the lines of each block, plain and as HTML."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[2]
PARENTS = {
    "rppo_lstm": None, "rppo_continuous": "rppo_lstm", "rppo_gru_atari": "rppo_lstm",
    "trpo": "rppo_continuous", "ppo1_mpi": "rppo_continuous",
}  # fmt: skip
SPLIT = "ResetLSTM", "Agent", "Run"  # classes whose methods are blocks of their own


class BuildError(Exception):
    """What a page asks for and the repository does not have."""


class Block(NamedTuple):
    first: int  # lines, counted from 1, both included
    last: int


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


def quote(script: str, name: str) -> list[str] | None:
    block = blocks(script).get(name)
    return text(script)[block.first - 1 : block.last] if block else None


def ancestors(script: str) -> list[str]:
    parent = PARENTS[script]
    return [parent, *ancestors(parent)] if parent else []
