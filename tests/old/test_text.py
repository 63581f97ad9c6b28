"""Scripts share code by having the same text; each is one file, free of side effects but for a variable for MKL."""

import ast
import subprocess
import sys
from itertools import combinations

import pytest
from conftest import ROOT, SCRIPTS

# Blocks of the same name that differ, with the reason. Everything else of one name is one text.
EXCEPTIONS = {
    "Args": "each script has its own flags",
    "Agent": "the heads and the memory are what the scripts differ in; its methods are compared one by one",
    "train": "each algorithm has its own story",
    "check_args": "each script checks its own flags",
    "make_env": "each script has its own families of environments",
    "make_envs": "Atari has one native environment, MPI one environment a rank",
    "play": "ppo1_mpi records expert episodes",
    "evaluate": "ppo1_mpi records expert episodes",
    "nature_cnn": "rppo_gru_atari's has channels last, which trpo's and ppo1_mpi's flat vectors cannot have",
    "Encoder": "rppo_gru_atari's reads uint8 frames only, in bfloat16 if asked",
    "normalize": "rppo_gru_atari's statistics are of every process's rows",
    "parse_args": "rppo_gru_atari has no presets and no velocities to mask, ppo1_mpi presets by family",
    "main": "ppo1_mpi ends every rank",
    "RowPolicy": "statistics, encoders and what it returns differ",
}
METHOD_EXCEPTIONS = {
    "__init__": "heads and memories differ", "step": "heads and memories differ", "act": "the distributions differ",
    "evaluate_actions": "the distributions differ", "observe": "masks and normalisation differ",
    "to_env": "Box actions are clipped or squashed", "predict": "the deterministic action differs",
    "next_state": "memories differ", "initial_state": "memories differ", "replay": "memories differ",
    "get_value": "memories differ", "log_probs": "masks differ",
    "encode": "ppo1_mpi has an encoder for the critic", "normalize_obs": "ppo1_mpi has baselines' statistics",
    "distribution": "the distributions differ", "sample": "the distributions differ",
    "head": "trpo needs Gaussians' deviations, too",
}  # fmt: skip


def blocks(script: str) -> dict[str, str]:
    """Top-level functions and classes by name, decorators and comments included."""
    source = (ROOT / f"{script}.py").read_text()
    lines = source.split("\n")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def methods(script: str) -> dict[str, str]:
    """The methods of Agent by name."""
    source = (ROOT / f"{script}.py").read_text()
    agent = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Agent")
    lines = source.split("\n")
    return {n.name: "\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in agent.body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("a,b", list(combinations(SCRIPTS, 2)))
def test_blocks_of_one_name_are_one_text(a, b):
    for name in sorted((blocks(a).keys() & blocks(b).keys()) - EXCEPTIONS.keys()):
        assert blocks(a)[name] == blocks(b)[name], f"{name} differs between {a}.py and {b}.py"
    for name in sorted((methods(a).keys() & methods(b).keys()) - METHOD_EXCEPTIONS.keys()):
        assert methods(a)[name] == methods(b)[name], f"Agent.{name} differs between {a}.py and {b}.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_layout(script):
    source = (ROOT / f"{script}.py").read_text()
    assert source.startswith("# /// script\n# requires-python") and source.endswith('if __name__ == "__main__":\n    main()\n')
    banners = [line.split("---")[1].strip() for line in source.split("\n") if line.startswith("# --- ")]
    expected = ["Environments", "Networks", "The mathematics", "Checkpoint, evaluate, play", "Training", "Command line"]
    assert banners == expected
    assert max(map(len, source.split("\n"))) <= 110
    assert len(ast.get_docstring(ast.parse(source)).split("\n")) <= 25
    imported = {a.name.split(".")[0] for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert not imported & {*SCRIPTS, "tests", "conftest", "benchmarks"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_public_functions_and_flags_are_documented(script):
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "Args":
            assert ast.get_docstring(node), node.name
    args = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args")
    lines = (ROOT / f"{script}.py").read_text().split("\n")
    for field in args.body:
        assert isinstance(field, ast.AnnAssign) and "  # " in lines[field.end_lineno - 1], ast.unparse(field)


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_has_no_side_effects(script, tmp_path):
    code = f"import sys, os, torch; sys.path.insert(0, {str(ROOT)!r}); before = {{*os.environ}}; import {script}, signal; " \
           "assert not os.listdir('.') and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL; " \
           "assert {*os.environ} - before <= {'MKL_VML_DEBUG_CPU_TYPE'}, {*os.environ} - before"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == done.stderr == ""
