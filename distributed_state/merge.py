"""How to merge a field that two writers changed at once. Law: a merge keeps both changes, or raises Conflict.

A policy is called as `policy(base, theirs, mine)` and returns the value to store: `base` is the value that both writers
read, `theirs` the value now stored, `mine` the value that this writer wants. An absent field is None. A policy of your
own takes the same three parameters; if it cannot decide, it raises Conflict, and the change runs again on the newest
state.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed_state.errors import Conflict, InvalidValue, StateError
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec
from distributed_state.values.model import PHASE

Merge = Callable[[Any, Any, Any], Any]
Operation = tuple[bytes, bytes, bytes]


def last_writer(base: Any, theirs: Any, mine: Any) -> Any:
    """The last commit wins."""
    return mine


def maximum(base: Any, theirs: Any, mine: Any) -> Any:
    """The larger of both."""
    return max(theirs, mine)


def minimum(base: Any, theirs: Any, mine: Any) -> Any:
    """The smaller of both."""
    return min(theirs, mine)


def union(base: Any, theirs: Any, mine: Any) -> Any:
    """A list as a set: it has the items that either side added, without those that either side removed."""
    base, theirs, mine = _lists(base, theirs, mine)
    kept = [item for item in theirs if item not in base or item in mine]
    return kept + [item for item in mine if item not in base and item not in kept]


def append(base: Any, theirs: Any, mine: Any) -> Any:
    """A list to which both sides only appended: their items, then mine."""
    base, theirs, mine = _lists(base, theirs, mine)
    if mine[: len(base)] != base:
        raise Conflict("append merges only what was added at the end of a list")
    return theirs + mine[len(base) :]


def _lists(*values: Any) -> list[list[Any]]:
    lists = [[] if value is None else value for value in values]
    for each in lists:
        if not isinstance(each, list):
            raise InvalidValue(f"merges lists, not a {type(each).__name__}")
    return lists


def check(policies: Any) -> Mapping[str, Merge]:
    """Raise InvalidValue unless these are policies by field."""
    if not isinstance(policies, Mapping):
        raise InvalidValue(f"merge takes a policy for each field, as {{'tags': union}}, not {policies!r:.80}")
    for key, policy in policies.items():
        codec.encode_key(key)
        if not callable(policy):
            raise InvalidValue(f"merge[{key!r}]: {policy!r:.80} is not a policy (base, theirs, mine) -> value")
    return policies


def three_way(
    record_codec: Codec,
    mine: Mapping[bytes, Operation],
    base: Mapping[bytes, bytes],
    theirs: Mapping[bytes, bytes],
    policies: Mapping[str, Merge],
) -> dict[str, Any] | None:
    """The merged values of the fields whose operation in `mine` must be replaced; None if they cannot be merged."""
    if theirs.get(PHASE) != base.get(PHASE):
        return None
    merged = {}
    for name, (kind, _, wanted) in mine.items():
        before = base.get(name)
        found = theirs.get(name)
        if found == before or name[:1] == b"#" or found == (wanted if kind == b"s" else None):
            continue
        key = codec.decode_key(name)
        states = (before, found, wanted)
        if kind != b"s" or found is None or key not in policies or any(map(field_ttl.marked, states)):
            return None
        values = [None if data is None else record_codec.decode(data, key) for data in states]
        try:
            merged[key] = policies[key](*values)
        except Conflict:
            return None
        except InvalidValue as error:
            raise InvalidValue(f"{key!r}: {error}") from error
        except StateError:
            raise
        except Exception as error:
            raise InvalidValue(f"{key!r}: the merge policy raised {type(error).__name__}: {error}") from error
    return merged
