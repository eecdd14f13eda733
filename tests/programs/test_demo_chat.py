"""The demo of a chat: a killed worker's answer is given by the other one, and Ctrl-C ends everything."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chatting import chatting

from distributed_state.programs.demo.chat import ANSWERS, NAMES, scripted
from distributed_state.programs.servers import wait_until

ONE = "/v1/conversations/chat"


def test_a_scripted_answer_is_given_word_by_word() -> None:
    for number in range(1, 8):
        words = scripted(number)
        assert len(words) > 50
        assert "".join(words).strip() in ANSWERS


@pytest.mark.wide
def test_a_killed_workers_answer_is_given_by_the_other_one_and_nothing_is_left_running() -> None:
    with chatting(pause=0.02) as link:
        url, _, key = link.partition("#")
        with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {key}"}) as client:

            def workers() -> dict[str, Any]:
                return {each["name"]: each for each in client.get(f"{url}workers").json()["workers"]}

            wait_until(lambda: {each["state"] for each in workers().values()} == {"serving"}, "both serve")
            killed, names = kill_the_one_that_speaks(
                client, url, {name: each["url"] for name, each in workers().items()}
            )
            assert names == ["chunk", "restarted", "chunk", "ended"]
            (other,) = {*NAMES} - {killed}
            found = client.get(workers()[other]["url"] + ONE + "/messages?fresh=true").json()["messages"]
            assert [each["role"] for each in found] == ["user", "assistant"]
            assert (found[1]["name"], found[1]["content"].strip()) == (other, ANSWERS[0])
            refuses_strangers(url)


def kill_the_one_that_speaks(client: httpx.Client, url: str, urls: dict[str, str]) -> tuple[str, list[str]]:
    """Post a message, and kill the worker that answers it; return its name, and those of the events, each once."""
    killed, names = "", list[str]()
    first, second = urls.values()
    client.post(first + ONE + "/inbox", json={"message": {"role": "user", "content": "?"}, "request_id": "r"})
    after = ""
    while "ended" not in names:
        # The worker that is followed may be the one that is killed.
        at = second if killed and urls[killed] == first else first
        try:
            with client.stream("GET", f"{at}{ONE}/output", params={"request": "r", "after": after}) as response:
                for line in response.iter_lines():
                    field, _, text = line.partition(": ")
                    if field == "id":
                        after = text
                    elif field == "event" and names[-1:] != [text]:
                        names.append(text)
                    elif field == "data" and not killed:
                        killed = json.loads(text)["value"]["worker"]
                        assert client.delete(f"{url}workers/{killed}").status_code == 200
        except httpx.TransportError:
            assert killed
    return killed, names


def refuses_strangers(url: str) -> None:
    """Without the key the page is empty, and shows and kills nothing."""
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{url}chat.js").status_code == 200
    assert [httpx.get(url + path).status_code for path in ("workers", "chat.py", "..%2fchat.py")] == [401, 404, 404]
    assert httpx.delete(f"{url}workers/ada", headers={"Authorization": "Bearer x"}).status_code == 401
