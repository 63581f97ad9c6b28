"""Builds the site: python docs/tools/build.py. While writing: python docs/tools/build.py --serve

The pages of docs/ go to build/docs/, as reading.py fills them in, and from there to site/. A name
that does not exist, or a link that leads nowhere, ends the build with exit code 1.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import reading
from reading import ROOT, all_recipes, fill, recipe_page


def render(out: Path) -> None:
    """Writes the pages to out/docs and the configuration to out/zensical.toml."""
    reading.read.cache_clear()
    pages: dict[str, bytes] = {}
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        try:
            markdown = path.suffix == ".md"
            pages[name] = fill(path.read_text()).encode() if markdown else path.read_bytes()
        except (ValueError, SyntaxError, OSError) as error:
            raise ValueError(f"docs/{name}: {error}") from error
    for path in all_recipes():
        pages[f"recipes/{path.stem}.md"] = recipe_page(path).encode()
    for name, page in pages.items():
        target = out / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != page:  # zensical serve sees what changed
            target.write_bytes(page)
    for path in (out / "docs").rglob("*"):
        if path.is_file() and path.relative_to(out / "docs").as_posix() not in pages:
            path.unlink()
    (out / "zensical.toml").write_text(configuration(pages))


def configuration(pages: dict[str, bytes]) -> str:
    """zensical.toml with the recipes' and exercises' pages in their places, and with pages that it
    does not list at the end."""
    config = (ROOT / "zensical.toml").read_text()
    listed = re.findall(r'= "([\w/.-]+\.md)"', config)
    for name in listed:
        if name not in pages:
            raise ValueError(f"zensical.toml lists {name}, which does not exist")

    def entry(name: str) -> str:
        title = pages[name].decode().split("\n")[0].removeprefix("# ").replace("`", "")
        return f"        {{ {json.dumps(title)} = {json.dumps(name)} }},\n"

    texts = {"recipes": "", "exercises": "", "else": ""}
    for folder, paths in groupby(all_recipes(), key=lambda path: path.parent.name):
        text = "".join(entry(f"recipes/{path.stem}.md") for path in paths)
        group = f'        {{ "{folder}" = [\n{text}        ] }},\n'
        texts["recipes"] += text if folder == "recipes" else group  # use.py is in no folder
    for name in sorted(x for x in pages if x.endswith(".md") and x not in listed):
        if not name.startswith("recipes/"):
            texts["exercises" if name.startswith("exercises/") else "else"] += entry(name)
    for place, text in texts.items():
        config = config.replace(f"        # pages of {place}\n", text)
    return config


def zensical(command: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "zensical", command, "-f", str(out / "zensical.toml")]


def build(out: Path, site: Path) -> None:
    render(out)
    shutil.rmtree(out / "site", ignore_errors=True)
    command = [*zensical("build", out), "--strict", "--clean"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.stdout.split("Traceback")[0].rstrip()
    print(said if sys.stdout.isatty() else re.sub(r"\x1b\[[\d;]*m", "", said))
    if done.returncode != 0:
        raise ValueError("zensical refuses the pages of build/docs")
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(out / "site", site)


def serve(out: Path) -> None:
    """Serves the site, and renders its pages again whenever a file changes, until it is stopped."""
    render(out)
    server = subprocess.Popen(zensical("serve", out))
    try:
        before = None
        while server.poll() is None:
            watched = [*ROOT.glob("*.py"), *(ROOT / "docs").rglob("*"), ROOT / "zensical.toml"]
            watched += (ROOT / "benchmarks").rglob("*")
            now = [(path, path.stat().st_mtime) for path in watched]
            if before not in (None, now):
                try:
                    render(out)
                except ValueError as error:
                    print(f"error: {error}", file=sys.stderr)
            before = now
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve the site at localhost:8000")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="where it goes")
    options = parser.parse_args()
    out = ROOT / "build"
    out.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the server ends, too
    try:
        serve(out) if options.serve else build(out, options.site.resolve())
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
