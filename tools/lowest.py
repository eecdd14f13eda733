#!/usr/bin/env python
"""Print the lowest versions that the package allows, as constraints for pip.

    python tools/lowest.py >lowest.txt && pip install -c lowest.txt -e '.[runner]'

These are the versions after `>=` in pyproject.toml: of what the package needs, and of the extras that its tests use.
Other packages, and the tests' tools, are the newest that fit.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_FLOOR = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?>=(?P<version>[\d.]+)")


def floors(project: dict[str, object]) -> dict[str, str]:
    """The lowest version of each package, by name. Raises ValueError for a requirement without one."""
    dependencies, extras = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(extras, dict)
    used = next(each for each in extras["runner"] if each.startswith(f"{project['name']}["))
    needed = [*dependencies, *(each for extra in used.split("[")[1].rstrip("]").split(",") for each in extras[extra])]
    found = {}
    for requirement in needed:
        floor = _FLOOR.match(requirement)
        if floor is None:
            raise ValueError(f"pyproject.toml: {requirement!r} names no lowest version")
        found[floor["name"]] = floor["version"]
    return found


if __name__ == "__main__":
    for name, version in sorted(floors(tomllib.loads(PROJECT.read_text())["project"]).items()):
        print(f"{name}=={version}")
