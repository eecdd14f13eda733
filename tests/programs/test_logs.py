"""Logs that no terminal shows: each line by itself says when, how bad, whose, and about what."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
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


def test_a_line_of_uvicorn_has_no_copy_for_terminals(written: io.StringIO) -> None:
    log.warning("Started %d", 1, extra={"color_message": "Started \x1b[36m%d\x1b[0m"})
    (line,) = lines(written)
    assert line["message"] == "Started 1"
    assert "color_message" not in line


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


def test_warnings_and_errors_that_nothing_caught_are_lines_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, hook in ((sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(module, hook, None)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            logs.take_uncaught()
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        finally:
            logging.captureWarnings(False)
    failed = threading.Thread(target=lambda: 1 // 0, name="of-a-test")
    failed.start()
    failed.join()
    dropped = Dropped()
    del dropped
    try:
        raise ValueError("of two\nlines")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    said = [record.getMessage() for record in caplog.records]
    assert [("old" in said[0]), *said[1:2], *said[3:]] == [
        True,
        "thread of-a-test ended by an unexpected error: integer division or modulo by zero",
        "ended by an unexpected error: of two\nlines",
    ]
    assert said[2].endswith(": it is over")
    assert [record.exc_info is not None for record in caplog.records] == [False, True, True, True]


class Dropped:
    def __del__(self) -> None:
        raise RuntimeError("it is over")


@pytest.mark.parametrize(("write", "level"), [(logs.report, "INFO"), (logs.ended, "CRITICAL")])
def test_progress_and_ends_are_lines_for_all_but_a_terminal(
    monkeypatch: pytest.MonkeyPatch, write: Any, level: str
) -> None:
    for terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        write("so far\n")
        if terminal:
            assert "so far" in stream.getvalue()
            assert "{" not in stream.getvalue()
        else:
            (line,) = lines(stream)
            assert (line["level"], line["message"].removeprefix("ended: ")) == (level, "so far\n")


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
