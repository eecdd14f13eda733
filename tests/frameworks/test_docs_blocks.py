"""The pages of the documentation that need frameworks, run as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import Block
from docs_pages import ROOT, own_servers, reader, runs


def cases() -> Iterator[Any]:
    """Each page that has a block for frameworks, with all its blocks, on each of its faces."""
    for page, face, found in runs(frameworks=True):
        yield pytest.param(face, found, id=f"{page.relative_to(ROOT)}-{face}")


@pytest.mark.parametrize(("face", "found"), list(cases()))
def test_a_page_does_what_it_says(
    face: str, found: list[Block], servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader has the framework, and does what stands there."""
    monkeypatch.chdir(tmp_path)
    with own_servers(servers.database) as own, reader(face, own) as somebody:
        somebody.read(found)
