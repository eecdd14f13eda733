"""Takes records out of every tier for good: one, or all that a user owns with every fork of it.

Law: what is to be erased is noted in SQL before anything is touched, and until nothing is left of it: a tombstone, so
that no tier brings anything back; when that is archived, the rows in SQL; then Redis, its events and the journal's last
entries. Each step may be repeated, by anybody, in any order with others': who asked, a second request, or a replica
that archives the partition. A fork that is begun meanwhile meets the note and fails; one that had read its source
before is noted when it is archived, and goes too: its forks meet that note.

Design: section 15.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from distributed_state.cold.values import Erasure
from distributed_state.errors import Conflict, DurabilityUnknown, StateError
from distributed_state.records import deletion
from distributed_state.tiers import actors, forks_under_way
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ERASE, FORGET, Ref
from distributed_state.warm.answers import Draft
from distributed_state.warm.scripts import DROP

log = logging.getLogger(__name__)
_AT_ONCE = 1000
_ROUNDS = 20


async def forget(tiers: Tiers, owner: str) -> int:
    """Erase all that a user owns and all that was forked from it; how many records that were."""
    found: set[str] = set()
    made: set[str] = set()
    for _ in range(_ROUNDS):
        # Whatever was acknowledged before this look is found by it.
        await tiers.archiver.drain()
        noted = {each.record: each for each in await tiers.port.sql(tiers.cold.request_owned, owner, actors.present())}
        late = await tiers.port.sql(partial(tiers.cold.pending, names=sorted(made))) if made else []
        noted |= {each.record: each for each in late}
        if not noted:
            return len(found)
        made |= await finish(tiers, list(noted.values()))
        found.update(noted)
    raise Conflict(f"{len(found)} records are erased, and more are written all the time: end that and repeat it")


async def erase(
    tiers: Tiers, names: RecordKeys, hooks: Sequence[Callable[[Ref], Awaitable[None]]], *, actor: str = ""
) -> bool:
    """Erase one record; False if there was nothing of it. `hooks` are awaited if it is there and not deleted.

    `actor` is that of the handle, escaped: its tombstone says so, whichever replica carries this through.
    """
    text = names.ref.text
    found = False
    entry = await read_path.read(tiers, names, fresh=True)
    if entry.version and not entry.deleted:
        for hook in tuple(hooks):
            await hook(names.ref)
    # Of the other partitions too: a fork that was made before this was asked for is erased as well.
    await tiers.archiver.drain()
    noted = await tiers.port.sql(tiers.cold.request, text, actor or actors.present())
    made: set[str] = {text}
    for _ in range(_ROUNDS):
        if not noted:
            return found
        found = True
        made |= await finish(tiers, noted)
        # A rollback or a fork that had read what it brings back is noted when it is archived.
        await tiers.archiver.drain({tiers.keys.partition_of(each) for each in made})
        noted = await tiers.port.sql(partial(tiers.cold.pending, names=sorted(made)))
    raise Conflict(f"{text[:200]}: is erased, and brought back all the time: end that and repeat it")


async def finish(tiers: Tiers, noted: Sequence[Erasure]) -> set[str]:
    """Carry these erasures through from wherever they were left; the forks that were being made meanwhile.

    Raises the first error when all were tried.
    """
    errors: list[StateError] = []
    made: set[str] = set()
    for at in range(0, len(noted), _AT_ONCE):
        some = noted[at : at + _AT_ONCE]
        sources = [tiers.keys.of(Ref.parse(each.record)) for each in some]
        made |= await forks_under_way.made(tiers, sources)
        buried = await _bury(tiers, [each for each in some if not each.version], errors)
        if buried:
            await tiers.port.sql(tiers.cold.erase, buried)
        names = [each.record for each in some]
        erased = await tiers.port.sql(partial(tiers.cold.pending, names=names))
        done = {each.record: each.version for each in erased if each.version}
        if done:
            for worker in tuple(tiers.workers):
                await worker.erased()
            await _clean(tiers, {tiers.keys.of(Ref.parse(text)): version for text, version in done.items()})
            # The note goes last: a fork that has not found it by then is archived by then, and noted as late.
            made |= await forks_under_way.ended(tiers, sources)
            await tiers.archiver.drain(sorted({tiers.keys.partition_of(each) for each in made}))
            await tiers.port.sql(tiers.cold.complete, done)
    if errors:
        raise errors[0]
    return made


async def _bury(tiers: Tiers, noted: Sequence[Erasure], errors: list[StateError]) -> list[str]:
    """Put tombstones on these records and archive them; those for which that was possible."""
    writes: list[tuple[RecordKeys, Draft]] = []
    for each in noted:
        names = tiers.keys.of(Ref.parse(each.record))
        draft = deletion.tombstone(tiers.settings, tiers.codec_of(each.record), FORGET if each.forks else ERASE)
        draft.actor = each.actor
        draft.deleted = (
            "revive"  # one that is deleted already gets another: replicas that are away learn of the end by it
        )
        writes.append((names, draft))
    buried: set[int] = set()
    texts = []
    for (names, _), result in zip(writes, await write_path.commit_many(tiers, writes) if writes else [], strict=True):
        if isinstance(result, StateError) and not isinstance(result, DurabilityUnknown):
            errors.append(result)
        else:
            buried.add(names.partition)
            texts.append(names.ref.text)
    await tiers.archiver.drain(sorted(buried))
    return texts


async def _clean(tiers: Tiers, done: Mapping[RecordKeys, int]) -> None:
    """Leave nothing in Redis, or in this process, of what SQL has erased up to these versions."""
    partitions = sorted({names.partition for names in done})
    patiently = tiers.warm.patiently
    last = {names.text: version for names, version in done.items()}
    places = await patiently(tiers.warm.partitions.states, [tiers.keys.partition(each) for each in partitions])
    calls = []
    for names, version in done.items():
        notice = f"{places[names.partition].epoch} {version + 1} {tiers.replica} -"
        keys = [names.record, names.hydration, names.channel, names.event_keys[3], names.items]
        keys += [names.leases, names.lock]
        calls.append((DROP, keys, [version, notice, names.text]))
    for answer in await patiently(tiers.port.scripts, calls):
        if isinstance(answer, StateError):
            raise answer
    for partition in partitions:
        keys_of = tiers.keys.partition(partition)
        await patiently(tiers.stream.redact, keys_of, partial(_is_about, last))
        # The journal keeps its last entry; a mark takes the place of the tombstone there.
        await patiently(tiers.warm.partitions.mark, keys_of, places[partition].epoch)
    await tiers.archiver.drain(partitions)
    for names in done:
        tiers.hot.forget(names.ref.text)


def _is_about(last: Mapping[bytes, int], head: bytes) -> bool:
    """Whether an event is about one of these, but for their end, which every replica has to hear, and a new life."""
    _, type, subject, _, version, _ = head.split(b"\n")
    if subject not in last or int(version) > last[subject]:
        return False
    return type != b"conversation.deleted" or int(version) != last[subject]
