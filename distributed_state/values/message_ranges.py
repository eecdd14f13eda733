"""Which messages a state shows: runs of sequence numbers, some stored under the records it was forked from.

Law: nothing here accesses a server; the fields of a state are enough.

Design: section 11.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import orjson

from distributed_state.errors import CorruptState, TooLarge
from distributed_state.values.journal import Segment
from distributed_state.values.model import NEXT, SEGMENTS, START

MOST = 2000  # runs in `#segments`, which is rewritten as a whole with each change of them


def segments(record: str, fields: Mapping[bytes, bytes]) -> list[Segment]:
    """The visible messages of a state, in order: the closed runs of `#segments`, then the record's own open run."""
    own = Segment(record, _number(fields, START), _number(fields, NEXT))
    return [run for run in [*parse(fields.get(SEGMENTS, b"[]")), own] if run.start < run.stop]


def parse(data: bytes) -> list[Segment]:
    """Parse the JSON of `#segments`. Raises CorruptState if it is not a list of segments."""
    try:
        return [Segment(str(source), int(start), int(stop)) for source, start, stop in orjson.loads(data)]
    except (ValueError, TypeError) as error:
        text = f"#segments: {len(data)} bytes are not a list of segments"
        raise CorruptState(text, field="#segments", data=data) from error


def joined(runs: Iterable[Segment]) -> list[Segment]:
    """The runs, with those that continue one another joined to one."""
    found: list[Segment] = []
    for run in runs:
        if found and found[-1].source == run.source and found[-1].stop == run.start:
            run = Segment(run.source, found.pop().start, run.stop)
        found.append(run)
    return found


def dump(runs: Iterable[Segment]) -> bytes:
    """The JSON that `parse` reads; runs that continue one another become one."""
    return orjson.dumps([[run.source, run.start, run.stop] for run in joined(runs)])


def close(record: str, fields: Mapping[bytes, bytes]) -> bytes:
    """The `#segments` of a state that shows the same messages and whose own run starts at `#mn`."""
    return dump(segments(record, fields))


def refuse_many(record: str, data: bytes, before: bytes = b"[]") -> None:
    """Raise TooLarge for a `#segments` with more runs than one change may write, unless it had as many before."""
    many = len(parse(data))
    if many > MOST and many > len(parse(before)):
        text = f"{record[:200]}: its messages would be shown in {many} runs, more than {MOST}"
        raise TooLarge(f"{text}; replace_messages() with all that it shows, which are one run then")


def taken_over(data: bytes, record: str) -> bytes:
    """The `#segments` of a state whose messages are all stored under this record."""
    return dump(Segment(record, run.start, run.stop) for run in parse(data))


def last(runs: Sequence[Segment], limit: int) -> list[Segment]:
    """The last `limit` messages of the runs."""
    kept: list[Segment] = []
    for run in reversed(runs):
        if limit <= 0:
            break
        kept.append(Segment(run.source, max(run.start, run.stop - limit), run.stop))
        limit -= run.stop - run.start
    return kept[::-1]


def between(runs: Iterable[Segment], after: int | None, before: int | None) -> list[Segment]:
    """The messages of the runs whose numbers are between these two, both exclusive."""
    first = 0 if after is None else after + 1
    end = 2**63 if before is None else before
    cut = (Segment(run.source, max(run.start, first), min(run.stop, end)) for run in runs)
    return [run for run in cut if run.start < run.stop]


def shown(kept: Sequence[Segment], fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The fields of a state that shows these runs, a part of what it showed."""
    # The last visible run is the open one, if that has messages. It stays open, so that its recent messages stay in
    # Redis.
    end = fields.get(NEXT, b"0")
    opened = bool(kept) and fields.get(START, b"0") != end and kept[-1].stop == int(end)
    return {START: b"%d" % kept[-1].start if opened else end, SEGMENTS: dump(kept[:-1] if opened else kept)}


def without(runs: Iterable[Segment], hidden: Iterable[Segment]) -> list[Segment]:
    """The runs without the parts that are in `hidden`, with the same source."""
    gaps: dict[str, list[tuple[int, int]]] = {}
    for gap in sorted(hidden, key=lambda gap: gap.start):
        of_it = gaps.setdefault(gap.source, [])
        if of_it and gap.start <= of_it[-1][1]:
            gap = replace(gap, start=of_it[-1][0], stop=max(gap.stop, of_it.pop()[1]))
        of_it.append((gap.start, gap.stop))
    left = []
    for run in runs:
        at, of_it = run.start, gaps.get(run.source, [])
        for nth in range(bisect_right(of_it, at, key=itemgetter(1)), len(of_it)):
            start, stop = of_it[nth]
            if start >= run.stop:
                break
            left.append(Segment(run.source, at, start))
            at = stop
        left.append(Segment(run.source, at, run.stop))
    return [run for run in left if run.start < run.stop]


def part(runs: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The messages of the runs at the positions `start` to `stop` (exclusive), counted from 0."""
    kept = []
    at = 0
    for run in runs:
        first = max(start - at, 0)
        end = min(stop - at, run.stop - run.start)
        if first < end:
            kept.append(Segment(run.source, run.start + first, run.start + end))
        at += run.stop - run.start
    return kept


def before(runs: Iterable[Segment], number: int) -> int:
    """How many messages of the runs have a lower number."""
    return sum(min(max(number - run.start, 0), run.stop - run.start) for run in runs)


def count(runs: Iterable[Segment]) -> int:
    """How many messages the runs hold."""
    return sum(run.stop - run.start for run in runs)


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    data = fields.get(name, b"0")
    try:
        return int(data)
    except ValueError as error:
        raise CorruptState(f"{name.decode()} is {data!r}, not a number", field=name.decode(), data=data) from error
