"""The pages of the documentation that need frameworks, run as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import Block
from docs_pages import ROOT, own_servers, reader, runs

ELSEWHERE = {"crewai"}  # it fits in no environment with another framework


def cases() -> Iterator[Any]:
    """Each page that has a block for frameworks, with all its blocks, on each of its APIs."""
    for page, api, found in runs(frameworks=True):
        if page.stem in ELSEWHERE:
            continue
        yield pytest.param(api, found, id=f"{page.relative_to(ROOT)}-{api}")


@pytest.mark.parametrize(("api", "found"), list(cases()))
def test_a_page_does_what_it_says(
    api: str, found: list[Block], servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader has the framework, and does what stands there."""
    monkeypatch.chdir(tmp_path)
    with own_servers(servers.database) as own, reader(api, own) as somebody:
        somebody.read(found)
