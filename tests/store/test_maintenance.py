"""Deleting, forgetting, purging, moving and listing records."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_state import NotFound, StateStore


async def test_what_never_was_cannot_be_deleted(store: Any) -> None:
    with pytest.raises(NotFound):
        await store.delete("nobody")
    with pytest.raises(NotFound):
        await store.session("nobody").fork("other")
    with pytest.raises(NotFound):
        await store.admin.export("nobody")


async def test_a_record_that_starts_anew_belongs_to_who_starts_it(store: Any) -> None:
    await store.session("s", user="a").set("n", 1)
    await store.delete("s")
    await store.session("s", user="b").create({"n": 2})
    await store.admin.archive()
    assert [row.user for row in await store.sessions()] == ["b"]
    assert await store.forget("a") == 0
    assert await store.session("s").get("n", fresh=True) == 2
    await store.delete("s")
    await store.session("s").create()
    await store.admin.archive()
    assert [row.user for row in await store.sessions()] == [None]


async def test_forgetting_nobody_changes_nothing(store: Any) -> None:
    await store.session("s", user="u").set("a", 1)
    assert await store.forget("nobody") == 0
    assert await store.session("s").get("a") == 1


def test_two_namespaces_share_servers_and_see_nothing_of_each_other(
    redis_url: str, archive_url: str, namespace: str
) -> None:
    one = StateStore.open(redis_url, archive=archive_url, namespace=f"{namespace}-1")
    two = StateStore.open(redis_url, archive=archive_url, namespace=f"{namespace}-2")
    with one, two:
        one.session("s", user="u").set("a", 1)
        two.session("s", user="u").set("a", 2)
        assert (
            one.admin.archive() + two.admin.archive(),
            one.admin.stats()["unarchived"],
            two.admin.stats()["unarchived"],
        )[1:] == (0, 0)
        assert [change.set for change in one.session("s").history()] == [{"a": 1}]
        assert two.forget("u") == 1
        assert one.session("s").get("a", fresh=True) == 1
        assert len(one.sessions()) == 1
        assert two.sessions() == []
