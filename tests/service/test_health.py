"""What a worker counts by tenant (values in, values out)."""

from __future__ import annotations

import pytest

from distributed_state.programs.service import Limits
from distributed_state.programs.service.app import Measures, Service

pytestmark = pytest.mark.unit


def counted(measures: Measures) -> dict[tuple[str, ...], float]:
    samples = [each for family in measures.registry.collect() for each in family.samples if "_tenant_" in each.name]
    told = [each for each in samples if not each.name.endswith("_created")]
    return {(each.name.removeprefix("distributed_state_tenant_"), *each.labels.values()): each.value for each in told}


def test_so_many_tenants_are_told_apart_and_the_rest_together() -> None:
    measures = Service(Limits(tenant_metrics=2)).measures
    for tenant, status, size in (("a:", 200, 10), ("b:", 200, 1), ("c:", 200, 2), ("d:", 429, 3), ("a:", 429, 5)):
        measures.of_tenant(tenant, status, size)
    assert counted(measures) == {
        ("requests_total", "a:", "200"): 1, ("requests_total", "a:", "429"): 1, ("requests_total", "b:", "200"): 1,
        ("requests_total", "others", "200"): 1, ("requests_total", "others", "429"): 1,
        ("bytes_total", "a:"): 15, ("bytes_total", "b:"): 1, ("bytes_total", "others"): 5,
    }  # fmt: skip


def test_nobody_is_named_unless_that_is_asked_for() -> None:
    measures = Service().measures
    measures.of_tenant("a:", 200, 10)
    assert not counted(measures)
