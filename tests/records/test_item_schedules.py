"""Items across the tiers, by random schedules. Law: each read says what was so at one version between its two ends.

What others do falls between the two tiers that one read or one precondition looks at. With each guard taken out, most
schedules go wrong.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from below import keys_of, redis_of, tiers
from controls import sabotage
from sync_api import core

from distributed_state import Conflict
from distributed_state.tiers import items as item_tiers

QUIET: dict[str, Any] = {"archiver": False, "durability": "memory"}
KEYS = [f"k{number}" for number in range(8)]
SMALL = ("mark_archived", "local window_items = 64", "local window_items = 2")
State = dict[str, int]


class Schedule:
    """One record, what it should show at each version, and what happens to it."""

    def __init__(self, store: Any, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store, self.core = store, core(store)
        self.names = keys_of(store, "u", "user")
        self.record = self.core.user("u")
        self.items = self.record.items("x")
        self.truth: list[State] = [{}]
        self.busy = False
        self.count = 0

    @property
    def now(self) -> State:
        return self.truth[-1]

    def note(self, version: int, state: State) -> None:
        assert version == len(self.truth), "a version is one commit"
        self.truth.append(state)

    # What others do

    async def put(self) -> None:
        self.count += 1
        key, value = self.chance.choice(KEYS), self.count
        if self.chance.random() < 0.75:
            self.note(await self.items.put(key, value), {**self.now, key: value})
        else:
            left = {name: value for name, value in self.now.items() if name != key}
            self.note(await self.items.delete(key), left)

    async def rollback(self) -> None:
        if len(self.truth) > 2:
            version = self.chance.randint(1, len(self.truth) - 1)
            self.note(await self.record.rollback(version=version), self.truth[version])

    async def clear(self) -> None:
        self.note(await self.record.clear(items=True), {})

    async def archive(self) -> None:
        """Something may be put behind what is archived, before that is noted in Redis."""
        partitions = tiers(self.store).warm.partitions
        plain = partitions.mark_archived

        async def mark_archived(calls: Any) -> Any:
            for _ in range(self.chance.choice((0, 0, 1, 4))):
                await self.put()
            return await plain(calls)

        partitions.mark_archived = mark_archived  # type: ignore[method-assign]
        try:
            await tiers(self.store).archiver.drain([self.names.partition])
        finally:
            del partitions.mark_archived

    async def evict(self) -> None:
        """Redis may take what has a TTL, each key for itself."""
        with redis_of(self.store) as client:
            for key in self.chance.choice(
                [(self.names.record,), (self.names.items,), (self.names.record, self.names.items)]
            ):
                if client.pttl(key) > 0:
                    client.delete(key)

    async def other(self, most: int = 3) -> None:
        for _ in range(self.chance.randint(0, most)):
            kind = self.chance.random()
            if kind < 0.5:
                await self.put()
            elif kind < 0.78:
                await self.archive()
            elif kind < 0.9:
                await self.evict()
            elif kind < 0.96:
                await self.rollback()
            else:
                await self.clear()

    @asynccontextmanager
    async def meddled(self) -> AsyncIterator[None]:
        """While SQL is looked into for items, others do something, before it and after it."""
        home = tiers(self.store)
        plain = home.port.sql

        async def sql(call: Callable[..., Any], *given: Any) -> Any:
            if getattr(call, "func", None) not in (home.cold.items, home.cold.list_items) or self.busy:
                return await plain(call, *given)
            self.busy = True
            try:
                await self.other()
                found = await plain(call, *given)
                await self.other(2)
                return found
            finally:
                self.busy = False

        home.port.sql = sql  # type: ignore[method-assign]
        try:
            yield
        finally:
            del home.port.sql

    # What is checked

    async def list(self) -> None:
        first = len(self.truth) - 1
        async with self.meddled():
            page = await self.items.list(reverse=self.chance.random() < 0.3)
        found = {item.key: item.value for item in page.items}
        assert found in self.truth[first:], (first, found, self.truth[first:])
        assert page.next is None

    async def pages(self) -> None:
        reverse, limit = self.chance.random() < 0.5, self.chance.randint(1, 3)
        found: list[str] = []
        at: str | None = None
        for _ in range(50):
            place = {} if at is None else {"before" if reverse else "after": at}
            page = await self.items.list(limit=limit, reverse=reverse, **place)
            assert len(page.items) <= limit
            found += [item.key for item in page.items]
            at = page.next
            if at is None:
                break
        assert found == sorted(self.now, reverse=reverse)

    async def get(self) -> None:
        wanted = self.chance.sample(KEYS, 3)
        first = len(self.truth) - 1
        async with self.meddled():
            found = await self.items.get_many(wanted)
        shown = [{key: state[key] for key in wanted if key in state} for state in self.truth[first:]]
        assert found in shown, (wanted, found, shown)

    async def put_if_absent(self) -> None:
        key, first = self.chance.choice(KEYS), len(self.truth) - 1
        self.count += 1
        value = self.count
        async with self.meddled():
            try:
                version = await self.items.put(key, value, if_absent=True)
            except Conflict:
                assert any(key in state for state in self.truth[first:]), key
                return
        assert key not in self.now, (key, self.now)
        self.note(version, {**self.now, key: value})

    async def put_missing(self) -> None:
        wanted = self.chance.sample(KEYS, 3)
        self.count += 1
        value = self.count
        async with self.meddled():
            put = await self.items.put_missing(dict.fromkeys(wanted, value))
        assert put == set(wanted) - self.now.keys(), (put, wanted, self.now)
        self.truth.append({**self.now, **dict.fromkeys(put, value)})

    async def swap(self) -> None:
        """Whatever is done to an item meanwhile is noticed."""
        key = self.chance.choice(KEYS)
        async with self.meddled():
            item = await self.items.find(key)
        if item is None:
            return
        await self.other(2)
        self.count += 1
        value = self.count
        async with self.meddled():
            try:
                version = await self.items.put(key, value, equals=item)
            except Conflict:
                return
        assert self.now.get(key) == item.value, (key, item, self.now)
        self.note(version, {**self.now, key: value})

    async def past(self) -> None:
        version = self.chance.randint(1, len(self.truth) - 1) if len(self.truth) > 1 else 0
        if version:
            page = await self.items.list(version=version)
            assert {item.key: item.value for item in page.items} == self.truth[version], version
            key = self.chance.choice(KEYS)
            assert await self.items.get(key, version=version) == self.truth[version].get(key), version

    async def fork(self) -> None:
        """It shows what its source showed, whatever that does from then on."""
        if len(self.truth) < 2:
            return
        version = self.chance.randint(1, len(self.truth) - 1)
        self.count += 1
        await self.record.fork(f"f{self.count}", version=version)
        expected = dict(self.truth[version])
        fork = self.core.user(f"f{self.count}").items("x")
        for _ in range(3):
            page = await fork.list()
            assert {item.key: item.value for item in page.items} == expected
            key = self.chance.choice(KEYS)
            try:
                await fork.put(key, -1, if_absent=True)
                assert key not in expected
                expected[key] = -1
            except Conflict:
                assert key in expected
            await self.other(2)

    async def run(self, steps: int) -> None:
        checks = [
            self.list,
            self.get,
            self.put_if_absent,
            self.put_missing,
            self.swap,
            self.pages,
            self.past,
            self.fork,
        ]
        for _ in range(steps):
            await self.other()
            await self.chance.choices(checks, [5, 4, 6, 3, 3, 2, 2, 1])[0]()
        assert await self.record.version(fresh=True) == len(self.truth) - 1


SEEDS = [0, *(pytest.param(n, marks=pytest.mark.wide if n < 5 else pytest.mark.full) for n in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
async def test_items_are_what_they_were_at_one_version(opener: Any, seed: int) -> None:
    with sabotage(*SMALL):
        await Schedule(await opener(**QUIET), seed).run(40)


def read_head(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """SQL is asked for its newest, not for what was so at the version that Redis said."""
    cold = tiers(store).cold
    for name in ("items", "list_items"):
        plain = getattr(cold, name)

        def newest(record: str, version: int | None, *rest: Any, plain: Any = plain, **more: Any) -> Any:
            return plain(record, None, *rest, **more)

        newest.__name__ = name
        monkeypatch.setattr(cold, name, newest)


def sql_first(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """SQL is asked before Redis: what leaves Redis in between is in neither answer."""
    home = tiers(store)
    plain = home.warm.list_items
    kept: list[Any] = []
    asked = home.cold.list_items

    async def listed(keys: Any, collection: bytes, prefix: bytes, *rest: Any, **more: Any) -> Any:
        wanted = item_tiers.Range(collection, prefix, *rest, more["reverse"])
        kept[:] = [asked(keys.ref.text, None, wanted, more["limit"], more["size"])]
        schedule = vars(home)["schedule"]
        if not schedule.busy:
            schedule.busy = True
            await schedule.other()
            schedule.busy = False
        return await plain(keys, collection, prefix, *rest, **more)

    def list_items(
        record: str, version: int | None, wanted: Any, limit: int, size: int, known: Any = (), **past: Any
    ) -> Any:
        if past:
            return asked(record, version, wanted, limit, size, known, **past)
        found = kept[0]
        rows = [row for row in found.rows if row[0] not in known] if found else []
        return item_tiers.FoundPage(10**9, rows, False)

    monkeypatch.setattr(home.warm, "list_items", listed)
    monkeypatch.setattr(home.cold, "list_items", list_items)


GUARDS: dict[str, tuple[str, str, str] | Callable[[pytest.MonkeyPatch, Any], None]] = {
    "what SQL said is as new as the floor": ("commit", "archived - needed >= 0", "archived - needed >= -1000"),
    "what is not archived stays": ("mark_archived", "if of + 0 > version or", "if"),
    "the log names an item once": ("commit", "left[#left + 1] = 'k' .. string.match(before, '^%d+')", ""),
    "keys that left are not absent": ("commit", "behind(string.sub(name, middle + 1), string.sub(highest, 2))", "true"),
    "the version that Redis said": read_head,
    "Redis first": sql_first,
}


@pytest.mark.wide
@pytest.mark.parametrize("guard", GUARDS)
async def test_without_a_guard_a_schedule_goes_wrong(opener: Any, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = GUARDS[guard]
    for seed in range(40):
        opener.namespace = f"{opener.namespace[:9]}{seed}"
        store = await opener(**QUIET)
        schedule = Schedule(store, seed)
        with ExitStack() as stack:
            stack.enter_context(sabotage(*SMALL))
            patch = stack.enter_context(monkeypatch.context())
            if isinstance(broken, tuple):
                stack.enter_context(sabotage(*broken))
            else:
                patch.setattr(tiers(store), "schedule", schedule, raising=False)
                broken(patch, store)
            try:
                await schedule.run(25)
            except AssertionError:
                return
        await store.close()
    pytest.fail(f"nothing went wrong without this: {guard}")
