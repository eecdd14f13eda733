"""The rules on which the core may rely when it waits and runs work elsewhere: the real port, and the simulated one.

Law: as in `test_port`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from distributed_state.errors import ColdUnavailable, StateError, WarmUnavailable
from distributed_state.port import bodies, waited
from distributed_state.port.background import REPLICA, JobStopped
from tests.contracts.grounds import EMBEDDED, EVERY, LIMIT, NETWORK, REAL, SIMULATED, on

SHORT = 0.5  # seconds, for tests that wait for an answer that never comes
seen: ContextVar[str] = ContextVar("seen", default="nothing")


class Unlike(StateError):
    """An error of the store's type that only a test raises."""


# Waiting


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work, which must not suspend."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise AssertionError("it waits for something")


@on(EVERY)
async def test_a_signal_stays_set_until_it_is_cleared(ground: Any) -> None:
    signal = ground.port.signal()
    assert not at_once(signal.wait(0))
    assert not await signal.wait(0.001)
    signal.set()
    assert at_once(signal.wait())
    assert at_once(signal.wait(0))
    assert await signal.wait(0.001)
    signal.clear()
    assert not await signal.wait(0.001)


@on(EVERY)
async def test_a_signal_wakes_all_who_wait_whoever_sets_it(ground: Any) -> None:
    signal = ground.port.signal()
    waiting = [ground.begin(signal.wait(*limit)) for limit in ((), (LIMIT,), ())]

    async def job() -> None:
        signal.set()

    ground.port.spawn(job, "contract")
    assert [await each.result() for each in waiting] == [True, True, True]


@on(EVERY, api="asyncio")
async def test_a_signal_that_is_cleared_before_a_waiter_looks_does_not_end_its_wait(ground: Any) -> None:
    signal = ground.port.signal()
    waiting = ground.begin(signal.wait())
    for _ in range(3):
        await ground.pause()
    signal.set()
    signal.clear()
    for _ in range(3):
        await ground.pause()
    assert not waiting.ended()
    signal.set()
    assert await waiting.result()


@on(EVERY, api="asyncio")
async def test_waits_of_a_task_end_when_it_is_cancelled(ground: Any) -> None:
    for work in (ground.port.signal().wait(), ground.port.sleep(LIMIT)):
        waiting = ground.begin(work)
        await ground.pause()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting.result()


@on(EVERY)
async def test_clocks_go_on(ground: Any) -> None:
    port = ground.port
    monotonic, wall = port.monotonic(), port.wall()
    await port.sleep(0.001)
    await port.sleep(0)
    assert port.monotonic() > monotonic
    assert port.wall() > wall - 60, "it may be set"
    with port.mutex():
        assert port.wall() > 1_600_000_000


@on(EVERY)
async def test_sql_and_threads_give_what_the_call_returns_or_raises(ground: Any) -> None:
    port = ground.port

    def refuse(text: str) -> None:
        raise Unlike(text)

    for way in (port.sql, port.thread):
        assert await way("{}/{}".format, 1, 2) == "1/2"
        with pytest.raises(Unlike, match="why"):
            await way(refuse, "why")


@on(EVERY)
async def test_code_in_a_thread_is_blocking_code_and_knows_the_callers_context(ground: Any) -> None:
    seen.set("the caller's")
    assert await ground.port.thread(lambda: (ground.port.suspends, ground.port.here())) == (False, None)
    assert await ground.port.thread(seen.get) == "the caller's"
    assert await ground.port.thread(lambda: seen.set("its own").old_value) == "the caller's"


@on(EVERY, api="asyncio")
@pytest.mark.parametrize("way", ["sql", "thread"])
async def test_what_blocks_goes_on_when_its_caller_is_cancelled(ground: Any, way: str) -> None:
    began, done, gate = [], [], ground.gate()

    def work() -> None:
        began.append(1)
        gate.wait()
        done.append(1)

    waiting = ground.begin(getattr(ground.port, way)(work))
    if not ground.is_simulated:  # there the work is done as soon as it has begun
        await ground.until(lambda: began)
    await ground.pause()
    waiting.cancel()
    try:
        await waiting.result()
    except asyncio.CancelledError:
        assert ground.is_simulated or not done
    gate.set()
    await ground.until(lambda: done)


@on(EVERY)
async def test_a_users_coroutine_is_completed(ground: Any) -> None:
    port = ground.port

    async def answer(value: int) -> int:
        return value

    async def refuse() -> None:
        raise Unlike("why")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    assert await port.complete(answer(7)) == 7
    with pytest.raises(Unlike):
        await port.complete(refuse())
    with pytest.raises(RuntimeError, match="cancelled"):
        await port.complete(cancelled())


@on(EVERY, api="asyncio")
async def test_the_callers_own_cancellation_ends_a_users_coroutine(ground: Any) -> None:
    waiting = ground.begin(ground.port.complete(ground.port.signal().wait()))
    await ground.pause()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.result()


# Work completed for a caller


@on(EVERY)
@pytest.mark.parametrize("way", ["shield", "drive", "drive_start"])
async def test_work_for_a_caller_gives_its_result_or_error_and_knows_the_context(ground: Any, way: str) -> None:
    finish_it = getattr(ground.port, way)

    async def answer() -> tuple[str, object]:
        found = seen.get()
        seen.set("the work's")
        await ground.port.sleep(0.001)
        return found, await ground.port.command(b"ECHO", seen.get())

    async def refuse() -> None:
        raise Unlike("why")

    seen.set("the caller's")
    assert await finish_it(answer()) == ("the caller's", b"the work's")
    assert seen.get() == "the caller's"
    with pytest.raises(Unlike, match="why"):
        await finish_it(refuse())


@on(EVERY, api="asyncio")
@pytest.mark.parametrize("way", ["shield", "drive", "drive_start"])
async def test_who_is_cancelled_waits_for_its_work_and_is_cancelled_then(ground: Any, way: str) -> None:
    port, began, done = ground.port, [], []
    proceed = port.signal()

    async def work() -> None:
        began.append(1)
        await proceed.wait()
        await port.command(b"ECHO", b"x")
        done.append(1)

    waiting = ground.begin(getattr(port, way)(work()))
    await ground.until(lambda: began)
    waiting.cancel()
    for _ in range(3):
        await ground.pause()
    assert not waiting.ended()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting.result()
    assert done, "it is cancelled when the work is done"


@on(EVERY, api="asyncio")
@pytest.mark.parametrize("way", ["shield", "drive", "drive_start"])
async def test_who_is_cancelled_twice_leaves_and_the_work_goes_on(ground: Any, way: str) -> None:
    port, began, done = ground.port, [], []
    proceed = port.signal()

    async def work() -> None:
        began.append(1)
        await proceed.wait()
        done.append(1)

    waiting = ground.begin(getattr(port, way)(work()))
    await ground.until(lambda: began)
    for _ in range(2):
        waiting.cancel()
        await ground.pause()
    with pytest.raises(asyncio.CancelledError):
        await waiting.result()
    assert not done
    proceed.set()
    await ground.until(lambda: done)


@on(EVERY, api="asyncio")
async def test_driven_work_is_blocking_code_and_does_not_wait_for_what_starts_partitions(ground: Any) -> None:
    port, began = ground.port, []
    proceed = port.signal()

    async def start() -> tuple[bool, object]:
        began.append(1)
        await proceed.wait()
        return port.suspends, port.here()

    async def drive() -> tuple[bool, object]:
        return port.suspends, port.here()

    starting = [ground.begin(port.drive_start(start())) for _ in range(6)]
    await ground.until(lambda: len(began) >= 4)
    assert await port.drive(drive()) == (False, None)
    assert len(began) == 4, "there are so many threads for it"
    proceed.set()
    for each in starting:
        assert await each.result() == (False, None)
    assert len(began) == 6


# Jobs


@on(EVERY)
async def test_a_job_is_blocking_code_of_the_replica_with_a_context_of_its_own(ground: Any) -> None:
    port = ground.port
    seen.set("the caller's")

    async def job() -> tuple[Any, ...]:
        return port.suspends, port.here(), REPLICA.get(), seen.get(), waited.present()

    with waited.call():
        assert await ground.in_job(job) == (False, None, "replica", "nothing", None)


@on(EVERY)
@pytest.mark.parametrize("way", ["sleep", "sleep not at all", "signal"])
async def test_a_job_ends_where_it_waits_once_it_is_asked_to(ground: Any, way: str) -> None:
    port, ends = ground.port, []
    signal = port.signal()
    begun = port.signal()

    async def job() -> None:
        try:
            begun.set()
            while True:
                await (signal.wait() if way == "signal" else port.sleep(LIMIT if way == "sleep" else 0))
        except BaseException as error:
            ends.append(type(error))
            raise

    jobs = [port.spawn(job, "contract") for _ in range(3)]
    await begun.wait()
    for each in jobs:
        each.ask()
    for each in jobs:
        await each.stop()
        await each.stop()
    assert ends == [JobStopped] * 3


@on(EVERY)
async def test_a_job_that_is_asked_to_end_finds_what_is_there_already(ground: Any) -> None:
    port, found = ground.port, []
    began, proceed, signal = port.signal(), port.signal(), port.signal()

    async def job() -> None:
        began.set()
        try:
            await proceed.wait()
        except JobStopped:
            found.append(await signal.wait())
            signal.clear()
            try:
                await signal.wait(0.001)
            except JobStopped:
                found.append("stopped")

    signal.set()
    asked = port.spawn(job, "contract")
    await began.wait()
    await asked.stop()
    assert found == [True, "stopped"]


@on(NETWORK)
async def test_a_job_is_not_interrupted_in_an_exchange(ground: Any) -> None:
    port, needle, found = ground.port, ground.key("needle"), []

    async def job() -> None:
        found.append(await port.command(b"ECHO", needle))
        found.append(await port.command(b"ECHO", b"more"))
        found.append(await port.sql(lambda: "sql"))
        try:
            await port.sleep(0)
        except JobStopped:
            found.append(JobStopped)
            raise

    held = ground.hold(needle)
    asked = port.spawn(job, "contract")
    await ground.until(held.arrived)
    asked.ask()
    for _ in range(3):
        await ground.pause()
    assert not found
    held.go()
    await asked.stop()
    assert found == [needle, b"more", "sql", JobStopped]


@on(EVERY)
async def test_a_job_that_stops_itself_does_not_wait_for_itself_and_waits_for_others(ground: Any) -> None:
    port, order, jobs = ground.port, [], []
    ready, proceed = port.signal(), port.signal()

    async def other() -> None:
        try:
            await port.sleep(LIMIT)
        except JobStopped:
            await port.command(b"ECHO", b"the last")
            order.append("other")
            raise

    async def job() -> None:
        await ready.wait()
        await jobs[0].stop()
        order.append("itself")
        await jobs[1].stop()
        order.append("done")

    jobs[:] = [port.spawn(job, "contract"), port.spawn(other, "other")]
    ready.set()
    await ground.until(lambda: len(order) == 3)
    assert order == ["itself", "other", "done"]
    proceed.set()


@on(EVERY)
async def test_all_jobs_are_asked_to_end_but_those_of_a_user(ground: Any) -> None:
    port, ends = ground.port, []
    proceed = port.signal()

    async def job() -> None:
        try:
            await port.sleep(LIMIT)
        finally:
            ends.append("ours")

    async def users() -> None:
        await proceed.wait()
        ends.append("the user's")

    port.spawn(job, "contract")
    here = port.spawn_here(users, "user")
    port.ask_all()
    await ground.until(lambda: ends)
    await ground.pause()
    assert ends == ["ours"]
    proceed.set()
    await ground.until(lambda: len(ends) == 2)
    await here.stop()


@on(EVERY)
async def test_a_job_of_a_users_runs_where_its_maker_does_and_is_stopped(ground: Any) -> None:
    port, found = ground.port, []
    seen.set("the caller's")

    async def job() -> None:
        found.append((port.suspends, port.here(), seen.get(), REPLICA.get()))
        try:
            await port.sleep(LIMIT)
        except BaseException as error:
            await port.command(b"ECHO", b"the last")
            found.append(type(error))
            raise

    here = port.spawn_here(job, "user")
    await ground.until(lambda: found)
    await here.stop()
    await here.stop()
    context = "the caller's" if ground.suspends else "nothing"
    end = asyncio.CancelledError if ground.suspends else JobStopped
    assert found == [(ground.suspends, port.here(), context, "replica"), end]


@on(EVERY)
async def test_a_job_of_a_users_that_stops_itself_does_not_wait_for_itself(ground: Any) -> None:
    port, found, jobs = ground.port, [], []
    ready = port.signal()

    async def job() -> None:
        await ready.wait()
        await jobs[0].stop()
        found.append("asked")
        try:
            await port.sleep(LIMIT)
        except BaseException as error:
            found.append(type(error))
            raise

    jobs.append(port.spawn_here(job, "user"))
    ready.set()
    await ground.until(lambda: len(found) == 2)
    assert found == ["asked", asyncio.CancelledError if ground.suspends else JobStopped]


# Guards and owners


@on(EVERY, api="asyncio")
async def test_a_guard_interrupts_the_body_and_knows_its_own_cancellation(ground: Any) -> None:
    guards: list[Any] = []

    async def body() -> str:
        guards.append(ground.port.guard())
        try:
            await ground.port.sleep(LIMIT)
        except asyncio.CancelledError as error:
            if guards[-1].leave(error):
                await ground.port.sleep(0)
                return "interrupted"
            raise
        return "not at all"

    interrupted = ground.begin(body())
    await ground.until(lambda: guards)
    assert not guards[0].fired
    guards[0].interrupt()
    assert await interrupted.result() == "interrupted"
    assert guards[0].fired

    cancelled = ground.begin(body())
    await ground.until(lambda: len(guards) == 2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled.result()

    both = ground.begin(body())
    await ground.until(lambda: len(guards) == 3)
    guards[2].interrupt()
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both.result()


@on(EVERY)
async def test_a_guard_that_was_left_interrupts_nobody(ground: Any) -> None:
    port = ground.port
    left = port.guard()
    assert not left.leave(None)
    left.interrupt()
    late = port.guard()
    late.interrupt()  # by the body itself, which no longer waits
    assert not late.leave(None)
    for _ in range(3):
        await port.sleep(0)
    assert await port.command(b"ECHO", b"x") == b"x"


@on((*EMBEDDED, *SIMULATED))
async def test_a_guard_of_blocking_code_interrupts_nothing(ground: Any) -> None:
    async def job() -> bool:
        guard = ground.port.guard()
        guard.interrupt()
        await ground.port.sleep(0)
        return bool(guard.leave(asyncio.CancelledError()))

    assert not await ground.in_job(job)


@on(EVERY)
async def test_who_calls_is_known(ground: Any) -> None:
    port, owners = ground.port, []
    proceed = port.signal()
    assert port.suspends == ground.suspends
    assert (port.here() is not None) == ground.suspends
    assert not port.holds_up(port.here())
    assert port.loop_of(port.owner()) is port.here()

    async def other() -> None:
        owners.append((port.owner(), port.here()))
        await proceed.wait()

    begun = ground.begin(other())
    await ground.until(lambda: owners)
    ((owner, here),) = owners
    assert owner is not port.owner()
    assert here is port.here()
    assert port.loop_of(owner) is here
    proceed.set()
    await begun.result()


# The end


@on(NETWORK, api="asyncio")
async def test_closing_ends_what_tasks_wait_for_and_begin(ground: Any) -> None:
    port, needle = ground.open(), ground.key("needle")
    await ground.again(port.open)
    node = ground.node
    held = ground.hold(needle)
    waiting = ground.begin(port.command(b"ECHO", needle))
    await ground.until(held.arrived)
    await port.close()
    with pytest.raises(WarmUnavailable):
        await waiting.result()
    held.go()
    for refused in (port.exchange, partial(port.exchange_with, node), port.commands):
        with pytest.raises(WarmUnavailable):
            await refused([(b"PING",)])


@on(EVERY, api="asyncio")
async def test_after_the_end_nothing_is_begun(ground: Any) -> None:
    port, done = ground.open(), []

    async def work() -> None:
        done.append(1)

    await ground.again(port.open)
    await port.close()
    with pytest.raises(WarmUnavailable):
        await port.command(b"PING")
    for way in (port.drive, port.drive_start):
        with pytest.raises(WarmUnavailable):
            await way(work())
    with pytest.raises(ColdUnavailable):
        await port.sql(done.append, 1)
    assert not done
    await port.close()


@on(EVERY, api="asyncio")
async def test_closing_waits_for_what_asks_sql(ground: Any) -> None:
    port, began, done = ground.open(), [], []
    await ground.again(port.open)

    async def work() -> None:
        began.append(1)
        await port.sleep(0.01)
        await port.sql(done.append, "driven")

    waiting = ground.begin(port.drive(work()))
    await ground.until(lambda: began)
    await port.close()
    assert done == ["driven"]
    await waiting.result()


@on(EVERY)
async def test_jobs_that_are_spawned_after_the_end_are_asked_to_end(ground: Any) -> None:
    port, found = ground.open(), []
    await ground.again(port.open)

    async def job() -> None:
        try:
            await port.sleep(LIMIT)
        except JobStopped:
            found.append("before")
            raise

    async def late() -> None:
        found.append(await port.command(b"ECHO", b"a thread may still say something"))
        try:
            await port.sleep(LIMIT)
        except JobStopped:
            found.append("after")
            raise

    before = port.spawn(job, "contract")
    await port.close()
    await before.stop()
    assert found == ["before"]
    await port.spawn(late, "contract").stop()
    assert found == ["before", b"a thread may still say something", "after"]


@on(NETWORK)
async def test_jobs_that_wait_for_a_silent_server_are_given_up_within_the_limit_of_a_call(ground: Any) -> None:
    port, errors, began = ground.open(retry_for=SHORT), [], []

    async def job() -> None:
        await port.command(b"ECHO", b"x")
        began.append(1)
        await proceed.wait()
        for _ in range(2):
            try:
                await port.command(b"ECHO", ground.key("lost"))
            except WarmUnavailable as error:
                errors.append(str(error))

    proceed = port.signal()
    await ground.again(port.open)
    spawned = port.spawn(job, "contract")
    await ground.until(lambda: began)
    ground.freeze()
    proceed.set()
    await ground.pause()
    before = port.monotonic()
    port.ask_all()
    await spawned.stop()
    took = port.monotonic() - before
    assert len(errors) == 2 or ground.is_simulated
    assert took < (SHORT + 0.2 if ground.is_simulated else LIMIT / 2)
    await port.close()


@on(NETWORK)
async def test_a_call_that_closes_still_reaches_redis_after_waits_were_cut(ground: Any) -> None:
    """A job may wait for SQL for so long. What the store says to Redis in the end arrives nevertheless."""
    port = ground.open(retry_for=SHORT)
    await ground.again(port.open)
    with waited.call():
        port.ask_all()
        await port.sleep(SHORT + 0.2)
        for _ in range(2):
            assert await port.command(b"ECHO", b"the last") == b"the last"
    await port.close()


@on((*EMBEDDED, *REAL), api="asyncio")
async def test_the_end_of_an_event_loop_is_reported(ground: Any) -> None:
    port, ended, loops = ground.port, [], []
    port.when_a_loop_ends(ended.append)

    async def other() -> None:
        loops.append(asyncio.get_running_loop())
        assert await port.command(b"ECHO", b"x") == b"x"

    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    await ground.until(lambda: not thread.is_alive())
    assert ended == loops
    assert len(ended) == 1


@on((*EMBEDDED, *REAL), api="blocking")
async def test_after_a_fork_the_port_connects_anew(ground: Any) -> None:
    if (watch := ground.port._connections._watch) is not None:
        watch.end()  # no thread survives fork()
    ground.port.abandon()
    assert await ground.again(lambda: ground.port.command(b"ECHO", b"x")) == b"x"


@on(EVERY, api="asyncio")
async def test_an_interruption_that_is_on_its_way_when_the_body_ends_is_absorbed(ground: Any) -> None:
    port = ground.port

    async def body() -> tuple[type[BaseException] | None, bool]:
        guard = port.guard()
        assert await guard.absorb(None) is None
        guard.interrupt()
        late = await guard.absorb(None)
        return type(late), guard.leave(late)

    assert await ground.begin(body()).result() == (asyncio.CancelledError, True)


@on((*EMBEDDED, *REAL), api="blocking")  # the simulator has no blocking bodies that are stopped
async def test_interrupted_blocking_code_raises_at_its_next_call_to_a_server_once(
    ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ground.port
    around, inner = port.guard(), port.guard()

    def check() -> None:
        for guard in (inner, around):
            guard.check()

    monkeypatch.setattr(bodies.interruptions, "check", check)  # leases know the guards of a context
    around.interrupt()
    assert await port.command(b"ECHO", "x") == b"x", "a lease that was lost interrupts no thread"
    around.interrupt(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError) as caught:
        await port.command(b"ECHO", "x")
    assert await port.command(b"ECHO", "x") == b"x"
    assert not inner.leave(caught.value)
    assert around.leave(caught.value)
    inner.interrupt(ZeroDivisionError())
    assert inner.leave(await inner.absorb(None)), "it ended the body at its end"
    inner.interrupt(ZeroDivisionError())
    assert not inner.leave(None)
    assert await port.command(b"ECHO", "x") == b"x"
    assert not bodies.interruptions.pending
