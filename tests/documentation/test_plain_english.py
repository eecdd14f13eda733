"""The text is plain English. Law: eight patterns that make sentences hard to read may only become rarer.

    python -m tests.documentation.test_plain_english [-v] [FOLDER]     prints how often each occurs, with -v each place

In the manual each place that is left has a reason. In the package the count is an upper limit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
START = r"(?:^|(?<=[.:;!?|*(] )|(?<=- )|(?<=\* ))"  # of a sentence, a clause, a cell, an item


class Pattern(NamedTuple):
    """A way to write that is hard to read: a sentence that has it, and the same without it."""

    regex: re.Pattern[str]
    hard: str
    plain: str


def _pattern(regex: str, hard: str, plain: str) -> Pattern:
    return Pattern(re.compile(regex, re.MULTILINE), hard, plain)


PATTERNS = {
    "What, Who as the subject": _pattern(
        START + r"(?:What|Who|Whoever|Whatever)\b(?![^.?|]*\?)|[;:] (?:what|who) \w(?![^.?|]*\?)|\b[Ww]hoever\b",
        "What starts a partition waits. Whoever held a lock is refused.",
        "A worker that starts a partition waits. What must I do?",
    ),
    "told, heard": _pattern(
        r"\b(?:[Tt]old|[Tt]ells?|[Tt]elling|[Hh]eard?|[Hh]ears|[Hh]earing)\b",
        "What happens to a conversation is told to every replica.",
        "Every replica receives an event.",
    ),
    "Of ... in front": _pattern(
        START + r"Of (?!course\b)",
        "Of several servers one may be away.",
        "One of several servers may be down. Of course it may.",
    ),
    "is no": _pattern(
        r"(?<![Tt]here )\b(?:[Ii]s|[Aa]re|[Ww]as|[Ww]ere|be) (?:no (?!longer\b|\w+er than\b|more than\b)|none\b)",
        "An offset is no identity. It is none.",
        "An offset is not an identity. It is no longer one. There is no other.",
    ),
    "no more, once more": _pattern(
        r"\b(?:[Nn]o more\b(?! than| \w+ than)|[Oo]nce more|[Aa]new|any more)\b",
        "It is asked no more, and begun anew.",
        "It is no longer asked, and starts again. It takes no more memory than before.",
    ),
    "so hard, kept so": _pattern(
        r"\b(?:[Ss]o|[Hh]ow) hard\b|\bkept so\b|\b[Ss]o (?:much|many)\b",
        "How hard is a write kept?",
        "How durable is a write?",
    ),
    "of before, behind": _pattern(
        r"\bof before\b|\b(?:versions|those|steps|tokens) before\b(?=[.,;)]| show| is| are)|"
        r"\bbehind (?:the |which |that )?(?:offset|commit|cursor|entry)\b|\b(?:right|put|stands?) behind\b",
        "Every lease of before is over, and it is lost behind offset 7.",
        "All earlier leases have ended, and it is lost after offset 7. It is behind a proxy.",
    ),
    "riddles": _pattern(
        r"\b[Nn]obody\b|\b(?:has|have|had|know|knows|take|takes|of) none\b|\bon neither\b|\bneeds somebody\b",
        "Nobody encrypts them; who has none needs somebody.",
        "Tags are not encrypted; a problem without an owner needs attention.",
    ),
}

# Places in the manual that stay, each with its reason: the page, and the words around the pattern.
LEFT = {
    ("docs/reliability.md", "because its writer was not heard when Redis had lost it"): "what the last run printed",
}
# How often the patterns occur in the package. Lower the limit when the count falls; never raise it.
LIMIT = 18


class Text(NamedTuple):
    """A piece of prose, and where it stands."""

    where: str
    text: str


def manual(root: Path) -> Iterator[Text]:
    """README, changelog, .github/, docs/ and deploy/: without blocks of code and headings."""
    for pattern in ("*.md", ".github/*.md", "docs/**/*.md", "deploy/**/*.md"):
        for page in sorted(root.glob(pattern)):
            yield Text(str(page.relative_to(root)), _prose(page.read_text()))


def package(root: Path) -> Iterator[Text]:
    """Docstrings, comments and messages of the package, in Python and Lua; generated files say the same again."""
    for path in sorted((root / "distributed_state").rglob("*.py")):
        source, where = path.read_text(), str(path.relative_to(root))
        if "generate_blocking" not in source[:400]:
            yield from (Text(f"{where}:{line}", text) for line, text in _comments(source))
            yield from (Text(f"{where}:{line}", text) for line, text in _strings(source))
    for path in sorted((root / "distributed_state").rglob("*.lua")):
        lines = (line.partition("-- ")[2] for line in path.read_text().splitlines())
        yield Text(str(path.relative_to(root)), "\n".join(lines))


def _prose(page: str) -> str:
    """A page without its programs and headings, each paragraph on one line. Metrics are described in the package."""
    page = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^#.*$|<!--.*?-->|^\| `distributed_state_.*$", "", page, flags=re.MULTILINE)
    return re.sub(r"(?<=\S)\n(?! *[|*+-]| *\d+\. |\n) *", " ", page)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, those of adjacent lines as one."""
    line, text = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("#: ")
            if token.start[0] == line + 1 and text:
                line, text = line + 1, f"{text} {words}"
                continue
            if text:
                yield line, text
            line, text = token.start[0], words
    if text:
        yield line, text


def _strings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, and other strings of at least three words, which are messages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3:
            yield node.lineno, re.sub(r"(?<=\S)\n(?!\n) *", " ", node.value)


def found(texts: Iterator[Text]) -> Iterator[tuple[str, str, str]]:
    """Each place of each pattern: the pattern, where it is, the words around it."""
    for where, text in texts:
        for name, pattern in PATTERNS.items():
            for match in pattern.regex.finditer(text):
                around = text[max(0, match.start() - 60) : match.end() + 60]
                yield name, where, re.sub(r"\s+", " ", around)


def test_every_hard_sentence_of_the_manual_has_its_reason() -> None:
    unexplained = [
        f"{where}: {name}: {around}"
        for name, where, around in found(manual(ROOT))
        if not any(where == page and quote in around for page, quote in LEFT)
    ]
    assert not unexplained


@pytest.mark.parametrize(("page", "quote"), LEFT)
def test_a_reason_goes_with_its_sentence(page: str, quote: str) -> None:
    assert quote in _prose((ROOT / page).read_text())


def test_hard_sentences_become_no_more_frequent() -> None:
    counts = Counter(name for name, _, _ in found(package(ROOT)))
    assert counts.total() <= LIMIT, f"{counts}: python -m tests.documentation.test_plain_english -v shows each place"


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_finds_a_hard_sentence_and_leaves_the_plain_one(name: str) -> None:
    """The negative control."""
    pattern = PATTERNS[name]
    assert name in {each for each, _, _ in found(iter([Text("hard", pattern.hard)]))}
    assert name not in {each for each, _, _ in found(iter([Text("plain", pattern.plain)]))}


def test_every_kind_of_text_is_read(tmp_path: Path) -> None:
    """A comment, a docstring, a message and a page are read; code is not."""
    for folder in ("docs/design", "distributed_state", ".github", "deploy/observe"):
        (tmp_path / folder).mkdir(parents=True)
    hard = "It is told here."
    for page in ("README.md", ".github/one.md", "docs/index.md", "docs/design/one.md", "deploy/observe/one.md"):
        (tmp_path / page).write_text(f"# It is told here\n\n{hard}\n\n```sh\n{hard}\n```\n")
    (tmp_path / "distributed_state/one.py").write_text(f'"""{hard}"""\n\ntold = f"{hard}{{1}}"  # {hard}\n')
    (tmp_path / "distributed_state/one.lua").write_text(f"-- {hard}\nlocal told = 1\n")
    assert [len(list(found(texts(tmp_path)))) for texts in (manual, package)] == [5, 4]


def main(arguments: list[str]) -> None:
    """Print the counts of a folder, with -v each place."""
    folders = [Path(each) for each in arguments if each != "-v"]
    for texts in (manual, package):
        places = list(found(texts(folders[0] if folders else ROOT)))
        counts = Counter(name for name, _, _ in places)
        lines = [f"{texts.__name__}: {counts.total()}", *(f"  {counts[name]:5} {name}" for name in PATTERNS)]
        lines += [f"    {name}: {where}: {around}" for name, where, around in places if "-v" in arguments]
        sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
