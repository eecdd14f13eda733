"""What became of each acknowledged write. Law: pure; it is given what was acknowledged and what was found.

Each acknowledged write is one of: shown to readers; **hidden** (SQL or Redis has it, and readers are not shown it);
**branched** or **quarantined** (put aside, under a cause that is named); or **lost** (nowhere). **Doubled** is what is
shown or archived twice, and a count that is higher than the writes that are shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from deploy.load.matrix.histories import Found, Read, Write
from deploy.load.matrix.linear import violations

_PLACE = re.compile(r"partition \D{0,3}\d+.*?offset \D{0,3}\d+", re.DOTALL)


@dataclass(slots=True)
class Tally:
    """One level of one cell, in writes."""

    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    branched: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gap: float = 0.0
    went_on: bool = True


@dataclass(frozen=True, slots=True)
class Required:
    """What a cell has to keep to.

    `failover`: another server's copy goes on being used. `same_data`: the server that had confirmed goes on with its
    own files. `fsync_always`: it confirms nothing before its disk has it.
    """

    failover: bool = False
    same_data: bool = True
    fsync_always: bool = False

    def keeps(self, level: str) -> bool:
        """Whether a write of this level survives here even if its writer does not."""
        if level == "archived":
            return True
        if level == "replicated":
            return self.failover
        if level == "fsynced":
            return self.same_data and self.fsync_always
        return False


def tallies(
    writes: Sequence[Write], reads: Iterable[Read], found: Mapping[str, Found], *, max_staleness: float
) -> dict[str, Tally]:
    """Judge each level's records."""
    of_record: dict[str, list[Write]] = {record: [] for record in found}
    seen: dict[str, list[Read]] = {record: [] for record in found}
    for write in writes:
        of_record[write.record].append(write)
    for read in reads:
        seen[read.record].append(read)
    result: dict[str, Tally] = {}
    for record, its in of_record.items():
        tally = result.setdefault(level_of(record), Tally())
        _judge(tally, found[record], its, seen[record], max_staleness)
    return result


def level_of(record: str) -> str:
    """The level at which a record is written: its id is `<level>/<number>`."""
    return record.partition("/")[0]


def _judge(tally: Tally, found: Found, writes: Sequence[Write], reads: Sequence[Read], max_staleness: float) -> None:
    shown = Counter(found.shown)
    archived = Counter(name for _, _, name in found.archived)
    for each in writes:
        if not each.version:
            tally.errors[each.error.partition(":")[0]] += 1
            continue
        tally.acknowledged += 1
        if each.name in shown:
            continue
        if each.name in found.branched:
            tally.branched.append(each.name)
            tally.causes[found.branched[each.name] or "without a cause"] += 1
        elif each.name in found.quarantined:
            tally.quarantined.append(each.name)
            tally.causes[found.quarantined[each.name] or "without a cause"] += 1
        elif each.name in archived or each.name in found.warm:
            tally.hidden.append(each.name)
        else:
            tally.lost.append(each.name)
    tally.doubled += [name for name in shown | archived if max(shown[name], archived[name]) > 1]
    if found.problem:
        tally.problems.append(f"{found.record} cannot be read: {found.problem}")
        return
    extra = found.count - len(shown)
    tally.doubled += [f"{found.record} counts {found.count}, and shows {len(shown)} writes"] * max(extra, 0)
    if len({found.version, found.count, len(found.shown)}) > 1 and extra <= 0:
        tally.problems.append(
            f"{found.record} is at version {found.version}, counts {found.count} and shows {len(found.shown)} writes"
        )
    lossy = len({epoch for epoch, _, _ in found.archived}) > 1
    tally.violations += violations(found.shown, writes, reads, max_staleness=max_staleness, lossy=lossy)


def missed(tally: Tally, level: str, required: Required, dead: Collection[str], report: str) -> Iterator[str]:
    """Say what one level of a cell did not keep to. `dead`: the writers that were killed; `report`: what was said."""
    owed = [name for name in tally.lost if required.keeps(level) or name.partition(":")[0] not in dead]
    if owed:
        yield f"{level}: {len(owed)} of {tally.acknowledged} acknowledged writes lost, as {owed[0]}"
    if len(tally.lost) > len(owed) and not _PLACE.search(report):
        yield f"{level}: {len(tally.lost) - len(owed)} writes died with their writer, and no report says where"
    for what, names in (("doubled", tally.doubled), ("hidden", tally.hidden)):
        if names:
            yield f"{level}: {len(names)} writes {what}, as {names[0]}"
    if nameless := tally.causes["without a cause"]:
        yield f"{level}: {nameless} writes put aside without a cause"
    if tally.violations:
        yield f"{level}: not linearizable in {len(tally.violations)} places, as: {tally.violations[0]}"
    yield from (f"{level}: {problem}" for problem in tally.problems)
    if not tally.went_on:
        yield f"{level}: no write was acknowledged after the fault"


def longest_gap(ends: Iterable[float], since: float, until: float) -> float:
    """The longest time without an acknowledged write, from `since` on, in seconds."""
    moments = [since, *sorted(end for end in ends if since < end < until), until]
    return max(later - earlier for earlier, later in pairwise(moments))
