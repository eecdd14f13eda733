"""What a worker counts by tenant, and whether it says truly that it is ready."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from below import until
from tenants import Served, opened

from distributed_state.errors import ColdUnavailable, WarmUnavailable
from distributed_state.programs.service import Access, Limits, app
from distributed_state.programs.service.app import Measures, Service

QUICK = Limits(check=0.02)


def counted(measures: Measures) -> dict[tuple[str, ...], float]:
    samples = [each for family in measures.registry.collect() for each in family.samples if "_tenant_" in each.name]
    told = [each for each in samples if not each.name.endswith("_created")]
    return {(each.name.removeprefix("distributed_state_tenant_"), *each.labels.values()): each.value for each in told}


@pytest.mark.unit
def test_so_many_tenants_are_told_apart_and_the_rest_together() -> None:
    measures = Service(Limits(tenant_metrics=2)).measures
    for tenant, status, size in (("a:", 200, 10), ("b:", 200, 1), ("c:", 200, 2), ("d:", 429, 3), ("a:", 429, 5)):
        measures.of_tenant(tenant, status, size)
    assert counted(measures) == {
        ("requests_total", "a:", "200"): 1, ("requests_total", "a:", "429"): 1, ("requests_total", "b:", "200"): 1,
        ("requests_total", "others", "200"): 1, ("requests_total", "others", "429"): 1,
        ("bytes_total", "a:"): 15, ("bytes_total", "b:"): 1, ("bytes_total", "others"): 5,
    }  # fmt: skip


@pytest.mark.unit
def test_nobody_is_named_unless_that_is_asked_for() -> None:
    measures = Service().measures
    measures.of_tenant("a:", 200, 10)
    assert not counted(measures)


async def shown(served: Served) -> dict[str, tuple[float, int]]:
    """What a scrape shows and what /readyz answers, by what is needed."""
    transport = httpx.ASGITransport(served.service.ops)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as operator:
        text = (await operator.get("/metrics")).text
        found = re.findall(r'http_ready\{need="([^"]*)"\} (\S+)', text)
        asked = [await operator.get("/readyz", params={"need": need}) for need, _ in found]
    return {need: (float(value), each.status_code) for (need, value), each in zip(found, asked, strict=True)}


async def settle(served: Served, *, both: bool, redis: bool) -> None:
    """Wait until a scrape and /readyz agree on this."""
    wanted = {"redis,sql": (1.0, 200) if both else (0.0, 503), "redis": (1.0, 200) if redis else (0.0, 503)}

    async def settled() -> bool:
        return await shown(served) == wanted

    await until(settled)


async def test_a_scrape_shows_what_readyz_answers_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It showed 1 while every worker answered 503."""
    away = False

    async def any_server(*_: Any) -> None:
        if away:
            raise WarmUnavailable("away")

    monkeypatch.setattr(app, "any_server", any_server)
    async with opened() as store:
        served = Served(store, Access(insecure=True), limits=QUICK)

        await settle(served, both=True, redis=True)
        away = True
        await settle(served, both=False, redis=False)
        away = False
        await settle(served, both=True, redis=True)
        served.service.draining = True
        await settle(served, both=False, redis=False)
        await served.service.close()


@pytest.mark.parametrize("known", [True, False])
async def test_a_worker_that_can_check_no_token_is_not_ready_even_with_redis_alone(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started while SQL was away, said that it is ready, and refused every request."""
    silent = False
    async with opened() as store:
        port = store._lifecycle.tiers().port
        ask = port.sql

        async def sql(*asked: Any) -> Any:
            if silent:
                raise ColdUnavailable("away")
            return await ask(*asked)

        monkeypatch.setattr(port, "sql", sql)
        served = Served(store, Access(tokens=True), limits=QUICK)
        token = await served.token("acme:", "read")
        await settle(served, both=True, redis=True)
        if known:
            assert (await served.ask("GET", "/v1/caller", token)).status_code == 200
        silent = True
        await settle(served, both=False, redis=known)
        assert (await served.ask("GET", "/v1/caller", token)).status_code == (200 if known else 503)
        told = (await served.ask("GET", "/readyz?need=redis")).json()
        assert ("tokens" in told) is not known
        await served.service.close()
