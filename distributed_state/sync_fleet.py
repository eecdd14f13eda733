"""The blocking face of what a store tells of the fleet. Law: no logic here."""

from __future__ import annotations

from distributed_state.fleet import AsyncFleet
from distributed_state.model import Event
from distributed_state.port.blocking import finish
from distributed_state.sync_records import Record


class Fleet:
    _twin: AsyncFleet

    def audit(
        self,
        *,
        conversation: str | None = None,
        subject: str | Record | None = None,
        type: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Event]:
        return finish(
            self._twin.audit(
                conversation=conversation,
                subject=subject._twin if isinstance(subject, Record) else subject,
                type=type,
                since=since,
                until=until,
                limit=limit,
                after=after,
            )
        )
