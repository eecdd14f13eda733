#!/usr/bin/env python
"""Check which packages can be installed beside this one, as docs/start/beside-others.md says.

    pip install uv && python tools/check_neighbours.py [PACKAGE]...

Each row of the page's table names a package, the oldest release that counts, and the extras that cannot be installed
with it. An index is asked, so no test runs this; the nightly workflow does. Exits with 1 if a row is wrong: an extra
that it does not name cannot be installed with the package, or one that it names now can.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "start" / "beside-others.md"
PYTHON = "3.13"  # the newest that all of them support
# Extras with which this project is developed; nobody installs them beside something else.
DEVELOPMENT = {"bench", "browser", "docs", "frameworks", "load", "locust", "manifests", "runner", "test"}
_ROW = re.compile(r"\| `(?P<package>[^`]+)` \| (?P<extras>all(?: but (?:`[\w-]+`(?:, )?)+)?) \|")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A row of the table: a requirement, and the extras that cannot be installed with it."""

    requirement: str
    excluded: frozenset[str]


def neighbours(page: str) -> list[Neighbour]:
    """Return the rows of a page. Raises ValueError for one that cannot be read."""
    rows = [line for line in page.split("\n") if line.startswith("| `")]
    found = []
    for row in rows:
        read = _ROW.match(row)
        if read is None:
            raise ValueError(f"not `package>=version` and `all` or `all but ...`: {row}")
        found.append(Neighbour(read["package"], frozenset(re.findall(r"`([\w-]+)`", read["extras"]))))
    return found


def extras() -> list[str]:
    """The extras that users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(project["optional-dependencies"].keys() - DEVELOPMENT)


def wrong(neighbour: Neighbour, known: Sequence[str], resolves: Callable[[str, Sequence[str]], bool]) -> Iterator[str]:
    """Say what the row says wrongly."""
    if unknown := neighbour.excluded - set(known):
        yield f"{neighbour.requirement}: there is no extra {', '.join(sorted(unknown))}"
    possible = [each for each in known if each not in neighbour.excluded]
    if not resolves(neighbour.requirement, possible):  # all at once is more than anybody needs
        for extra in possible:
            if not resolves(neighbour.requirement, [extra]):
                yield f"{neighbour.requirement}: cannot be installed with {extra}"
    for extra in sorted(neighbour.excluded & set(known)):
        if resolves(neighbour.requirement, [extra]):
            yield f"{neighbour.requirement}: can be installed with {extra} now"


def resolves(requirement: str, chosen: Sequence[str]) -> bool:
    """Ask the index whether both can be installed in one environment. Raises RuntimeError if it does not answer."""
    wanted = f"{requirement}\ndistributed-state[{','.join(chosen)}] @ {ROOT.as_uri()}\n"
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", PYTHON, "-"],
        input=wanted, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "No solution found" not in done.stderr:
        raise RuntimeError(done.stderr)
    print(f"{requirement} with {', '.join(chosen)}: {'no' if done.returncode else 'yes'}", flush=True)
    return not done.returncode


def main(words: Sequence[str]) -> int:
    """Check all rows, or those of the named packages."""
    found: list[str] = []
    for each in neighbours(PAGE.read_text()):
        if not words or re.split(r"[\[>=]", each.requirement)[0] in words:
            found += wrong(each, extras(), resolves)
    print("\n".join(found) or "the page is right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
