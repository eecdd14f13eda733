"""What a doctor finds where no store can be opened. Law: a server that is away hides nothing of the other one.

Design: section 27.
"""

from __future__ import annotations

from contextlib import closing

from distributed_state.cold.store import ColdStore
from distributed_state.errors import NotFound, StateError, WarmUnavailable
from distributed_state.port.blocking import finish
from distributed_state.port.connections import Connections
from distributed_state.port.shared import SharedPort
from distributed_state.settings import Settings
from distributed_state.store import doctor
from distributed_state.store.finding import Finding


def examine_apart(settings: Settings, error: StateError) -> list[Finding]:
    """What can be seen without a store, as one of the two servers is away or SQL is empty. For blocking callers."""
    if isinstance(error, WarmUnavailable):
        return [doctor.away(error), *_archive_alone(settings)]
    advice = "start a worker with these, or correct --archive and --namespace; `distributed-state migrate` makes tables"
    empty = Finding("sql", False, str(error), advice)
    return [*finish(_warm_alone(settings)), empty if isinstance(error, NotFound) else doctor.no_archive(error)]


def _archive_alone(settings: Settings) -> list[Finding]:
    try:
        cold = ColdStore.open(
            settings.archive or "", settings.namespace, migrate=False,
            snapshot_every=settings.snapshot_every, timeout=settings.sql_timeout,
        )  # fmt: skip
        with closing(cold):
            return doctor.archive(cold.check())
    except StateError as error:
        return [doctor.no_archive(error)]


async def _warm_alone(settings: Settings) -> list[Finding]:
    port = SharedPort(Connections(settings.url, settings.timeout, retry_for=settings.retry_for))
    try:
        await port.open()
        return await doctor.check_server(port)
    except StateError as error:
        return [doctor.away(error)]
    finally:
        await port.close()
