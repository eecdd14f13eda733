"""The demo of a chat: a killed worker's answer is given by another one, and Ctrl-C ends everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from chatting import chatting

from distributed_state.programs.demo.chat import NAMES
from distributed_state.programs.demo.chat_agent import ANSWERS, HANDLER, scripted
from distributed_state.programs.servers import wait_until

ONE = "/v1/conversations/chat"


def test_a_scripted_answer_is_given_word_by_word() -> None:
    for number in range(1, 8):
        words = scripted(number)
        assert len(words) > 50
        assert "".join(words).strip() in ANSWERS


@pytest.mark.wide
def test_a_killed_workers_answer_is_given_by_another_one_and_nothing_is_left_running() -> None:
    with chatting(pause=0.02) as link:
        url, _, key = link.partition("#")
        origin = url.removesuffix("/chat/")
        with httpx.Client(base_url=origin, timeout=60, headers={"Authorization": f"Bearer {key}"}) as client:

            def workers() -> dict[str, Any]:
                return {each["name"]: each for each in client.get("/chat/workers").json()["workers"]}

            def kill(name: str) -> None:
                assert client.delete(f"/chat/workers/{name}").status_code == 200

            wait_until(lambda: {each["state"] for each in workers().values()} == {"serving"}, "both serve", 60)
            _, names = answered(client, "r1", kill)
            assert names == ["chunk", "restarted", "chunk", "ended"]
            first = workers()
            _, names = answered(client, "r2", lambda _: [kill(name) for name in NAMES])
            assert names == ["chunk", "restarted", "chunk", "ended"]
            assert not {each["pid"] for each in first.values()} & {each["pid"] for each in workers().values()}
            found = client.get(ONE + "/messages?fresh=true").json()["messages"]
            assert [each["role"] for each in found] == ["user", "assistant"] * 2
            assert [each["content"].strip() for each in found[1::2]] == list(ANSWERS[:2])
            assert {each["name"] for each in found[1::2]} <= {*NAMES}  # also that of the killed one: it begins again
            refuses_strangers(url)


def answered(client: httpx.Client, request: str, kill: Callable[[str], Any]) -> tuple[str, list[str]]:
    """Post a message, kill workers once one speaks; return its name, and those of the events, each once."""
    killed, names = "", list[str]()
    message = {"role": "user", "content": "?"}
    given = {"message": message, "handler": HANDLER, "request_id": request}
    assert client.post(ONE + "/inbox", json=given).status_code == 202
    with client.stream("GET", ONE + "/output", params={"request": request}) as response:
        for line in response.iter_lines():
            field, _, text = line.partition(": ")
            if field == "event" and names[-1:] != [text]:
                names.append(text)
            elif field == "data" and not killed:
                killed = json.loads(text)["value"]["worker"]
                kill(killed)
    return killed, names


def refuses_strangers(url: str) -> None:
    """Without the key the page is empty, and shows and kills nothing."""
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{url}chat.js").status_code == 200
    assert [httpx.get(url + path).status_code for path in ("workers", "chat.py", "..%2fchat.py")] == [401, 404, 404]
    assert httpx.delete(f"{url}workers/ada", headers={"Authorization": "Bearer x"}).status_code == 401
