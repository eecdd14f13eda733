"""Which replicas a primary has, as those who choose the next primary know. Law: one that is away is still a replica.

A primary forgets a replica whose connection ended; Sentinels and the servers of a cluster do not, and may promote it
when it is back. Asking blocks: an event loop lends a thread for it.

Design: sections 14, 19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port.addresses import node_name
from distributed_state.port.facts import KnownReplicas

_PATIENT = 1.0  # seconds for one server to answer
_NEVER = b"nofailover"


def behind_sentinels(seeds: Iterable[str], service: str, primary: str, ask: Callable[..., list[Any]]) -> KnownReplicas:
    """The replicas of a primary that all Sentinels together know: a Sentinel that was restarted knows fewer.

    Sentinels that know only of an older failover are ignored. Raises WarmUnavailable if the others name another
    primary, because the promoted server is then missing from their lists. Raises the last error if none answers.
    """
    heard: dict[str, tuple[int, str, list[Any]]] = {}
    last: StateError | None = None
    named = service.encode()
    words = [(b"SENTINEL", word, named) for word in (b"MASTER", b"GET-MASTER-ADDR-BY-NAME", b"REPLICAS")]
    for seed in seeds:
        try:
            said, (host, port), listed = ask(seed, *words, timeout=_PATIENT, sentinel=True)
        except StateError as error:
            last = error
        else:
            heard[seed] = (int(_facts(said)[b"config-epoch"]), node_name(host.decode(), int(port)), listed)
    if not heard:
        assert last is not None, "a URL of Sentinels names one"
        raise last
    newest = max(epoch for epoch, _, _ in heard.values())
    promotable, others = set[str](), set[str]()
    for epoch, named_primary, listed in heard.values():
        if epoch == newest and named_primary != primary:
            raise WarmUnavailable(f"{primary} is no longer the primary: Sentinels name {named_primary}")
        for each in map(_facts, listed) if epoch == newest else ():
            name = node_name(each[b"ip"].decode(), int(each[b"port"]))
            (others if each.get(b"slave-priority") == b"0" else promotable).add(name)
    # One that leads a failover still lists the new primary among them for a moment.
    return KnownReplicas(frozenset(promotable - {primary}), frozenset(others - promotable))


def in_cluster(node: str, ask: Callable[..., list[Any]]) -> KnownReplicas:
    """What a primary of a cluster knows of its own replicas. Raises as `ask`."""
    (text,) = ask(node, (b"CLUSTER", b"NODES"), timeout=_PATIENT)
    rows = [line.split(b" ") for line in text.splitlines() if line]
    me = next((row[0] for row in rows if b"myself" in row[2].split(b",")), b"")
    mine = [(row[1].partition(b"@")[0].decode(), row[2].split(b",")) for row in rows if len(row) > 3 and row[3] == me]
    promotable = frozenset(name for name, flags in mine if _NEVER not in flags)
    return KnownReplicas(promotable, frozenset(name for name, _ in mine) - promotable)


def _facts(answer: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))
