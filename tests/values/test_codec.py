"""Values and messages come back exactly as they went in, or do not go in."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import uuid
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from distributed_state import CorruptState, InvalidValue, Message, TooLarge
from distributed_state.values import codec, encryption, field_ttl
from distributed_state.values.model import has_pair

pytestmark = pytest.mark.unit

always = settings(derandomize=True, deadline=None, database=None)

RECORD = codec.Codec("n", "session:s")
RING = encryption.KeyRing({"k": bytes(32)})
PAIR = "\ud83d\ude00"  # two surrogates in a row: JSON text knows them as one character only
letters = st.characters(exclude_categories=()) | st.sampled_from('\0\ud800\udfff\u2028\uffff"\\\n{}[]:, ')
texts = st.text(letters).filter(lambda text: not has_pair(text))
integers = st.integers() | st.integers(2**62, 2**65) | st.integers(-(2**65), -(2**62)) | st.integers(10**400, 10**420)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars, lambda items: st.lists(items, max_size=5) | st.dictionaries(texts, items, max_size=5), max_leaves=25
)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types all the way down, keys in the same order, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


def decode_message(data: bytes) -> Message:
    """Read it as a record reads its own."""
    return RECORD.decode_message(data, RECORD.record)


@always
@given(values)
def test_any_json_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    data = codec.encode(value)
    assert same(codec.decode(data), value)
    json.loads(data)  # it is JSON for every other reader too


@always
@given(st.binary(), st.floats(0, 1e11) | st.just(field_ttl.NEVER))
def test_bytes_come_back_and_are_never_taken_for_json(data: bytes, until: float) -> None:
    for form in (RECORD, encryption.Sealed(encryption.Encryption(RING), "n", "session:s")):
        stored = field_ttl.wrap(form.encode(data, "a"), until)
        assert form.decode(stored, "a") == data
        assert len(field_ttl.split(stored)[1]) <= len(data) + 40
        with pytest.raises(CorruptState):
            codec.decode(form.open(stored, "a"))


@always
@given(values)
def test_no_json_value_is_taken_for_bytes(value: Any) -> None:
    assert same(codec.decode_value(codec.encode_value(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 1.0, -0.0, 1e308, 5e-324, 0.1, "", "\0", "\ud800", "\udfff\ud800", [], {}, [[]],
        [{}], {"": {}}, {"a": []}, 2**53 + 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, -(10**400), [2**64],
        {"n": 10**4299}, [1, 1.0, True], "x" * 2**20, ["é\0" * 2**19], {"\ud800": "\0"}, {"a": {"b": {"c": [None]}}},
    ],
    ids=lambda value: f"{value!r:.20}",
)  # fmt: skip
def test_values_that_other_encoders_spoil_come_back(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


def test_equal_values_of_different_types_stay_apart() -> None:
    assert len({codec.encode(value) for value in (1, 1.0, True, "1")}) == 4
    assert codec.encode([]) != codec.encode({})


def nested(depth: int, innermost: Any = 0) -> Any:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


class Colour(enum.Enum):
    RED = "red"


circle: list[Any] = [1]
circle.append({"again": circle})


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"field\['a'\]\[1\]\['b'\]: a set is not a JSON value; use a list"),
        ({"a": (1, 2)}, r"field\['a'\]: a tuple .*use a list"),
        ((1, 2), r"field: a tuple"),
        ([b"bytes"], r"field\[0\]: a bytes"),
        ({"a": {1: "one"}}, r"field\['a'\]: the key 1 is an int"),
        ({None: 1}, r"field: the key None is a NoneType"),
        ([0, math.nan], r"field\[1\]: nan is not a JSON number"),
        (math.inf, r"field: inf is not a JSON number"),
        ({"x": [-math.inf]}, r"field\['x'\]\[0\]: -inf"),
        ([object()], r"field\[0\]: an object"),
        ([Colour.RED], r"field\[0\]: a Colour"),
        ({"f": len}, r"field\['f'\]: a builtin_function_or_method"),
        ([["fine", PAIR]], r"field\[0\]\[1\]: two surrogates in a row"),
        ({"k": {PAIR: 1}}, r"field\['k'\]\[.*\]: two surrogates"),
        (PAIR, r"field: two surrogates"),
        ([10**4300], r"field\[0\]: an integer of more than 4300 digits"),
        (-(10**5000), r"field: an integer of more than 4300 digits"),
        (circle, r"field\[1\]\['again'\]: contains itself"),
        (nested(1000), r"nested more than 200 levels deep"),
        (nested(100_000), r"nested more than 200 levels deep"),
        (nested(300, 2**64), r"nested more than 200 levels deep"),
    ],
    ids=range(21),
)  # fmt: skip
def test_what_json_cannot_hold_is_refused_and_its_path_named(value: Any, complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        codec.encode(value, "field")


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    ADA = "ada"


class OldName(str, enum.Enum):  # noqa: UP042 - as many programs still define it
    ADA = "ada"


class Text(str):
    __slots__ = ()


class Number(int):
    __slots__ = ()


PLAIN: list[tuple[Any, Any]] = [
    (Level.HIGH, 3), (Name.ADA, "ada"), (OldName.ADA, "ada"), (Text("ada"), "ada"), (Number(3), 3),
    (collections.Counter("aab"), {"a": 2, "b": 1}), (collections.defaultdict(list, k=[1]), {"k": [1]}),
    (numpy.int64(3), 3), (numpy.uint64(2**64 - 1), 2**64 - 1), (numpy.float64(0.5), 0.5), (numpy.float32(0.5), 0.5),
    (numpy.bool_(True), True), (numpy.str_("ada"), "ada"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "plain"), PLAIN, ids=range(len(PLAIN)))
def test_a_value_of_a_subclass_is_stored_as_its_plain_value(value: Any, plain: Any) -> None:
    for each, wanted in ((value, plain), ([value], [plain]), ({"k": {"deep": value}}, {"k": {"deep": plain}})):
        stored = codec.encode(each)
        assert stored == codec.encode(wanted), "the same bytes, so that a condition on the value holds"
        assert repr(codec.decode(stored)) == repr(wanted)


@dataclasses.dataclass
class Point:
    x: int


class Model(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Colour.RED, r"a Colour is not a JSON value; use its \.value"),
        (Decimal("1.5"), r"a Decimal is not a JSON value; use str\(\)"),
        (uuid.UUID(int=1), r"an? UUID is not a JSON value; use str\(\)"),
        (datetime(2026, 5, 1), r"a datetime is not a JSON value; use \.isoformat\(\)"),
        (date(2026, 5, 1), r"a date is not a JSON value; use \.isoformat\(\)"),
        (timedelta(1), r"a timedelta is not a JSON value; use \.total_seconds\(\)"),
        (Point(1), r"a Point is not a JSON value; use dataclasses\.asdict\(\)"),
        (Model(x=1), r"a Model is not a JSON value; use \.model_dump"),
        (numpy.array([1]), r"an? ndarray is not a JSON value; use \.tolist\(\)"),
        (numpy.float32("nan"), r"nan is not a JSON number"),
    ],
    ids=range(10),
)
def test_the_error_says_what_to_write_instead(value: Any, advice: str) -> None:
    for each, place in ((value, "field"), ([value], r"field\[0\]")):
        with pytest.raises(InvalidValue, match=f"^{place}: {advice}"):
            codec.encode(each, "field")


@always
@given(st.recursive(scalars, lambda items: st.lists(items, min_size=1, max_size=3), max_leaves=10), st.data())
def test_one_bad_leaf_anywhere_is_found(value: Any, data: st.DataObject) -> None:
    """However deep it lies, the path leads to it."""
    path, holder = "value", [value]
    at: Any = 0
    while isinstance(holder[at], list) and holder[at]:
        holder, at = holder[at], data.draw(st.integers(0, len(holder[at]) - 1))
        path += f"[{at}]"
    holder[at] = {"bad"}
    with pytest.raises(InvalidValue) as caught:
        codec.encode(holder[0] if path == "value" else value)
    assert str(caught.value) == f"{path}: a set is not a JSON value; use a list"


def test_what_is_accepted_can_be_read_from_a_deep_stack() -> None:
    """Encoding and decoding may not depend on how deep the caller's own calls are nested."""
    data = {depth: codec.encode(nested(depth, 2**64)) for depth in (1, 100, 199)}

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            for depth, each in data.items():
                assert codec.decode(each) == nested(depth, 2**64)

    deeper(600)


@pytest.mark.parametrize("data", [b"", b" ", b"{", b"\xff", b" \xff", b" {]", b"nul", b"[1]]", b" " + b"1" * 5000])
def test_bytes_that_are_not_json_are_reported_and_handed_over(data: bytes) -> None:
    with pytest.raises(CorruptState) as caught:
        codec.decode(data, "colour")
    assert caught.value.field == "colour"
    assert caught.value.data == data


@always
@given(st.binary(max_size=30))
def test_no_bytes_make_decode_raise_anything_else(data: bytes) -> None:
    for decode in (codec.decode, decode_message, codec.decode_key):
        with suppress(CorruptState):
            decode(data)


# Names of fields


@always
@given(st.text(letters, max_size=200), st.text(letters, max_size=200))
def test_field_names_come_back_and_stay_apart(one: str, other: str) -> None:
    names = [name for name in (one, other) if name and not name.startswith("#")]
    encoded = [codec.encode_key(name) for name in names]
    assert [codec.decode_key(data) for data in encoded] == names
    assert len(set(encoded)) == len(set(names))


@pytest.mark.parametrize("name", ["#", "#v", "#m0", "#phase", "#\0"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="reserved"):
        codec.encode_key(name)


def test_a_field_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a field's name cannot be empty"):
        codec.encode_key("")


@pytest.mark.parametrize("name", [None, 1, b"a", ("a",), ["a"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(InvalidValue, match="must be a str"):
        codec.encode_key(name)


def test_a_long_name_is_refused() -> None:
    assert len(codec.encode_key("é" * 512)) == 1024
    with pytest.raises(TooLarge):
        codec.encode_key("é" * 513)


# Messages


messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": st.none() | texts | st.lists(st.dictionaries(texts, scalars)),
        "name": st.none() | texts,
        "tool_calls": st.none() | st.lists(values, max_size=3),
        "tool_call_id": st.none() | texts,
        "timestamp": st.none() | floats,
        "metadata": st.none() | st.dictionaries(texts, values, max_size=3),
        "refusal": values,
    },
)


@always
@given(messages)
def test_a_message_comes_back_exactly(fields: dict[str, Any]) -> None:
    back = decode_message(codec.encode_message(fields))
    assert back == codec.as_message(fields)
    found = back.to_dict()
    assert found.keys() == fields.keys()
    assert all(same(found[name], fields[name]) for name in fields)


@pytest.mark.parametrize(
    "name", ["cls", "self", "_fields_set", "model_extra", "model_fields_set", "copy", "to_dict", "__class__", "values"]
)
def test_an_unknown_field_may_have_any_name(name: str) -> None:
    fields = {"role": "user", "content": "hi", name: [1]}
    assert decode_message(codec.encode_message(fields)).to_dict() == fields


def test_absent_and_none_are_not_the_same() -> None:
    absent, none = Message(role="assistant"), Message(role="assistant", content=None)
    assert decode_message(codec.encode_message(absent)).to_dict() == {"role": "assistant"}
    assert decode_message(codec.encode_message(none)).to_dict() == {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "message: .*has a role, or a type"),
        ({"content": "Hi", "type": None}, "message: .*has a role, or a type"),
        ({"role": "wizard"}, "message.role"),
        ({"role": "user", "content": 7}, "message.content"),
        ({"role": "user", "metadata": {"a": {1}}}, r"message\['metadata'\]\['a'\]: a set"),
        ({"role": "user", "extra": [math.nan]}, r"message\['extra'\]\[0\]: nan"),
        ("hi", "message"),
        (None, "message"),
    ],
)
def test_a_bad_message_is_refused_and_the_place_named(fields: Any, complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        codec.encode_message(fields)


@pytest.mark.parametrize(
    "part", ["role", "content", "name", "tool_calls", "tool_call_id", "timestamp", "metadata", "x"]
)
@pytest.mark.parametrize(
    "value", [b"user", ("a",), [("a",)], {"a"}, {"a": b"x"}, bytearray(b"x"), Decimal(1), date(2020, 1, 1), {1: 2}],
    ids=repr,
)  # fmt: skip
def test_a_message_that_json_would_change_is_refused(part: str, value: Any) -> None:
    """Bytes became a text, and a tuple a list, without a word."""
    with pytest.raises(InvalidValue, match=f"message.*{part}"):
        codec.encode_message({"role": "user", part: value})


@pytest.mark.parametrize(
    ("part", "value"),
    [("name", True), ("timestamp", "3"), ("timestamp", True), ("timestamp", 2**53 + 1), ("content", 5)],
)  # fmt: skip
def test_a_message_is_made_of_what_its_fields_are(part: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        Message(role="user", **{part: value})
    assert Message(role="user", timestamp=5).timestamp == 5.0


@pytest.mark.parametrize("data", [b"[]", b"5", b"null", b"{", b'"text"', b"{}"])
def test_stored_bytes_that_are_no_message_are_reported(data: bytes) -> None:
    with pytest.raises(CorruptState) as caught:
        decode_message(data)
    assert caught.value.data == data
