"""A connection is cut. Law: whoever waits for an answer gets it within `retry_for`, whatever was asked and when."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from below import tiers
from proxy import Proxy

from distributed_state import WarmUnavailable
from distributed_state.warm.scripts import RELEASE

Call = Callable[[Any], Awaitable[Any]]
pytestmark = pytest.mark.only(warm="single")


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def joined(store: Any, **options: Any) -> Any:
    events = store.events("*", **options)
    return await events.__aenter__()


async def forgotten(store: Any) -> None:
    """Somebody else each time: the session that all of these calls are about stays."""
    user = uuid.uuid4().hex
    await store.session(f"of {user}", user=user).set("a", 1)
    assert await store.forget(user) == 1


CALLS: dict[str, Call] = {
    "archive": lambda store: store.admin.archive(),
    "audit": lambda store: store.admin.audit(),
    "audit of one": lambda store: store.admin.audit(conversation="s"),
    "stats": lambda store: store.admin.stats(),
    "replicas": lambda store: store.admin.replicas(),
    "doctor": lambda store: store.admin.doctor(),
    "purge": lambda store: store.admin.purge(older_than=1000),
    "history": lambda store: store.session("s").history(),
    "at": lambda store: store.session("s").at(version=1),
    "messages": lambda store: store.session("s").messages(),
    "rollback": lambda store: store.session("s").rollback(version=1),
    "fork": lambda store: store.session("s").fork(uuid.uuid4().hex),
    "export": lambda store: store.admin.export("s"),
    "forget": forgotten,
    "emit": lambda store: store.emit("mail.sent"),
    "events": lambda store: joined(store),
    "events of a group": lambda store: joined(store, group="g"),
}


ALWAYS = ("archive", "audit", "stats", "replicas", "doctor", "purge", "history", "rollback", "events of a group")


async def cut_everywhere(store: Any, proxy: Proxy, call: Call) -> int:
    """Make a call, with what it says to Redis cut at the first thing, then at the second, and so on; how many."""
    port = tiers(store).port
    exchange, said_now, cut_at = port.exchange, 0, 0

    async def cut(commands: Any) -> Any:
        nonlocal said_now
        if threading.current_thread().name != "distributed-state-unarchived":  # it looks for itself, now and then
            said_now += 1
            if said_now == cut_at:
                proxy.cut()
        return await exchange(commands)

    port.exchange = cut
    try:
        while said_now >= cut_at:
            cut_at, said_now = cut_at + 1, 0
            # So that there is something to archive.
            await store.session("s", user="u").append(said("hello"))
            said_now = 0
            result = await call(store)
            if hasattr(result, "__aexit__"):
                await result.__aexit__(None, None, None)
    finally:
        port.exchange = exchange
    return cut_at - 1


@pytest.mark.replicas
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in CALLS]
)
async def test_a_connection_that_is_cut_at_any_moment_is_not_noticed(opener: Any, name: str) -> None:
    """On either API: the caller is given its answer."""
    with Proxy(opener.url) as proxy:
        # Fewer partitions, fewer moments; no background work, whose moments are not the caller's.
        given = {"partitions": 2, "archiver": False, "beat": 0.0, "max_staleness": 0, "durability": "memory"}
        store = await opener(url=proxy.url, **given)
        assert await cut_everywhere(store, proxy, CALLS[name]) >= 1
        await opener.close()


@pytest.mark.replicas
async def test_a_lock_whose_release_was_cut_off_is_free_at_once(opener: Any) -> None:
    """Not only when it has run out: the next waits for it."""
    given = {"archiver": False, "beat": 0.0, "max_staleness": 0}
    with Proxy(opener.url) as proxy:
        store, other = await opener(url=proxy.url, **given), await opener(**given)
        await store.session("s").set("n", 1)
        for lost in (False, True):
            async with store.session("s").lock(ttl=30):
                if lost:
                    proxy.lose(RELEASE.sha).go.set()
                else:
                    proxy.cut()
            async with other.session("s").lock(wait=2):
                pass
        assert (tiers(store).leases.lost, tiers(other).leases.lost) == (0, 0)
        await opener.close()


@pytest.mark.replicas
async def test_a_lock_is_not_given_back_for_longer_than_it_lives(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, beat=0.0)
        async with store.session("s").lock(ttl=0.5):
            proxy.close()
            began = time.monotonic()
        assert time.monotonic() - began < 2
        await opener.close()


@pytest.mark.replicas
async def test_without_retry_the_same_calls_fail(opener: Any) -> None:
    """Negative control."""
    with Proxy(opener.url) as proxy:
        given = {"partitions": 2, "archiver": False, "beat": 0.0, "max_staleness": 0, "durability": "memory"}
        store = await opener(url=proxy.url, retry_for=0, **given)
        for name in ("archive", "audit", "stats", "replicas", "purge"):
            with pytest.raises(WarmUnavailable):
                await cut_everywhere(store, proxy, CALLS[name])
        await opener.close()
