"""The parts of an agent that need no store: how a hook is bound, the figures, two APIs alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from blocking_text import in_blocking_words

from distributed_state import Agent, AsyncAgent, AsyncHost, Host, Limits, Status
from distributed_state.agents import hooks
from distributed_state.agents.display import memory_mb
from distributed_state.events.config import newest, part_of

pytestmark = pytest.mark.unit

GIVEN = {"config": 1, "changed": 2}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: (), ()),
        (lambda config: config, 1),
        (lambda changed: changed, 2),
        (lambda changed, config: (changed, config), (2, 1)),
        (lambda values: values, 1),
        (lambda values, names: (values, names), (1, 2)),
        (lambda values, changed: (values, changed), (1, 2)),
        (lambda *, changed: changed, 2),
        (lambda config, other=7: (config, other), (1, 7)),
        (lambda *everything: everything, (1, 2)),
        (lambda config, *rest: (config, rest), (1, (2,))),
        (lambda **named: named, GIVEN),
        (lambda config, /, **named: (config, named), (1, {"changed": 2})),
    ],
)
def test_a_hook_gets_what_it_names_and_the_rest_in_order(function: Callable[..., Any], expected: Any) -> None:
    assert hooks.binding(function, GIVEN)() == expected


@pytest.mark.parametrize("function", [lambda a, b, c: None, lambda *, other: None])
def test_what_cannot_be_given_is_said_before_the_call(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError):
        hooks.binding(function, GIVEN)


def test_every_hook_is_described_and_may_be_left_out() -> None:
    for name, hook in vars(hooks.Hooks).items():
        if not name.startswith("_"):
            assert hook.__doc__, name
            assert hook(*[None] * len(inspect.signature(hook).parameters)) is None
    assert hooks.GIVEN.keys() < vars(hooks.Hooks).keys()


def test_a_warning_for_each_figure_beyond_its_limit() -> None:
    def the_status(**figures: Any) -> Status:
        given = dict.fromkeys(Status.__slots__, 0) | {"tiers": {}} | figures
        return Status(**given)

    def warned(**figures: Any) -> list[str]:
        return [name for _, name, _, _ in the_status(**figures).warnings(Limits())]

    assert warned() == warned(error_rate=10.0, queue_size=1000) == []
    assert warned(error_rate=10.1, queue_size=1001, lag=11.0, memory_mb=1e9) == ["error_rate", "queue_size", "lag"]
    assert [each[3] for each in the_status(memory_mb=2.0).warnings(Limits(memory_mb=1.0))] == [1.0]
    assert memory_mb() > 1


def test_of_two_configs_the_later_one_counts() -> None:
    fields = {"all": {"config": {"a": 1}, "time": 5.0}, "agent:x": {"config": {"a": 2}, "time": 4.0}, "odd": 7}
    found = [newest(fields, agent, 3) for agent in ("x", "y")]
    assert [each and (each.config, each.version) for each in found] == [({"a": 1}, 3)] * 2
    fields["agent:x"]["time"] = 6.0  # type: ignore[index]
    assert newest(fields, "x", 3).config == {"a": 2}  # type: ignore[union-attr]
    assert newest({}, "x", 0) is None
    assert part_of({"a": 1, "agents": "none of ours"}, "x") == {"a": 1, "agents": "none of ours"}


@pytest.mark.parametrize(("sync_class", "async_class"), [(Agent, AsyncAgent), (Host, AsyncHost)], ids=["Agent", "Host"])
def test_both_apis_of_an_agent_are_alike(sync_class: type, async_class: type) -> None:
    names = {name for name, each in vars(sync_class).items() if callable(each) and not name.startswith("_")}
    assert names
    for name in names:
        ours, theirs = getattr(sync_class, name), getattr(async_class, name)
        for one, other in zip(
            inspect.signature(ours).parameters.values(), inspect.signature(theirs).parameters.values(), strict=True
        ):
            assert (one.name, one.kind, one.default, one.annotation) == (
                other.name, other.kind, other.default, other.annotation,
            )  # fmt: skip
        said = in_blocking_words(theirs.__doc__, {"AsyncAgent": "Agent", "AsyncHost": "Host"})
        assert ours.__doc__ == said, name
        assert not inspect.iscoroutinefunction(ours)
        assert inspect.iscoroutinefunction(theirs) or name == "stop"
    if sync_class is Agent:
        own = {name for name in vars(async_class) if not name.startswith("_")}
        assert own == names
