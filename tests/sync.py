"""Copies what scripts share from the script that owns it: python tests/sync.py

Functions, classes, constants, and methods of Agent and Run, are one text in all scripts that have
their name, but for EXCEPTIONS. The owner is the first script of a group: edit it there. `--check`
changes nothing, and ends with exit code 1 if a script differs.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs/tools"))
from blocks import blocks  # noqa: E402

SCRIPTS = ["rppo_lstm", "rppo_continuous", "rppo_gru_atari", "trpo", "ppo1_mpi"]
SPLIT = "Agent", "Run"  # classes whose methods are copied one by one
LSTM, CONTINUOUS, ATARI, TRPO, MPI = ((script,) for script in SCRIPTS)
EACH = [LSTM, CONTINUOUS, ATARI, TRPO, MPI]
PPO = LSTM + CONTINUOUS + ATARI
# What is not one text in all scripts: which of them share one, and why.
EXCEPTIONS = {
    "docstring": (EACH, "each has its own story"),
    "imports": (EACH, "each imports what it needs"),
    "SCRIPT": (EACH, "its name"),
    "VERSION": (EACH, "in the same line as the name"),
    "Args": (EACH, "each has its own flags"),
    "METRICS": ([PPO, TRPO, MPI], "trpo has a step of its own; ppo1 means over ranks"),
    "PRESETS": ([CONTINUOUS, TRPO, MPI], "each has its own tasks"),
    "Agent.__init__": (EACH, "heads and memories differ"),
    "Agent.initial_state": ([LSTM + CONTINUOUS, ATARI, TRPO, MPI], "memories differ"),
    "Agent.step": (EACH, "heads and memories differ"),
    "Agent.evaluate_actions": (EACH, "distributions differ"),
    "Agent.predict": (EACH, "distributions differ"),
    "Agent.policy": ([CONTINUOUS, TRPO + MPI], "gSDE; discrete actions, too"),
    "Agent.sample_noise": ([CONTINUOUS, TRPO + MPI], "gSDE; discrete actions, too"),
    "Agent.act": ([CONTINUOUS, TRPO + MPI], "gSDE; discrete actions, too"),
    "normalize_advantage": ([PPO, TRPO], "trpo has no minibatches"),
    "too_far": ([PPO, MPI], "ranks decide together"),
    "minibatches": ([PPO, MPI], "a rank takes part in each message, whatever its steps"),
    "count_steps": ([PPO + TRPO, MPI], "of all ranks"),
    "train": (EACH, "each algorithm has its own story"),
    "check_args": ([LSTM + ATARI, CONTINUOUS, TRPO, MPI], "each checks its own flags"),
    "check_sequences": ([PPO, MPI], "ppo1 normalises advantages over a rollout, not a minibatch"),
    "check_actions": ([LSTM, CONTINUOUS, TRPO + MPI], "each has its own actions"),
    "to_env": ([LSTM + ATARI, CONTINUOUS, TRPO + MPI], "real-valued actions are clipped"),
    "make_envs": ([LSTM + CONTINUOUS + TRPO, MPI, ATARI], "a rank has one; ale_py's games"),
    "play": ([LSTM + CONTINUOUS + TRPO + MPI, ATARI], "games are cut at a stated length"),
    "parse_args": ([LSTM + ATARI, CONTINUOUS + TRPO, MPI], "presets; rank 0 prints"),
    "main": ([PPO + TRPO, MPI], "several processes"),
    "Run.__init__": ([PPO + TRPO, MPI], "several processes"),
    "Run.restore": ([PPO + TRPO, MPI], "several processes"),
    "Run.log": ([PPO + TRPO, MPI], "several processes"),
    "Run.contents": ([PPO + TRPO, MPI], "several processes"),
    "Run.finish": ([LSTM + CONTINUOUS + TRPO + MPI, ATARI], "games are cut at a stated length"),
}


def group(name: str, script: str) -> tuple[str, ...]:
    """The scripts that share a block's text with this one."""
    groups, _ = EXCEPTIONS.get(name, ([tuple(SCRIPTS)], ""))
    return next((scripts for scripts in groups if script in scripts), (script,))


def pieces(text: str) -> dict[str, range]:
    """The blocks that are copied as one: no class of SPLIT, and methods of these alone."""
    return {
        name: lines
        for name, lines in blocks(text).items()
        if name not in SPLIT and ("." not in name or name.split(".")[0] in SPLIT)
    }


def synced(texts: dict[str, str]) -> dict[str, str]:
    """The texts of the scripts, with every block as its owner has it."""
    found = {script: pieces(text) for script, text in texts.items()}
    new = {}
    for script, text in texts.items():
        lines = text.splitlines(keepends=True)
        for name, where in sorted(found[script].items(), key=lambda item: -item[1].start):
            owner = next(other for other in group(name, script) if name in found[other])
            piece = found[owner][name]
            if owner != script:
                copied = texts[owner].splitlines(keepends=True)[piece.start : piece.stop]
                lines[where.start : where.stop] = copied
        new[script] = "".join(lines)
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
