"""mkdocs hook: pages quote code, flags and figures from the repository when they are built, so they cannot rot.

{{ source SCRIPT.NAME }} and {{ source SCRIPT.CLASS.METHOD }}   that block of SCRIPT.py
{{ flags SCRIPT }}               every flag with its default and help
{{ results TASK TASK ... }}      rows of benchmarks/results/learning.csv
{{ throughput SECTION }}         rows of benchmarks/results/throughput.csv
{{ recipe NAME }}                docs/recipes/NAME.py
A name that does not exist fails the build.
"""

import ast
import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import plot  # noqa: E402


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


def results(tasks: str) -> str:
    """Of benchmarks/results/learning.csv, as `python benchmarks/plot.py table TASK ...` prints it."""
    return plot.table(tasks.split())


def throughput(section: str) -> str:
    """The latest rows of a section of benchmarks/results/throughput.csv, with ratios to the peer's."""
    with open(ROOT / "benchmarks/results/throughput.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["section"] == section]
    latest = {(row["work"], row["system"]): row for row in rows}
    table = ["| work | system | SPS, median (min, max) | ratio | machine | commit |", "|---|---|---|---|---|---|"]
    for (work, system), row in latest.items():
        peers = [r for (w, s), r in latest.items() if w == work and not s.startswith("ours")]
        ratio = f"{float(row['median']) / float(peers[0]['median']):.1f}" if peers else "-"
        median, low, high = (f"{float(row[name]):,.0f}" for name in ("median", "min", "max"))
        table.append(f"| {work} | {system} | {median} ({low}, {high}) | {ratio} | {row['machine']} | {row['commit']} |")
    assert latest, f"throughput.csv has no section {section}"
    return "\n".join(table)


def recipe(name: str) -> str:
    return f'```python title="docs/recipes/{name}.py"\n' + (ROOT / f"docs/recipes/{name}.py").read_text() + "```"


def on_page_markdown(markdown: str, **_) -> str:
    kinds = {"source": source, "flags": flags, "results": results, "throughput": throughput, "recipe": recipe}
    return re.sub(rf"\{{\{{ ({'|'.join(kinds)}) ([^}}]+?) \}}\}}", lambda m: kinds[m[1]](m[2]), markdown)
