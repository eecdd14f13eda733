"""G9: the state at version n is the fold of the changes up to n. A random program against a plain Python model."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest

from distributed_state import Message
from distributed_state.values import journal

Past = list[tuple[dict[str, Any], list[str], str | None]]


class Plain:
    """A session as a plain dict, a list and a phase, with every earlier state kept."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.messages: list[str] = []
        self.phase: str | None = None
        self.past: Past = []
        self.labels: dict[str, int] = {}

    def committed(self) -> int:
        self.past.append((deepcopy(self.fields), list(self.messages), self.phase))
        return len(self.past)

    def become(self, version: int) -> None:
        self.fields, self.messages, self.phase = deepcopy(self.past[version - 1])


async def step(dice: random.Random, session: Any, plain: Plain) -> int:
    """One random operation on both; the version that the session says it came to."""
    key, value = dice.choice("abcd"), dice.choice([1, "x", [1, {"y": None}], {}, 2.5, -7, 10**30])
    match dice.randrange(12):
        case 0 | 1:
            plain.fields[key] = value
            return await session.set(key, value)
        case 2:
            plain.fields.pop(key, None)
            return await session.delete(key)
        case 3 | 4:
            texts = [f"m{len(plain.past)}.{n}" for n in range(dice.randint(1, 5))]
            plain.messages += texts
            return await session.append(*(Message(role="user", content=text) for text in texts))
        case 5:
            plain.fields = {}
            wipe = dice.random() < 0.5
            plain.messages = [] if wipe else plain.messages
            return await session.clear(messages=wipe)
        case 6:
            plain.fields["n"] = plain.fields.get("n", 0) + 3
            assert await session.increment("n", 3) == plain.fields["n"]
            return await session.version(fresh=True)
        case 7:
            plain.phase = plain.fields["p"] = dice.choice(["planning", "executing", "done"])
            return (await session.write(phase=plain.phase, set={"p": plain.phase})).version
        case 8:
            plain.fields["o"] = plain.fields.get("o", {}) | {key: value}
            return await session.update("o", {key: value})
        case 9:
            label = f"label {len(plain.past)}"
            plain.labels[label] = len(plain.past) + 1
            return await session.checkpoint(label)
        case 10 if plain.past:
            version = dice.randint(1, len(plain.past))
            plain.become(version)
            return await session.rollback(version=version)
        case _ if plain.labels:
            label = dice.choice(sorted(plain.labels))
            plain.become(plain.labels[label])
            return await session.rollback(label=label)
        case _:
            plain.fields["e"] = True
            return await session.set("e", True)


async def run(store: Any, seed: int, steps: int = 60) -> None:
    """Run a program, then read every version back, from SQL and through a fork."""
    dice, session, plain = random.Random(seed), store.session(f"program-{seed}"), Plain()
    for _ in range(steps):
        version = await step(dice, session, plain)
        assert plain.committed() == version
        assert await session.get_all(fresh=True) == plain.fields, f"seed {seed}, version {version}"
        assert [m.content for m in await session.messages(last=7)] == plain.messages[-7:]
    for version, (fields, messages, phase) in enumerate(plain.past, start=1):
        found = await session.at(version=version)
        assert (found.fields, [m.content for m in found.messages], found.phase) == (fields, messages, phase)
    assert [change.version for change in await session.history()] == list(range(1, steps + 1))
    origin = dice.randint(1, steps)
    await session.fork(f"fork-{seed}", version=origin)
    child, (fields, messages, phase) = store.session(f"fork-{seed}"), plain.past[origin - 1]
    await child.append({"role": "user", "content": "only here"})
    assert (await child.get_all(), await child.phase()) == (fields, phase)
    assert [m.content for m in await child.messages()] == [*messages, "only here"]
    assert [m.content for m in await session.messages(fresh=True)] == plain.messages


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(4))
async def test_every_version_reads_as_it_was(opener: Any, seed: int) -> None:
    """Fields, messages and phase, whatever was done, with snapshots and a small window of recent messages."""
    await run(await opener(snapshot_every=7, recent_messages=5), seed)


async def test_a_broken_fold_is_noticed(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a fold that forgets deletions."""
    fold = journal.fold

    def forgetful(fields: Any, ops: Any) -> None:
        fold(fields, [op for op in ops if op.kind not in (b"d", b"c")])

    monkeypatch.setattr("distributed_state.cold.record_history.fold", forgetful)
    monkeypatch.setattr("distributed_state.cold.archive.fold", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(4):
            await run(await opener(snapshot_every=7), seed + 100)
