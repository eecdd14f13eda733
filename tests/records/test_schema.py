"""Schemas by themselves: what is refused when one is made, and what a field may hold."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, RootModel, field_serializer, field_validator

from distributed_state import InvalidValue, Schema
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.model import SCHEMA

pytestmark = pytest.mark.unit


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    name: str
    below: list[Leaf] = []


class Everything(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)
    text: str = ""
    number: int = 0
    real: float = 0.0
    flag: bool = False
    day: date = date(2000, 1, 1)
    moment: datetime | None = None
    span: timedelta = timedelta(0)
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (0, "")
    names: frozenset[str] = frozenset()
    counts: dict[int, int] = {}
    leaf: Leaf | None = None


def same(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


async def later(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


class Choice(BaseModel):
    a: int = Field(default=0, validation_alias=AliasChoices("x", "y"))


class Reserved(BaseModel):
    a: int = Field(default=0, alias="#a")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Schema(dict), "a pydantic model with fields or a dataclass, not <class 'dict'>"),  # type: ignore[type-var]
        (lambda: Schema(RootModel[int]), "a pydantic model with fields"),
        (lambda: Schema(Leaf(name="x")), "a pydantic model with fields"),  # type: ignore[arg-type]
        (lambda: Schema(Leaf, version=0), "a version is an int from 1 on, not 0"),
        (lambda: Schema(Leaf, version=True), "not True"),
        (lambda: Schema(Leaf, version=2), "Leaf version 2: needs upcasters from each of 1 to 1, has them from none"),
        (lambda: Schema(Leaf, version=4, upcasters={1: same, 3: same}), "each of 1 to 3, has them from 1, 3"),
        (lambda: Schema(Leaf, version=2, upcasters={1: same, 2: same}), "has them from 1, 2"),
        (lambda: Schema(Leaf, version=2, upcasters={1: later}), "not a plain function"),  # type: ignore[dict-item]
        (lambda: Schema(Leaf, version=2, upcasters={1: "same"}), "not a plain function"),  # type: ignore[dict-item]
        (lambda: Schema(Choice), "Choice.a: is read under one alias and written under another"),
        (lambda: Schema(Reserved), "reserved"),
    ],
)
def test_a_schema_that_cannot_work_is_refused_when_it_is_made(make: Any, said: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        make()
    assert said in str(refused.value)


VALUES = {
    "text": st.text(),
    "number": st.integers(),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "day": st.dates(),
    "moment": st.none() | st.datetimes(),
    "span": st.timedeltas(min_value=timedelta(days=-9999), max_value=timedelta(days=9999)),
    "colour": st.sampled_from(Colour),
    "kind": st.sampled_from(["a", "b"]),
    "pair": st.tuples(st.integers(), st.text()),
    "names": st.frozensets(st.text()),
    "counts": st.dictionaries(st.integers(), st.integers()),
    "leaf": st.builds(Leaf, name=st.text(), below=st.lists(st.builds(Leaf, name=st.text()), max_size=2)),
}
EVERYTHING = Schema.of(Everything)


def entry(fields: dict[str, Any]) -> CachedRecord:
    return CachedRecord(
        Codec("n", "r"), "e", 1, {codec.encode_key(key): codec.encode(value) for key, value in fields.items()}, {}
    )


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_model_comes_back_as_it_was(values: dict[str, Any]) -> None:
    model = Everything(**values)
    assert EVERYTHING.read("r", entry(EVERYTHING.settle(model))) == model


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_field_alone_is_stored_as_it_is_with_all_the_others(values: dict[str, Any]) -> None:
    whole = EVERYTHING.settle(Everything(**values))
    alone = {key: EVERYTHING.prepare(key, value) for key, value in values.items()}
    for fields in (whole, alone):
        fields["names"] = sorted(fields.get("names", []))  # a set has no order
    assert alone == {key: whole[key] for key in alone}


@given(st.sampled_from(sorted(VALUES)), st.none() | st.integers() | st.text() | st.lists(st.integers()) | st.booleans())
def test_a_field_takes_alone_what_it_takes_with_all_the_others(key: str, value: Any) -> None:
    def outcome(call: Any) -> Any:
        try:
            return call()
        except InvalidValue:
            return InvalidValue

    alone = outcome(lambda: EVERYTHING.prepare(key, value))
    assert alone == outcome(lambda: EVERYTHING.settle({key: value})[key])


def test_a_field_keeps_its_own_validators_and_serialisers() -> None:
    class Trip(BaseModel):
        code: str
        price: float = 0.0

        @field_validator("code", mode="before")
        @classmethod
        def upper(cls, code: str) -> str:
            return code.upper()

        @field_validator("price", mode="before")
        @classmethod
        def from_cents(cls, price: Any) -> Any:
            return int(price[:-1]) / 100 if isinstance(price, str) else price

        @field_serializer("price")
        def as_cents(self, price: float) -> str:
            return f"{round(price * 100)}c"

    schema = Schema(Trip)
    assert schema.prepare("code", "lis") == "LIS"
    assert schema.prepare("price", 1.25) == "125c"
    assert schema.read("r", entry({"code": "LIS", "price": "125c"})) == Trip(code="LIS", price=1.25)
    assert not schema.countable("price")


def test_the_server_counts_only_where_any_number_will_do() -> None:
    class Counts(BaseModel):
        plain: int = 0
        from_one: int = 1
        required: int
        limited: int = Field(default=0, le=9)
        maybe: int | None = 0
        real: float = 0

    counted = [key for key in Counts.model_fields if Schema.of(Counts).countable(key)]
    assert counted == ["plain"]


def test_an_error_names_the_type_and_never_the_value() -> None:
    with pytest.raises(InvalidValue) as refused:
        EVERYTHING.settle({"number": "hunter2", "flag": "hunter2"})
    assert str(refused.value) == "number: Input should be a valid integer (given a str); and 1 more"


@given(st.integers(1, 5), st.dictionaries(st.text(min_size=1).filter(lambda key: key[0] != "#"), st.integers()))
def test_every_version_is_brought_up_through_all_that_follow(stored: int, fields: dict[str, int]) -> None:
    def step(number: int) -> Any:
        return lambda fields: {**fields, "way": [*fields.get("way", []), number]}

    class Way(BaseModel):
        model_config = ConfigDict(extra="allow")
        way: list[int] = []

    fields = {"way_": 0, **fields}
    fields.pop("way", None)
    schema = Schema(Way, version=5, upcasters={number: step(number) for number in range(1, 5)})
    before = entry(fields)
    before.fields[SCHEMA] = b"%d" % stored
    kept = dict(before.fields)
    after = schema.view("r", before)
    assert after.all().get("way", []) == list(range(stored, 5))
    assert {key: value for key, value in after.all().items() if key != "way"} == fields
    assert schema.view("r", after) is after
    assert before.fields == kept
