"""What a doctor sees of the fleet: who archives, and how far behind. Law: it is read from Redis, which everybody tells.

Design: section 27.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from distributed_state.errors import StateError
from distributed_state.store import failed_starts
from distributed_state.store.finding import Finding
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.results import Replica
from distributed_state.warm.answers import PartitionState

_OLD = 60.0  # seconds that a commit waits for SQL before somebody should look
_RECENT = 600.0  # seconds for which what Redis lost is news
_NAMED = 5  # partitions, in one line
_STOPPED = "see the message: this archiver makes no progress until then"


def here(tiers: Tiers) -> list[Finding]:
    """What stops the archiver of a store whose Redis is in its own process: nobody else archives, nor hears of it."""
    failure = tiers.archiver.failure
    return [Finding("archiver", False, failure, _STOPPED)] if failure else []


async def present(tiers: Tiers) -> tuple[list[Replica], list[Finding]]:
    """The replicas that are there; or none, and what is to be said if nobody can tell."""
    try:
        return await tiers.presence.replicas(), []
    except StateError as error:
        return [], [Finding("replicas", False, str(error), "see the message: nobody knows who is there")]


async def fleet(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """Who archives, whether one of them fails or could not start, and whether all run the same release."""
    return [*_archivers(tiers, replicas), *await _unstarted(tiers), *_lost(tiers, replicas), _versions(replicas)]


async def _unstarted(tiers: Tiers) -> list[Finding]:
    """Who wants to be one of them and could not start."""
    advice = "see the message; it is forgotten as soon as one starts there, or after ten minutes"
    try:
        failed = await failed_starts.lately(tiers)
    except StateError as error:
        return [Finding("starts", False, str(error), advice)]
    return [
        Finding(
            f"start on {each.host}", False,
            f"process {each.pid}, release {each.version}, could not start {each.ago:.0f} s ago: {each.why}",
            advice,
        )
        for each in failed
    ]  # fmt: skip


def _archivers(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """Those that say with their beats that they have partitions to archive; this store may be one without a beat."""
    count = tiers.keys.partitions
    at_work = [each for each in replicas if each.positions.get("archives", 0)]
    taken = min(count, sum(each.positions["archives"] for each in at_work))
    here = tiers.settings.archiver
    found = f"{len(at_work)} of {len(replicas)} replicas archive {taken} of {count} partitions"
    advice = "start `distributed-state archiver`: until then nothing reaches SQL, and full journals refuse writes"
    findings = [Finding("archivers", bool(at_work) or here, found, advice)]
    return findings + [
        Finding(f"archiver {each.id}", False, f"{each.host}, process {each.pid}: {each.archiving}", _STOPPED)
        for each in replicas
        if each.archiving
    ]


def _lost(tiers: Tiers, replicas: list[Replica]) -> list[Finding]:
    """What Redis lost lately, as those say who started its partitions anew; after a while it is history."""
    ago = tiers.clock.now() - max((each.stats.get("restarted_at", 0) for each in replicas), default=0)
    if ago > _RECENT:
        return []
    count = sum(each.stats.get("restarted", 0) for each in replicas)
    found = f"Redis lost data, or may have: partitions were started anew, {count} so far, the last {ago:.0f} s ago"
    advice = "its log says why: emptied, restarted without its file, or replaced; SQL has what was archived"
    return [Finding("lost data", False, found, advice)]


def _versions(replicas: list[Replica]) -> Finding:
    found = Counter(each.version or "unknown" for each in replicas)
    shown = ", ".join(f"{number} of {version}" for version, number in sorted(found.items()))
    return Finding("releases", len(found) < 2, shown or "no replica is there", "finish the upgrade, or take it back")


@dataclass(frozen=True, slots=True)
class Journals:
    """How far partitions are, those whose server answers, and of those that wait for SQL how old their oldest is."""

    places: dict[int, PartitionState]
    ages: dict[int, float]  # seconds, by the server's clock

    @property
    def behind(self) -> dict[int, PartitionState]:
        """Those of which something waits."""
        return {each: place for each, place in self.places.items() if place.offset > place.archived}


async def diverged(tiers: Tiers, replicas: Iterable[Replica]) -> dict[int, str]:
    """Of which partitions nothing is archived, whoever archives them, and why: their journals and SQL do not fit.

    By what SQL and the journals say, and by what those who archive them say, here and with their beats.
    """
    reported = {int(each): why for replica in replicas for each, why in replica.diverged.items() if each.isdecimal()}
    here = dict(tiers.archiver.diverged)
    try:
        behind = await tiers.recovery.behind()
    except StateError:
        return reported | here  # whichever server is away is named elsewhere
    # One that somebody else archives by now is theirs to report.
    mine = behind.keys() | set(tiers.archiver.mine)
    return behind | reported | {each: why for each, why in here.items() if each in mine}


async def look(tiers: Tiers, partitions: Iterable[int] | None = None) -> Journals:
    """Look at these journals, or at all: two exchanges at most. Raises WarmUnavailable if no server answers."""
    asked = range(tiers.keys.partitions) if partitions is None else partitions
    keys = [tiers.keys.partition(each) for each in asked]
    found = Journals(await tiers.warm.partitions.reachable_states(keys) if keys else {}, {})
    return replace(found, ages=await ages(tiers, found.behind))


async def lag(tiers: Tiers) -> list[Finding]:
    """What is not archived yet: how much, how old, and how full it makes the journals."""
    advice = "add archivers, or make SQL faster; `replicas` shows who archives"
    try:
        journals = await look(tiers)
    except StateError as error:
        return [Finding("archive lag", False, str(error), "see the message")]
    behind, old = journals.behind, journals.ages
    waiting = sum(place.offset - place.archived for place in behind.values())
    fills = {each: place.fill(tiers.settings) for each, place in behind.items()}
    fullest = max(fills.values(), default=0.0)
    found = f"{waiting} commit{'s' * (waiting != 1)}"
    found += f", the oldest {max(old.values()):.1f} s old" if old else ""
    found += f", the fullest journal {fullest:.0%} full" if behind else ""
    late = sorted(each for each, seconds in old.items() if seconds > _OLD or fills[each] > 0.5)
    found += f"; partitions {', '.join(map(str, late[:_NAMED]))}{', ...' * (len(late) > _NAMED)}" if late else ""
    return [Finding("archive lag", not late, found, advice)]


async def ages(tiers: Tiers, behind: Mapping[int, PartitionState]) -> dict[int, float]:
    """How old the oldest commit of each partition is that waits for SQL, in seconds, by the server's clock."""
    if not behind:
        return {}
    asked = [(tiers.keys.partition(each), place.archived + 1) for each, place in behind.items()]
    journals = await tiers.warm.partitions.journals(asked, 1)
    now = tiers.clock.now()
    return {
        each: max(0.0, now - journal.onward[0].time_ms / 1000)
        for each, journal in zip(behind, journals, strict=True)
        if journal.onward
    }
