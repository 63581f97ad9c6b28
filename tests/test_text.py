"""A script is read in one sitting, in one order, and shares blocks with the others to the byte."""

import ast
import difflib
import re
import subprocess
import sys
from collections import defaultdict

import pytest
from conftest import ROOT, SCRIPTS

sys.path.insert(0, str(ROOT / "tests/mutants"))
from mutants import MUTANTS  # noqa: E402

BUDGETS = {  # lines, characters, lines up to the end of train, lines of train, flags
    "rppo_lstm": (600, 30_500, 370, 105, 36),
    "rppo_continuous": (630, 32_500, 410, 110, 42),
    "rppo_gru_atari": (620, 32_000, 410, 120, 40),
    "trpo": (690, 36_000, 480, 110, 42),
    "ppo1_mpi": (660, 34_500, 450, 120, 40),
}
# A script's parent, and at most so many lines that differ from it, a replaced line counted once.
DIFFERENCES = {
    "rppo_continuous": ("rppo_lstm", 180),
    "rppo_gru_atari": ("rppo_lstm", 280),
    "trpo": ("rppo_continuous", 360),
    "ppo1_mpi": ("rppo_continuous", 360),
}
# Blocks of one name that differ, and why. All others are one text.
EXCEPTIONS = {
    "Args": "each has its own flags",
    "train": "each algorithm has its own story",
    "check_args": "each checks its own flags",
    "make_envs": "Atari's is ale_py's native environment; a rank of ppo1_mpi has one, which sync plays fastest",
    "play": "Atari's games are shown by Gymnasium's preprocessing",
    "parse_args": "Atari has no presets; trpo's and ppo1_mpi's check --memory",
    "main": "ppo1_mpi ends every rank",
    "num_choices": "trpo and ppo1_mpi have Box actions, too",
    "to_env": "Gaussian actions are clipped",
    "Run.__init__": "several processes",
    "Run.log": "several processes",
    "Run.save": "several processes",
    "Run.finish": "several processes",
    "Agent.__init__": "heads and memories differ",
    "Agent.initial_state": "memories differ",
    "Agent.encode": "ppo1_mpi has an encoder for the critic",
    "Agent.log_probs": "Atari has no masks",
    "Agent.policy": "trpo has discrete actions, too",
    "Agent.act": "trpo and ppo1_mpi have discrete actions, too",
    "Agent.sample_noise": "trpo and ppo1_mpi have discrete actions, too",
    "Agent.step": "heads and memories differ",
    "Agent.evaluate_actions": "distributions differ",
    "Agent.predict": "distributions differ",
}
# They say everything without a docstring, or are what torch and Gymnasium say they are.
TRIVIAL = {"Args", "check", "initial_state", "NatureCNN.forward", "FireReset.reset"}
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


@everywhere
def test_budgets(script):
    source, nodes = parse(script)
    fields = [x for x in nodes["Args"].body if isinstance(x, ast.AnnAssign)]
    counted = (
        source.count("\n"),
        len(source),
        nodes["train"].end_lineno,
        length(nodes["train"]),
        len(fields),
    )
    assert all(n <= most for n, most in zip(counted, BUDGETS[script], strict=True)), counted
    assert max(map(len, source.splitlines())) <= 100
    for name, node in nodes.items():  # a screen
        if isinstance(node, ast.FunctionDef) and name != "train":
            assert length(node) <= 45, name


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
    assert source.count("\n# --- Not about learning") == 1
    comments = re.findall(
        r"\n        # (\w+)", "".join(source.splitlines(True)[nodes["train"].lineno :])
    )
    assert [x for x in comments if x in ("Rollout", "Advantages", "Update")] == [
        "Rollout",
        "Advantages",
        "Update",
    ]


def test_blocks_of_one_name_are_one_text():
    texts = defaultdict(dict)
    for script in SCRIPTS:
        source, nodes = parse(script)
        lines = source.splitlines()
        for name, node in nodes.items():
            if name not in ("Agent", "Run"):  # whose methods are compared
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                texts[name][script] = "\n".join(lines[first - 1 : node.end_lineno])
    for name, versions in texts.items():
        differ = len({*versions.values()}) > 1
        assert not differ or name in EXCEPTIONS, f"{name} differs between {[*versions]}"
        assert differ or name not in EXCEPTIONS or len(versions) < 2, f"{name} is no exception"
    assert {name for name in EXCEPTIONS if name not in texts} == set()


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
before = state()
import {script}
assert state() == before, (before, state())
assert not torch.cuda.is_initialized() and os.listdir() == []
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_every_mutant_is_a_change_of_todays_text():
    """What a mutant changes is in its script once; `python tests/mutants/run.py` tries them all."""
    for script, what, text, bug, file in MUTANTS:
        assert (ROOT / f"{script}.py").read_text().count(text) == 1 and text != bug, (script, what)
        assert (ROOT / "tests" / file).exists()
    assert len(MUTANTS) > 200
