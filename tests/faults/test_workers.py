"""Workers in processes of their own, which are killed and replaced. Law: each input is answered once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, said, until

AGENT = """
import asyncio, time
from distributed_state import {kind}

store = {kind}.open({url!r}, archive={archive!r}, namespace={namespace!r})

@store.handler("answer")
{prefix}def answer(turn):
    taken = turn.take()
    {pause}
    for each in taken:
        turn.append(each.message, {{"role": "assistant", "content": each.message.content}})
"""
TASK = """
import asyncio, time
from distributed_state import ToolCall, Workflow, {kind}

store = {kind}.open({url!r}, archive={archive!r}, namespace={namespace!r})

def plan(state, turn):
    return state.with_memory(state.memory.plan(*"abcdefghijkl")).to_executing()

{prefix}def look(state, turn):
    {pause}
    pending = state.memory.pending_steps()
    if not pending:
        return state.to_done("done")
    call = ToolCall(tool_name="look", arguments={{"at": pending[0]}}, result=turn.request_id)
    return state.record_observation("?", call).with_memory(state.memory.complete(pending[0]))

store.handler("answer", Workflow({{"planning": plan, "executing": look}}))
"""
pytestmark = [pytest.mark.only(warm="single", api="asyncio"), pytest.mark.replicas]


class Workers:
    """Processes that serve the handler `answer` of a store of this kind."""

    def __init__(self, folder: Path, kind: str, opener: Any, module: str) -> None:
        awaits = kind.startswith("Async")
        text = module.format(
            kind=kind, url=opener.url, archive=opener.archive, namespace=opener.namespace,
            prefix="async " if awaits else "", pause="await asyncio.sleep(0.05)" if awaits else "time.sleep(0.05)",
        )  # fmt: skip
        (folder / "answering.py").write_text(text)
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, count: int = 1, *, options: Sequence[str] = ()) -> None:
        """Start so many."""
        words = ["-m", "distributed_state", "work", "answering:store", "--ttl", "2", "--concurrency", "4", *options]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}
        for _ in range(count):
            with (self.folder / f"worker{len(self.processes)}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, *words], cwd=self.folder, env=environment, stdout=log, stderr=log
                )
            self.processes.append(process)

    async def end(self) -> set[int]:
        """Ask all to end, once they work; the exit codes of those that had not been killed."""
        living = [each for each in self.processes if each.poll() is None]
        for each in living:
            at = self.processes.index(each)
            await until(lambda at=at: self.working(at), 60.0)
            each.send_signal(signal.SIGTERM)
        return {await asyncio.to_thread(each.wait, 60) for each in living}

    def working(self, at: int) -> int:
        """How many processes have begun to work in the one that was started at this place."""
        return (self.folder / f"worker{at}.log").read_text().count("working")


@contextmanager
def workers(folder: Path, kind: str, opener: Any, module: str = AGENT) -> Iterator[Workers]:
    found = Workers(folder, kind, opener, module)
    try:
        yield found
    finally:
        for each in found.processes:
            each.kill()
            each.wait()


@pytest.mark.parametrize("kind", ["AsyncStateStore", "StateStore"])
async def test_each_input_is_answered_once_though_workers_are_killed(opener: Any, tmp_path: Path, kind: str) -> None:
    store = await opener()
    asked = [str(number) for number in range(120)]
    sessions = [store.session(f"s{at}") for at in range(12)]
    with workers(tmp_path, kind, opener) as running:
        running.begin(3)
        for number, text in enumerate(asked):
            await sessions[number % 12].post(said(text), request_id=text, handler="answer")
            if number in (40, 80):
                running.processes[number // 40 - 1].kill()
                running.begin()
            await asyncio.sleep(0.02)
        for each in sessions:
            while await each.inbox():
                await asyncio.sleep(0.05)
        assert await running.end() == {0}
    answers = Counter[str]()
    for at, each in enumerate(sessions):
        found = await each.messages(fresh=True)
        answers.update(message.content for message in found if message.role == "assistant")
        assert [message.content for message in found if message.role == "user"] == asked[at::12]
    assert answers == Counter(asked)


@pytest.mark.parametrize("kind", ["AsyncStateStore", "StateStore"])
async def test_tasks_of_workflows_go_on_though_workers_are_killed(opener: Any, tmp_path: Path, kind: str) -> None:
    """Each step is committed once, and nobody has to call for the next one."""
    store = await opener()
    sessions = [store.session(f"s{at}") for at in range(8)]

    async def calls() -> list[int]:
        states = [await each.load_state() for each in sessions]
        return [0 if state is None else len(state.memory.tool_calls) for state in states]

    with workers(tmp_path, kind, opener, TASK) as running:
        running.begin(2)
        for each in sessions:
            await each.post(said("look"), handler="answer")
        for at, steps in enumerate((8, 24, 40)):
            while sum(await calls()) < steps:
                await asyncio.sleep(0.01)
            running.processes[at].kill()
            running.begin()
        assert sum(await calls()) < 96, "a task that had ended would prove nothing"
        while [await each.phase(fresh=True) for each in sessions] != ["done"] * 8:
            await asyncio.sleep(0.05)
        assert await running.end() == {0}
    for each in sessions:
        state = await each.load_state()
        results = [call.result for call in state.memory.tool_calls]
        assert results == [f"{each.ref.id}/{number}" for number in range(1, 13)]
        assert [change.kind for change in await each.history()] == ["post", *["turn"] * 14]
        assert await each.inbox() == []


async def test_a_restart_of_all_workers_loses_nothing(opener: Any, tmp_path: Path) -> None:
    store = await opener()
    session = store.session("s")

    async def answered(count: int) -> None:
        while len(await session.messages(fresh=True)) < 2 * count:
            await asyncio.sleep(0.05)

    await session.post(said("1"), handler="answer")
    with workers(tmp_path, "StateStore", opener) as running:
        running.begin(2)
        await answered(1)
        assert await running.end() == {0}
        await session.post(said("2"))
        await session.wake("3", after=0.1)
        await asyncio.sleep(0.3)
        assert len(await session.messages(fresh=True)) == 2
        running.begin()
        await answered(3)
        assert await running.end() == {0}
    assert [each.content for each in await session.messages()] == ["1", "1", "2", "3", "2", "3"] or [
        each.content for each in await session.messages()
    ] == ["1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize("kind", ["AsyncStateStore", "StateStore"])
async def test_a_repeated_sigterm_lets_running_turns_end(opener: Any, tmp_path: Path, kind: str) -> None:
    """As of systemd, which sends it to all processes of a service while the first one ends the others."""
    store = await opener()
    with workers(tmp_path, kind, opener) as running:
        agent = tmp_path / "answering.py"
        agent.write_text(agent.read_text().replace("sleep(0.05)", "sleep(2)"))
        running.begin()
        await store.session("s").post(said("1"), handler="answer")
        while not await store.admin.leases():
            await asyncio.sleep(0.02)
        worker = running.processes[0]
        worker.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 60) == 0
    assert len(await store.session("s").messages(fresh=True)) == 2


async def test_a_function_that_hangs_does_not_keep_its_worker_from_ending(opener: Any, tmp_path: Path) -> None:
    store = await opener()
    hangs = AGENT.replace("{prefix}def", "def").replace("{pause}", "print('called', flush=True); time.sleep(3600)")
    with workers(tmp_path, "AsyncStateStore", opener, hangs) as running:
        running.begin(options=("--shutdown-timeout", "0.2"))
        await store.session("s").post(said("1"), handler="answer")
        await until(lambda: "called" in (tmp_path / "worker0.log").read_text(), 60.0)
        assert await running.end() == {0}
    assert [each.message.content for each in await store.session("s").inbox()] == ["1"]


async def test_several_processes_of_one_command_end_together(opener: Any, tmp_path: Path) -> None:
    store = await opener()
    with workers(tmp_path, "StateStore", opener) as running:
        words = ["-m", "distributed_state", "work", "answering:store", "--processes", "2"]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        with (tmp_path / "worker0.log").open("wb") as log:
            parent = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, stdout=log, stderr=log)
        running.processes.append(parent)
        await store.session("s").post(said("1"), handler="answer")
        while len(await store.session("s").messages(fresh=True)) < 2:
            await asyncio.sleep(0.05)

        def children() -> list[int]:
            found = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
            return [int(each) for each in found.read_text().split()] if found.exists() else []

        await until(lambda: running.working(0) == 2, 60.0)
        first = children()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: len(children()) == 2 and first[0] not in children(), 30.0)
        await until(lambda: running.working(0) == 3, 60.0)
        assert await running.end() == {0}
        assert not any(Path(f"/proc/{each}").exists() for each in first[1:])
