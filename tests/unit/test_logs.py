"""Logs that no terminal shows: each line by itself says when, how bad, whose, and about what."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from distributed_state.programs import logs

log = logging.getLogger("distributed_state.test_logs")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    handler = logs.json_lines()
    stream = io.StringIO()
    handler.setStream(stream)
    log.addHandler(handler)
    monkeypatch.setattr(log, "propagate", False)
    yield stream
    log.removeHandler(handler)
    logs.of_replica("")


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_whatever_is_in_it(written: io.StringIO) -> None:
    log.warning('a "text"\nof two lines, \x1b[31m and %s', "\u2028", extra={"record": "session:c"})
    (line,) = lines(written)
    assert line["message"] == 'a "text"\nof two lines, \x1b[31m and \u2028'
    assert (line["level"], line["logger"], line["record"]) == ("WARNING", log.name, "session:c")
    assert abs(datetime.fromisoformat(line["time"]).timestamp() - datetime.now().timestamp()) < 60
    assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0  # type: ignore[union-attr]
    assert "\n" not in written.getvalue().rstrip("\n")
    assert "\x1b" not in written.getvalue()
    assert not {"replica", "request_id"} & line.keys()


def test_it_says_whose_it_is_and_which_request_it_is_about(written: io.StringIO) -> None:
    logs.of_replica("0123456789ab")
    token = logs.REQUEST_ID.set("r-1")
    try:
        log.error("it failed")
    finally:
        logs.REQUEST_ID.reset(token)
    log.error("and later")
    first, later = lines(written)
    assert (first["replica"], first["request_id"]) == ("0123456789ab", "r-1")
    assert (later["replica"], "request_id" in later) == ("0123456789ab", False)


def test_an_error_keeps_its_trace_in_its_line(written: io.StringIO) -> None:
    try:
        raise ValueError("of two\nlines")
    except ValueError:
        log.exception("it failed")
    (line,) = lines(written)
    assert "test_an_error_keeps_its_trace_in_its_line" in line["exc_info"]
    assert "ValueError: of two\nlines" in line["exc_info"]
