"""Lines in and out of a process, over real pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distributed_state.adapters.opperator import wire
from distributed_state.adapters.opperator.wire import Incoming, Outgoing

pytestmark = pytest.mark.unit


@contextmanager
def a_pipe() -> Iterator[tuple[Any, Any]]:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as source, os.fdopen(writes, "wb", buffering=0) as target:
        yield source, target


def lines_of(sent: list[bytes], longest: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], list[int]]:
    monkeypatch.setattr(wire, "MAX_LINE", longest)
    with a_pipe() as (source, target):
        long: list[int] = []
        incoming = Incoming(source, long.append)
        for each in sent:
            target.write(each)
        target.close()
        found = list(incoming)
        incoming.free()
    return found, long


def test_lines_come_whole_however_they_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_CHUNK", 3)
    assert lines_of([b"one\ntw", b"o\r\n\n \nthree"], 100, monkeypatch) == ([b"one", b"two", b"three"], [])


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_a_line_that_is_too_long_is_passed_over_alone(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(wire, "_CHUNK", chunk)
    assert lines_of([b"before\n", b"x" * 50 + b"\nafter\n12345678\n"], 8, monkeypatch) == (
        [b"before", b"after", b"12345678"],
        [50],
    )


def test_reading_ends_when_it_is_closed_from_another_thread() -> None:
    with a_pipe() as (source, _):
        incoming = Incoming(source, lambda size: None)
        threading.Timer(0.05, incoming.close).start()
        assert list(incoming) == []
        incoming.free()


def test_nobody_waits_for_a_reader_that_sleeps_and_the_log_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_WAITING_LOGS", 10)
    with a_pipe() as (source, target):
        outgoing = Outgoing(target, lambda: None)
        line = b"x" * 100_000 + b"\n"
        for _ in range(30):
            outgoing.send_log(line)
        outgoing.send(b"an answer\n")
        assert not outgoing.close(0.05), "it is not all read"
        taken = [source.readline() for _ in range(11)]
        while taken[-1] != b"an answer\n":
            taken.append(source.readline())
        assert 10 <= len(taken) - 1 <= 12
        assert outgoing.close(5)


def test_a_reader_that_is_gone_is_told_of_once() -> None:
    reads, writes = os.pipe()
    gone = threading.Event()
    with os.fdopen(writes, "wb", buffering=0) as target:
        outgoing = Outgoing(target, gone.set)
        os.close(reads)
        outgoing.send(b"x\n")
        assert gone.wait(5)
        outgoing.send(b"y\n")
        assert not outgoing.close(5)
