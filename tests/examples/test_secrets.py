"""Secrets and access, as an application uses them."""

from __future__ import annotations

from typing import Any

import pytest
from below import everything_in_redis, redis_of
from sync_api import core

from distributed_state import AccessDenied, DecryptionFailed, Encryption, KeyRing, Request


async def test_chosen_fields_and_messages_are_encrypted(opener: Any) -> None:
    """Redis, SQL, exports and what replicas tell one another hold only ciphertext."""
    keys = KeyRing({"2026-11": b"thirty-two bytes from a vault..."})
    store = await opener(encryption=Encryption(keys, fields=("ssn", "card*"), messages=True))

    session = store.session("user-123", user="u1")
    await session.write(
        set={"ssn": "078-05-1120", "card_number": "4111 1111 1111 1111", "city": "Lisbon"},
        append=[{"role": "user", "content": "my card is 4111 1111 1111 1111"}],
    )
    assert await session.get("ssn") == "078-05-1120"

    with redis_of(store) as client:
        stored = everything_in_redis(client, core(store).settings.namespace)
    assert b"078-05-1120" not in stored
    assert b"4111 1111" not in stored  # four digits alone are in some id now and then
    assert b"Lisbon" in stored


@pytest.mark.replicas
async def test_a_key_is_replaced_while_workers_go_on(opener: Any) -> None:
    """First every worker gets the new key, then it becomes the current one, then `reencrypt`, then the old one goes."""
    old, new = b"o" * 32, b"n" * 32
    worker = await opener(encryption=Encryption(KeyRing({"2026-11": old, "2026-12": new}, current="2026-11")))
    await worker.session("user-123").set("ssn", "078-05-1120")

    rotated = await opener(encryption=Encryption(KeyRing({"2026-11": old, "2026-12": new})))
    done = await rotated.admin.reencrypt()
    assert (done.records, done.failed) == (1, 0)
    assert await worker.session("user-123").get("ssn", fresh=True) == "078-05-1120"

    later = await opener(encryption=Encryption(KeyRing({"2026-12": new})))
    assert await later.session("user-123").get("ssn") == "078-05-1120"
    assert (await later.session("user-123").history())[0].set == {"ssn": "078-05-1120"}


@pytest.mark.replicas
async def test_a_store_that_was_plain_is_migrated(opener: Any) -> None:
    """Plain values are refused, so that nobody slips one in; for the migration they are accepted."""
    plain = await opener()
    await plain.session("user-123").set("ssn", "078-05-1120")

    keys = KeyRing({"2026-11": b"k" * 32})
    strict = await opener(encryption=Encryption(keys))
    with pytest.raises(DecryptionFailed):
        await strict.session("user-123").get("ssn")

    migrating = await opener(encryption=Encryption(keys, accept_plaintext=True))
    assert await migrating.session("user-123").get("ssn") == "078-05-1120"
    await migrating.admin.reencrypt()
    assert await strict.session("user-123").get("ssn", fresh=True) == "078-05-1120"


async def test_a_policy_says_who_may_do_what(opener: Any) -> None:
    """Support reads everything but the social security number, users do as they like with what is theirs."""

    def policy(request: Request) -> bool:
        if request.actor == "service":
            return True
        if request.actor.startswith("support:"):
            return request.action == "read" and request.field != "ssn"
        return request.action != "admin" and request.user is not None and request.actor == f"user:{request.user}"

    store = await opener(access=policy)
    mine = store.session("s1", user="ann", actor="user:ann")
    await mine.set_many({"ssn": "078-05-1120", "city": "Lisbon"})
    assert await mine.get("ssn") == "078-05-1120"

    support = store.session("s1", actor="support:7")
    assert await support.get("city") == "Lisbon"
    for denied in (
        lambda: support.get("ssn"),
        lambda: support.get_all(),
        lambda: support.history(),
        lambda: support.set("city", "Porto"),
        lambda: store.session("s1", user="ann", actor="user:bob").get("city"),
        lambda: store.admin.export("s1"),
    ):
        with pytest.raises(AccessDenied):
            await denied()
