#!/usr/bin/env python
"""Turn the tree into a release: its date in the changelog, and a documentation that installs it from the index.

    python tools/release.py 2026-12-01 && git commit -am "Release 0.1.0" && git tag v0.1.0

The version is the one of pyproject.toml, whose entry in the changelog must be unreleased. After the first release the
documentation stays as it is. The workflow `release` refuses a tag of a tree without this.
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = "CHANGELOG.md"
QUICKSTART = "docs/start/quickstart.md"
# A paragraph of the quickstart until the first release.
UNPUBLISHED = "The package is not on a package index yet: install it from a clone.\n\n"


def is_published(root: Path) -> bool:
    """Whether any version has a date."""
    return bool(re.search(r"^## \[[^]]+\] - \d", (root / CHANGELOG).read_text(), re.MULTILINE))


def release(root: Path, day: date) -> None:
    """Change the files of a tree. Raises ValueError if its version is not an unreleased one of the changelog."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    changes, quickstart = root / CHANGELOG, root / QUICKSTART
    text, heading = changes.read_text(), f"## [{version}] - "
    if f"{heading}unreleased\n" not in text:
        raise ValueError(f"{CHANGELOG} has no line '{heading}unreleased'")
    changes.write_text(text.replace(f"{heading}unreleased\n", f"{heading}{day.isoformat()}\n"))
    quickstart.write_text(quickstart.read_text().replace(UNPUBLISHED, ""))


if __name__ == "__main__":
    release(ROOT, date.fromisoformat(sys.argv[1]))
