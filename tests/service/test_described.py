"""The interface is as its description says: what schemathesis makes of the description is asked of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from serving import served

from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.requests import CONDITIONS
from distributed_state.programs.service.resources import admin, conversations

# The strategies of schemathesis use it.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def client(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("described")
    namespace = f"t{os.urandom(6).hex()}"
    with served(servers.redis("valkey").url, f"sqlite:///{folder}/a.db", namespace, search=True) as client:
        yield client


@pytest.fixture(scope="module")
def described(client: httpx.Client) -> Any:
    import schemathesis  # here, as it takes a second

    found = schemathesis.openapi.from_dict(client.get("/v1/openapi.json").json())
    found.config.update(base_url=f"{client.base_url}/v1")
    return found.exclude(path="/events")  # which has no end


def checks() -> list[Any]:
    from schemathesis.checks import CHECKS as known
    from schemathesis.checks import load_all_checks

    load_all_checks()
    return [known.get_one(name) for name in CHECKS]


def ask_all(described: Any, examples: int) -> int:
    """Ask every operation so often; how many there are."""
    from schemathesis import GenerationMode

    described.config.generation.update(modes=list(GenerationMode))
    asked = 0
    wanted = checks()
    for found in described.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate], derandomize=examples < 10,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(checks=wanted)

        ask()
        asked += 1
    return asked


@pytest.mark.wide
def test_every_operation_answers_as_it_is_described(described: Any) -> None:
    assert ask_all(described, 2) > 70


@pytest.mark.wide
def test_an_answer_that_is_not_as_it_is_described_is_noticed(described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before."""
    monkeypatch.setattr(admin, "asdict", lambda replica: repr(replica))
    with pytest.raises(BaseException, match="replicas"):
        ask_all(described.include(path="/replicas"), 1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_operation_answers_as_it_is_described_however_often(described: Any) -> None:
    assert ask_all(described, 15) > 70


def lead(described: Any, examples: int, steps: int) -> set[str]:
    """Go from operation to operation along the links; where that led, beyond what was made."""
    from schemathesis import GenerationMode

    described.config.generation.update(modes=[GenerationMode.POSITIVE])  # what is refused leads nowhere
    machine = described.as_state_machine()
    wanted = checks()
    found, broken, walks = set[str](), list[BaseException](), 0

    class Led(machine):  # type: ignore[misc, valid-type]  # made at run time
        def before_call(self, case: Any, **more: Any) -> None:
            # Made up, they hold hardly ever, and nothing would be made.
            for name in CONDITIONS:
                (case.headers or {}).pop(name, None)

        def validate_response(self, response: Any, case: Any, **more: Any) -> None:
            try:
                case.validate_response(response, checks=wanted)
            except BaseException as error:
                broken.append(error)
                raise
            if "{id}" in case.path and response.status_code < 300:
                found.add(f"{case.method} {case.path}")

        def teardown(self) -> None:
            nonlocal walks
            walks += 1
            super().teardown()

    while walks < examples:
        before = walks
        try:
            Led.run(
                settings=settings(
                    max_examples=examples - walks,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
            )
            break
        except Flaky:
            # The worker keeps what earlier walks made, so that one which begins as they did may lead elsewhere. That
            # ends hypothesis' plan of walks, of which a new one is made; an answer that broke the description counts.
            assert walks > before, "not one walk of a plan was possible"
            if broken:
                raise broken[0] from None
    return found


def test_what_was_made_answers_as_it_is_described(described: Any) -> None:
    assert any(lead(described, 6, 5) for _ in range(10)), "six ways may lead nowhere"


def test_an_answer_on_the_way_that_is_not_as_it_is_described_is_noticed(
    described: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test before."""
    monkeypatch.setattr(
        conversations, "answer", lambda content, *args, **more: answer(content | {"version": "none"}, *args, **more)
    )
    with pytest.raises(BaseException, match="version"):
        for _ in range(10):
            lead(described, 6, 5)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_operation_answers_as_it_is_described_very_often(described: Any) -> None:
    assert ask_all(described, 100) > 70


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_was_made_answers_as_it_is_described_however_long(described: Any) -> None:
    assert len(lead(described, 20, 12)) > 10
