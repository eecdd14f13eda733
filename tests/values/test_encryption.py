"""What is encrypted opens where it was written, and nowhere else; keys are never shown."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_state import ConfigurationError, DecryptionFailed, Encryption, InvalidValue, KeyRing, Message
from distributed_state.values.codec import Codec, encode, item_name
from distributed_state.values.encryption import Sealed

pytestmark = pytest.mark.unit

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
RING = KeyRing({"old": OLD, "new": NEW})


def said(error: BaseException | None) -> str:
    """All that an error and those before it say."""
    return "" if error is None else f"{error!r} {error} {said(error.__cause__)} {said(error.__context__)}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def form(record: str = "session:s", namespace: str = "n", keys: KeyRing = RING, **options: Any) -> Sealed:
    return Sealed(Encryption(keys, **options), namespace, record)


@given(values, st.text().filter(lambda key: key[:1] != "#"))
def test_any_value_comes_back_as_it_was(value: Any, key: str) -> None:
    data = form().encode(value, key)
    assert data[:1] == b"\x01"
    assert form().decode(data, key) == value
    assert form().encode(value, key) != data, "a nonce is never used again"


@given(values)
def test_any_message_comes_back_as_it_was(content: Any) -> None:
    message = Message.model_validate({"role": "user", "content": "x", "metadata": {"any": content}})
    data = form().encode_message(message)
    assert data[:1] == b"\x01"
    assert form().decode_message(data, "session:s") == message


def test_a_value_opens_only_in_its_own_place() -> None:
    data = form().encode("secret", "ssn")
    for other, key in [
        (form(), "name"),
        (form(record="session:t"), "ssn"),
        (form(namespace="m"), "ssn"),
        (form(record="user:s"), "ssn"),
        (form(), "#message"),
    ]:
        with pytest.raises(DecryptionFailed) as caught:
            other.decode(data, key)
        assert (caught.value.record, caught.value.field, caught.value.key) == (other.record, key, "new")
        assert "secret" not in str(caught.value)


def test_without_its_place_a_value_would_open_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(Sealed, "_place", lambda self, name: b"")
    assert form(record="session:t").decode(form().encode("secret", "ssn"), "name") == "secret"


def test_names_that_run_into_one_another_are_not_confused() -> None:
    """The place is written with lengths: 'session:ab' + 'c' is not 'session:a' + 'bc'."""
    data = form(record="session:ab").encode(1, "c")
    with pytest.raises(DecryptionFailed):
        form(record="session:a").decode(data, "bc")


def test_a_message_opens_only_under_the_record_it_was_appended_to() -> None:
    data = form(record="session:parent").encode_message({"role": "user", "content": "x"})
    assert form(record="session:child").decode_message(data, "session:parent").content == "x"
    with pytest.raises(DecryptionFailed, match="a message is encrypted with key 'new'"):
        form(record="session:child").decode_message(data, "session:child")
    with pytest.raises(DecryptionFailed):
        form(record="session:parent").decode(data, "a message in place of a field")


@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_refused_by_name(rest: bytes) -> None:
    with pytest.raises(DecryptionFailed):
        form().decode(b"\x01" + rest, "ssn")
    with pytest.raises(DecryptionFailed, match="has no keys"):
        Codec("n", "session:s").decode(b"\x01" + rest, "ssn")


@given(st.integers(min_value=0))
def test_a_flipped_bit_is_seen(at: int) -> None:
    data = bytearray(form().encode("secret", "ssn"))
    data[1 + at % (len(data) - 1)] ^= 1
    with pytest.raises(DecryptionFailed):
        form().decode(bytes(data), "ssn")


def test_every_key_of_the_ring_reads_and_the_current_one_writes() -> None:
    before = form(keys=KeyRing({"old": OLD})).encode("v", "f")
    assert form().decode(before, "f") == "v"
    assert form().encode("v", "f")[1:5] == b"\x03new"
    assert form(keys=KeyRing({"old": OLD, "new": NEW}, current="old")).encode("v", "f")[1:5] == b"\x03old"
    with pytest.raises(
        DecryptionFailed, match=r"field 'f' is encrypted with key 'old' and the key ring has new"
    ) as caught:
        form(keys=KeyRing({"new": NEW})).decode(before, "f")
    assert caught.value.key == "old"
    with pytest.raises(DecryptionFailed, match="does not open"):
        form(keys=KeyRing({"old": NEW})).decode(before, "f")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.record, again.field, again.key, str(again)) == ("session:s", "f", "old", str(caught.value))


def test_plain_text_is_refused_where_it_may_not_be() -> None:
    with pytest.raises(DecryptionFailed, match="field 'ssn' is not encrypted as required") as caught:
        form().decode(b'"123-45"', "ssn")
    assert "123" not in said(caught.value)
    assert caught.value.data == b""
    assert form(accept_plaintext=True).decode(b'"123-45"', "ssn") == "123-45"
    assert form(fields=("ssn",)).decode(b"1", "age") == 1
    with pytest.raises(DecryptionFailed, match="a message is not encrypted"):
        form(fields=()).decode_message(b'{"role":"user"}', "session:s")


def test_patterns_choose_fields() -> None:
    chosen = Encryption(RING, fields=("ssn", "card*"), messages=False)
    assert [chosen.covers(name) for name in ("ssn", "card", "card_number", "SSN", "ssn2", "a\nssn", "#message")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    assert Encryption(RING).covers("anything\nat all")
    assert not Encryption(RING, fields=()).covers("x")
    # What was encrypted once can still be read where it need not be any more.
    assert form(fields=()).decode(form().encode(1, "x"), "x") == 1


def test_a_complaint_names_an_item_as_users_do_and_leaves_other_names_alone() -> None:
    for value in (object(), float("nan"), [float("nan")]):
        with pytest.raises(InvalidValue, match=r"^item notes k(\[0\])?: "):
            encode(value, item_name(b"notes\0k"))
        with pytest.raises(InvalidValue, match=r"^#tag\0k(\[0\])?: "):
            encode(value, "#tag\0k")


def test_complaints_do_not_repeat_what_is_to_be_encrypted() -> None:
    cases: list[Any] = [
        lambda form: form.encode({"4111-1111": object()}, "card"),
        lambda form: form.encode({"a": [float("nan")], "4111-1111": 1}, "card"),
        lambda form: form.encode_message({"role": "user", "content": ["4111-1111", {"4111-1111": {1, 2}}]}),
        lambda form: form.encode_message({"role": "4111-1111", "content": "4111-1111"}),
        lambda form: form.encode_message({"role": "user", "content": 4111_1111}),
    ]
    for case in cases:
        with pytest.raises(InvalidValue) as caught:
            case(form())
        assert "4111" not in said(caught.value)
    with pytest.raises(InvalidValue, match="4111"):  # where nothing is to be hidden, the place is named
        cases[0](Codec("n", "session:s"))


@pytest.mark.parametrize(
    ("keys", "current"),
    [
        ({}, None),
        ({"a": b"short"}, None),
        ({"a": "x" * 32}, None),
        ({"": OLD}, None),
        ({"no spaces": OLD}, None),
        ({"a" * 65: OLD}, None),
        ({1: OLD}, None),
        ({"a": OLD}, "b"),
        ([OLD], None),
    ],
)
def test_a_wrong_ring_is_a_configuration_error(keys: Any, current: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeyRing(keys, current=current)
    assert "x" * 32 not in str(caught.value)


def test_keys_of_16_and_24_bytes_do_too() -> None:
    for size in (16, 24, 32):
        assert (
            form(keys=KeyRing({"k": OLD[:size]})).decode(form(keys=KeyRing({"k": OLD[:size]})).encode(1, "f"), "f") == 1
        )


def test_keys_are_never_shown() -> None:
    shown = f"{RING!r} {RING} {Encryption(RING)!r} {form()!r} {RING.__dict__!r}"
    for key in (OLD, NEW):
        for text in (repr(key), repr(key)[2:-1], key.hex(), base64.b64encode(key).decode()):
            assert text not in shown
    assert "KeyRing(old, new; current new)" in shown
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(RING)


def test_the_environment_gives_keys_to_the_command_line(tmp_path: Path) -> None:
    old, new = base64.b64encode(OLD).decode(), base64.urlsafe_b64encode(NEW).decode()
    assert Encryption.from_environment({}) is None
    found = Encryption.from_environment({"DISTRIBUTED_STATE_KEYS": f"old:{old}, new:{new}"})
    assert found is not None
    assert (found.keys.ids, found.keys.current, found.fields, found.messages) == (("old", "new"), "new", ("*",), True)
    file = tmp_path / "keys"
    file.write_text(f"# rotated in November\nold: {old}\nnew: {new}  # not yet current\n")
    environment = {
        "DISTRIBUTED_STATE_KEY_FILE": str(file),
        "DISTRIBUTED_STATE_CURRENT_KEY": "old",
        "DISTRIBUTED_STATE_ENCRYPTED_FIELDS": "ssn, card*",
        "DISTRIBUTED_STATE_ENCRYPTED_MESSAGES": "false",
        "DISTRIBUTED_STATE_ACCEPT_PLAINTEXT": "true",
    }
    found = Encryption.from_environment(environment)
    assert found is not None
    assert found.keys.current == "old"
    assert (found.fields, found.messages, found.accept_plaintext) == (("ssn", "card*"), False, True)
    assert form(keys=found.keys).decode(form().encode(1, "f"), "f") == 1


@pytest.mark.parametrize(
    "environment",
    [
        {"KEYS": "hunter2"},
        {"KEYS": "a:hunter2!"},
        {"KEYS": "a:aHVudGVyMg=="},
        {"KEYS": f"a:{base64.b64encode(OLD).decode()},a:{base64.b64encode(OLD).decode()}"},
        {"KEYS": "#"},
        {"KEY_FILE": "/nowhere/hunter"},
        {"KEYS": "x", "KEY_FILE": "y"},
        {"ENCRYPTED_FIELDS": "ssn"},
        {"KEYS": f"a:{base64.b64encode(OLD).decode()}", "ACCEPT_PLAINTEXT": "perhaps"},
        {"KEYS": f"a:{base64.b64encode(OLD).decode()}", "CURRENT_KEY": "b"},
    ],
)
def test_wrong_keys_in_the_environment_are_refused_and_not_repeated(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Encryption.from_environment({f"DISTRIBUTED_STATE_{name}": text for name, text in environment.items()})
    shown = said(caught.value)
    assert "hunter2" not in shown
    assert "aHVudGVyMg" not in shown
    assert base64.b64encode(OLD).decode() not in shown


def test_encryption_is_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="KeyRing"):
        Encryption({"a": OLD})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="tuple"):
        Encryption(RING, fields="ssn")  # type: ignore[arg-type]
    assert Encryption(RING, fields=["a"]).fields == ("a",)  # type: ignore[arg-type]
