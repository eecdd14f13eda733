"""Build the documentation's site: the pages of docs/, the generated reference, and what both need to become a site.

    python tools/build_site.py [--into FOLDER] [--serve]

This program prepares the pages (blocks of both APIs become tabs, links out of docs/ are named) in a temporary folder;
Zensical makes HTML of them.

Law: what is written in docs/ reads well without it, too; nothing is written that stands elsewhere.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from docs_apis import OnOneApi, in_blocking_words
from docs_blocks import Block, all_fences, blocks
from docs_http import openapi
from docs_reference import pages

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tools" / "site.yml"
OUTSIDE = "repository"  # the folder of the site for pictures of the repository that lie outside docs/
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s]+)\)")
# Pages that are made of files outside docs/, unless docs/ has one of that name.
TAKEN = {"index.md": "README.md", "contributing.md": ".github/CONTRIBUTING.md"}


class Wrong(ValueError):
    """A page that cannot be part of the site; the message names it."""


@dataclass
class Prepared:
    """The files of the site before they are HTML: pages, by their places, and pictures from outside docs/."""

    docs: Path = ROOT / "docs"
    pages: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # of each page, in the repository
    others: dict[str, bytes] = field(default_factory=dict)

    def read(self, reference: Iterable[tuple[str, str]]) -> None:
        """Read all pages and pictures."""
        for path in sorted(self.docs.rglob("*")):
            place = path.relative_to(self.docs).as_posix()
            if path.suffix == ".md":
                self._add(place, f"docs/{place}", path.read_text())
            elif path.is_file():
                self.others[place] = path.read_bytes()
        for place, source in TAKEN.items():
            if place not in self.pages and (ROOT / source).exists():
                self._add(place, source, (ROOT / source).read_text())
        for place, text in reference:
            self._add(f"reference/{place}.md", f"docs/reference/{place}.md", text)

    def _add(self, place: str, source: str, text: str) -> None:
        self.pages[place], self.sources[place] = text, source

    def nav(self, nav: list[Any]) -> list[Any]:
        """The navigation with every page. Raises Wrong if a page is in no line of it."""
        left = set(self.pages) - set(_named(nav))
        whole = _expanded(nav, left)
        if lost := sorted(set(self.pages) - set(_named(whole))):
            raise Wrong(f"not in the navigation of {CONFIG.name}: {', '.join(lost)}")
        return whole

    def write(self, into: Path) -> None:
        """Write the pages as the generator understands them. Raises Wrong, WrongBlock."""
        for place, text in self.pages.items():
            source = self.sources[place]
            (path := into / place).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._links(shown(source, text), place, source))
        for place, content in self.others.items():
            (path := into / place).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _links(self, markdown: str, place: str, source: str) -> str:
        """Links to files outside docs/: a picture comes along, of others the name is told."""
        parts = re.split(r"(^ *(`{3,}|~{3,}).*?^ *\2`*~* *$)", markdown, flags=re.MULTILINE | re.DOTALL)
        # The odd parts are blocks and their fences.
        return "".join(
            LINK.sub(lambda link: self._link(link, place, source), part) if n % 3 == 0 else part
            for n, part in enumerate(parts)
            if n % 3 != 2
        )

    def _link(self, link: re.Match[str], place: str, source: str) -> str:
        to, mark, anchor = link["to"].partition("#")
        if not to or re.match(r"[\w+.-]+:", to):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), to))
        within = path.removeprefix("docs/")
        if path != within and (within in self.pages or within in self.others):
            # From a page that is taken from elsewhere, docs/ lies elsewhere as well.
            to = posixpath.relpath(within, posixpath.dirname(place) or ".")
            return f"{link['picture']}[{link['text']}]({to}{mark}{anchor})"
        if to.startswith("/") or not (ROOT / path).exists():
            raise Wrong(f"{source}: a link leads to {link['to']}, which is not there")
        if link["picture"]:
            self.others[there := f"{OUTSIDE}/{path}"] = (ROOT / path).read_bytes()
            return f"![{link['text']}]({posixpath.relpath(there, posixpath.dirname(place) or '.')})"
        plain = link["text"].strip("`")
        return f"`{path}`" if plain in (path, to) else f"{link['text']} (`{path}`)"


def _expanded(nav: list[Any], left: set[str]) -> list[Any]:
    """The same with those of the pages that are left in place of each pattern; a section without pages is none."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            for title, inside in entry.items():
                within = _expanded(inside, left) if isinstance(inside, list) else inside
                found += [{title: within}] if within else []
        elif "*" in entry:
            those = fnmatch.filter(left, entry)
            found += sorted(those, key=lambda page: (page.count("/"), not page.endswith("/index.md"), page))
        else:
            found.append(entry)
    return found


def _named(nav: Iterable[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, dict):
            for inside in entry.values():
                yield from _named(inside if isinstance(inside, list) else [inside])
        else:
            yield entry


def shown(page: str, markdown: str) -> str:
    """The page with the blocks as readers see them: those of both APIs as two tabs, none with words for tests."""
    blocks(page, markdown)  # says what is wrong with them
    lines = markdown.split("\n")
    for block in reversed(all_fences(page, markdown)):
        lines[block.first - 1 : block.last] = [
            (block.indent + line).rstrip() for line in _block(block, "\n".join(lines[block.first : block.last - 1]))
        ]
    return "\n".join(lines)


def _block(block: Block, text: str) -> list[str]:
    if "both" in block.words:
        try:
            return [*_tab("asyncio", block, block.text), "", *_tab("blocking", block, in_blocking_words(block.text))]
        except OnOneApi as error:
            raise block.wrong(str(error)) from error
    options = {"title": "Output"} if "output" in block.words else block.options
    return _fence(block.language, options, "\n".join(line.removeprefix(block.indent) for line in text.split("\n")))


def _tab(name: str, block: Block, text: str) -> list[str]:
    inside = _fence(block.language, block.options, text.rstrip("\n"))
    return [f'=== "{name}"', "", *(f"    {line}" for line in inside)]


def _fence(language: str, options: dict[str, str], text: str) -> list[str]:
    """A block, in a fence longer than any in it."""
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall(r"^ *(`{3,})", text, re.MULTILINE) or [""]))
    said = " ".join([language, *(f'{name}="{value}"' for name, value in options.items())])
    return [f"{fence}{said}".rstrip(), *text.split("\n"), fence]


def prepare(into: Path, prepared: Prepared, changes: Mapping[str, Any]) -> None:
    """Write what Zensical reads into a folder: the pages and its settings. Raises Wrong, WrongBlock."""
    settings = {**yaml.safe_load(CONFIG.read_text()), "docs_dir": "docs", "site_dir": "site", **changes}
    settings["nav"] = prepared.nav(settings["nav"])
    prepared.write(into / "docs")
    (into / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))


def build(site: Path, prepared: Prepared, *, serve: bool = False, **changes: Any) -> None:
    """Build the site, or show it until Ctrl-C. Raises Wrong, with what Zensical says if it finds the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), prepared, changes)
        command = [sys.executable, "-m", "zensical", *(["serve"] if serve else ["build", "--strict"])]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tools'}{os.pathsep}{ROOT}"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=not serve, text=True, check=False)
        if done.returncode:
            said = re.sub(r"\x1b\[[\d;]*m", "", f"{done.stdout or ''}{done.stderr or ''}")
            raise Wrong(said.partition("\nTraceback ")[0])
        if not serve:
            _name_methods(Path(folder, "site", "search.json"))
            shutil.copytree(Path(folder, "site"), site, dirs_exist_ok=True)


def _name_methods(path: Path) -> None:
    """Call a method `AsyncRecord.set` where the search lists it: `set` alone is said by many pages."""
    index = json.loads(path.read_text())
    for each in index["items"]:
        method = re.search(r"#distributed_state\..*\.([A-Z]\w*\.\w+)$", each["location"])
        if method:
            each["title"] = method[1]
    path.write_text(json.dumps(index, separators=(",", ":")))


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "site", metavar="FOLDER", help="default: site/")
    parser.add_argument("--serve", action="store_true", help="show it on a port of this machine until Ctrl-C")
    given = parser.parse_args()
    prepared = Prepared(others={"reference/openapi.json": openapi().encode()})
    try:
        prepared.read(pages())
        build(given.into, prepared, serve=given.serve)
    except ValueError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
