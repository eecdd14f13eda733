"""What a partition holds in Redis, looked for key by key. Law: rarely done; nobody waits for it but a recovery.

Design: section 14.
"""

from __future__ import annotations

from distributed_state.values.keys import PartitionKeys
from distributed_state.warm.patience import Patience

_PAGE = 1000


async def page(patience: Patience, keys: PartitionKeys, cursor: int) -> tuple[int, list[str]]:
    """Texts of the partition's records in Redis, and where the next page begins; from 0, and 0 after the last.

    With those of what lies beside a record, as its lock; some may come twice.
    """
    prefix = keys.meta.removesuffix(b"meta") + b"r:"
    pattern = b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^-" else bytes([each]) for each in prefix)
    words = (b"SCAN", cursor, b"match", pattern + b"*", b"COUNT", _PAGE)
    following, found = await patience.patiently(patience.port.command_with, patience.port.node_of(keys.meta), *words)
    return int(following), [key.removeprefix(prefix).decode() for key in found]
