"""Whether each listener saw each event once and in order, or was to reload. Law: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

Heard = Mapping[str, Any]
Places = Mapping[tuple[int, str, int], str]


def amiss(
    written: Collection[str], heard: Mapping[str, Sequence[Heard]], gone: Collection[str], places: Places
) -> Iterator[str]:
    """Say what is wrong. `written`: ids of acknowledged events; `gone`: listeners that were killed or stopped.

    What a listener hears is {"id", "partition", "epoch", "sequence"}, or {"resync": reason}. `places`: each event's
    id, of those that SQL has, by partition, epoch and sequence.
    """
    for listener, events in heard.items():
        ids = [each["id"] for each in events if "id" in each]
        if len(ids) != len(set(ids)):
            yield f"{listener} heard {len(ids) - len(set(ids))} events twice"
        yield from _disorder(listener, events, places)
        if listener not in gone and not any("resync" in each for each in events):
            unheard = set(written) - set(ids)
            if unheard:
                yield f"{listener} heard {len(unheard)} of {len(written)} events never, and was not told to reload"


def _disorder(listener: str, events: Iterable[Heard], places: Places) -> Iterator[str]:
    last: dict[tuple[int, str], int] = {}
    ids = set[str]()
    for each in events:
        if "resync" in each:
            last.clear()
            continue
        place = (each["partition"], each["epoch"])
        # What was heard, lost and written again has another number, and is not heard again.
        between = range(last.get(place, each["sequence"] - 1) + 1, each["sequence"])
        backward = each["sequence"] <= last.get(place, -1)
        if backward or any(places.get((*place, number)) not in ids for number in between):
            yield f"{listener} heard event {each['sequence']} of partition {place[0]} after {last[place]}"
        last[place] = each["sequence"]
        ids.add(each["id"])
