"""A script's text by its blocks, and the one way to change it: within a block, found by name."""

import ast
from functools import cache


@cache
def blocks(source: str) -> dict[str, range]:
    """The lines of each block, counted from 0, in order: docstring, imports, and by name each
    constant, function, class and method (Class.method). Decorators and comments directly above
    belong to a block."""
    lines = source.splitlines()
    found: dict[str, range] = {}

    def add(name: str, node: ast.stmt, last: ast.stmt) -> None:
        first = min(n.lineno for n in [node, *getattr(node, "decorator_list", ())])
        while first > 1 and lines[first - 2].strip().startswith("# "):
            first -= 1
        found[name] = range(first - 1, last.end_lineno)

    module = ast.parse(source)
    imports = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if ast.get_docstring(module) is not None:
        add("docstring", module.body[0], module.body[0])
    if imports:
        add("imports", imports[0], imports[-1])
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            add(node.name, node, node)
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef):
                add(f"{node.name}.{method.name}", method, method)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in ast.walk(ast.Tuple(targets)):
                if isinstance(target, ast.Name):
                    add(target.id, node, node)
    return found


def parts(source: str, block: str) -> tuple[str, str, str]:
    """The text before a block, that of the block, and the text after it. ValueError if there is
    none of that name."""
    if block not in blocks(source):
        raise ValueError(f"there is no block {block!r}")
    lines, where = source.splitlines(keepends=True), blocks(source)[block]
    cuts = lines[: where.start], lines[where.start : where.stop], lines[where.stop :]
    return tuple(map("".join, cuts))


def text_of(source: str, block: str) -> str:
    return parts(source, block)[1]


def patched(source: str, block: str, old: str, new: str) -> str:
    """The source with one text of a block replaced. ValueError unless it is there exactly once."""
    before, text, after = parts(source, block)
    if text.count(old) != 1:
        raise ValueError(f"{block} contains {text.count(old)} times, not once:\n{old}")
    return before + text.replace(old, new) + after
