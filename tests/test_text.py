"""A script is read in one sitting, in one order, and shares blocks with the others to the byte."""

import ast
import difflib
import io
import re
import sys
import tokenize

import launch
import pytest
import sync
from conftest import ROOT, SCRIPTS

sys.path.insert(0, str(ROOT / "tests/mutants"))
from mutants import MUTANTS  # noqa: E402

BUDGETS = {  # lines and characters of the lesson, lines of train, lines after it, flags
    "rppo_lstm": (470, 23_000, 105, 320, 36),
    "rppo_continuous": (500, 25_000, 115, 310, 42),
    "rppo_gru_atari": (475, 24_000, 125, 340, 40),
    "trpo": (570, 29_500, 110, 320, 42),
    "ppo1_mpi": (505, 26_000, 120, 370, 40),
}
TOKENS = 12.5  # a code line of the lesson, on average
COMMENTS = 5.5  # lines of train for one comment, at most
# A script's parent, and at most so many lines that differ from it, a replaced line counted once.
DIFFERENCES = {
    "rppo_continuous": ("rppo_lstm", 180),
    "rppo_gru_atari": ("rppo_lstm", 410),
    "trpo": ("rppo_continuous", 360),
    "ppo1_mpi": ("rppo_continuous", 360),
}
# They say everything without a docstring, or are what torch and Gymnasium say they are.
TRIVIAL = {
    "Args",
    "check",
    "initial_state",
    "seed_everything",
    "flat_gradient",
    "NatureCNN.forward",
    "FireReset.reset",
}
PLAIN = [
    *(ROOT / f"{script}.py" for script in SCRIPTS),
    *sorted((ROOT / "docs/recipes").glob("*.py")),
]
everywhere = pytest.mark.parametrize("script", SCRIPTS)


def parse(script: str) -> tuple[str, dict[str, ast.AST]]:
    """The text of a script and its functions and classes; methods are called Class.method."""
    source = (ROOT / f"{script}.py").read_text()
    nodes = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
            for method in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(method, ast.FunctionDef):
                    nodes[f"{node.name}.{method.name}"] = method
    return source, nodes


def length(node) -> int:
    return node.end_lineno - node.lineno + 1


SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def docstring_lines(tree: ast.AST) -> set[int]:
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@everywhere
def test_budgets(script):
    """Of the lesson, which ends with `train`, and of the rest: two budgets that cannot trade."""
    source, nodes = parse(script)
    lines = source.splitlines(keepends=True)
    flags = [x for x in nodes["Args"].body if isinstance(x, ast.AnnAssign)]
    end = nodes["train"].end_lineno
    counted = (
        end,
        sum(map(len, lines[:end])),
        length(nodes["train"]),
        len(lines) - end,
        len(flags),
    )
    assert all(n <= most for n, most in zip(counted, BUDGETS[script], strict=True)), counted
    assert max(map(len, source.splitlines())) <= 100
    for name, node in nodes.items():  # a screen
        if isinstance(node, ast.FunctionDef) and name != "train":
            assert length(node) <= 48, name


@everywhere
def test_density(script):
    """Tokens on a line of the lesson's code; lines of train for a comment."""
    source, nodes = parse(script)
    train, flags = nodes["train"], nodes["Args"]
    skipped = docstring_lines(ast.parse(source)) | set(range(flags.lineno, flags.end_lineno + 1))
    tokens, comments = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT and "fmt:" not in token.string:
            comments.add(line)
        elif token.type not in SILENT and line not in skipped and line <= train.end_lineno:
            tokens[line] = tokens.get(line, 0) + 1
    assert sum(tokens.values()) / len(tokens) <= TOKENS
    inside = [line for line in comments if train.lineno <= line <= train.end_lineno]
    assert length(train) / len(inside) <= COMMENTS


def stumbling(tree: ast.AST):
    """Yields (line, what) of constructions that make a reader stop."""
    for node in ast.walk(tree):
        conditional = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n is not node]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            yield node.lineno, "a conditional expression as a statement"
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
            yield node.iter.lineno, "a loop over `A if c else B`"
        if isinstance(node, ast.IfExp) and conditional:
            yield node.lineno, "a conditional expression in another"
        if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, ast.Tuple):
            if any(isinstance(x, ast.IfExp) for x in node.value.elts):
                yield node.lineno, "a conditional expression in a tuple"
        if isinstance(node, ast.Assign):
            several = (ast.Tuple, ast.Attribute)
            if len(node.targets) > 1 and any(isinstance(x, several) for x in node.targets):
                yield node.lineno, "a chained assignment to an attribute or to several names"
            both = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            if both and len(node.value.elts) > 2:
                yield node.lineno, "three assignments or more in one"
        if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            if isinstance(node.left, ast.Compare) or isinstance(node.right, ast.Compare):
                yield node.lineno, "arithmetic with a comparison"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "sleep":
            if any(isinstance(x, ast.Compare) for x in node.args):
                yield node.lineno, "a comparison as a number of seconds"


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: file.name)
def test_nothing_to_stumble_over(file):
    assert list(stumbling(ast.parse(file.read_text()))) == []


def test_the_test_sees_what_makes_a_reader_stumble():
    golf = """
f() if a else g()
for x in a if b else c: pass
y = 1 if a else 2 if b else 3
s, t = u, (v if w else x)
def f(): return a, b if c else d
self.a = b = c
a, b, c = 1, 2, 3
n = 3 * (rank > 0)
time.sleep(rank > 0)
"""
    assert len({line for line, _ in stumbling(ast.parse(golf))}) == 9


@pytest.mark.parametrize("script", DIFFERENCES)
def test_a_variants_diff_is_its_concept(script):
    parent, most = DIFFERENCES[script]
    before, after = ((ROOT / f"{name}.py").read_text().splitlines() for name in (parent, script))
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal"]
    assert 100 < sum(changed) <= most


@everywhere
def test_newspaper_order(script):
    """The lesson, `train`, and then what any experiment needs."""
    source, nodes = parse(script)
    top = [name for name in nodes if "." not in name]
    assert top[0] == "Args" and top[-1] == "main"
    after = ["ArgumentError", "check", "check_args", "make_envs", "Run", "load", "evaluate", "play",
             "parse_args", "main"]  # fmt: skip
    assert [name for name in top if name in ("Agent", "train", *after)] == [
        "Agent",
        "train",
        *after,
    ]
    assert top[top.index("train") + 1] == "ArgumentError"
    assert source.count("\n# --- The lesson ends here. ") == 1
    comments = re.findall(
        r"\n        # (\w+)", "".join(source.splitlines(True)[nodes["train"].lineno :])
    )
    assert [x for x in comments if x in ("Rollout", "Advantages", "Update")] == [
        "Rollout",
        "Advantages",
        "Update",
    ]


def test_blocks_of_one_name_are_one_text():
    """`python tests/sync.py` makes them so."""
    texts = {script: (ROOT / f"{script}.py").read_text() for script in SCRIPTS}
    new = sync.synced(texts)
    assert [script for script in SCRIPTS if new[script] != texts[script]] == []


def test_the_exceptions_are_exceptions():
    """No two groups of scripts have the same text of a block, and every exception exists."""
    texts = {script: (ROOT / f"{script}.py").read_text() for script in SCRIPTS}
    blocks = {script: sync.blocks(text) for script, text in texts.items()}
    for name, (groups, _) in sync.EXCEPTIONS.items():
        versions = []
        for scripts in groups:
            having = [script for script in scripts if name in blocks[script]]
            if having:
                first, last = blocks[having[0]][name]
                versions.append("\n".join(texts[having[0]].splitlines()[first:last]))
        assert len(versions) == len({*versions}) > 0, name
        assert len(versions) > 1, f"{name} is no exception"


@everywhere
def test_everything_public_is_documented(script):
    source, nodes = parse(script)
    for name, node in nodes.items():
        last = name.split(".")[-1]
        assert ast.get_docstring(node) or {name, last} & TRIVIAL or last.startswith("_"), name
    lines = source.splitlines()
    docstring = ast.get_docstring(ast.parse(source))
    assert f"python {script}.py" in docstring and "arXiv:" in docstring
    for field in nodes["Args"].body:
        assert isinstance(field, ast.AnnAssign)
        assert re.search(r"  # \S.{5,}", lines[field.end_lineno - 1]), ast.unparse(field)


@everywhere
def test_every_flag_is_read(script):
    source, nodes = parse(script)
    read = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "self.args")
        if isinstance(node.ctx, ast.Load)
    }
    assert {field.target.id for field in nodes["Args"].body} - read == set()


@everywhere
def test_it_is_one_file_that_runs_alone(script):
    source, _ = parse(script)
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert not imported & (
        {*BUDGETS, "tests", "docs", "benchmarks"} | {x.stem for x in ROOT.glob("*.py")}
    )
    header = re.match(
        r'# /// script\n# requires-python = ">=3\.\d+"\n'
        r"# dependencies = (\[(?:.|\n#)*?\])\n# ///\n",
        source,
    )
    dependencies = ast.literal_eval(header[1].replace("\n#", "\n"))
    names = [re.fullmatch(r"([\w-]+)(\[[\w,-]+\])?(>=[\d.]+)?", x) for x in dependencies]
    assert all(names), f"no upper bounds: {dependencies}"
    packages = {
        "mpi4py": "mpi4py",
        "ale_py": "ale-py",
        "gymnasium": "gymnasium",
        "torch": "torch",
        "tqdm": "tqdm",
        "tyro": "tyro",
    }
    assert {packages[x] for x in imported & packages.keys()} <= {match[1] for match in names}
    assert source.endswith('if __name__ == "__main__":\n    main()\n')


@everywhere
def test_importing_has_no_side_effect(script, tmp_path):
    """Beside those of the libraries that it imports."""
    code = f"""
import gymnasium, os, signal, sys, threading, torch, torch.utils.tensorboard, tqdm, tyro
def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    settings = torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed()
    settings += torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    return dict(os.environ), handlers, settings, os.listdir(), threading.active_count()
sys.path.insert(0, {str(ROOT)!r})
sys.modules.pop({script!r}, None)
before = state()
import {script}
assert state() == before, (before, state())
assert not torch.cuda.is_initialized() and os.listdir() == []
"""
    program, empty = tmp_path / "program.py", tmp_path / "empty"
    program.write_text(code)
    empty.mkdir()
    done = launch.start(str(program), [], empty, tmp_path / "log").wait()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_every_mutant_is_a_change_of_todays_text():
    """What a mutant changes is in its script once; `python tests/mutants/run.py` tries them all."""
    for script, what, text, bug, file in MUTANTS:
        assert (ROOT / f"{script}.py").read_text().count(text) == 1 and text != bug, (script, what)
        assert (ROOT / "tests" / file).exists()
    assert len(MUTANTS) > 200
