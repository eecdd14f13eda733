"""Which replicas of a primary Sentinels know. Law: only what those list counts that name this very primary."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_state.errors import WarmUnavailable
from distributed_state.port.topology import replicas_behind_sentinels as behind_sentinels

pytestmark = pytest.mark.unit

A, B, C = "10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"


class Told:
    """What each Sentinel says: epoch, primary and the replicas that it lists; one that is missing does not answer."""

    def __init__(self, **answers: tuple[int, str, list[str]]) -> None:
        self._answers = answers

    def __call__(self, node: str, *commands: tuple[bytes, ...], timeout: float, sentinel: bool = False) -> list[Any]:
        if node not in self._answers:
            raise WarmUnavailable(f"{node} is silent")
        epoch, primary, listed = self._answers[node]
        said = {
            b"MASTER": [b"config-epoch", b"%d" % epoch],
            b"GET-MASTER-ADDR-BY-NAME": [each.encode() for each in primary.split(":")],
            b"REPLICAS": [[b"ip", host.encode(), b"port", b"6379"] for host in (each[:-5] for each in listed)],
        }
        return [said[words[1]] for words in commands]

    def known(self, primary: str) -> frozenset[str]:
        """The replicas of this primary that may be promoted."""
        return behind_sentinels(["s1", "s2", "s3"], "service", primary, self).promotable


def test_all_that_any_sentinel_lists_count() -> None:
    assert Told(s1=(0, A, [B]), s3=(0, A, [C])).known(A) == {B, C}


def test_those_of_an_older_failover_do_not_count() -> None:
    assert Told(s1=(0, A, [B, C]), s2=(1, B, [C])).known(B) == {C}


def test_a_primary_that_was_replaced_is_not_told_the_replicas_of_the_new_one() -> None:
    """Its promoted replica is not among them: a write that only the other one has would be lost with the failover."""
    with pytest.raises(WarmUnavailable, match=r"Sentinels name 10\.0\.0\.2"):
        Told(s1=(0, A, [B, C]), s2=(1, B, [A, C])).known(A)
