"""Whether one record's history is linearizable. Law: pure, and exact, because each answer names its version.

To decide it for histories of reads and writes alone is NP-complete: checkers search for an order (Wing and Gong, 1993;
Porcupine in Go, Knossos in Clojure; no maintained one was found for Python). Here the store names the order itself. The
version that acknowledges a write, and the count that a read finds, leave one order to examine, so no search is needed:

1. a version stands for one write;
2. of two writes, the one that ended before the other began has the lower version;
3. a read returns the write that its version names, which was begun before the read ended;
4. a fresh read is not older than a write or a fresh read that ended before it began;
5. any other read is at most `max_staleness` older than that.

A write of which nothing is known took effect at any time after it was begun, or never. One that was lost or put aside
has no place in this order and is left out: it is counted elsewhere. So is what a reader saw of a write that a server
carried out and lost before it was acknowledged, and that its writer then repeated: it has the place of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from operator import itemgetter

from deploy.load.matrix.histories import Read, Write, begun


def violations(
    order: Sequence[str], writes: Iterable[Write], reads: Iterable[Read], *, max_staleness: float, lossy: bool = False
) -> Iterator[str]:
    """Say what no order of the operations explains. `order`: the record's writes, version 1 first.

    `lossy`: a server may have lost something meanwhile.
    """
    versions = {name: at for at, name in enumerate(order, 1)}
    kept = [each for each in writes if each.version and each.name in versions]
    yield from _misnumbered(versions, kept)
    yield from _overtaken(versions, kept)
    repeated = (each for each in reads if not (lossy and _is_of_a_lost_attempt(each, versions, kept)))
    yield from _misread(order, versions, kept, list(repeated), max_staleness)


def _misnumbered(versions: Mapping[str, int], kept: Sequence[Write]) -> Iterator[str]:
    for each in kept:
        if versions[each.name] != each.version:
            yield f"{each.name} was acknowledged as version {each.version} and stands as version {versions[each.name]}"


def _overtaken(versions: Mapping[str, int], kept: Sequence[Write]) -> Iterator[str]:
    bounds = _Bounds((each.end, versions[each.name]) for each in kept)
    for each in kept:
        if (bound := bounds.before(each.start)) >= versions[each.name]:
            yield f"{each.name} is version {versions[each.name]}, but version {bound} had ended before it began"


def _is_of_a_lost_attempt(read: Read, versions: Mapping[str, int], kept: Sequence[Write]) -> bool:
    """Whether a read saw a write under a lower version than it has, before that was acknowledged."""
    acknowledged = next((each.end for each in kept if each.name == read.last), inf)
    return 0 < read.count < versions.get(read.last, 0) and read.start < acknowledged


def _misread(
    order: Sequence[str],
    versions: Mapping[str, int],
    kept: Sequence[Write],
    reads: Sequence[Read],
    max_staleness: float,
) -> Iterator[str]:
    # A state that is not of this order was lost or put aside since; who saw it saw no state of this history.
    known = [each for each in reads if not each.count or each.last in versions]
    written = [(each.end, versions[each.name]) for each in kept]
    seen = [(each.end, versions[each.last]) for each in known if each.fresh and each.count]
    bounds = _Bounds([*written, *seen])
    for each in known:
        said = f"{each.reader} read version {each.count} of {each.record}"
        if each.count and versions[each.last] != each.count:
            yield f"{said} with the state of version {versions[each.last]}"
        elif each.count and begun(each.last) > each.end:
            yield f"{said} before it was begun"
        elif each.count < (bound := bounds.before(each.start - (0.0 if each.fresh else max_staleness))):
            yield f"{said}{'' if each.fresh else ' from memory'} although version {bound} had ended before"


class _Bounds:
    """The highest version that had ended by a moment."""

    def __init__(self, ended: Iterable[tuple[float, int]]) -> None:
        self._ends: list[float] = []
        self._highest: list[int] = []
        highest = 0
        for end, version in sorted(ended, key=itemgetter(0)):
            highest = max(highest, version)
            self._ends.append(end)
            self._highest.append(highest)

    def before(self, moment: float) -> int:
        """Among those that ended strictly before it."""
        at = bisect_left(self._ends, moment)
        return self._highest[at - 1] if at else 0
