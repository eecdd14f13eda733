"""Limits of one worker. Law: everything that a client could make grow without bound has its limit here.

Design: section 24.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    # Of a connection: who does not keep them is answered 408 where that is possible, and disconnected.
    head: float = 10.0  # for the head of a request, from its first byte on, and from the connection's to its first
    arriving: float = 10.0  # for a body, and a second more for each `rate` bytes of it that came
    leaving: float = 10.0  # for a client to read its answer, and a second more for each `rate` bytes that it read
    rate: int = 16 * 1024  # bytes a second, the slowest that a client may send and read
    idle: int = 75  # between requests: longer than most proxies keep a connection, as the proxy should close it
    connections: int = 4096  # at once, or fewer if the process may not open as many descriptors
    per_address: int = 0  # connections of one client's address, 0: any number; behind a proxy all are the proxy's
    in_flight: int = 64 * 2**20  # of all bodies, answers that are made or not read yet, and events that are not sent
    room: float = 10.0  # for room among these: a request that waits longer is answered 503

    # Of a request.
    body: int = 2**20  # a larger one is answered 413 before all of it is read
    depth: int = 64  # of arrays and objects within each other
    values: int = 50_000  # in a body, however they are nested
    fields: int = 5_000  # that one request sets: Redis serves nobody else meanwhile
    messages: int = 1_000  # that one request appends
    answer: int = 16 * 2**20  # a larger one is refused, as it would be built in memory
    request: float = 30.0  # for the work of one request, once its body is here
    busy: float = 10.0  # how long a turn waits for another one of the same conversation
    requests: int = 512  # at once; more are answered 429. One whose body is still on its way is not among them, and of
    # those whose caller is being found out there may be as many beside

    # Of a tenant, 0: any number. Of this worker, as each counts for itself.
    tenant_requests: float = 0.0  # a second, and ten seconds' worth at once; more are answered 429
    tenant_bytes: float = 0.0  # a second, of bodies and answers; likewise
    tenant_metrics: int = 0  # so many tenants have metrics of their own, those that come first
    tenant_conversations: int = 0  # counted in the archive once a minute, so about; more are answered 429
    tenant_tasks: int = 0  # likewise
    tenant_users: int = 0
    tenant_items: int = 0  # of all its records together

    # Of event streams.
    streams: int = 512  # open at once; more are answered 429
    heartbeat: float = 15.0  # between comments on a stream of events that is silent
    slow: float = 10.0  # a stream of events whose client reads nothing for so long is closed

    # Of the worker itself.
    notice: float = 1.0  # at shutdown: how long /readyz fails before connections are refused
    drain: float = 15.0  # then: for the requests that are running
    archive: float = 5.0  # then: to archive what is written, if this worker archives
    close: float = 5.0  # then: to close the connections to the servers
    check: float = 1.0  # for the probe of one server by /readyz, and how long its result is cached
