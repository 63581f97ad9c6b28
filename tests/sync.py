"""Copies the blocks that the scripts share from rppo_lstm.py into the others: python tests/sync.py

A block is a function, a class or a method. Blocks of one name are one text in all scripts, but for
EXCEPTIONS. Edit a block in the first script that has it. `--check` changes nothing, and ends with
exit code 1 if a script differs.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"]
SPLIT = "Agent", "Run"  # classes whose methods are blocks of their own
ALONE = [(script,) for script in SCRIPTS]
VECTORS, ATARI, MPI = ("rppo_lstm", "rppo_continuous", "trpo"), ("rppo_gru_atari",), ("ppo1_mpi",)
# Blocks that are not one text in all scripts: which scripts share one, and why.
EXCEPTIONS = {
    "Args": (ALONE, "each has its own flags"),
    "train": (ALONE, "each algorithm has its own story"),
    "check_args": (ALONE, "each checks its own flags"),
    "Agent.__init__": (ALONE, "heads and memories differ"),
    "Agent.step": (ALONE, "heads and memories differ"),
    "Agent.predict": (ALONE, "distributions differ"),
    "Agent.evaluate_actions": (ALONE, "distributions differ"),
    "Agent.initial_state": (
        [("rppo_lstm", "rppo_continuous"), ATARI, ("trpo",), MPI],
        "memories differ",
    ),
    "Agent.log_probs": ([("rppo_lstm", "trpo", "ppo1_mpi"), ATARI], "Atari has no masks"),
    "Agent.policy": (ALONE, "trpo has discrete actions, too"),
    "Agent.sample_noise": ([("rppo_continuous",), ("trpo",)], "gSDE has matrices"),
    "Agent.act": (ALONE, "gSDE is rppo_continuous's"),
    "num_choices": ([("rppo_lstm",), ("trpo", "ppo1_mpi")], "Box actions, too"),
    "to_env": (
        [("rppo_lstm", "rppo_gru_atari"), ("rppo_continuous",), ("trpo", "ppo1_mpi")],
        "Gaussian actions are clipped",
    ),
    "minibatches": ([("rppo_lstm", "rppo_continuous", *ATARI), MPI], "MPI's ranks have no GPU"),
    "check_inputs": ([(*VECTORS, *MPI), ATARI], "frames are not vectors"),
    "make_envs": ([VECTORS, ATARI, MPI], "ale_py's games; one environment on a rank"),
    "play": ([(*VECTORS, *MPI), ATARI], "Atari's games are shown by Gymnasium's preprocessing"),
    "parse_args": ([VECTORS, ATARI, MPI], "Atari has no presets; rank 0 prints"),
    "main": ([VECTORS, ATARI, MPI], "several processes"),
    "Run.__init__": ([VECTORS, ATARI, MPI], "several processes"),
    "Run.log": ([VECTORS, ATARI, MPI], "several processes"),
    "Run.save": ([VECTORS, (*ATARI, *MPI)], "several processes"),
    "Run.finish": ([(*VECTORS, *MPI), ATARI], "an evaluation in Atari is cut at a stated length"),
}


def group(name: str, script: str) -> tuple[str, ...]:
    """The scripts that share a block's text with this one."""
    groups, _ = EXCEPTIONS.get(name, ([tuple(SCRIPTS)], ""))
    return next((scripts for scripts in groups if script in scripts), (script,))


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


def synced(texts: dict[str, str]) -> dict[str, str]:
    """The texts of the scripts, with every block as the first script of its group has it."""
    found = {script: blocks(text) for script, text in texts.items()}
    new = {}
    for script, text in texts.items():
        lines = text.splitlines()
        for name, (first, last) in reversed(found[script].items()):
            owner = next(other for other in group(name, script) if name in found[other])
            start, end = found[owner][name]
            lines[first:last] = texts[owner].splitlines()[start:end]
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
