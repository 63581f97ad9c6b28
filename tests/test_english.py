"""Plain English: patterns that made the docs read as translated are in no page, docstring or message.

A pattern is a regular expression over a text in one line, without code blocks. Each names what to
write instead. What a page quotes from somewhere else it may quote as it is: in backquotes.
"""

import ast
import re

import pytest
from conftest import ROOT, SCRIPTS

PATTERNS = {
    r"\b(?:goes|go|went|going) on\b(?! to\b|:)": "continues",
    r"\b(?:stands?|stood)\b(?! for\b| still\b)": "is, or the verb that is meant",
    r"\b(?:is|are|was|were) of (?:an?|the|one|all|this|each) (?!kind)": "belongs to, comes from",
    r"\b(?:has|have|had) -?\d[\d,]*\.\d": "scores",
    r"\b(?:has|have|had) -?\d+,\d{3}(?: and|[.,;] |$)": "scores",
    r"\bours\b(?! to choose)": "this project, or our and a noun",
    r"\btheirs\b": "their and a noun",
    r"\bas they come\b": "raw",
    r"\bwith everything in sight\b": "fully observed",
    r"\bfor ever\b": "forever",
    r"\bto and fro\b": "back and forth",
    r"\bsees? to (?:it|that)\b": "takes care of that",
    r"\bby whom\b": "who",
    r"\b(?:its|their) third\b": "whose third what?",
    r"\blearnt\b": "learned",
    r"\ball else\b": "everything else",
    r"\bdoes not tell enough\b": "is not enough",
    r"\bare more in number\b|\bare others\b": "there are more; have changed",
    r"\bwhat stands\b|\bthe other's\b|\bas far as there are\b": "the noun",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
for folder in "concepts", "reading", "exercises":
    PAGES += sorted((ROOT / "docs" / folder).glob("*.md"))
PROGRAMS = [ROOT / f"{script}.py" for script in SCRIPTS]
for folder in "docs/tools", "docs/exercises", "docs/recipes", "benchmarks":
    PROGRAMS += sorted((ROOT / folder).glob("*.py"))


def prose(path) -> str:
    """A page without code, or a program's docstrings, comments and messages, in one line."""
    text = path.read_text()
    if path.suffix == ".py":
        strings = [
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        strings = [x for x in strings if " " in x and not x.startswith("ours")]  # a key of a CSV
        text = "\n".join([*strings, *re.findall(r"# .*", text)])
    else:
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]+`", "", text)
    return " ".join(text.split())


def found(path) -> list[str]:
    words = prose(path)
    return [
        f"{words[max(match.start() - 40, 0) : match.end() + 30]!r}: {better}"
        for pattern, better in PATTERNS.items()
        for match in re.finditer(pattern, words, re.I)
    ]


@pytest.mark.parametrize("path", [*PAGES, *PROGRAMS], ids=lambda x: x.relative_to(ROOT).as_posix())
def test_nothing_reads_as_translated(path):
    assert found(path) == []


@pytest.mark.parametrize(
    "sentence, wrong",
    [
        ("--resume goes on with a run", 1),
        ("The state goes on over the cut.", 1),
        ("A task on its own goes onto a list; it goes on to the next page", 0),
        ("The pole still stands, and would have stood on.", 2),
        ("A letter stands for a shape; it stands still", 0),
        ("Our agents of seeds 1 and 2 have 4,333 and 4,346", 1),
        ("Our agents had 12.0 and 5.4", 1),
        ("The rollout has 1,024 steps, and the network has 2 layers", 0),
        ("rewards as they come", 1),
        ("theirs CountRecall's seeds", 1),
        ("agents, ours above all", 1),
        ("RUN is of the script; a figure of ours", 2),
    ],
)
def test_the_patterns_are_precise(sentence, wrong):
    assert sum(len(re.findall(pattern, sentence, re.I)) for pattern in PATTERNS) == wrong
