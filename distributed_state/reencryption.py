"""Everything stored is encrypted anew under the current key.

Law: SQL first, then what Redis holds, so that nothing read back from SQL is old. What is done already is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from distributed_state import codec
from distributed_state.errors import ConfigurationError, CorruptState, StateError, WarmUnavailable
from distributed_state.keys import RecordKeys
from distributed_state.model import Ref, is_value
from distributed_state.tiers import Tiers
from distributed_state.warm import EVICT

log = logging.getLogger(__name__)
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Reencrypted:
    """How many records were looked at, values encrypted anew in SQL, copies taken out of Redis, records unreadable."""

    records: int = 0
    values: int = 0
    copies: int = 0
    failed: int = 0


Progress = Callable[[Reencrypted], None]


async def reencrypt(tiers: Tiers, dry_run: bool, progress: Progress | None) -> Reencrypted:
    """All records of the namespace, in the order of their texts."""
    if not tiers.form("").seals:
        raise ConfigurationError("reencrypt: this store has no keys; give encryption= or DISTRIBUTED_STATE_KEYS")
    await tiers.archiver.drain()
    run = _Run(tiers, dry_run, progress or (lambda done: None))
    await run.each(run.archived)
    # Not before all of SQL is done: a copy in Redis holds messages that were written under other records.
    await run.each(run.copied)
    if not dry_run:
        await _forget_journal(tiers)
    return run.done


class _Run:
    def __init__(self, tiers: Tiers, dry_run: bool, progress: Progress) -> None:
        self._tiers, self._dry_run, self._progress = tiers, dry_run, progress
        self._unreadable: set[str] = set()
        self.done = Reencrypted()

    async def each(self, step: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        after = ""
        while texts := await self._tiers.port.sql(self._tiers.cold.names, after):
            await step(texts)
            self._progress(self.done)
            after = texts[-1]

    async def archived(self, texts: Sequence[str]) -> None:
        """What SQL holds of these records."""
        for text in texts:
            values = 0
            try:
                values = await self._rewrite(text)
            except CorruptState as error:
                log.warning("%s", error)
                self._unreadable.add(text)
            done = self.done
            self.done = Reencrypted(done.records + 1, done.values + values, done.copies, len(self._unreadable))

    async def _rewrite(self, text: str) -> int:
        tiers, form = self._tiers, self._tiers.form(text)

        def again(source: str, name: str, data: bytes) -> bytes:
            own = form if source == text else form.of(source)
            return own.carry(data, name, own) if own.stale(data, name) else data

        def rewrite() -> int:
            return tiers.cold.rewrite(text, again, keep=self._dry_run)

        return await tiers.port.sql(rewrite)

    async def copied(self, texts: Sequence[str]) -> None:
        """What Redis holds of these records."""
        tiers = self._tiers
        many = [tiers.keys.of(Ref.parse(text)) for text in texts]
        answers = await tiers.port.exchange([(b"HGETALL", names.record) for names in many])
        for names, answer in zip(many, answers, strict=True):
            if isinstance(answer, Exception):
                raise WarmUnavailable(f"{names.ref.text[:200]}: {answer}") from answer
            if names.ref.text not in self._unreadable and self._old(names, answer):
                if not self._dry_run:
                    await self._evict(names)
                self.done = replace(self.done, copies=self.done.copies + 1)

    def _old(self, names: RecordKeys, pairs: Sequence[bytes]) -> bool:
        form = self._tiers.form(names.ref.text)
        for name, data in zip(pairs[::2], pairs[1::2], strict=True):
            if is_value(name):
                old = form.stale(data, codec.decode_key(name))
            else:
                old = name[:2] == b"#m" and name[2:].isdigit() and form.stale(data, codec.MESSAGE)
            if old:
                return True
        return False

    async def _evict(self, names: RecordKeys) -> None:
        """Let the record be read back from SQL. What was written meanwhile under an old key is done first."""
        tiers = self._tiers
        for _ in range(_TRIES):
            version = await tiers.port.command(b"HGET", names.record, b"#v")
            told = f"{tiers.epoch(names.partition)} {int(version or 0) + 1} {tiers.replica} -"
            answer = (await tiers.port.scripts([(EVICT, [names.record, names.hydration, names.channel], [told])]))[0]
            if isinstance(answer, StateError):
                raise answer
            tiers.hot.forget(names.ref.text)
            if answer[0] == b"ok":
                return
            await tiers.archiver.drain()
            try:
                await self._rewrite(names.ref.text)
            except CorruptState as error:
                log.warning("%s", error)
        raise WarmUnavailable(f"{names.ref.text[:200]}: changes faster than it can be archived; run it again")


async def _forget_journal(tiers: Tiers) -> None:
    """The journal keeps its last entry; a mark takes its place."""
    partitions = [tiers.keys.partition(number) for number in range(tiers.keys.partitions)]
    for number, place in (await tiers.warm.places(partitions)).items():
        if place.epoch:
            await tiers.warm.mark(tiers.keys.partition(number), place.epoch)
    await tiers.archiver.drain()
    await tiers.port.sql(tiers.cold.sync)
