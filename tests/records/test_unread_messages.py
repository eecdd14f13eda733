"""A message that nobody has looked at yet. Law: nothing that can be done with a message shows whether it was read."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from distributed_state import CorruptState, Message
from distributed_state.values import codec, field_ttl
from distributed_state.values.codec import Codec

pytestmark = pytest.mark.unit

texts = st.text(st.characters())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(texts, items, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": st.none() | texts | st.lists(values, max_size=3),
        "name": st.none() | texts,
        "tool_calls": st.none() | st.lists(values, max_size=3),
        "timestamp": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "metadata": st.none() | st.dictionaries(texts, values, max_size=3),
        "refusal": values,
    },
)
TIME_MS = 1_795_237_177_378
FIELDS = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}], "mood": {"good": True}}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    messages: tuple[Message, ...]


class Revalidating(BaseModel):
    model_config = ConfigDict(revalidate_instances="always")

    message: Message


class Mine(Message):
    mood: dict[str, bool]


def unread(fields: dict[str, Any], kind: type[Message] = Message) -> Any:
    stored = field_ttl.dated(codec.encode_message(fields), TIME_MS)
    return kind.unread(Codec("n", "session:s").read_message, [stored], [7])[0]


def read(fields: dict[str, Any]) -> Any:
    """The same as pydantic makes it of what was given, with the time of its commit."""
    made = Message.model_validate(fields)
    if "timestamp" not in fields:
        made.__dict__["timestamp"] = TIME_MS / 1000
    return made


LOOKS: dict[str, Callable[[Any], Any]] = {
    "fields": lambda it: [getattr(it, name) for name in Message.model_fields],
    "unknown": lambda it: it.refusal if "refusal" in it.model_fields_set else None,
    "dict": lambda it: it.__dict__,
    "vars": vars,
    "pairs": dict,
    "to_dict": lambda it: it.to_dict(),
    "order": lambda it: list(it.to_dict().items()),
    "given": lambda it: (type(it.model_fields_set), sorted(it.model_fields_set)),
    "extra": lambda it: it.model_extra,
    "private": lambda it: it.__pydantic_private__,
    "dump": lambda it: repr(it.model_dump()),
    "set": lambda it: it.model_dump(exclude_unset=True),
    "iter": lambda it: [*it],
    "repr": repr,
    "str": str,
    "hash": hash,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda it: it.model_copy(update={"content": "other"}),
    "deep model_copy": lambda it: it.model_copy(deep=True),
    "pickle": lambda it: pickle.loads(pickle.dumps(it)),
    "made anew": lambda it: type(it)(**it.to_dict()),
    "validated": Message.model_validate,
    "strict": lambda it: Strict(messages=(it,)).messages[0],
    "revalidated": lambda it: Revalidating(message=it).message,
    "in a list": lambda it: TypeAdapter(list[Message]).dump_python([it]),
    "in a model": lambda it: Strict(messages=(it,)).model_dump(),
    "type": type,
    "instance": lambda it: isinstance(it, Message),
    "absent": lambda it: getattr(it, "no_such_thing", "absent"),
    "equal": lambda it: (it == it, it == Message(role="user"), Message(role="user") != it),
    "inside": lambda it: [it].index(it),
}


@settings(derandomize=True, deadline=None, database=None)
@given(messages)
def test_it_is_as_one_that_was_read(fields: dict[str, Any]) -> None:
    for name, look in LOOKS.items():
        found = look(unread(fields))
        assert repr(found) == repr(look(read(fields))), name
        again = unread(fields)
        look(again)
        assert again == unread(fields) == read(fields), name
        assert again.to_dict() == fields, name
        assert again.number == 7


def test_json_is_the_same_too() -> None:
    assert unread(FIELDS).model_dump_json() == read(FIELDS).model_dump_json()
    assert TypeAdapter(list[Message]).dump_json([unread(FIELDS)]) == TypeAdapter(list[Message]).dump_json(
        [read(FIELDS)]
    )


def test_it_cannot_be_changed() -> None:
    message = unread(FIELDS)
    with pytest.raises(ValidationError, match="frozen"):
        message.content = "other"
    assert message == read(FIELDS)


def test_a_copy_has_no_number_and_no_bond() -> None:
    message = unread(FIELDS)
    copied = copy.copy(message)
    assert (message.number, copied.number) == (7, None)
    deep = copy.deepcopy(message)
    deep.tool_calls.append(1)
    assert message == read(FIELDS)


def test_a_message_of_a_class_of_its_own_is_read_as_well() -> None:
    message = unread(FIELDS, Mine)
    assert (message.mood, message.content, type(message)) == ({"good": True}, "hi", Mine)


def test_one_that_cannot_be_read_says_so_each_time() -> None:
    [message] = Message.unread(Codec("n", "session:s").read_message, [b"{broken"], [3])
    for look in (
        repr,
        str,
        hash,
        vars,
        copy.copy,
        pickle.dumps,
        Message.to_dict,
        lambda it: it.role,
        lambda it: it == it,
    ):
        with pytest.raises(CorruptState, match=r"^session:s: message 3: message: 7 stored bytes are not JSON"):
            look(message)
    assert message.number == 3


@pytest.fixture
def hurried() -> Iterator[None]:
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hurried")
def test_threads_that_look_at_once_see_the_same() -> None:
    """None of them finds half a message."""
    looks: list[Callable[[Any], Any]] = [
        lambda it: it.content,
        lambda it: it.model_fields_set and it.content,
        lambda it: it.mood and it.content,
        lambda it: it.to_dict()["content"],
    ]
    wrong: list[Any] = []
    start = threading.Barrier(len(looks))

    def run(look: Callable[[Any], Any], many: list[Any]) -> None:
        start.wait()
        for message in many:
            try:
                assert look(message) == "hi"
            except Exception as error:  # noqa: BLE001 - reported below
                wrong.append(error)

    for _ in range(200):
        many = [unread(FIELDS) for _ in range(20)]
        threads = [threading.Thread(target=run, args=(look, many)) for look in looks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
