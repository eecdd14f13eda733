"""What is wrong with a built site. Law: only the files are looked at; nothing is asked of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "video": "src", "audio": "src"}
RELS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}


@dataclass
class Looked(HTMLParser):
    """A page: what it links to, what it loads, and the places in it."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[each] for each in ("id", "name") if each in given and (each == "id" or tag == "a")}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        if tag == "link" and RELS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        self.loads += re.findall(r"url\(['\"]?([^)'\"]+)", given.get("style", ""))


class Site:
    """A built site."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages = {path: self._looked(path.read_text()) for path in sorted(root.rglob("*.html"))}

        self.search: dict[str, Any] = json.loads((root / "search.json").read_text())

    def _looked(self, text: str) -> Looked:
        page = Looked()
        page.feed(text)
        return page

    def broken(self) -> Iterator[str]:
        """Every link that leads nowhere, and every one to elsewhere that nobody could follow."""
        for path, page in self.pages.items():
            for link in page.links:
                if not self._leads(path, link):
                    yield f"{path.relative_to(self.root)}: {link}"

    def _leads(self, path: Path, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return parts.scheme == "mailto" or (
                parts.scheme in ("http", "https") and bool(re.fullmatch(r"[\w.-]+(:\d+)?", parts.netloc))
            )
        if path.name == "404.html":
            return True  # it is shown at any address, and its links begin at the root of wherever the site is
        there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        there = there / "index.html" if there.is_dir() else there
        if not there.is_file() or not there.is_relative_to(self.root.resolve()):
            return False
        return not parts.fragment or there.suffix != ".html" or unquote(parts.fragment) in self._at(there).ids

    def _at(self, path: Path) -> Looked:
        return next(page for each, page in self.pages.items() if each.resolve() == path)

    def foreign(self) -> Iterator[str]:
        """All that pages and their styles load from elsewhere."""
        for path, page in self.pages.items():
            yield from (f"{path.relative_to(self.root)}: {each}" for each in page.loads if _elsewhere(each))
        for path in self.root.rglob("*.css"):
            found = re.findall(r"url\(['\"]?([^)'\"]+)|@import ['\"]([^'\"]+)", path.read_text())
            yield from (
                f"{path.relative_to(self.root)}: {one or other}" for one, other in found if _elsewhere(one or other)
            )

    def found(self) -> dict[str, dict[str, Any]]:
        """What the search can find: by the place that it leads to."""
        return {each["location"]: each for each in self.search["items"]}


def _elsewhere(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")
