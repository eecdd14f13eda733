"""Config of agents: from files and from the fleet; a broken one never replaces a good one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from below import until
from pydantic import BaseModel
from recording_agents import Recorder, ask, hosted, made, now

from distributed_state import ConfigurationError, InvalidValue


class Checked(Recorder):
    """Takes only what its model takes."""

    class Config(BaseModel):
        poll_interval: float = 60.0
        endpoint: str = "https://example.com"


def write(path: Path, text: str, *, age: float = 0.0) -> Path:
    path.write_text(text, encoding="utf-8")
    if age:
        past = path.stat().st_mtime - age
        os.utime(path, (past, past))
    return path


async def test_a_file_is_read_at_the_start_and_again_when_asked(store: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "agents.yaml", "poll_interval: 5\nfeatures: [a]\n")
    agent = made(Recorder, store, config=file)
    async with hosted(agent):
        assert agent.config == {"poll_interval": 5, "features": ["a"]}
        await ask(agent, "reload")
        write(file, "features: [a]   # the same\npoll_interval: 5\n")
        await ask(agent, "reload")
        assert agent.saw == [], "it did not change"
        write(file, "poll_interval: 5.0\nextra: true\n")
        await ask(agent, "reload")
        expected = {"poll_interval": 5.0, "extra": True}
        assert agent.saw == [("config", expected, {"poll_interval", "features", "extra"})]
        assert agent.config == expected


@pytest.mark.only(warm="fake", cold="memory")
async def test_a_list_of_agents_in_a_file_is_read_as_the_mapping_is(store: Any, tmp_path: Path) -> None:
    mapping = "model: small\nagents:\n  Recorder: {interval: 5}\n  Other: {model: large}\n"
    entries = "model: small\nagents:\n  - {name: Recorder, interval: 5}\n  - {name: Other}\n  - {name: [odd]}\n"
    file = write(tmp_path / "agents.yaml", mapping)
    agent = made(Recorder, store, config=file)
    async with hosted(agent):
        assert agent.config == {"model": "small", "interval": 5}
        write(file, entries)
        await ask(agent, "reload")
        assert (agent.config, agent.saw) == ({"model": "small", "interval": 5}, []), "nothing changed"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "poll_interval: 5\n  oops: [1\n", r"c\.yaml, line 2, column"),
        ("c.json", '{"poll_interval": 5,\n oops}', r"c\.json, line 2, column 2"),
        ("c.yaml", "- a\n- b\n", "must hold an object"),
        ("c.yaml", "poll_interval: soon\n", r"c\.yaml: poll_interval: Input should be a valid number"),
        ("c.yaml", "{1: 2}\n", "with string keys"),
        ("c.yaml", "a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("c.yaml", None, "cannot be read"),
    ],
)
async def test_a_broken_file_keeps_the_old_config_and_says_where(
    store: Any, tmp_path: Path, caplog: Any, name: str, text: str | None, words: str
) -> None:
    file = write(tmp_path / name, '{"poll_interval": 7}')
    agent = made(Checked, store, config=str(file))
    async with hosted(agent):
        write(file, text) if text is not None else file.unlink()
        await ask(agent, "reload")
        assert agent.config == Checked.Config(poll_interval=7)
        assert agent.saw == []
        errors = [r for r in caplog.records if r.levelname == "ERROR"]
        assert len(errors) == 1
        assert errors[0].getMessage().startswith("the config file is broken: the old config stays")
        with pytest.raises(ConfigurationError, match=words):
            raise ConfigurationError(errors[0].fields["error"])
        write(file, '{"poll_interval": 8}')
        await ask(agent, "reload")
        assert agent.config.poll_interval == 8
    if text is not None:
        write(file, text)
        with pytest.raises(ConfigurationError, match=words):
            async with hosted(made(Checked, store, config=file)):
                pass


async def test_several_agents_share_a_file(store: Any, tmp_path: Path) -> None:
    text = {"level": 1, "agents": {"one": {"level": 2}, "two": {"colour": "red"}}}
    file = write(tmp_path / "agents.json", json.dumps(text))
    many = [made(Recorder, store, name=name, config=file) for name in ("one", "two", "three")]
    async with hosted(*many):
        assert [agent.config for agent in many] == [{"level": 2}, {"level": 1, "colour": "red"}, {"level": 1}]
        text["agents"] = [{"name": "two", "colour": "blue"}]
        await store.admin.reload_config(text)
        await until(lambda: many[1].saw)
        assert many[1].config == {"level": 1, "colour": "blue"}


async def test_a_file_is_watched_where_signals_are_not(store: Any, tmp_path: Path) -> None:
    class Watching(Recorder):
        watch_config = 0.05

    file = write(tmp_path / "c.yaml", "a: 1")
    agent = made(Watching, store, config=file)
    async with hosted(agent):
        write(file, "a: 22")
        await until(lambda: agent.saw == [("config", {"a": 22}, {"a"})])


async def test_what_a_config_cannot_be_is_refused(store: Any, tmp_path: Path) -> None:
    for wrong in (7, ["a"], None):
        with pytest.raises(InvalidValue):
            await store.admin.reload_config(wrong)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        await store.admin.reload_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigurationError):
        await store.admin.reload_config({"a": float("nan")})
    with pytest.raises(InvalidValue):
        await store.admin.reload_config({}, agent=7)
    assert await store.app("agent-config").version() == 0
    with pytest.raises(ConfigurationError, match="a pydantic model class"):
        made(type("Odd", (Recorder,), {"Config": {"a": int}}), store)


@pytest.mark.replicas
async def test_a_config_reaches_every_replica_and_the_agent_it_is_for(opener: Any, tmp_path: Path) -> None:
    here, there = await opener(), await opener()
    file = write(tmp_path / "new.yaml", "poll_interval: 3\n")
    first, second, other = made(Checked, here), made(Checked, there), made(Recorder, there, name="other")
    async with hosted(first), hosted(second, other):
        await here.admin.reload_config(file)
        for agent in (first, second, other):
            await until(lambda agent=agent: agent.saw)
        assert first.config == second.config == Checked.Config(poll_interval=3)
        await there.admin.reload_config({"colour": "red"}, agent="other")
        await until(lambda: len(other.saw) == 2)
        await here.admin.reload_config({"poll_interval": "broken"})
        await here.admin.reload_config({"poll_interval": 4})
        await until(lambda: len(first.saw) == 2 and len(second.saw) == 2)
        assert first.config == second.config == Checked.Config(poll_interval=4), "the broken one changed nothing"
        assert other.config == {"poll_interval": 4}


async def test_the_fleet_is_told_which_names_of_a_config_changed_and_no_value(store: Any) -> None:
    """Events reach whoever may listen; the record, whoever may read it."""
    agent = made(Recorder, store)
    async with hosted(agent):
        await store.admin.reload_config({"api_key": "sk-5ecret", "level": 1, "same": [1]})
        await store.admin.reload_config({"api_key": "sk-another", "level": 1, "same": [1]}, agent="notes")
        await store.admin.reload_config({"api_key": "sk-an0ther", "same": [1]})
        await until(lambda: agent.saw and agent.saw[-1][1] == {"api_key": "sk-an0ther", "same": [1]})
    told = [event.data for event in await store.admin.audit(type="config.changed")]
    assert "sk-" not in str(told)
    everything = ["api_key", "level", "same"]
    assert [(each["agent"], each["changed"]) for each in told] == [
        ("", everything), ("notes", everything), ("", ["api_key", "level"]),
    ]  # fmt: skip
    assert len({each["digest"] for each in told}) == 3


def test_a_relative_file_is_read_again_wherever_the_program_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed_state.events.config import Config

    (tmp_path / "agent.yaml").write_text("a: 1")
    monkeypatch.chdir(tmp_path)
    config = Config("x", None, "agent.yaml")
    config.begin(None)
    monkeypatch.chdir("/")
    (tmp_path / "agent.yaml").write_text("a: 23")
    assert config.touched()
    assert config.reload() == {"a"}
    assert config.value == {"a": 23}


def test_what_was_given_once_is_not_taken_again_when_the_record_moves_on_for_others() -> None:
    """Else a later file would be overwritten by it."""
    from distributed_state.events.config import Config, Spread

    config = Config("x", None, {"a": 0})
    assert config.take(Spread({"a": 1}, 1.0, 1)) == {"a"}
    config._put({"a": "from a later file"})
    assert config.take(Spread({"a": 1}, 1.0, 2)) == set()
    assert config.value == {"a": "from a later file"}


@pytest.mark.replicas
async def test_of_many_reloads_at_once_all_replicas_end_with_the_same(opener: Any) -> None:
    stores = [await opener() for _ in range(3)]
    many = [made(Recorder, store) for store in stores]
    async with hosted(many[0]), hosted(many[1]), hosted(many[2]):
        for round in range(5):
            before = await stores[0].app("agent-config").version(fresh=True)
            await asyncio.gather(
                *(store.admin.reload_config({"round": round, "by": by}) for by, store in enumerate(stores))
            )
            kept = await stores[0].app("agent-config").get("all", fresh=True)
            for agent in many:
                await until(lambda agent=agent, before=before: agent.agent_context.config._version == before + 3)
                assert agent.config == kept["config"]
        for agent in many:
            seen = [(config["round"], config["by"]) for _, config, _ in agent.saw]
            assert [round for round, _ in seen] == sorted(round for round, _ in seen), "no step back"
            assert len(set(seen)) == len(seen), "and each at most once"


@pytest.mark.replicas
async def test_a_later_replica_takes_what_is_newer(opener: Any, tmp_path: Path) -> None:
    store = await opener()
    old = write(tmp_path / "old.yaml", "a: file", age=1000)
    await store.admin.reload_config({"a": "fleet"})
    await store.admin.reload_config({"a": "mine"}, agent="mine")
    later = write(tmp_path / "later.yaml", "a: later")
    os.utime(later, (later.stat().st_mtime + 1000,) * 2)
    for name, file, expected in (
        ("any", old, "fleet"), ("any", later, "later"), ("any", None, "fleet"), ("mine", old, "mine"),
    ):  # fmt: skip
        agent = made(Recorder, await opener(), name=name, config=file)
        async with hosted(agent):
            assert agent.config == {"a": expected}
            assert agent.saw == []
            if file is old:
                await ask(agent, "reload")
                assert agent.config == {"a": expected}, "the file is what it was"
    await store.admin.reload_config({"poll_interval": "broken"})
    agent = made(Checked, store, config={"poll_interval": 1})
    async with hosted(agent):
        assert agent.config.poll_interval == 1, "what is not valid is passed over"
    assert await now(store.app("agent-config").version()) == 3


async def test_a_config_given_while_the_agent_starts_is_not_missed(store: Any) -> None:
    """Between reading the fleet's config and hearing events there is a moment."""

    class Early(Recorder):
        async def initialize(self) -> None:
            it: Any = self
            await now(it.store.admin.reload_config({"a": 2}))

    agent = made(Early, store, config={"a": 1})
    async with hosted(agent):
        assert agent.saw == [("config", {"a": 2}, {"a"})]
        await store.emit("later")
        await until(lambda: agent.of("event"))
        assert len(agent.of("config")) == 1


async def test_an_older_config_does_not_replace_a_newer_one(store: Any) -> None:
    from distributed_state.events.config import Config, Spread

    config = Config("x", None, None)
    assert config.take(Spread({"a": 2}, 2.0, 2)) == {"a"}
    assert config.take(Spread({"a": 1}, 1.0, 1)) == set()
    assert config.value == {"a": 2}
    config._version = 0
    assert config.take(Spread({"a": 1}, 1.0, 1)) == {"a"}, "without the guard it would"


async def test_what_else_stands_in_the_fleets_record_keeps_no_agent_from_starting(store: Any) -> None:
    for found in ({"a": 1}, {"config": 5, "time": 1.0}, {"config": {}, "time": "now"}, "text", None):
        await store.app("agent-config").set("all", found)
        agent = made(Recorder, store, config={"a": 1})
        async with hosted(agent):
            assert agent.config == {"a": 1}
