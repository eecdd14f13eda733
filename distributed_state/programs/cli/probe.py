"""The command `probe`: turns as a user has them. Law: a turn is bounded in time, and its metrics are of now.

Each turn is on a conversation of the probe's own, and its message is read back from Redis. The conversation stays
short: it is erased after `_KEPT` turns, and ends `_IDLE` seconds after the last one. A connection is opened for each
turn, so that turns reach all workers behind a name.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

import distributed_state
from distributed_state.errors import ConfigurationError, CorruptState, StateError
from distributed_state.programs import logs
from distributed_state.programs.cli.shell import app, open_existing, span, stop_on_signals

log = logging.getLogger(__name__)
_KEPT = 100  # turns
_IDLE = 3600.0
_STEPS = 5  # requests of a turn at most, each of which may take the whole timeout
_COUNT = "turns"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A turn: when it began, how long it took until it was read back, and why it failed, "" if it did not."""

    time: float
    ok: bool
    seconds: float
    error: str


@app.command()
def probe(
    context: typer.Context,
    every: Annotated[
        str | None, typer.Option(help="Pause between two turns, such as 10s; without it one turn is taken.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Service to probe, such as http://worker:8080, or Redis; as the global --url.")
    ] = None,
    conversation: Annotated[
        str | None, typer.Option(help="Id of the probe's conversation; by default probe:HOST.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one request of a turn may take.")] = 5.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(envvar="DISTRIBUTED_STATE_METRICS_PORT", min=0, max=65535, help="Port for Prometheus metrics."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per turn.")] = False,
) -> None:
    """Take a turn as a user does, read it back, and print how long that took. Exit code 1 if the only turn failed.

    Over HTTP, give its token in DISTRIBUTED_STATE_TOKEN or DISTRIBUTED_STATE_TOKEN_FILE: one of the tenant probe with
    the rights read, write and delete. The probe erases its conversation regularly, and it expires.

    Example: [cyan]distributed-state --url http://127.0.0.1:8080 probe --every 10s[/]
    """
    context.obj |= {} if url is None else {"url": url}
    pause = None if every is None else span("--every", every)
    id = conversation or f"probe:{platform.node()}"
    if pause is None:
        outcome = _probed(context, id, timeout)
        _show(outcome, as_json)
        raise typer.Exit(0 if outcome.ok else 1)
    stopping = stop_on_signals()
    with ExitStack() as stack:
        noted = Noted(pause + _STEPS * timeout)
        if metrics_port is not None:
            stack.enter_context(distributed_state.metrics.serve_registry(noted.registry, metrics_port))
        while not stopping():
            began = time.monotonic()
            noted.note(outcome := _probed(context, id, timeout))
            _show(outcome, as_json)
            while not stopping() and time.monotonic() < began + pause:
                time.sleep(0.1)


def _probed(context: typer.Context, id: str, timeout: float) -> Outcome:
    """Take one turn. Raises ConfigurationError."""
    began, taken = time.time(), time.monotonic()
    try:
        with _opened(context, timeout) as store:
            taken = time.monotonic()
            turns = _turn(store, id, timeout)
            seconds = time.monotonic() - taken
            if turns >= _KEPT:
                _erase(store, id)
    except ConfigurationError:
        raise
    except (StateError, OSError) as error:
        return Outcome(began, False, time.monotonic() - taken, f"{type(error).__name__}: {error}")
    return Outcome(began, True, seconds, "")


def _opened(context: typer.Context, timeout: float) -> AbstractContextManager[Any]:
    """The store that the options name, without retries: a user's client may have none."""
    url = context.obj["url"]
    if str(url).startswith(("http://", "https://")):
        return distributed_state.RemoteStore.open(url, timeout=timeout, retry_for=0.0)
    return open_existing(context, archiver=False, timeout=timeout, sql_timeout=timeout, retry_for=0.0)


def _turn(store: Any, id: str, timeout: float) -> int:
    """Take a turn and read it back; return how many turns the conversation has had. Raises CorruptState."""
    text, session = secrets.token_hex(8), store.session(id)
    with session.turn(request_id=text, wait=timeout, revive=True) as turn:
        turn.append({"role": "user", "content": text})
        turns = turn[_COUNT] = turn.get(_COUNT, 0) + 1
    last = session.messages(last=1, fresh=True)
    if [each.content for each in last] != [text] or session.get(_COUNT, fresh=True) != turns:
        raise CorruptState("another state was read than the turn had written")
    if turns == 1:
        session.set_lifetime(idle=_IDLE)
    return int(turns)


def _erase(store: Any, id: str) -> None:
    try:
        store.erase(id)
    except StateError as error:
        log.warning("the probe's conversation is not erased, and will be after a later turn: %s", error)


def _show(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()
    else:
        logs.report(f"{'ok' if outcome.ok else 'failed'} after {outcome.seconds * 1000:.1f} ms{_reason(outcome)}")


def _reason(outcome: Outcome) -> str:
    return f": {outcome.error}" if outcome.error else ""


class Noted:
    """The metrics of turns. A result counts for `lasting` seconds: then the next one is missing, which is a failure."""

    def __init__(self, lasting: float) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Histogram

        self.registry = CollectorRegistry()
        self._lasting = lasting
        self._ok = True  # until the first turn has ended or should have
        self._at = time.monotonic()
        self._turns = Histogram(
            "distributed_state_probe_seconds", "Seconds until the probe had read its turn back, by outcome.",
            ["outcome"], registry=self.registry,
        )  # fmt: skip
        for each in ("ok", "failed"):
            self._turns.labels(each)
        text = "Whether the last turn of the probe was read back: 1 or 0; 0 also if none ended in time."
        Gauge("distributed_state_probe_ok", text, registry=self.registry).set_function(self._is_ok)

    def note(self, outcome: Outcome) -> None:
        """Count a turn."""
        self._ok, self._at = outcome.ok, time.monotonic()
        self._turns.labels("ok" if outcome.ok else "failed").observe(outcome.seconds)

    def _is_ok(self) -> float:
        return float(self._ok and time.monotonic() - self._at <= self._lasting)
