"""A script's text by its blocks, and the one way to change it: within a block, found by name."""

import ast

Lines = range  # of a text, counted from 0


def blocks(source: str) -> dict[str, Lines]:
    """The lines of each block, in order: docstring, imports, and by name each constant, function,
    class and method (Class.method). Decorators and comments directly above belong to a block."""
    lines = source.splitlines()
    found: dict[str, Lines] = {}

    def add(name: str, node: ast.stmt) -> None:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        while first > 1 and lines[first - 2].strip().startswith("# "):
            first -= 1
        assert node.end_lineno is not None
        found[name] = range(first - 1, node.end_lineno)

    body = ast.parse(source).body
    if body and ast.get_docstring(ast.parse(source)) is not None:
        add("docstring", body[0])
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        add("imports", imports[0])
        found["imports"] = range(found["imports"].start, imports[-1].end_lineno or 0)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            add(node.name, node)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    add(f"{node.name}.{method.name}", method)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in ast.walk(ast.Tuple(targets)):
                if isinstance(target, ast.Name):
                    add(target.id, node)
    return found


def text_of(source: str, block: str) -> str:
    """The text of a block. ValueError if there is none of that name."""
    if block not in blocks(source):
        raise ValueError(f"there is no block {block!r}")
    where = blocks(source)[block]
    return "".join(source.splitlines(keepends=True)[where.start : where.stop])


def patched(source: str, block: str, old: str, new: str) -> str:
    """The source with one text of a block replaced. ValueError unless it is there exactly once."""
    text = text_of(source, block)
    if text.count(old) != 1:
        raise ValueError(f"{block} contains {text.count(old)} times, not once:\n{old}")
    where = blocks(source)[block]
    lines = source.splitlines(keepends=True)
    return "".join([*lines[: where.start], text.replace(old, new), *lines[where.stop :]])
