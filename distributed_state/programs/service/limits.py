"""What one worker allows. Law: everything that a client could make grow without end has its number here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    body: int = 4 * 2**20  # of a request; a larger one is answered 413 before it is read to its end
    request: float = 30.0  # for one request, its body included
    busy: float = 10.0  # how long a turn waits for another one of the same conversation
    requests: int = 512  # at once; more are answered 429
    streams: int = 512  # of events, at once; more are answered 429
    heartbeat: float = 15.0  # a comment in a stream of events that is silent so long
    slow: float = 10.0  # a reader of events that takes nothing for so long is disconnected
    notice: float = 1.0  # at the end: how long /readyz says so before connections are refused
    drain: float = 15.0  # and then for the requests that are running
    archive: float = 5.0  # and then for the archive to take what is written, if this worker archives
    close: float = 5.0  # and then to say goodbye to the servers
    check: float = 1.0  # for one answer to /readyz, and how long it is believed
