"""Tools as a model sees them. Law: what a model may give is in the schema, and nothing else reaches the function."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from distributed_state import InvalidValue, tool
from distributed_state.conversation import turn_user
from distributed_state.conversation.tools import Scratch

pytestmark = pytest.mark.unit


class Seat(BaseModel):
    row: int
    letter: Literal["A", "B"]


@tool
def book(
    state: Any,
    city: Annotated[str, Field(description="Where to.")],
    seats: list[Seat],
    session: Any,
    name: str = "nobody",
    model_config: int = 3,
) -> str:
    """Book a flight."""
    return f"{city} {len(seats)} {name} {model_config}"


def test_the_schema_shows_what_a_model_gives() -> None:
    schema = book.parameters
    assert set(schema["properties"]) == {"city", "seats", "name", "model_config"}
    assert schema["required"] == ["city", "seats"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["city"]["description"] == "Where to."
    assert schema["$defs"]["Seat"]["properties"]["letter"]["enum"] == ["A", "B"]
    json.dumps(schema)


def test_both_formats_hold_the_same() -> None:
    openai, anthropic = book.to_openai(), book.to_anthropic()
    assert openai["type"] == "function"
    assert openai["function"]["parameters"] == anthropic["input_schema"] == book.parameters
    assert openai["function"]["name"] == anthropic["name"] == "book"
    assert openai["function"]["description"] == anthropic["description"] == "Book a flight."


def test_arguments_are_converted_as_annotated() -> None:
    given = book.read('{"city": "Oslo", "seats": [{"row": "3", "letter": "A"}]}')
    bound = book.bind(given)
    assert bound == {"city": "Oslo", "seats": [Seat(row=3, letter="A")], "name": "nobody", "model_config": 3}
    assert book({}, **bound, session=None) == "Oslo 1 nobody 3"
    assert book.read("") == book.read(None) == {}


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"city": "Oslo"}, "seats"),
        ({"city": 5, "seats": []}, "city"),
        ({"city": "Oslo", "seats": [], "state": {}}, "state"),
        ({"city": "Oslo", "seats": [], "p_city": "x"}, "p_city"),
        ({"city": "Oslo", "seats": [{"row": 1, "letter": "C"}]}, "seats.0.letter"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidValue, match=place):
        book.bind(arguments)


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "\ud800", [1], [], "null", 0, {"city": {1}}])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    with pytest.raises(InvalidValue, match="book"):
        book.read(arguments)


def test_a_tool_has_a_name_and_a_description_of_choice() -> None:
    renamed = tool(name="other", description="Does it.")(book.function)
    assert (renamed.name, renamed.description, renamed.parameters) == ("other", "Does it.", book.parameters)


def test_what_cannot_be_called_by_name_is_no_tool() -> None:
    for function in (lambda *args: None, lambda **named: None, lambda a, /: None):
        with pytest.raises(InvalidValue, match="by name"):
            tool(function)
    with pytest.raises(InvalidValue, match="function"):
        tool(5)  # type: ignore[call-overload]


def test_a_parameter_without_an_annotation_is_refused_when_the_tool_is_made() -> None:
    def guess(state, agent_state, user_state, session, city: str, nights=1):  # type: ignore[no-untyped-def]
        return city

    with pytest.raises(InvalidValue, match=r"guess: parameter 'nights' needs an annotation.*agent_state"):
        tool(guess)
    with pytest.raises(InvalidValue, match="other: parameter 'nights'"):
        tool(name="other")(guess)
    guess.__annotations__["nights"] = int
    made = tool(guess)
    assert set(made.parameters["properties"]) == {"city", "nights"}
    assert made.wants == {"state", "agent_state", "user_state", "session"}


def test_a_scratch_updates_as_a_dict_and_as_a_record() -> None:
    below: dict[str, Any] = {"user": {"name": "Ana", "age": 1}, "n": 1}
    scratch = Scratch(below)
    scratch.update("user", {"age": 2})
    scratch.update("new", {"x": 1})
    scratch.update({"n": 2}, values=3)
    scratch.update([("pair", 4)])
    scratch.update(key=5)
    for key, values in ("n", {"a": 1}), ("user", 7), ("user", None), (["user"], {}):
        with pytest.raises((InvalidValue, TypeError)):
            scratch.update(key, values)
    assert below == {"user": {"name": "Ana", "age": 1}, "n": 1}
    scratch.keep()
    assert below == {
        "user": {"name": "Ana", "age": 2}, "n": 2, "new": {"x": 1}, "values": 3, "pair": 4, "key": 5,
    }  # fmt: skip


def test_a_scratch_is_kept_whole_or_not_at_all() -> None:
    below: dict[str, Any] = {"a": 1, "list": [1], "gone": 2, "object": {"x": [1]}}
    scratch = Scratch(below)
    scratch["a"] = True
    scratch["list"].append(2)
    scratch["object"]["x"].append(2)
    del scratch["gone"]
    scratch["new"] = []
    scratch["new"].append(5)
    assert dict(scratch) == {"a": True, "list": [1, 2], "object": {"x": [1, 2]}, "new": [5]}
    assert len(scratch) == 4
    assert below == {"a": 1, "list": [1], "gone": 2, "object": {"x": [1]}}
    scratch.keep()
    assert below == {"a": True, "list": [1, 2], "object": {"x": [1, 2]}, "new": [5]}
    assert below["a"] is True
    for key in ("gone", "absent"):
        with pytest.raises(KeyError):
            del scratch[key]
    with pytest.raises(InvalidValue):
        scratch["#phase"] = 1


# The sum of two changes

NUMBERS = st.integers(-1000, 1000)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_two_counts_add_up(base: int, mine: int, theirs: int) -> None:
    assert turn_user.sum_of(base, base + theirs, base + mine) == base + mine + theirs


@given(st.lists(NUMBERS), st.lists(NUMBERS), st.lists(NUMBERS))
def test_two_lists_that_grew_hold_both(base: list[int], mine: list[int], theirs: list[int]) -> None:
    assert turn_user.sum_of(base, base + theirs, base + mine) == base + theirs + mine


OBJECTS = st.dictionaries(st.sampled_from("abcd"), NUMBERS)


@given(OBJECTS, OBJECTS)
def test_objects_changed_at_different_keys_hold_both(base: dict[str, int], theirs: dict[str, int]) -> None:
    mine = {**base, "mine": 1}
    assert turn_user.sum_of(base, theirs, mine) == {**theirs, "mine": 1}


@given(OBJECTS, OBJECTS)
def test_a_change_on_an_unchanged_value_is_itself(base: dict[str, int], mine: dict[str, int]) -> None:
    assert turn_user.sum_of(base, base, mine) == mine
    assert turn_user.sum_of(base, mine, base) == mine


def test_kinds_that_do_not_add_up_are_replaced() -> None:
    assert turn_user.sum_of(1, "text", 2) == 2
    assert turn_user.sum_of(True, 5, False) is False
    assert turn_user.sum_of([1], [1, 2], [3]) == [3]
    assert turn_user.sum_of(None, 3, 4) == 7
