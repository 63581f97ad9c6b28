"""Copies the blocks that the scripts share from rppo_lstm.py into the others: python tests/sync.py

A block is a function, a class or a method. Blocks of one name are one text in all scripts, but for
EXCEPTIONS. The first of SCRIPTS that has a block owns it; edit it there. `--check` changes nothing,
and ends with exit code 1 if a script differs.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"]
SPLIT = "Agent", "Run"  # classes whose methods are blocks of their own
# Blocks with a text of their own, in which scripts, and why.
EVERYWHERE = tuple(SCRIPTS)
EXCEPTIONS = {
    "Args": (EVERYWHERE, "each has its own flags"),
    "train": (EVERYWHERE, "each algorithm has its own story"),
    "check_args": (EVERYWHERE, "each checks its own flags"),
    "Agent.__init__": (EVERYWHERE, "heads and memories differ"),
    "Agent.step": (EVERYWHERE, "heads and memories differ"),
    "Agent.predict": (EVERYWHERE, "distributions differ"),
}


def blocks(text: str) -> dict[str, tuple[int, int]]:
    """The blocks of a script: the number of the first line, counted from 0, and of the line after
    the last. Methods of SPLIT are called Class.method."""
    found = {}
    for node in ast.parse(text).body:
        nodes = {}
        if isinstance(node, ast.ClassDef) and node.name in SPLIT:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    nodes[f"{node.name}.{method.name}"] = method
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
        for name, block in nodes.items():
            first = min([block.lineno, *(x.lineno for x in block.decorator_list)])
            found[name] = first - 1, block.end_lineno
    return found


def owners(texts: dict[str, str]) -> dict[str, str]:
    """Which script owns a block that several share."""
    found: dict[str, str] = {}
    for script, text in texts.items():
        for name in blocks(text):
            own, _ = EXCEPTIONS.get(name, ((), ""))
            if script not in own:
                found.setdefault(name, script)
    return found


def synced(texts: dict[str, str]) -> dict[str, str]:
    """The texts of the scripts, with every shared block as its owner has it."""
    owner = owners(texts)
    new = {}
    for script, text in texts.items():
        lines = text.splitlines()
        for name, (first, last) in reversed(blocks(text).items()):
            own, _ = EXCEPTIONS.get(name, ((), ""))
            if script in own or owner[name] == script:
                continue
            source = texts[owner[name]]
            start, end = blocks(source)[name]
            lines[first:last] = source.splitlines()[start:end]
        new[script] = "\n".join(lines) + "\n"
    return new


def main() -> int:
    texts = {script: (ROOT / f"{script}.py").read_text() for script in SCRIPTS}
    new = synced(texts)
    changed = [script for script in SCRIPTS if new[script] != texts[script]]
    for script in changed:
        print(f"{script}.py differs" if "--check" in sys.argv else f"{script}.py written")
        if "--check" not in sys.argv:
            (ROOT / f"{script}.py").write_text(new[script])
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
