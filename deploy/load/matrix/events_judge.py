"""Whether each listener saw each event once and in order, or was to reload. Law: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Heard = Mapping[str, Any]


def amiss(written: Collection[str], heard: Mapping[str, Sequence[Heard]], gone: Collection[str]) -> Iterator[str]:
    """Say what is wrong. `written`: ids of acknowledged events; `gone`: listeners that were killed or stopped.

    What a listener hears is {"id", "partition", "epoch", "sequence"}, or {"resync": reason}.
    """
    for listener, events in heard.items():
        ids = [each["id"] for each in events if "id" in each]
        if len(ids) != len(set(ids)):
            yield f"{listener} heard {len(ids) - len(set(ids))} events twice"
        yield from _disorder(listener, events)
        if listener not in gone and not any("resync" in each for each in events):
            unheard = set(written) - set(ids)
            if unheard:
                yield f"{listener} heard {len(unheard)} of {len(written)} events never, and was not told to reload"


def _disorder(listener: str, events: Iterable[Heard]) -> Iterator[str]:
    last: dict[tuple[int, str], int] = {}
    for each in events:
        if "resync" in each:
            last.clear()
            continue
        place = (each["partition"], each["epoch"])
        if place in last and each["sequence"] != last[place] + 1:
            yield f"{listener} heard event {each['sequence']} of partition {place[0]} after {last[place]}"
        last[place] = each["sequence"]
