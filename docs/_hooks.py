"""mkdocs hook: pages quote code, flags and figures from the repository when they are built, so they cannot rot.

{{ source SCRIPT.NAME }} and {{ source SCRIPT.CLASS.METHOD }}   that block of SCRIPT.py
{{ flags SCRIPT }}                                              every flag with its default and help
{{ results NAME NAME ... }}                                     a table of benchmarks/results/NAME.json
A name that does not exist fails the build.
"""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source(path: str) -> str:
    script, *names = path.split(".")
    text = (ROOT / f"{script}.py").read_text()
    nodes: list = ast.parse(text).body
    for name in names:
        node = next(n for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name)
        nodes = node.body
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return f'```python title="{script}.py, line {first}"\n' + "\n".join(text.split("\n")[first - 1 : node.end_lineno]) + "\n```"


def flags(script: str) -> str:
    text = (ROOT / f"{script}.py").read_text()
    lines = text.split("\n")
    args = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    rows = ["| flag | default | |", "|---|---|---|"]
    for field in args.body:
        assert isinstance(field, ast.AnnAssign) and field.value is not None
        help_text = lines[field.end_lineno - 1].split("  # ", 1)[1]
        following = lines[field.end_lineno]
        help_text += " " + following.strip()[2:] if following.strip().startswith("# ") else ""
        name = ast.unparse(field.target).replace("_", "-")
        rows.append(f"| `--{name}` | `{ast.unparse(field.value)}` | {help_text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def results(names: str) -> str:
    rows = ["| run | seeds | return of the final agents: interquartile mean [95 %] | worst seed | wall, median | commit |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for name in names.split():
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        done = [s for s in result["seeds"].values() if "eval_mean" in s]
        failed = len(result["seeds"]) - len(done)
        seconds = sorted(s["shell_seconds"] for s in done if "shell_seconds" in s)  # peer.py does not take it
        e = result["eval"]
        rows.append(
            f"| `python {result['script']} {result['flags']}` | {len(done)}{f' ({failed} failed)' if failed else ''} "
            f"| {e['iqm']:.2f} [{e['low']:.2f}, {e['high']:.2f}] | {min(s['eval_mean'] for s in done):.2f} "
            f"| {f'{seconds[len(seconds) // 2]:.0f} s' if seconds else ''} | {result['commit']} |"
        )
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_) -> str:
    kinds = {"source": source, "flags": flags, "results": results}
    return re.sub(r"\{\{ (source|flags|results) ([^}]+?) \}\}", lambda m: kinds[m[1]](m[2]), markdown)
