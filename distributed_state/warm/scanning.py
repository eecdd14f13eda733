"""What a partition holds in Redis, looked for key by key. Law: rarely done; nobody waits for it but a recovery.

Design: section 14.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distributed_state.values.journal import Happened, KeptItems, Loaded, State
from distributed_state.values.keys import PartitionKeys, RecordKeys
from distributed_state.values.model import is_state
from distributed_state.warm.patience import Patience

_PAGE = 1000
_COMMITTED = re.compile(rb"(?:^|;)[^; ]+ \d+ (\d+)")  # when, in seconds, as commit.lua keeps it with the op ids
_OPS = (b"#ops", *(b"#ops%d" % piece for piece in range(1, 16)))  # in one field or in pieces, as op_pieces.lua says


async def page(patience: Patience, keys: PartitionKeys, cursor: int) -> tuple[int, list[str]]:
    """Texts of the partition's records in Redis, and where the next page begins; from 0, and 0 after the last.

    With those of what lies beside a record, as its lock; some may come twice.
    """
    prefix = keys.meta.removesuffix(b"meta") + b"r:"
    pattern = b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^-" else bytes([each]) for each in prefix)
    words = (b"SCAN", cursor, b"match", pattern + b"*", b"COUNT", _PAGE)
    following, found = await patience.patiently(patience.port.command_with, patience.port.node_of(keys.meta), *words)
    return int(following), [key.removeprefix(prefix).decode() for key in found]


async def states(patience: Patience, epoch: str, records: Sequence[RecordKeys]) -> dict[str, Loaded]:
    """The records that are there as they stand, whatever life of the data they are of, with all messages they hold.

    `time_ms` is when each was last committed, to the second; 0 if that is not kept any more.
    """
    found = {}
    answers = await patience.commands([(b"HGETALL", each.record) for each in records])
    for names, pairs in zip(records, answers, strict=True):
        kept = dict(zip(pairs[::2], pairs[1::2], strict=True))
        if b"#v" in kept:
            messages = [(int(name[2:]), kept[name]) for name in kept if name[:2] == b"#m" and name[2:].isdigit()]
            fields = {name: value for name, value in kept.items() if is_state(name)}
            times = [int(each) * 1000 for each in _COMMITTED.findall(b"".join(kept.get(each, b"") for each in _OPS))]
            state = State(epoch, int(kept[b"#v"]), fields)
            found[names.ref.text] = Loaded(state, sorted(messages), int(kept.get(b"#t", b"0")) or max(times, default=0))
    return found


async def windows(patience: Patience, records: Sequence[RecordKeys]) -> dict[str, KeptItems]:
    """What is there of the items of these records, whatever life of the data it is of, as item_window.lua has it."""
    commands = [each for names in records for each in ((b"HGETALL", names.items), (b"HGET", names.record, b"#kv"))]
    answers = await patience.commands(commands)
    return {
        names.ref.text: _window(dict(zip(pairs[::2], pairs[1::2], strict=True)), int(last or b"0"))
        for names, pairs, last in zip(records, answers[::2], answers[1::2], strict=True)
    }


def _window(kept: dict[bytes, bytes], last: int) -> KeptItems:
    """`last` is the version at which an item changed last."""
    held = {name[1:]: value.split(b" ", 2) for name, value in kept.items() if name[:1] == b":"}
    items = {name: (int(version), frame) for name, (_, version, frame) in held.items()}
    floor = int(kept.get(b"#f", b"0"))
    if max((floor, *(version for version, _ in items.values()))) < last:
        return KeptItems({}, last)  # it is gone, or outlived what the record became since
    # A window that nothing left, and that never lacked any, begins with its layer.
    whole = kept.get(b"#d", b"1") == b"1" and kept.get(b"#u") != b"2"
    return KeptItems(items, 0 if whole else floor)


async def events(patience: Patience, keys: PartitionKeys, epoch: str, after: int, count: int) -> list[Happened]:
    """Events of a partition's stream behind an offset, at most `count`, whatever life of the data they are of."""
    rows = await patience.command(b"XRANGE", keys.events, b"%d-0" % (after + 1), b"+", b"COUNT", count)
    found = []
    for identity, (_, head, _, data) in rows:
        id, type, subject, time, version, actor = head.decode().split("\n")
        seconds, micros = time.split()
        time_ms = int(seconds) * 1000 + int(micros) // 1000
        offset = int(identity[:-2])
        found.append(Happened(keys.partition, epoch, offset, id, type, subject, time_ms, actor, int(version), data))
    return found
