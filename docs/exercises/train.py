"""rppo_lstm.py with the change of an exercise, the diff on its page.

    python docs/exercises/train.py carry_state --env-id tasks:Bell-v0 --total-timesteps 40000
    python docs/exercises/train.py unchanged --env-id tasks:Bell-v0 --total-timesteps 40000

The flags are rppo_lstm.py's. Environments are looked for in the current folder, too, and here.
"""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(Path.cwd())]
sys.path.append(str(ROOT / "docs/tools"))
from blocks import patched  # noqa: E402

PAGES = {page.stem[3:]: page.read_text() for page in sorted(HERE.glob("[0-9]*.md"))}
DIFFS = {name: page.split("```diff\n")[1].split("```")[0] for name, page in PAGES.items()
         if "```diff\n" in page}  # fmt: skip


def changed(diff: str) -> str:
    """rppo_lstm.py's text after a diff: in each block that a line @@ BLOCK @@ names, what the lines
    with - and the unmarked ones say is there once, and is replaced by those with + and unmarked."""
    text = (ROOT / "rppo_lstm.py").read_text()
    _, *parts = re.split(r"(?m)^@@ (.+) @@\n", diff)
    for block, hunk in zip(parts[::2], parts[1::2]):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if not line.startswith("+"))
        new = "".join(line[1:] for line in lines if not line.startswith("-"))
        text = patched(text, block, old, new)
    return text


def load(name: str, folder: str):
    """The changed script as a module, whose runs are named after the change."""
    file = Path(folder, f"rppo_lstm_{name}.py")
    text = changed("" if name == "unchanged" else DIFFS[name])
    file.write_text(
        text.replace('SCRIPT, VERSION = "rppo_lstm"', f'SCRIPT, VERSION = "{file.stem}"')
    )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "nothing"
    if name not in {"unchanged", *DIFFS}:
        sys.exit(f"error: {name} is not one of unchanged, {', '.join(DIFFS)}")
    with tempfile.TemporaryDirectory() as folder:
        load(name, folder).main()


if __name__ == "__main__":
    main()
