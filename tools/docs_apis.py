"""The blocking text of an example that is written for asyncio. Law: token by token; what is in a string stays."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from collections.abc import Iterator
from tokenize import TokenInfo

# What has another name where nobody waits; of other libraries, too.
NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "anext": "next",
    "aiter": "iter",
    "aclosing": "closing",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "ainvoke": "invoke",
    "astream": "stream",
}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
OPENING, CLOSING = {"(", "[", "{"}, {")", "]", "}"}
Edit = tuple[tuple[int, int], tuple[int, int], str]  # from, to (row and column), and what stands there instead


class OnOneApi(ValueError):
    """An example that has no blocking text; it is for asyncio alone, or needs to be written otherwise."""


def in_blocking_words(text: str) -> str:
    """The same program without asyncio; OnOneApi if there is none."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = [token for token in tokens if token.type not in LAYOUT]
    edits = [edit for at in range(len(code)) for edit in _edits(code, at)]
    edits += [(t.start, t.end, _comment(t.string)) for t in tokens if t.type == tokenize.COMMENT]
    found = _applied(text, edits)
    waits = re.search(r"\btime\.sleep\b", found) and not re.search(r"^import time$", found, re.MULTILINE)
    found = re.sub(r"^ *import asyncio\n", "import time\n" if waits else "", found, flags=re.MULTILINE)
    found = re.sub(r"\n{4,}", "\n\n\n", found).lstrip("\n")
    names = {t.string for t in tokenize.generate_tokens(io.StringIO(found).readline) if t.type == tokenize.NAME}
    left = {"asyncio", "async", "await"} & names
    if left:
        raise OnOneApi(f"it has no blocking text: {', '.join(sorted(left))} would be left in it")
    if found == text:
        raise OnOneApi("it is the same on both APIs, so it is no block for both")
    return found


def _edits(code: list[TokenInfo], at: int) -> Iterator[Edit]:
    token, following = code[at], code[at + 1 : at + 4]
    words = [token.string, *(each.string for each in following)]
    if words[0] == "await":
        yield token.start, following[0].start, ""
        yield from _needless_brackets(code, at)
    elif words[0] == "async":
        yield token.start, following[0].start, ""
    elif words == ["asyncio", ".", "run", "("]:
        closing = code[_closing(code, at + 3)]
        yield token.start, following[2].end, ""
        yield closing.start, closing.end, ""
    elif words[:3] == ["asyncio", ".", "sleep"]:
        yield token.start, token.end, "time"
    elif token.type == tokenize.NAME:
        yield token.start, token.end, NAMES.get(token.string, _name(token.string))
    elif token.type == tokenize.STRING and "f" in re.match(r"\w*", token.string.lower())[0]:  # type: ignore[index]  # it always matches
        # One token up to Python 3.11; afterwards what is in braces are tokens like others.
        yield token.start, token.end, re.sub(r"\{[^{}]*\}", lambda m: m[0].replace("await ", ""), token.string)


def _needless_brackets(code: list[TokenInfo], at: int) -> Iterator[Edit]:
    """`(await a.b(c)).d`: without the await, its brackets go too, unless they hold more or are those of a call."""
    if at == 0 or code[at - 1].string != "(":
        return
    before = code[at - 2] if at > 1 else None
    if before and (before.string in CLOSING or (before.type == tokenize.NAME and not keyword.iskeyword(before.string))):
        return
    closing = _closing(code, at - 1)
    inside, place = [], at + 1
    while place < closing:
        inside.append(code[place])
        place = _closing(code, place) + 1 if code[place].string in OPENING else place + 1
    plain = all(
        each.string in OPENING | {"."} or (each.type == tokenize.NAME and not keyword.iskeyword(each.string))
        for each in inside
    )
    if plain and code[at - 1].start[0] == code[closing].end[0]:
        yield code[at - 1].start, code[at - 1].end, ""
        yield code[closing].start, code[closing].end, ""


def _closing(code: list[TokenInfo], at: int) -> int:
    """Where the bracket is closed that is opened at this place."""
    depth = 0
    for place in range(at, len(code)):
        depth += (code[place].string in OPENING) - (code[place].string in CLOSING)
        if depth == 0:
            return place
    raise OnOneApi("a bracket is not closed")


def _name(name: str) -> str:
    return name.removeprefix("Async") if re.match(r"Async[A-Z]", name) else name


def _comment(text: str) -> str:
    return re.sub(r"\bAsync(?=[A-Z])|\bawait (?=\w)|\basync (?=with\b|for\b|def\b)", "", text)


def _applied(text: str, edits: list[Edit]) -> str:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for (row, column), (last_row, last_column), new in sorted(set(edits), reverse=True):
        start, end = starts[row - 1] + column, starts[last_row - 1] + last_column
        text = text[:start] + new + text[end:]
    return text
