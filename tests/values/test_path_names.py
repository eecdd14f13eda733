"""Names in paths: whatever they hold, they come out of a path as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from names import HARD, NAMES, tidied

from distributed_state.errors import InvalidValue
from distributed_state.remote.requests import encoded
from distributed_state.values import as_text

pytestmark = pytest.mark.unit


@given(NAMES | st.text())
def test_a_name_comes_out_of_a_path_as_it_went_in(name: str) -> None:
    percent, encoded = as_text.quoted(name), as_text.in_base64(name)
    assert as_text.read(percent.encode()) == as_text.read_base64(encoded.encode()) == name
    assert "/" not in percent + encoded
    padded = encoded + "=" * (-len(encoded) % 4)
    assert as_text.read_base64(padded.encode()) == as_text.read_base64(padded.replace("=", "%3D").encode()) == name


@given(st.lists(NAMES, min_size=1, max_size=3))
def test_no_proxy_changes_a_path_that_is_made_here(names: list[str]) -> None:
    path = as_text.path("/v1", "/users" + "/{}" * len(names), *names)
    *_, last = (parts := path.split("/")[-len(names) :])
    read = as_text.read_base64 if path.startswith("/v1/base64/") else as_text.read
    assert [read(each.encode()) for each in parts] == names
    after = tidied(path).split("/")[-len(names) :]
    assert [read(each.encode()) for each in after] == names, (path, last)


def test_plain_names_stay_readable() -> None:
    assert as_text.path("/v1", "/users/{}/fields/{}", "acme:u-1", "a.b") == "/v1/users/acme%3Au-1/fields/a.b"
    assert as_text.path("/v1", "/users/{}", "a/b") == "/v1/base64/users/YS9i"


@pytest.mark.parametrize("part", [b"YS9", b"YS9i!", b"YS9i=a", b"Y S9i", b"/w", b"_w", b"%FF", b"YS9j\n"])
def test_what_is_no_base64url_of_utf8_is_refused(part: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        as_text.read_base64(part)


def test_two_surrogates_that_are_one_character_in_json_are_refused() -> None:
    pair = "a\ud83d\ude00"
    assert pair != json.loads(json.dumps(pair)) == "a\U0001f600", "the negative control"
    for carry in as_text.quoted, as_text.in_base64, lambda name: encoded({"id": name}):
        with pytest.raises(InvalidValue, match="JSON reads back as one character"):
            carry(pair)
    with pytest.raises(InvalidValue):
        as_text.read(b"a%ED%A0%BD%ED%B8%80")
    for kept in "\ude00\ud83d", "😀", "\ud83d":
        assert json.loads(encoded({kept: 1})) == {kept: 1}


def test_no_two_names_have_one_path() -> None:
    for made in as_text.quoted, as_text.in_base64:
        assert len({made(each) for each in HARD}) == len(set(HARD))
