"""Values and messages in the form for a template. Law: nobody's text becomes markup that we did not choose."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from distributed_state.programs.inspector import values
from distributed_state.programs.inspector.values import Node, chat, compared, markdown, marked

ALLOWED = {
    "p", "br", "em", "strong", "s", "a", "code", "pre", "ul", "ol", "li", "blockquote", "hr", "table", "thead", "tbody",
    "tr", "th", "td",
}  # fmt: skip


def tags(html: str) -> set[str]:
    return set(re.findall(r"<(\w+)", html))


def test_markdown_is_shown_as_it_is_meant() -> None:
    shown = markdown("# Plan\n\n**two** `hotels`\n\n- one\n\n|a|b|\n|-|-:|\n|1|2|\n\n[map](https://example.org)\nnext")
    for part in (
        '<p class="heading">Plan</p>',
        "<strong>two</strong> <code>hotels</code>",
        "<li>one</li>",
        '<td class="number">2</td>',
        '<a href="https://example.org" rel="noreferrer noopener">map</a><br />',
    ):
        assert part in shown, part  # fmt: skip
    assert "style=" not in shown, "the browser refuses styles, and says so on its console"


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "<javascript:a(1)>",
        "![x](http://127.0.0.1/x.png)", "[x](data:text/html,y)", "[x](/inspect/sign-out)", "[x](//evil.example)",
        "[a]\n\n[a]: javascript:alert(1)", '[x](https://e.org "a\" onclick=\"alert(1)")', "```<script>\nx\n```",
        "`<b>`", "<!-- x -->", "&lt;script&gt;", "[<img src=x>](https://e.org)", "|<b>|\n|-|\n|<i>|",
        "[x](JavaScript:y)",
        "[x](https://e.org/?\u202e)", "> <b>\n\n1. <i>", "<https://e.org/<b>>", "\0<b>",
    ],
)  # fmt: skip
def test_nothing_in_markdown_becomes_other_markup(text: str) -> None:
    shown = str(markdown(text))
    assert tags(shown) <= ALLOWED, shown
    for address in re.findall(r'href="([^"]*)"', shown):
        assert re.match(r"https?://|mailto:", address), address
    attributes = {name for tag in re.findall(r"<\w+([^<>]*)>", shown) for name in re.findall(r'([\w-]+)="[^"]*"', tag)}
    assert attributes <= {"href", "rel", "title", "class"}, shown


def test_markup_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setitem(values._MARKDOWN.options, "html", True)
    assert not tags(str(markdown("<script>alert(1)</script>"))) <= ALLOWED


@pytest.mark.parametrize("unit", ["[", "![", "*a ", "_a*", "`", "<", "> ", "- ", "[a](", "|a\n", "~~", "&#x", "\\"])
def test_no_text_takes_long(unit: str) -> None:
    begun = time.process_time()
    markdown((unit * 4000)[:4000])
    assert time.process_time() - begun < 0.5, "ten times what it takes"


def test_a_long_text_is_shown_as_it_was_written() -> None:
    assert markdown("**<b>**" + "x" * 4000).startswith('<p class="plain">**&lt;b&gt;**xxx')


def called(id: str, name: str = "book") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"city": "Bergen", "n": [1]}'}}


def test_a_result_is_shown_with_its_call() -> None:
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [called("1"), called("2")], "number": 1},
        {"role": "tool", "tool_call_id": "2", "content": '{"price": 9}', "number": 2},
        {"role": "tool", "tool_call_id": "1", "content": "booked", "number": 3},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "3", "name": "weather", "input": {}}],
            "number": 4,
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3", "content": [{"text": "rain"}]}]},
        {"role": "tool", "tool_call_id": "1", "content": "again", "number": 6},
    ]
    one, three, alone = chat(said, new=2)
    assert [(each["brief"], each["result"]["text"]) for each in one["calls"]] == [
        ("city: Bergen, n: 1 in []", "booked"), ("city: Bergen, n: 1 in []", '{"price": 9}'),
    ]  # fmt: skip
    assert (one["calls"][0]["result"]["tree"], one["calls"][1]["result"]["tree"].children[0].text) == (None, "9")
    assert three["calls"][0]["result"]["text"] == "rain"
    assert [each["text"] for each in alone["results"]] == ["again"], "a call has one result"
    assert [each["new"] for each in (one, three, alone)] == [False, False, True]


def test_calls_of_one_id_get_each_the_next_result() -> None:
    said = [
        each
        for text in ("first", "second")
        for each in (
            {"role": "assistant", "tool_calls": [called("call_1")]},
            {"role": "tool", "tool_call_id": "call_1", "content": text},
        )
    ]
    assert [each["calls"][0]["result"]["text"] for each in chat(said)] == ["first", "second"]


def marks(nodes: list[Node]) -> list[Any]:
    return [
        (each.name or each.text, each.mark or marks(each.children) or (each.text, *each.changed)) for each in nodes
    ]  # fmt: skip


def test_only_differences_are_shown_and_marked() -> None:
    had = {"a": 1, "list": [1, 2, 3], "gone": 0, "plan": {"x": 1, "y": [{"z": 1}]}, "text": "the big red house", "n": 1}
    has = {
        "a": 1,
        "list": [1, 9, 2, 3],
        "new": 0,
        "plan": {"x": 1, "y": [{"z": 2}]},
        "text": "the small red house",
        "n": True,
    }
    assert marks(compared(had, has)) == [
        ("gone", "removed"),
        ("list", [("1", "added"), ("3 unchanged", ("3 unchanged", "", "", ""))]),
        ("n", ("", "1", "true", "")),
        ("new", "added"),
        ("plan", [("y", [("0", [("z", ("", "1", "2", ""))])]), ("1 unchanged", ("1 unchanged", "", "", ""))]),
        ("text", ("the ", "big", "small", " red house")),
        ("1 unchanged", ("1 unchanged", "", "", "")),
    ]
    assert marks(compared({"t": "x" * 100 + " a"}, {"t": "x" * 100 + " b"})) == [
        ("t", ("…" + "x" * 59 + " ", "a", "b", ""))
    ]


def test_of_many_differences_some_are_shown() -> None:
    found = compared({}, {f"f{number}": [number] * 9 for number in range(1000)})
    assert len(found) < 60
    assert found[-1].text == "more differences"


def test_the_words_of_a_search_are_marked() -> None:
    assert marked("A hotel, hotels & HOTEL: a motel", '"hotel".') == (
        "A <mark>hotel</mark>, <mark>hotels</mark> &amp; <mark>HOTEL</mark>: a motel"
    )
    assert marked("a.b <b> (c", "<b> (c .") == "a.<mark>b</mark> &lt;<mark>b</mark>&gt; (<mark>c</mark>"
    assert marked("nothing", '"') == "nothing"
