"""The warm tiers of the load generator: each fault ends, and tells when another primary was elected."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.load.warm_tiers import Cluster, Sentinel, WarmTier, warm_tier

Act = Callable[[WarmTier], float | None]


def within(act: Act, tier: WarmTier) -> None:
    """It returns a moment of its own time."""
    began = time.monotonic()
    elected = act(tier)
    assert elected is not None
    assert began < elected <= time.monotonic()


def kill(tier: WarmTier) -> float | None:
    return tier.kill_primary(0.2)


def test_one_server_that_is_killed_comes_back_with_what_it_had(tmp_path: Path) -> None:
    with warm_tier("single", tmp_path) as tier:
        (server,) = tier.servers()
        server.ask("SET", "a", "1")
        before = server.pid
        assert tier.kill_primary(0.1) is None
        assert server.pid != before
        assert server.ask("GET", "a") == "1"
        for act in (tier.failover, tier.reshard):
            with pytest.raises(RuntimeError, match="one server has no"):
                act()


@pytest.mark.wide
def test_a_primary_that_sentinels_watch_is_replaced(tmp_path: Path) -> None:
    with warm_tier("sentinel", tmp_path) as tier:
        assert isinstance(tier, Sentinel)
        primary = tier.primary()
        within(kill, tier)
        second = tier.primary()
        assert second is not primary
        assert primary.running, "it comes back, as a replica"
        assert primary.info("replication")["role"] == "slave"
        within(lambda tier: tier.failover(), tier)
        assert tier.primary() is not second
        with pytest.raises(RuntimeError, match="no slots"):
            tier.reshard()


@pytest.mark.wide
def test_primaries_of_a_cluster_are_replaced_and_its_slots_moved(tmp_path: Path) -> None:
    with warm_tier("cluster", tmp_path) as tier:
        assert isinstance(tier, Cluster)
        first = tier.primaries()
        within(kill, tier)
        killed = next(node for node in first if node not in tier.primaries())
        assert killed.running, "it comes back, as a replica"
        within(lambda tier: tier.failover(), tier)
        assert len(set(first) - set(tier.primaries())) == 2
        owned = [node.itself().slot_ranges for node in tier.primaries()]
        tier.reshard(share=1000)
        assert [node.itself().slot_ranges for node in tier.primaries()] != owned
        assert sum(len(each) for node in tier.primaries() for each in node.itself().slot_ranges) == 16_384
