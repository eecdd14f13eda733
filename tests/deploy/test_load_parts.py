"""The parts of the load generator that need no fleet: when it sends, what it measures, what it finds wrong."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from deploy.load import faults, fleet, growth, load, scenarios
from deploy.load.baseline import Commands, _quoted, _trip
from deploy.load.client import targets
from deploy.load.curves import sizing
from deploy.load.curves.curve import Curve
from deploy.load.curves.stored import Stored, merged
from deploy.load.faults import Breaking, Broke, Fault
from deploy.load.figures import at_knees
from deploy.load.knee import PHASES, PRECISION, Knee
from deploy.load.measures import Outage, Recorder, Result, Timeline, carried, combine, without_lost
from deploy.load.reporting import Figure, Report, show
from deploy.load.scenarios import Caller, Chat
from deploy.load.schedule import arrivals
from deploy.load.thresholds import Thresholds
from deploy.load.verifying import Difference, Expected, differences, messages_of

pytestmark = pytest.mark.unit

USER = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SOURCE = [[USER, [{"role": "user", "content": "and?"}]], [[{"role": "user", "content": "bye"}]]]


def result(**given: Any) -> Result:
    latency = {"50": 0.01, "75": 0.01, "90": 0.02, "99": 0.1, "99.9": 0.2, "99.99": 0.2, "100": 0.3}
    values = {"rate": 100.0, "seconds": 1.0, "offered": 100, "answered": 100, "failed": 0, "retries": 0}
    return Result(**{"scenario": "chat", **values, "per_second": 100.0, "latency": latency, "curve": [], **given})


# When requests are sent


def test_all_processes_together_keep_the_rate() -> None:
    shares = [list(arrivals(50, 2, process=at, of=3)) for at in range(3)]
    assert sorted(at for share in shares for at in share) == pytest.approx([number / 50 for number in range(100)])


def test_in_a_burst_all_are_due_at_its_beginning() -> None:
    assert list(arrivals(4, 2, burst=1)) == [0, 0, 0, 0, 1, 1, 1, 1]


# What is measured


def test_parts_of_processes_are_put_together() -> None:
    one, other = Recorder(0.0), Recorder(0.0)
    for number in range(99):
        one.answer(0.0, 0.010 + number / 1e6)
    other.fail(0.0, 2.0, "given up")
    whole = combine("chat", 10, 10, [one.part(0.0), other.part(0.5)], took=9.9)
    assert (whole.answered, whole.failed, whole.offered, whole.late) == (99, 1, 100, 0.5)
    assert whole.per_second == pytest.approx(10)
    assert whole.p50 == pytest.approx(0.010, rel=0.02)
    assert whole.latency["100"] == pytest.approx(2.0, rel=0.01), "what was given up counts with the time it waited"
    assert whole.errors == {"given up": 1}


def test_a_timeline_knows_the_first_success_after_a_moment() -> None:
    recorder, timeline = Recorder(100.0), Timeline()
    for end in (100.5, 100.6, 103.0):
        recorder.answer(100.0, end)
    assert timeline.add(2.0, *recorder.taken()) == 3
    assert recorder.taken() == ([], [])
    assert timeline.first_due_after(3.0) == pytest.approx(5.0)
    assert timeline.first_due_after(6.0) is None
    assert [row[:2] for row in timeline.by_second()] == [(0, 0), (1, 0), (2, 2), (3, 0), (4, 0), (5, 1)]


@pytest.mark.parametrize("change", [{"failed": 1}, {"per_second": 90.0}, {"latency": {"99": 0.6}}])
def test_a_rate_is_carried_if_all_are_answered_in_time(change: dict[str, Any]) -> None:
    assert carried(result(), 0.5)
    assert not carried(result(**change), 0.5)


def searched(limit: float, start: float = 50.0, *, misses: int = 0) -> Knee:
    """The search on a machine that carries exactly this; so many first attempts are spoilt by somebody else."""
    knee = Knee(start, 0.5)
    left = misses

    def measure(rate: float) -> Result:
        nonlocal left
        left -= 1
        fine = rate <= limit and left < 0
        return result(rate=rate, per_second=rate if fine else min(rate, limit), failed=0 if fine else 1)

    assert list(knee.search(measure)) == knee.steps
    return knee


@pytest.mark.parametrize("limit", [3.0, 49.9, 50.0, 51.0, 1281.0, 2066.0, 40_000.0])
def test_a_knee_is_found_to_five_percent_from_wherever_the_search_begins(limit: float) -> None:
    knee = searched(limit)
    assert knee.found
    assert knee.best is not None
    assert limit / PRECISION <= knee.best.rate <= limit
    refused = min(step.rate for step in knee.steps if not carried(step, 0.5))
    assert limit < refused <= knee.best.rate * PRECISION, "a rate above it was tried, and not carried"
    assert len(knee.steps) <= 25


def test_one_bad_moment_does_not_make_a_knee() -> None:
    knee = searched(1000.0, misses=1)
    assert knee.found
    assert knee.best is not None
    assert knee.best.rate >= 1000 / PRECISION


def test_a_search_that_no_rate_ends_has_found_nothing() -> None:
    for knee in (searched(float("inf")), searched(0.0)):
        assert not knee.found
        assert len(knee.steps) in (PHASES, PHASES + 1)


def test_knees_are_compared_only_if_both_were_found() -> None:
    commands = Commands([], [])
    reached, _ = at_knees(searched(960), searched(1000), 2, commands)
    assert reached.reached is True
    missed, _ = at_knees(searched(800), searched(1000), 2, commands)
    assert missed.reached is False
    assert missed.measured == "800/s, 81%"
    (unknown,) = at_knees(searched(960), searched(float("inf")), 2, commands)
    assert unknown.reached is False
    assert unknown.measured.startswith("not found to 5%")


def test_a_missed_goal_is_a_reason_to_fail() -> None:
    figures = [Figure("a", "1", reached=None), Figure("b", "2", reached=True)]
    assert not Report({}, figures=figures).missed_figures
    missed = Figure("c", "3", reached=False)
    assert Report({}, figures=[*figures, missed]).missed_figures == [missed]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_p50": 0.005}, "p50 0.010"),
        ({"max_p99": 0.05}, "p99 0.100"),
        ({"min_rate": 101}, "100.0/s"),
        ({"max_errors": 0.0}, "5.00% failed"),
        ({"max_recovery": 5.0}, "7.0 s after"),
    ],
)
def test_a_missed_threshold_is_told(limits: dict[str, float], said: str) -> None:
    results, recoveries = [result(answered=95, failed=5)], [1.0, 7.0]
    (missed,) = Thresholds(**limits).missed(results, recoveries)
    assert said in missed
    assert not list(Thresholds(**{name: value * 100 + 0.1 for name, value in limits.items() if name != "min_rate"})
                    .missed(results, recoveries))  # fmt: skip


def test_what_cannot_be_judged_is_missed() -> None:
    assert list(Thresholds(max_p99=1).missed([], [])) == ["nothing was measured"]
    assert "never" in next(iter(Thresholds(max_recovery=5).missed([], [None])))
    assert list(Thresholds(max_p50=1).missed([result(answered=0)], []))


def test_what_a_replaced_primary_meant_is_seen_in_those_who_waited_for_it() -> None:
    """Half of the conversations are on another server, which answers all the while."""
    timeline = Timeline()
    fine = [10 + number / 10 for number in range(60)]
    timeline.add(0.0, [at + 0.01 for at in fine], [0.01] * len(fine))
    timeline.add(0.0, [13.4, 13.45, 13.9], [2.4, 2.0, 0.3])
    outage = timeline.outage(11.0, 13.0)
    assert (outage.without, outage.after) == (pytest.approx(2.4), pytest.approx(0.4))
    assert timeline.outage(15.0, 15.5) == Outage(0.0, pytest.approx(0.01)), "nobody had to wait"
    assert timeline.outage(20.0, 21.0) == Outage(None, None)


def test_a_new_primary_that_is_not_found_soon_is_a_missed_threshold() -> None:
    outages = [Outage(2.0, 0.5), Outage(4.0, 2.5), Outage(None, None)]
    late, never = Thresholds(max_after_election=2.0).missed([], [], outages)
    assert "2.5 s after the election" in late
    assert "never" in never


def test_requests_of_a_conversation_that_went_with_its_primary_are_not_held_against_the_fleet() -> None:
    given = {"given up: 404 SessionNotFound": 2, "given up: 409 Conflict": 1, "given up: 503 WarmUnavailable": 1}
    assert without_lost(result(failed=4, errors=given | {"503 WarmUnavailable": 7})).failed == 1


# What is wrong


def talk(*acks: tuple[int, str], uncertain: tuple[str, ...] = ()) -> Expected:
    return Expected("s", [(1, "n"), *acks], list(uncertain))


def wrong(expected: Expected, *turns: str) -> list[str]:
    found = [dict(message) for turn in turns for message in messages_of(SOURCE, turn)]
    return [each.text for each in differences(SOURCE, expected, found)]


def lost(expected: Expected, *turns: str) -> list[bool]:
    found = [dict(message) for turn in turns for message in messages_of(SOURCE, turn)]
    return [each.lost for each in differences(SOURCE, expected, found)]


ALL = ((2, "c:0:0"), (3, "c:0:1"))


def test_what_was_acknowledged_and_is_there_once_is_right() -> None:
    assert not wrong(talk(*ALL), "c:0:0", "c:0:1")
    assert not wrong(talk((3, "t:b"), (2, "t:a")), "t:a", "t:b"), "the order is that of the versions"
    assert not wrong(talk(*ALL, uncertain=("t:x",)), "c:0:0", "c:0:1"), "what nobody acknowledged may be missing"
    assert not wrong(talk(*ALL, uncertain=("t:x",)), "c:0:0", "t:x", "c:0:1"), "or not"
    assert not list(differences(SOURCE, Expected("s", [], ["n"]), None))
    assert not wrong(talk((1, "n"), *ALL), "c:0:0", "c:0:1"), "two processes may begin one conversation"


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (("c:0:1",), "turn c:0:0, acknowledged as version 2, is lost"),
        (("c:0:0",), "turn c:0:1, acknowledged as version 3, is lost"),
        (("c:0:0", "c:0:0", "c:0:1"), "turn c:0:0, acknowledged as version 2, is there more than once"),
        (("c:0:0", "c:0:1", "c:0:1"), "turn c:0:1, acknowledged as version 3, is there more than once"),
        (("c:0:1", "c:0:0"), "in another order"),
        (("c:0:0", "c:0:1", "c:1:0"), "1 messages that nobody sent"),
    ],
)
def test_a_lost_and_a_doubled_turn_are_found(turns: tuple[str, ...], said: str) -> None:
    (found,) = wrong(talk(*ALL), *turns)
    assert said in found


def test_a_turn_of_which_nothing_is_known_is_not_there_twice() -> None:
    assert wrong(talk(*ALL, uncertain=("t:x",)), "c:0:0", "t:x", "t:x", "c:0:1")


def test_half_a_turn_is_a_lost_one() -> None:
    found = list(differences(SOURCE, talk((2, "c:0:0")), USER[:1]))
    assert "is lost" in found[0].text
    assert not found[0].lost, "no failover leaves half a commit"


def test_a_turn_that_is_only_lost_is_told_from_everything_worse() -> None:
    """Behind a failover versions are given once more, and the rest of the conversation goes on."""
    after = talk((2, "c:0:0"), (3, "t:gone"), (3, "t:a"), (4, "t:b"))
    assert lost(after, "c:0:0", "t:a", "t:b") == [True]
    assert lost(talk(*ALL)) == [True, True]
    assert set(lost(after, "c:0:0", "t:a", "t:a", "t:b")) == {False}, "lost, and another one doubled"
    assert set(lost(after, "c:0:0", "t:b", "t:a")) == {False}, "lost, and the rest in another order"
    assert False in lost(after, "c:0:0", "t:gone", "t:a", "t:b"), "two with one version, both there"
    (conversation,) = differences(SOURCE, talk(*ALL), None)
    assert conversation.lost
    assert conversation.turns == 2


def test_what_a_failover_lost_is_printed_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({}, lost_by_failover=[Difference("s: turn t:a is lost", lost=True, turns=1)])
    show(Console(width=120), report)
    said = capsys.readouterr().out
    assert "lost by an asynchronous failover: 1 acknowledged turns are not there" in said
    assert "passed" in said


def test_of_two_turns_that_say_the_same_one_may_be_lost() -> None:
    assert lost(talk((2, "t:yes"), (3, "t:no"), (4, "t:yes")), "t:no", "t:yes") == [True]


def test_a_lost_conversation_and_one_version_for_two_turns_are_found() -> None:
    assert "the conversation is lost" in next(differences(SOURCE, talk(*ALL), None)).text
    assert "with one version" in wrong(talk((2, "t:a"), (2, "t:b")), "t:a", "t:b")[0]


# Requests


class Worker:
    """Answers as it is told to, then well."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[tuple[str, str, Any]]()

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        answer = self.answers.pop(0) if self.answers else 201 if path == "/v1/conversations" else 200
        if isinstance(answer, Exception):
            raise answer
        return answer, {"id": f"c{len(self.asked)}", "version": len(self.asked), "error": "Some"}


def caller(worker: Worker, retry_for: float = 5.0) -> Caller:
    return Caller(worker, SOURCE, Recorder(0.0), "run", 0, retry_for)  # type: ignore[arg-type]


def test_a_turn_is_repeated_under_its_own_id_until_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "_PAUSE", 0)
    worker = Worker(201, 503, ConnectionResetError(), 429)
    calls = caller(worker)
    asyncio.run(Chat(calls, 1).request(time.monotonic()))
    turns = [body for _, path, body in worker.asked if path.endswith("/turns")]
    assert len(turns) == 4
    assert len({body["request_id"] for body in turns}) == 1
    (expected,) = calls.expected.values()
    assert [version for version, _ in expected.acks] == [1, 5]
    assert calls.recorder.retries == 3


def test_a_turn_that_was_given_up_is_kept_as_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "_PAUSE", 60)  # beyond its retry_for, so that it gives up at the first
    calls = caller(Worker(201, 503))
    with pytest.raises(TimeoutError, match="503 Some"):
        asyncio.run(Chat(calls, 1).request(time.monotonic()))
    (expected,) = calls.expected.values()
    assert (len(expected.acks), len(expected.uncertain)) == (1, 1)


def test_a_conversation_is_led_in_order() -> None:
    worker = Worker()
    chat = Chat(caller(worker), 1)

    async def run() -> None:
        for _ in range(3):
            await chat.request(time.monotonic())

    asyncio.run(run())
    assert [path.count("/") for _, path, _ in worker.asked] == [2, 4, 2, 4, 4], "another begins when one is told"


# Faults, and what is called


def test_faults_without_a_time_are_spread_over_the_run() -> None:
    found = faults.parse(["kill-worker", "stop-redis@1", "pause-postgres"], 9)
    assert found == [Fault("stop-redis", 1), Fault("kill-worker", 3), Fault("pause-postgres", 6)]


@pytest.mark.parametrize("text", ["kill", "kill-worker@", "kill-worker@soon", "kill-worker@9", "kill-worker@-1"])
def test_a_fault_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'kill.*': "):
        faults.parse([text], 9)


def test_a_fault_that_fails_is_told_of_and_the_next_one_comes() -> None:
    class Fleet:
        def kill_worker(self) -> None:
            raise RuntimeError("no worker")

        def stop_redis(self, seconds: float) -> None:
            pass

    began = time.monotonic()
    breaking = Breaking(Fleet(), [Fault("kill-worker", 0), Fault("stop-redis", 0.01)], began)  # type: ignore[arg-type]
    breaking.begin(began)
    first, second = breaking.join()
    assert (first.over, first.error) == (None, "RuntimeError: no worker")
    assert second.over is not None


@pytest.mark.parametrize(
    ("kind", "warm", "fine"),
    [
        ("kill-primary", "single", True), ("stop-redis", "cluster", True), ("failover", "cluster", True),
        ("failover", "sentinel", True), ("failover", "single", False), ("reshard", "cluster", True),
        ("reshard", "sentinel", False), ("reshard", "single", False),
    ],
)  # fmt: skip
def test_a_fault_that_a_warm_tier_cannot_have_is_refused(kind: str, warm: str, fine: bool) -> None:
    if fine:
        faults.check([kind], warm)
    else:
        with pytest.raises(ValueError, match=f"'{kind}' needs --warm .*cluster: this warm tier is {warm}"):
            faults.check([kind], warm)


def test_only_a_failover_may_lose_what_was_acknowledged_and_only_with_its_writer() -> None:
    def broke(*kinds: str) -> list[Broke]:
        return [Broke(kind, 1.0, 2.0) for kind in kinds]

    for warm in ("sentinel", "cluster"):
        assert faults.may_lose(broke("kill-worker", "failover"), warm)
        assert faults.may_lose(broke("kill-primary", "kill-worker"), warm)
        assert not faults.may_lose(broke("stop-redis", "failover", "kill-primary"), warm)
        assert not faults.may_lose(broke("kill-worker", "stop-redis", "reshard"), warm)
    assert not faults.may_lose(broke("kill-primary", "kill-worker"), "single"), "its append-only file has it"


def test_a_fault_tells_when_another_primary_was_elected() -> None:
    class Fleet:
        def kill_primary(self, seconds: float) -> float:
            return time.monotonic() + 5

        def reshard(self) -> None:
            pass

    began = time.monotonic()
    breaking = Breaking(Fleet(), [Fault("kill-primary", 0), Fault("reshard", 0)], began)  # type: ignore[arg-type]
    breaking.begin(began)
    killed, moved = breaking.join()
    assert killed.elected == pytest.approx(5, abs=1)
    assert moved.elected is None


def test_a_url_that_is_none_is_refused() -> None:
    assert targets(["http://127.0.0.1:81", "127.0.0.1:81", "http://127.0.0.1:82/"]) == [
        ("127.0.0.1", 81),
        ("127.0.0.1", 82),
    ]
    for url in ("https://127.0.0.1", "http://", "redis://127.0.0.1"):
        with pytest.raises(ValueError, match="not the URL of a worker"):
            targets([url])


def test_the_comparison_repeats_the_commands_that_were_seen() -> None:
    words = [b"EVALSHA", b"abc", b"2", b"{s}:r", b"{s}:j", b"value", b"1"]
    commands = [[b"HSET", b"{s}:r", b"a", b"\"\x00'"], [b"XADD", b"{s}:j", b"7-0", b"value", b"1"]]
    trip = _trip(words, commands)
    assert (trip.keys, trip.words) == (2, (b"value", b"1"))
    assert trip.script.splitlines() == [
        "redis.call('HSET', KEYS[1], 'a', '\"\\000\\039')",
        "redis.call('XADD', KEYS[2], '*', ARGV[1], '1')",
        "return 'ok'",
    ]
    assert _quoted(b"\\") == "'\\092'"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "name one of --local, --compose, and --url"),
        ({"local": True, "scenario": ["dance"]}, "a scenario is one of chat"),
        ({"url": ["http://127.0.0.1:1"], "fault": ["kill-worker"]}, "cannot be broken from here"),
        ({"local": True, "fault": ["flood"]}, "a fault is one of kill-worker"),
        (
            {"local": True, "fault": ["failover"]},
            "'failover' needs --warm sentinel or cluster",
        ),
        (
            {"local": True, "warm": "sentinel", "fault": ["reshard"]},
            "'reshard' needs --warm cluster",
        ),
        ({"local": True, "warm": "mirrored"}, "--warm is one of single, sentinel, cluster"),
        ({"local": True, "warm": "cluster", "with_figures": True}, "--warm single"),
        ({"local": True, "file": Path("nowhere.jsonl")}, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_asked_is_refused_at_once(
    given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(typer.Exit) as refused:
        load.main(**given)
    assert refused.value.exit_code == 2
    assert said in capsys.readouterr().out


def test_what_ended_meanwhile_has_used_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of PostgreSQL come and go between two looks at /proc."""
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: read(path) + " 999999999" if path.name == "children" else read(path)
    )
    assert fleet._family(os.getpid())[0] == os.getpid()
    assert sum(map(fleet._cpu, fleet._family(os.getpid()))) > 0


# How costs grow


LOAD = Path(growth.__file__).parent
SIZING = LOAD.parents[1] / "docs/running/sizing.md"
SETTING = {
    "date": "2026-11-24",
    "cores": "2",
    "load": "0.1",
    "software": "Python 3.11.7, Redis 7.0.15, PostgreSQL 15.18",
}


def curves(only: str, *costs: float) -> dict[str, list[Curve]]:
    """Of a measurement as many curves as there are costs, the last of which is that."""
    return {only: [Curve(f"{only}-{n}", "us", "things", [10, 1000], [1.0, cost], 5.0) for n, cost in enumerate(costs)]}


def test_the_table_for_sizing_is_made_of_the_stored_curves() -> None:
    """What `growth.py --sizing deploy/load/growth.json` prints, and no figure that nobody measured."""
    text = SIZING.read_text()
    assert f"{sizing.BEGIN}\n{sizing.sizing(Stored.read(LOAD / 'growth.json'))}\n{sizing.END}" in text


def test_each_letter_of_a_formula_is_a_row_and_each_row_is_in_one() -> None:
    text = SIZING.read_text()
    formulas = text.partition(sizing.BEGIN)[0]
    letters = [line.letter for line in sizing.LINES]
    assert len(set(letters)) == len(letters)
    assert sorted(set(re.findall(r"\*([a-z])\*", formulas))) == sorted(letters)


def test_the_stored_curves_are_all_that_is_measured_today() -> None:
    assert list(Stored.read(LOAD / "growth.json").curves) == list(growth.MEASURED)
    assert {line.only for line in sizing.LINES} <= growth.MEASURED.keys()


def test_a_row_for_sizing_says_what_its_curve_says() -> None:
    stored = Stored(SETTING, curves("archive", 1.0, 40.0) | curves("small", 396.4))
    first, _, _, _, small, archiver = sizing.sizing(stored).splitlines()
    assert first.startswith("Measured on 2026-11-24: 2 cores, with a load of 0.1 from other work; Python 3.11.7, Redis")
    assert "| 396 bytes | 1,000 things | 1.30 | `small` |" in small
    assert "| 25,000 changes/s | 1,000 things | 0.80 | `archive` |" in archiver


def test_the_table_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    stored = Stored(SETTING, curves("small", 396.4))
    document.write_text(f"before\n{sizing.BEGIN}\nold\n{sizing.END}\nafter\n")
    for _ in range(2):
        sizing.write(stored, document)
        assert document.read_text() == f"before\n{sizing.BEGIN}\n{sizing.sizing(stored)}\n{sizing.END}\nafter\n"
    document.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the table"):
        sizing.write(stored, document)


def test_a_run_replaces_the_curves_that_it_measured_and_leaves_the_others(tmp_path: Path) -> None:
    path, order = tmp_path / "growth.json", ["small", "archive"]
    first = Stored(SETTING, curves("small", 1.0) | curves("archive", 1.0) | curves("gone", 1.0))
    merged(path, first, [*order, "gone"]).write(path)
    merged(path, Stored(SETTING | {"cores": "8"}, curves("small", 2.0)), order).write(path)
    assert Stored.read(path) == Stored(SETTING | {"cores": "8"}, curves("small", 2.0) | curves("archive", 1.0))
    assert list(Stored.read(path).curves) == order
