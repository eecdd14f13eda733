"""Limits of one worker. Law: everything that a client could make grow without bound has its limit here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    body: int = 4 * 2**20  # of a request; a larger one is answered 413 before all of it is read
    request: float = 30.0  # for one request, including its body
    busy: float = 10.0  # how long a turn waits for another one of the same conversation
    requests: int = 512  # at once; more are answered 429
    streams: int = 512  # of events, open at once; more are answered 429
    heartbeat: float = 15.0  # between comments on a stream of events that is silent
    slow: float = 10.0  # a stream of events whose client reads nothing for so long is closed
    notice: float = 1.0  # at shutdown: how long /readyz fails before connections are refused
    drain: float = 15.0  # then: for the requests that are running
    archive: float = 5.0  # then: to archive what is written, if this worker archives
    close: float = 5.0  # then: to close the connections to the servers
    check: float = 1.0  # for the probe of one server by /readyz, and how long its result is cached
