"""The page of the documentation that needs CrewAI, run as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, blocks_of, chosen, own_servers, reader


def test_the_page_does_what_it_says(servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = chosen(blocks_of(ROOT / "docs" / "how-to" / "crewai.md"), frameworks=True)
    assert page
    with own_servers(servers.database) as own, reader("asyncio", own) as somebody:
        somebody.read(page)
