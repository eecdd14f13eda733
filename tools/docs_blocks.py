"""The fenced blocks of a page of docs/. Law: what a block's first line says of it is all that decides how it is run.

    ```python                       a program, run as it stands
    ```python both                  written for asyncio, with `await` outside a function; run and shown on both APIs
    ```python frameworks            run where the frameworks are (`pytest --frameworks`); also `both frameworks`
    ```python no-run: REASON        only compiled; readers do not see the reason
    ```sh                           run by bash in the page's folder; also `frameworks`, `no-run: REASON`
    ```yaml title="agents.yaml"     not run: it is that file in the page's folder, in any language
    ```python title="a.py" frameworks    that file, for blocks that are run where the frameworks are
    ```text output                  what the block before it prints; `...` stands for anything

The blocks of a page are run in order. Python's share one namespace, the shell's their variables and directory.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
OPTION = re.compile(r"""(\w+)=("[^"]*"|'[^']*')""")  # those of pymdownx.superfences: title, hl_lines, linenums
WORDS = {"python": {"both", "frameworks"}, "sh": {"frameworks"}, "text": {"output"}}
# Nobody passes by the tests by calling a language otherwise.
CALLED = {"py": "python", "python3": "python", "pycon": "python", "bash": "sh", "shell": "sh", "console": "sh"}


class WrongBlock(ValueError):
    """A block whose first line says what nobody understands; the message names the page and the line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: what is in it, what its first line says, and where it stands."""

    page: str
    first: int  # the line of the opening fence, counted from 1
    last: int  # the line of the closing one
    indent: str
    language: str
    words: frozenset[str]
    options: dict[str, str]
    reason: str | None  # why it is not run
    text: str
    output: str | None = None

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.first}"

    @property
    def file(self) -> str | None:
        """The name of the file that this block is."""
        return self.options.get("title")

    @property
    def runs(self) -> bool:
        """Whether it is run anywhere."""
        return self.language in ("python", "sh") and self.reason is None and self.file is None

    def wrong(self, what: str) -> WrongBlock:
        """The error that says what is wrong with this block."""
        return WrongBlock(f"{self.where}: {what}")


def blocks(page: str, markdown: str) -> list[Block]:
    """The blocks of a page in order, each with the output that is shown behind it."""
    lines = markdown.split("\n")
    found: list[Block] = []
    for block in _fenced(page, lines):
        _check(block)
        if "output" not in block.words:
            found.append(block)
            continue
        between = lines[found[-1].last : block.first - 1] if found else ["nothing"]
        if any(map(str.strip, between)) or not found[-1].runs:
            raise block.wrong("output stands right behind the block that prints it, which is run")
        found[-1] = replace(found[-1], output=block.text)
    return found


def _fenced(page: str, lines: list[str]) -> Iterator[Block]:
    opened: re.Match[str] | None = None
    first = 0
    for number, line in enumerate(lines, 1):
        match = FENCE.fullmatch(line.rstrip())
        if opened is None:
            opened, first = match, number
        elif match and not match["info"].strip() and match["fence"].startswith(opened["fence"]):
            yield _block(page, first, number, opened, "\n".join(lines[first : number - 1]))
            opened = None
    if opened is not None:
        raise WrongBlock(f"{page}:{first}: the block has no end")


def _block(page: str, first: int, last: int, opened: re.Match[str], text: str) -> Block:
    info, no_run, reason = opened["info"].strip().partition("no-run:")
    options = {name: value[1:-1] for name, value in OPTION.findall(info)}
    language, *words = OPTION.sub("", info).split() or [""]
    text = "\n".join(line.removeprefix(opened["indent"]) for line in text.split("\n"))
    return Block(
        page, first, last, opened["indent"], language, frozenset(words), options, reason.strip() if no_run else None,
        textwrap.dedent(text).rstrip() + "\n",
    )  # fmt: skip


def _check(block: Block) -> None:
    if block.language in CALLED:
        raise block.wrong(f"{block.language} is called {CALLED[block.language]} here")
    unknown = block.words - WORDS.get(block.language, set())
    if unknown:
        raise block.wrong(f"{block.language} has no word {', '.join(sorted(unknown))}")
    if block.reason == "":
        raise block.wrong("no-run wants its reason")


def all_fences(page: str, markdown: str) -> list[Block]:
    """Every block as it stands, outputs too: for whoever rewrites a page."""
    return list(_fenced(page, markdown.split("\n")))
