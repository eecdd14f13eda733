"""What the site does that MkDocs does not: blocks of both APIs, pages of folders, links out of docs/, the reference.

Law: what is written in docs/ reads well without it, too; nothing is written that stands elsewhere.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docs_apis import OnOneApi, in_blocking_words
from docs_blocks import Block, all_fences, blocks
from docs_http import openapi
from docs_python import PAGES
from docs_reference import pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"  # the folder of the site for pictures of the repository that lie outside docs/
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s]+)\)")
# Of what the search finds, these pages come before others that say the same words.
FIRST = {"errors", "events", "settings", *(page.place for page in PAGES)} - {"remote", "typed-records"}
# Pages that are made of files outside docs/, unless docs/ has one of that name.
TAKEN = {"index.md": "README.md", "contributing.md": ".github/CONTRIBUTING.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand elsewhere, and say which pages are where."""
    for place, source in TAKEN.items():
        if files.get_file_from_path(place) is None and (ROOT / source).exists():
            files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/openapi.json", content=openapi()))
    for place, content in pages():
        first = "---\nsearch: {boost: 2}\n---\n" if place in FIRST else ""
        files.append(File.generated(config, f"reference/{place}.md", content=first + content))
    left = {file.src_uri for file in files.documentation_pages()} - set(_named(config["nav"]))
    config["nav"] = _expanded(config["nav"], left)
    return files


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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page as MkDocs understands it."""
    place = page.file.src_uri
    source = TAKEN.get(place, f"docs/{place}") if page.file.generated_by else f"docs/{place}"
    try:
        return _links(shown(source, markdown), place, source, config, files)
    except ValueError as error:
        raise PluginError(str(error)) from error


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


def _links(markdown: str, place: str, source: str, config: Any, files: Files) -> str:
    """Links to files outside docs/: a picture comes along, of others the name is told. Those to nothing stay broken."""
    parts = re.split(r"(^ *(`{3,}|~{3,}).*?^ *\2`*~* *$)", markdown, flags=re.MULTILINE | re.DOTALL)

    def replaced(link: re.Match[str]) -> str:
        to, mark, anchor = link["to"].partition("#")
        if not to or re.match(r"[\w+.-]+:|/", to):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), to))
        if not (ROOT / path).exists():
            return link[0]
        if path.startswith("docs/"):  # from a page that is taken from elsewhere, docs/ lies elsewhere as well
            to = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(place) or ".")
            return f"{link['picture']}[{link['text']}]({to}{mark}{anchor})"
        if link["picture"]:
            return f"![{link['text']}]({_picture(path, place, config, files)})"
        plain = link["text"].strip("`")
        return f"`{path}`" if plain in (path, to) else f"{link['text']} (`{path}`)"

    # The odd parts are blocks and their fences.
    return "".join(LINK.sub(replaced, part) if n % 3 == 0 else part for n, part in enumerate(parts) if n % 3 != 2)


def _picture(path: str, place: str, config: Any, files: Files) -> str:
    there = f"{OUTSIDE}/{path}"
    if files.get_file_from_path(there) is None:
        files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
    return posixpath.relpath(there, posixpath.dirname(place) or ".")


def on_post_build(config: Any) -> None:
    """Call a method `AsyncRecord.set` where the search lists it: `set` alone is said by many pages."""
    path = Path(config["site_dir"]) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    for each in index["docs"]:
        method = re.search(r"#distributed_state\..*\.([A-Z]\w*\.\w+)$", each["location"])
        if method:
            each["title"] = method[1]
    path.write_text(json.dumps(index, separators=(",", ":")))
