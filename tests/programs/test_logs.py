"""Logs that no terminal shows: each line by itself says when, how bad, whose, and about what."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context
from datetime import datetime
from typing import Any

import pytest
from rich.console import Console

import distributed_state
from distributed_state.port.background import finish
from distributed_state.programs import logs
from distributed_state.values.model import log_fields

pytestmark = pytest.mark.unit

log = logging.getLogger("distributed_state.test_logs")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setattr(logs._NAMED, "replicas", [])  # another test's service may be open in this process
    handler = logs.json_lines()
    stream = io.StringIO()
    handler.setStream(stream)
    log.addHandler(handler)
    monkeypatch.setattr(log, "propagate", False)
    yield stream
    log.removeHandler(handler)


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
    logs.opened("0123456789ab")

    def served() -> None:
        logs.REQUEST_ID.set("r-1")
        logs.RECORD.set("session:c")
        log.error("it failed")
        log.error("so did another", extra={"record": "user:u"})

    copy_context().run(served)
    log.error("and later")
    logs.closed("0123456789ab")
    log.error("and with none")
    first, other, later, none = lines(written)
    assert (first["replica"], first["request_id"], first["record"]) == ("0123456789ab", "r-1", "session:c")
    assert other["record"] == "user:u", "what a line says itself counts"
    assert (later["replica"], later.keys() & {"request_id", "record"}) == ("0123456789ab", set())
    assert "replica" not in none


def test_of_two_stores_each_line_names_its_own_or_none(written: io.StringIO) -> None:
    async def work() -> None:
        log.error("in the background")

    with (
        distributed_state.StateStore.open(archive="memory") as one,
        distributed_state.StateStore.open(archive="memory") as other,
    ):
        for store in (one, other):
            logs.opened(store.replica)
        log.error("whose, nobody knows")
        for store in (one, other):
            job = store._core._lifecycle.tiers().port.spawn(work, "test")
            finish(job.stop())
        for store in (one, other):
            logs.closed(store.replica)
        asked, *ours = lines(written)
        assert "replica" not in asked
        assert [line["replica"] for line in ours] == [one.replica, other.replica]


def test_what_a_line_is_about_is_a_record_or_nothing() -> None:
    assert log_fields("session:c1") == {"record": "session:c1"}
    assert [log_fields(text) for text in ("client:web", "", "session", "replica:1")] == [{}] * 4


def test_an_error_keeps_its_trace_in_its_line(written: io.StringIO) -> None:
    try:
        raise ValueError("of two\nlines")
    except ValueError:
        log.exception("it failed")
    (line,) = lines(written)
    assert "test_an_error_keeps_its_trace_in_its_line" in line["exc_info"]
    assert "ValueError: of two\nlines" in line["exc_info"]


@pytest.mark.parametrize("made", [logs._Shown, logging.Formatter])
def test_a_terminal_is_told_nothing_that_it_would_obey(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    """Of an id of a tenant's: a title, a colour, C1 controls, a line that is turned round; the second is a control."""
    monkeypatch.setattr(logs, "_Shown", made)
    monkeypatch.setattr(logging.root, "handlers", [])
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    logs.write(logging.WARNING, console)
    log.warning("of %s\nand é", "a\x1b]0;title\x07b\x9b31mc\u202ed\r")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    obeyed = {each for each in "\x1b\x9b\u202e" if each in shown}
    assert bool(obeyed) is (made is logging.Formatter)
    assert "and é" in shown
