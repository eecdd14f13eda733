"""The animated replay of the first page of the site."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import replay_picture

TEXT = "{http://www.w3.org/2000/svg}text"


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(TEXT)]


@pytest.mark.unit
def test_each_line_is_drawn_and_long_ones_are_wrapped() -> None:
    long = "verified: " + "word " * 30
    drawn = texts(replay_picture.drawn(["$ a <b>", "worker 1 was killed", "  worker 2 went on", long.rstrip()]))
    assert drawn[:3] == ["$ a <b>", "worker 1 was killed", "  worker 2 went on"]
    assert len(drawn) == 5
    assert max(map(len, drawn)) <= 84
    assert "".join(drawn[3:]).split() == long.split()


@pytest.mark.unit
def test_the_picture_shows_a_replay_that_lost_nothing() -> None:
    drawn = texts(replay_picture.PICTURE.read_text())
    assert drawn[0] == "$ distributed-state replay --kill 3"
    assert sum(bool(re.match(r"worker \d+ was killed in ", each)) for each in drawn) == 3
    assert re.search(r"verified: (\d+) of \1 messages", " ".join(drawn))
