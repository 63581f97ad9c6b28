"""The scripts' texts: one text where they share a name; each runs alone; every flag is read."""

import ast
import re
import subprocess
import sys

import pytest
import sync
from blocks import blocks, patched, text_of
from support import MODULES, ROOT, SCRIPTS, main

TEXTS = {script: (ROOT / f"{script}.py").read_text() for script in SCRIPTS}


def test_a_shared_name_has_one_text():
    """Where scripts must differ, sync.EXCEPTIONS says so; `python tests/sync.py` copies."""
    assert sync.synced(TEXTS) == TEXTS


def test_every_exception_is_needed():
    found = {script: blocks(text) for script, text in TEXTS.items()}
    lines = {script: text.splitlines() for script, text in TEXTS.items()}
    for name, (groups, reason) in sync.EXCEPTIONS.items():
        assert reason
        texts = [
            {"\n".join(lines[s][i] for i in found[s][name]) for s in group if name in found[s]}
            for group in groups
        ]
        texts = [of_group for of_group in texts if of_group]
        assert len(texts) >= 2 and all(len(of_group) == 1 for of_group in texts), name
        assert len(set().union(*texts)) == len(texts), f"{name}: some groups are one"


def test_a_block_is_copied_from_its_owner():
    changed = {**TEXTS}
    changed["trpo"] = patched(TEXTS["trpo"], "compute_gae", "reversed(", "list(")
    assert sync.synced(changed) == TEXTS
    changed = {**TEXTS}
    changed["rppo_lstm"] = patched(TEXTS["rppo_lstm"], "compute_gae", "reversed(", "list(")
    new = sync.synced(changed)
    assert all("for t in list(range(len(deltas)))" in new[script] for script in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_only_what_its_header_lists(script):
    """So it runs alone; wandb and mpi4py are imported where they are asked for."""
    header = TEXTS[script].split("# ///")[1]
    listed = {re.split(r"[\[>=<]", name)[0] for name in re.findall(r'"([^"]+)"', header)}
    listed |= {"numpy", "wandb"}  # gymnasium brings NumPy; --track imports wandb
    for node in ast.walk(ast.parse(TEXTS[script])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in listed, f"{script}: {name}"


def test_importing_the_scripts_has_no_side_effect(tmp_path):
    """No output, no file, no random number drawn, no thread or process, no MPI."""
    code = f"""
import sys, threading, multiprocessing
sys.path.insert(0, {str(ROOT)!r})
import numpy as np, torch, random
torch.manual_seed(1); np.random.seed(1); random.seed(1)
before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
for script in {SCRIPTS}:
    __import__(script)
after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
assert torch.get_default_dtype() == torch.float32 and threading.active_count() == 1
assert not multiprocessing.active_children()
assert not any(name.split(".")[0] in ("wandb", "mpi4py") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read(script):
    """By the name of its field, somewhere outside Args."""
    text = TEXTS[script].replace(text_of(TEXTS[script], "Args"), "")
    unread = [name for name in vars(MODULES[script].Args()) if not re.search(rf"\.{name}\b", text)]
    assert not unread


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_every_flag_with_its_default(script, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, text, _ = main(tmp_path, script, "--help")
    assert code == 0
    defaults = MODULES[script].Args()
    if hasattr(defaults, "preset"):
        defaults = MODULES[script].preset(defaults.env_id)
    for name, default in vars(defaults).items():
        flag = rf"^\W*--{name.replace('_', '-')}[ ,].*?\(default: (.*?)\)"
        line = re.search(flag, text, re.S | re.M)
        assert line and line[1].strip("'") == str(default), name
