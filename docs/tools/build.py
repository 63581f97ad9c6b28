"""Builds the site: python docs/tools/build.py. While writing: python docs/tools/build.py --serve

The pages of docs/ go to build/docs/, with the parts in braces filled in from the repository
(fill.py) and with the scripts' text beside the notes of docs/reading (reading.py), and from there
to site/. A name that does not exist, or a link that leads nowhere, ends the build with exit code 1.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import reading
import scripts
from fill import all_recipes, fill, plot, recipe_page
from scripts import ROOT, BuildError


def render(out: Path) -> None:
    """Writes the pages to out/docs and the configuration to out/zensical.toml."""
    for cached in scripts.text, scripts.blocks, scripts.highlighted:
        cached.cache_clear()
    pages: dict[str, str | bytes] = {}
    for path in sorted((ROOT / "docs").rglob("*")):
        name = path.relative_to(ROOT / "docs").as_posix()
        if not path.is_file() or path.suffix in (".py", ".pyc"):
            continue
        try:
            if path.suffix != ".md":
                pages[name] = path.read_bytes()
            elif path.parent.name == "reading":
                pages[name] = reading.page(path.stem)
            else:
                pages[name] = fill(path.read_text())
        except (BuildError, ValueError, SyntaxError) as error:
            raise BuildError(f"docs/{name}: {error}") from error
    for path in all_recipes():
        pages[f"recipes/{path.stem}.md"] = recipe_page(path)
    for name, page in pages.items():
        page = page.encode() if isinstance(page, str) else page
        target = out / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != page:  # zensical serve sees what changed
            target.write_bytes(page)
    for path in (out / "docs").rglob("*"):
        if path.is_file() and path.relative_to(out / "docs").as_posix() not in pages:
            path.unlink()
    (out / "zensical.toml").write_text(configuration(pages))


def configuration(pages) -> str:
    """zensical.toml with the recipes' and exercises' pages in their places, and with pages that it
    does not list at the end."""
    config = (ROOT / "zensical.toml").read_text()
    listed = re.findall(r'= "([\w/.-]+\.md)"', config)
    for name in listed:
        if name not in pages:
            raise BuildError(f"zensical.toml lists {name}, which does not exist")
    entries: dict[str, str] = {}
    for name in sorted(name for name in pages if name.endswith(".md") and name not in listed):
        title = str(pages[name]).split("\n")[0].removeprefix("# ").replace("`", "")
        title = f"{Path(name).stem}.py" if name.startswith("recipes/") else title
        folder = name.split("/")[0] if name.startswith(("recipes/", "exercises/")) else "else"
        entries[folder] = (
            entries.get(folder, "") + f"        {{ {json.dumps(title)} = {json.dumps(name)} }},\n"
        )
    for folder in "recipes", "exercises", "else":
        config = config.replace(f"        # pages of {folder}\n", entries.get(folder, ""))
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
        raise BuildError("zensical refuses the pages of build/docs")
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(out / "site", site)


def serve(out: Path) -> None:
    """Serves the site, and renders its pages again whenever a file changes, until Ctrl-C."""
    render(out)
    server = subprocess.Popen(zensical("serve", out))
    try:
        before = None
        while server.poll() is None:
            watched = [*ROOT.glob("*.py"), *(ROOT / "docs").rglob("*"), ROOT / "zensical.toml"]
            now = [(path, path.stat().st_mtime) for path in [*watched, *plot.RESULTS.glob("*")]]
            if before not in (None, now):
                try:
                    render(out)
                except BuildError as error:
                    print(f"error: {error}", file=sys.stderr)
            before = now
            time.sleep(0.5)
    finally:
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="serve the site at localhost:8000")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="where it goes")
    options = parser.parse_args()
    out = ROOT / "build"
    out.mkdir(exist_ok=True)
    try:
        serve(out) if options.serve else build(out, options.site.resolve())
    except BuildError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
