"""The command `distributed-state`, on an embedded store in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from below import hidden

from distributed_state import Fenced, StateStore
from distributed_state.programs import cli
from distributed_state.programs.cli import shell
from distributed_state.values.journal import JournalEntry, pack

COMMANDS = [
    *("get", "history", "sessions", "doctor", "set", "delete", "erase", "forget", "audit", "replicas", "tail", "send"),
    *("export", "import", "archiver", "reencrypt", "migrate", "upcast", "replay", "reload-config", "opperator"),
    *("leases", "end-lease", "maintenance", "maintenance on", "maintenance off"),
    "serve",
    "branches",
    "repair",
    *("compact", "purge", "index", "search"),
    *("fork", "rollback", "messages", "post", "stop"),
    *("demo chat", "demo lifecycle"),
    *(f"send {each}" for each in ("new-conversation", "switch", "delete", "activate", "directory", "event")),
]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/archive.db"


@pytest.fixture
def run(archive: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command in this process."""
    for name in ("URL", "ARCHIVE", "NAMESPACE", "LOG_LEVEL"):
        monkeypatch.delenv(f"DISTRIBUTED_STATE_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    for console in (shell.out, shell.err):
        monkeypatch.setattr(console, "width", 200)  # they may have been made where COLUMNS was another
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*words: str, typed: str | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["distributed-state", "--archive", archive, *words])
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", open(_file(typed), encoding="utf-8"))  # noqa: SIM115 - closed below
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            if typed is not None:
                sys.stdin.close()
        seen = capsys.readouterr()
        return Done(ended.value.code if isinstance(ended.value.code, int) else 0, seen.out, seen.err)

    def _file(typed: str) -> Path:
        path = Path(archive.removeprefix("sqlite:///")).with_name("typed")
        path.write_text(typed)
        return path

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def lines(text: str) -> int:
    return len(text.strip().splitlines())


def test_values_come_back_as_they_went_in(run: Run) -> None:
    assert run("set", "s", "a", '{"n": 12345678901234567890, "t": ["ü", "\\u0000", "\\udc80"]}').out == "1\n"
    assert run("set", "s", "b", "null").out == "2\n"
    shown = run("get", "s", "a")
    assert json.loads(shown.out) == {"n": 12345678901234567890, "t": ["ü", "\x00", "\udc80"]}
    assert json.loads(run("get", "s").out).keys() == {"a", "b"}
    assert json.loads(run("set", "u", "x", "1", "--scope", "user").out) == 1
    assert run("get", "u", "x", "--scope", "user").out == "1\n"


def test_bytes_are_written_as_they_are_and_left_out_of_json(run: Run, archive: str, tmp_path: Path) -> None:
    with StateStore.open(archive=archive) as store:
        store.session("s").set_many({"photo": b"caf\xc3\xa9", "like": {"base64": "AA=="}})
    assert run("get", "s", "photo").out == "café"
    shown = run("get", "s")
    assert json.loads(shown.out) == {"like": {"base64": "AA=="}}
    assert "not shown: photo holds 5 bytes" in shown.err
    assert "photo = <5 bytes>" in run("history", "s").out
    assert run("export", "s", "--output", str(tmp_path / "s")).code == 0
    assert run("import", str(tmp_path / "s"), "--id", "copy").out == "copy\n"
    assert run("get", "copy", "photo").out == "café"


ERRORS = (
    # First, as a command that opens the embedded store makes its namespace.
    (("--url", "redis://127.0.0.1:1", "get", "s"), "there is no namespace 'default' in sqlite"),
    (("get", "nobody"), "there is no session 'nobody'"),
    (("get", "nobody", "a"), "there is no session 'nobody'"),
    (("history", "nobody"), "there is no session 'nobody'"),
    (("set", "s", "a", "Alice"), "'Alice' is not JSON"),
    (("set", "s", "#v", "1"), "reserved"),
    (("set", "", "a", "1"), "non-empty"),
    (("get", "s", "--scope", "galaxy"), "scope 'galaxy' is not one of session, user, app, task"),
    (("delete", "nobody"), "nothing to delete"),
    (("fork", "nobody", "f"), "there is nothing to fork"),
    (("fork", "nobody", "f", "--branch", "1-x"), "no branch '1-x'; it has no branches"),
    (("branches", "nobody"), "write it as session/nobody"),
    (("branches", "galaxy/nobody"), "scope 'galaxy' is not one of"),
    (("import", "/no/such/file"), "No such file"),
    (("export", "nobody"), "nobody"),
    (("replay", "/no/such/file"), "No such file"),
    (("replay", "--in-process", "--kill", "1"), "leave out --kill"),
    (("send", "new-conversation", "nobody", "--clear"), "there is no session 'nobody'"),
    (("send", "switch", "nobody"), "there is no session 'nobody'"),
    (("send", "delete", "nobody"), "nothing to delete"),
    (("send", "event", "resync"), "a word like 'mail.sent'"),
    (("send", "event", "a.b", "--data", "[1]"), "--data must be a JSON object"),
    (("send", "event", "a.b", "--data", "{"), "--data '{' is not JSON"),
    (("send", "activate", "notes", "--client", "\x07"), "printable"),
    (("tail", "a["), "'conversation.deleted', 'conversation.*' or '*'"),
    (("tail", "--since", "yesterday"), "--since is an age"),
    (("tail", "--since", "0=x@y"), "position"),
    (("--namespace", "a:b", "get", "s"), "namespace"),
    (("--url", "http://host", "get", "s"), "redis://"),
    (("--url", "redis://127.0.0.1:1", "set", "s", "n", "1"), "127.0.0.1:1"),
)


def test_an_error_is_one_line_on_stderr(run: Run, tmp_path: Path) -> None:
    (tmp_path / "archive.db").touch()  # else there is no store, which is another error
    for words, said in ERRORS:
        done = run(*words)
        assert (done.code, done.out) == (1, ""), words
        assert done.err.startswith("error: "), words
        assert said in done.err, words
        assert lines(done.err) == 1, words


@pytest.mark.parametrize("words", [("inspect", "--url", "x"), ("adopt", "openai", "x", "--archive", "y")])
def test_an_option_of_all_commands_behind_one_is_told_where_it_stands(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.code == 2
    assert "write it before the command" in " ".join(done.err.split())
    assert "before the command" not in run("inspect", "--ulr", "x").err


def test_the_name_of_a_record_is_shown_as_it_is(run: Run, tmp_path: Path) -> None:
    """Not as the pictures that `:a:` and the like may stand for."""
    run("set", "a", "x", "1")
    file = tmp_path / "a.jsonl"
    file.write_text(run("export", "a").out)
    assert run("import", str(file)).err == "error: session:a: exists already, at version 1\n"
    run("set", "c:smile:", "x", "1")
    assert "c:smile:" in run("sessions").out


def test_a_conversation_is_read_posted_to_and_rolled_back(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        session = store.session("c")
        session.set("photo", b"\x00")
        session.append({"role": "user", "content": "one"}, {"role": "assistant", "content": "two\x1b[2J"})
    got = run("get", "c")
    assert "its last message is number 1: distributed-state messages c" in got.err
    lines = run("messages", "c", "--last", "1").out.splitlines()
    assert lines[0].split() == ["number", "time", "message"]
    assert lines[1].startswith("1 ")
    assert lines[1].endswith('assistant: "two\\u001b[2J"')
    assert [json.loads(line)["content"] for line in run("messages", "c", "--json").out.splitlines()] == [
        "one", "two\x1b[2J",
    ]  # fmt: skip
    changes = [json.loads(line) for line in run("history", "c", "--json").out.splitlines()]
    assert changes[0]["set"] == {"photo": "AA=="}
    assert [each["content"] for each in changes[1]["appended"]] == ["one", "two\x1b[2J"]
    assert [run("post", "c", "and?", "--request", "r1").out for _ in range(2)] == ["1\n", "1\n"]
    assert run("rollback", "c", "--version", "1").out == "4\n"
    assert run("messages", "c").out.splitlines()[1:] == []
    assert run("stop", "c").out == "nothing ran\n"
    (row,) = (json.loads(line) for line in run("sessions", "--json", "--fresh").out.splitlines())
    assert (row["id"], row["version"]) == ("c", 4)
    assert "there is no session 'none'" in run("messages", "none").err
    for words in ("sessions",), ("history", "c"), ("branches",), ("audit",):
        for line in run(*words).out.splitlines():
            assert line == line.rstrip()
            assert not set(line) & set("\u2503\u2502\u2501\u2500"), "no boxes without a terminal"


def test_the_past_is_listed_without_what_a_terminal_would_obey(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        session = store.session("s\x1b[2J", user="u[red]", actor="agent[bold]")
        session.append({"role": "user", "content": "hi\x1b[2J"})
        session.set("a", "x" * 1000)
        session.delete("a")
        session.checkpoint("before\x07")
        session.write(phase="booking")
    shown = run("history", "s\x1b[2J", "--last", "4")
    assert "agent[bold]" in shown.out
    assert "a deleted" in shown.out
    assert "phase booking" in shown.out
    assert "before" in shown.out
    assert "hi" not in shown.out, "that was five changes ago"
    listed = run("sessions", "--user", "u[red]", "--limit", "1")
    assert "s\\x1b[2J" in listed.out
    assert "u[red]" in listed.out
    for text in (shown.out, listed.out, run("history", "s\x1b[2J").out):
        assert "\x1b[2J" not in text
        assert "\x07" not in text
        assert "x" * 101 not in text
    cursor = listed.err.split("--after ")[1].strip()
    assert "\\x1b" not in run("sessions", "--after", cursor).out


def test_sessions_are_listed_by_prefix_and_tags(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        for name, run_id in (("shop:1", "r1"), ("shop:2", "r2"), ("bank:1", "r1")):
            store.session(name).write(set={"a": 1}, tag={"run": run_id})
    listed = run("sessions", "--prefix", "shop:", "--tag", "run=r1", "--fresh").out
    assert "shop:1" in listed
    assert "shop:2" not in listed, "it has another tag"
    assert "bank:1" not in listed, "its id begins otherwise"
    refused = run("sessions", "--tag", "run")
    assert (refused.code, "write it as name=value" in refused.err) == (1, True)


def test_sessions_are_listed_by_phase_size_and_when_they_changed(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        store.session("small").write(set={"a": 1}, phase="booking")
        store.session("large").write(set={"a": "x" * 5000}, phase="paying")

    def found(*options: str) -> set[str]:
        listed = run("sessions", *options)
        assert listed.code == 0, listed.err
        return {name for name in ("small", "large") if name in listed.out}

    assert found("--phase", "booking") == {"small"}
    assert found("--larger-than", "4000") == {"large"}
    assert found("--changed-since", "1h") == {"small", "large"}
    assert found("--changed-before", "1h") == set()
    refused = run("sessions", "--changed-since", "yesterday")
    assert (refused.code, "--changed-since is an age" in refused.err) == (1, True)


def test_a_history_says_where_a_turn_spent_its_time(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        with store.session("s").turn() as turn:
            with turn.tool("search_hotels"):
                time.sleep(0.4)  # longer than all else, also on a busy machine
            turn["n"] = 1
        replica = store.replica
    (line,) = [line for line in run("history", "s").out.splitlines() if "took" in line]
    assert re.search(r"took \d+\.\d+ s, \d+% of it tool search_hotels", line)
    assert replica in run("history", "s").out


def test_branches_are_listed_and_forked(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        store.session("s\x1b[2J", actor="agent[bold]").set("city", "Oslo")
        cold = store._core._lifecycle.cold
        assert cold is not None
        text = store.session("s\x1b[2J").ref.text
        partition = store._core._lifecycle.context.keys.partition_of(text)
        data = pack([(b"s", b"city", b'"Bergen"')])
        entry = JournalEntry(9, "x.9.1", text, 2, 1_700_000_000_000, "set", "agent[bold]", 0, data, 0)
        cursor = cold.cursor(partition)
        assert cursor is not None
        epoch = cursor.epoch
        assert cold.branches.keep(partition, epoch, [entry], "failover")
    for shown in (run("branches"), run("branches", "session/s\x1b[2J")):
        assert epoch in shown.out
        assert "agent[bold]" in shown.out
        assert "failover" in shown.out
        assert "\x1b[2J" not in shown.out
    (line,) = run("branches", "--json").out.splitlines()
    found = json.loads(line)
    assert (found["record_id"], found["id"], found["base"], found["complete"]) == ("s\x1b[2J", epoch, 1, True)
    assert run("branches", "session/other", "--json").out == ""
    assert run("fork", "s\x1b[2J", "f", "--branch", epoch).out == "1\n"
    assert json.loads(run("get", "f").out) == {"city": "Bergen"}
    assert run("fork", "s\x1b[2J", "g", "--version", "1").out == "1\n"
    assert json.loads(run("get", "g").out) == {"city": "Oslo"}


def test_a_record_moves_with_its_history(run: Run, tmp_path: Path) -> None:
    run("set", "s", "a", "1")
    run("set", "s", "a", '"ü"')
    run("export", "s", "--output", str(tmp_path / "s.jsonl"))
    exported = (tmp_path / "s.jsonl").read_text(encoding="utf-8")
    assert run("export", "s").out == exported
    assert run("import", str(tmp_path / "s.jsonl"), "--id", "copy").out == "copy\n"
    assert json.loads(run("get", "copy").out) == {"a": "ü"}
    assert run("import", "-", "--id", "copy2", typed=exported).out == "copy2\n"
    again = run("import", str(tmp_path / "s.jsonl"))
    assert (again.code, lines(again.err)) == (1, 1)
    (tmp_path / "cut.jsonl").write_text(exported[:-20], encoding="utf-8")
    cut = run("import", str(tmp_path / "cut.jsonl"), "--id", "cut")
    assert cut.code == 1
    assert "line" in cut.err
    assert run("get", "cut").code == 1
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe{}")
    latin = run("import", str(tmp_path / "latin.jsonl"))
    assert (latin.code, lines(latin.err), "UTF-8" in latin.err) == (1, 1, True)


def test_an_exported_file_is_its_owners_alone_unless_it_was_there(run: Run, tmp_path: Path) -> None:
    run("set", "s", "a", "1")
    (tmp_path / "old.jsonl").touch(0o644)
    before = os.umask(0)
    try:
        for name, mode in (("new.jsonl", 0o600), ("old.jsonl", 0o644)):
            assert run("export", "s", "--output", str(tmp_path / name)).code == 0
            assert (tmp_path / name).stat().st_mode & 0o777 == mode
            assert (tmp_path / name).read_text()
    finally:
        os.umask(before)


@pytest.mark.wide
def test_all_records_move_with_one_file(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        run("set", f"s{number}", "a", str(number))
    run("set", "u", "a", '"user"', "--scope", "user")
    run("delete", "s2")
    file = str(tmp_path / "all.jsonl")
    written = run("export", "--all", "--output", file)
    assert (written.code, written.out) == (0, "")
    assert "3 records written" in written.err
    assert run("export", "--all").out == Path(file).read_text(encoding="utf-8")
    other = f"sqlite:///{tmp_path}/other.db"
    taken = run("--archive", other, "import", file)
    assert sorted(taken.out.split()) == ["s0", "s1", "u"]
    assert json.loads(run("--archive", other, "get", "s1").out) == {"a": 1}
    assert json.loads(run("--archive", other, "get", "u", "--scope", "user").out) == {"a": "user"}
    assert run("--archive", other, "export", "--all").out.count("\n") == Path(file).read_text().count("\n")
    again = run("--archive", other, "import", file)
    assert (again.code, "exists already" in again.err) == (1, True)
    third = f"sqlite:///{tmp_path}/third.db"
    run("--archive", third, "import", "-", typed=run("export", "s1").out)
    rest = run("--archive", third, "import", file, "--skip-existing")
    assert (rest.code, sorted(rest.out.split())) == (0, ["s0", "u"])
    assert "2 imported, 1 skipped" in rest.err


def test_a_file_of_many_records_that_is_wrong_says_where(run: Run, tmp_path: Path) -> None:
    run("set", "a", "a", "1")
    run("set", "b", "a", "1")
    text = run("export", "--all").out
    (tmp_path / "cut.jsonl").write_text(text[:-20], encoding="utf-8")
    other = f"sqlite:///{tmp_path}/other.db"
    cut = run("--archive", other, "import", str(tmp_path / "cut.jsonl"))
    assert (cut.code, lines(cut.out)) == (1, 1)
    assert "begins at line 3" in cut.err
    one = run("--archive", other, "import", str(tmp_path / "cut.jsonl"), "--id", "c")
    assert "2 records" in one.err
    assert run("export").code == run("export", "a", "--all").code == 2


def test_deleting_and_forgetting(run: Run, archive: str) -> None:
    run("set", "s", "a", "1")
    assert run("delete", "s").out == "deleted as version 2\n"
    assert run("get", "s").code == 1
    assert run("erase", "s", typed="n\n").code == 1
    assert lines(run("history", "s").out) > 1
    assert run("erase", "s", typed="y\n").out.strip() == "erased"
    assert run("erase", "s", "--yes").out == "there was nothing to erase\n"
    assert "erase" not in run("history", "s").out
    with StateStore.open(archive=archive) as store:
        store.session("mine", user="u").set("a", 1)
    refused = run("forget", "u", typed="n\n")
    assert refused.code == 1
    assert run("get", "mine").code == 0
    assert run("forget", "u", typed="").code == 1, "nobody there to ask"
    assert run("forget", "u", typed="y\n").code == 0
    assert run("get", "mine").code == 1
    assert run("forget", "nobody", "--yes").out == "0 records removed\n"


def test_who_only_reads_makes_no_store(tmp_path: Path, run: Run) -> None:
    for words in (
        ("get", "c1"), ("sessions",), ("doctor",), ("audit",), ("replicas",), ("export", "--all"), ("search", "x"),
        ("inspect",),
    ):  # fmt: skip
        done = run(*words)
        assert done.code == 1, words
        assert "there is no store in" in done.err, words
        assert not [*tmp_path.iterdir()], words
    assert run("set", "c1", "n", "1").code == 0
    assert run("get", "c1").code == 0, "there is one now"


def test_the_store_is_examined_and_migrated(run: Run) -> None:
    assert json.loads(run("migrate").out)["message"] == "the schema is up to date"
    done = run("doctor")
    assert done.code in (0, 1)
    assert done.code == int("bad" in done.out)


STATE = """
from pydantic import BaseModel
from distributed_state import Schema

class Trip(BaseModel):
    nights: int = 1

TRIP = Schema(Trip, version=2, upcasters={1: lambda fields: {"nights": fields.get("days", 2) - 1}})
"""


@pytest.mark.wide
def test_records_are_brought_up_to_a_schema(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trips_of_the_test.py").write_text(STATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number in range(3):
        run("set", f"s{number}", "days", str(number + 2))
    name = "trips_of_the_test:TRIP"
    assert run("upcast", name, "--dry-run").out == "3 to upcast, 0 unchanged, 0 failed\n"
    assert run("upcast", name, "--limit", "2").out == "2 upcast, 0 unchanged, 0 failed\n"
    assert run("upcast", name).out == "1 upcast, 2 unchanged, 0 failed\n"
    assert json.loads(run("get", "s2").out) == {"nights": 3}
    run("set", "bad", "days", '"two"')
    failed = run("upcast", name)
    assert (failed.code, failed.out) == (1, "0 upcast, 3 unchanged, 1 failed\n")
    assert "session:bad: the upcaster from version 1 to 2 of Trip raised TypeError" in failed.err
    assert run("upcast", name, "--scope", "task").out == "0 upcast, 0 unchanged, 0 failed\n"
    for wrong in ("trips_of_the_test:NONE", "no_such_module:X", ":", "json:loads"):
        refused = run("upcast", wrong)
        assert (refused.code, refused.err[:7], lines(refused.err)) == (1, "error: ", 1)


@pytest.mark.wide
def test_bringing_up_ends_cleanly_at_ctrl_c(archive: str, tmp_path: Path) -> None:
    """The records done are said and stay; the next run does the rest."""
    slow = STATE.replace("lambda fields: {", "lambda fields: __import__('time').sleep(0.1) or {")
    (tmp_path / "slow_trips.py").write_text(slow)
    with StateStore.open(archive=archive) as store:
        for number in range(40):
            store.session(f"s{number}").set("days", 3)
    root = str(Path(cli.__file__).parents[2])
    command = [sys.executable, "-m", "distributed_state", "--archive", archive, "upcast", "slow_trips:TRIP"]
    environment = os.environ | {"PYTHONPATH": root}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=environment) as process:
        deadline = time.monotonic() + 30
        while _upcast_so_far(archive) < 2:  # the first may be archived before the command counts it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    done = int(out.split()[0])
    assert process.returncode == 130, err
    assert 0 < done < 40
    assert "Traceback" not in err
    with StateStore.open(archive=archive) as store:
        stored = sum(store.session(f"s{number}").get("nights") == 2 for number in range(40))
    assert stored - done in (0, 1), "what was being written at that moment is written to its end"


def _upcast_so_far(archive: str) -> int:
    with closing(sqlite3.connect(archive.removeprefix("sqlite:///"))) as connection:
        return int(connection.execute("SELECT count(*) FROM changes WHERE kind = 'upcast'").fetchone()[0])


def test_the_environment_names_the_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_STATE_NAMESPACE", "one")
    run("set", "s", "a", "1")
    assert run("get", "s", "a").out == "1\n"
    assert run("--namespace", "two", "get", "s", "a").code == 1
    monkeypatch.setenv("DISTRIBUTED_STATE_LOG_LEVEL", "loud")
    wrong = run("get", "s")
    assert wrong.code == 2
    assert "debug, info, warning, error, critical" in wrong.err


def test_every_command_explains_itself(run: Run) -> None:
    for command in ("", *COMMANDS):
        done = run(*command.split(), "--help")
        assert done.code == 0, command
        if command == "send":
            assert all(f" {name.removeprefix('send ')} " in done.out for name in COMMANDS if name.startswith("send "))
        elif command:
            assert "Example: distributed-state" in " ".join(done.out.split()), command
        else:
            assert all(f" {name} " in done.out for name in COMMANDS if " " not in name)


def start(*words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    left, environment = hidden(*words)
    command = [sys.executable, "-m", "distributed_state", *left]
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=os.environ | environment
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.wide)])
def test_the_archiver_runs_until_it_is_told_to_end(servers: object, archive: str, number: signal.Signals) -> None:
    url = servers.redis("valkey").url  # type: ignore[attr-defined]  # the fixture's class is conftest's own
    namespace = f"cli-{os.getpid()}-{number.value}"
    with (
        StateStore.open(url, archive=archive, namespace=namespace, archiver=False) as store,
        start("--url", url, "--archive", archive, "--namespace", namespace, "archiver", "--every", "0.1") as process,
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["message"] == "archiving"
        store.session("s").set("a", 1)
        deadline = time.monotonic() + 20
        while store.admin.stats()["unarchived"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        *said, last = [json.loads(line)["message"] for line in out.splitlines()]
        progress = r"(1 commit|(0|[2-9]|\d\d+) commits) archived by this process"
        assert any(re.match(progress, each) for each in said)
        assert last == "stopped"


NO_ARCHIVE = "postgresql+psycopg://nobody@127.0.0.1:1/none"
NO_START: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a wrong archive": ({"ARCHIVE": NO_ARCHIVE}, ("serve", "archiver", "migrate", "purge", "token create")),
    "no archive": ({"ARCHIVE": "postgresql//oops"}, ("serve", "archiver", "migrate", "purge", "token create")),
    "a wrong setting": ({"WARM_TTL": "soon"}, ("serve", "archiver", "migrate", "purge", "token create")),
    "a wrong level": ({"LOG_LEVEL": "loud"}, ("serve", "archiver", "migrate", "purge", "token create")),
    "a wrong port": ({"SERVE_PORT": "http", "METRICS_PORT": "http"}, ("serve", "archiver")),
}
WORDS = {"serve": "--insecure --wait 0", "purge": "--yes", "token create": "--all-tenants"}


@pytest.mark.parametrize("name", NO_START)
def test_a_container_that_cannot_start_logs_one_line(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, commands = NO_START[name]
    for key, value in settings.items():
        monkeypatch.setenv(f"DISTRIBUTED_STATE_{key}", value)
    archive = [] if "ARCHIVE" not in settings else ["--archive", settings["ARCHIVE"]]
    for command in commands:
        done = run(*archive, *command.split(), *WORDS.get(command, "").split())
        assert (done.code, done.out) == (2 if "LOG_LEVEL" in settings or "SERVE_PORT" in settings else 1, ""), command
        (line,) = done.err.splitlines()
        assert json.loads(line)["message"].startswith("ended: "), command
    # The control: a command for people shows the same as text.
    if "SERVE_PORT" not in settings:
        done = run(*archive, "replicas")
        assert (done.code > 0, done.err.startswith("{")) == (True, False)


INTERRUPTED = """
import asyncio, os, signal
from distributed_state.programs.cli import shell

@shell.app.command()
def wait():
    asyncio.run(waiting())

async def waiting():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60))
        group.create_task(hit())

async def hit():
    try:
        os.kill(os.getpid(), {number})
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.01)
        print("left in order")

signal.signal(signal.SIGINT, signal.{before})
shell.main()
"""


@pytest.mark.parametrize("before", ["SIG_IGN", "default_int_handler"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_hits_a_task_cancels_it(number: signal.Signals, code: int, before: str) -> None:
    script = INTERRUPTED.format(number=int(number), before=before)
    done = subprocess.run(
        [sys.executable, "-c", script, "wait"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "left in order\n", "")


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_word(tmp_path: Path) -> None:
    program = """if True:
        import builtins, os, signal, sys
        load = builtins.__import__
        def interrupted(name, *rest):
            if name == "typer":
                os.kill(os.getpid(), signal.SIGINT)
            return load(name, *rest)
        builtins.__import__ = interrupted
        from PLACE as start
    """
    for control, code, said in ((False, -signal.SIGINT, False), (True, -signal.SIGINT, True)):
        place = "distributed_state.programs import cli" if control else "distributed_state import __main__"
        text = program.replace("PLACE", place)
        text += "" if control else "    start.main()\n"
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (done.returncode, "Traceback" in done.stderr) == (code, said), done.stderr


@pytest.mark.wide
def test_tests_of_ctrl_c_pass_in_a_background_job_of_a_script(tmp_path: Path) -> None:
    """A shell starts such a job with SIGINT ignored, and so does this test."""
    chosen = (
        f"{__file__}::test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_word",
        f"{Path(__file__).parent.parent}/store/test_opening.py::test_an_interrupted_opening_leaves_nothing_open",
    )
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t")]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = subprocess.Popen([*command, *chosen], stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0, out
    assert "2 passed" in out


def test_importing_the_command_brings_no_test_tools() -> None:
    tools = "('pytest', 'matplotlib', 'psycopg')"
    code = f"import sys, distributed_state.programs.cli; print([n for n in {tools} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == metadata.version("distributed-state")


def test_what_happened_is_listed(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store, store.acting_as("agent[bold]\x1b[2J"):
        session = store.session("s\x1b[2J")
        session.append({"role": "user", "content": "hi"})
        session.checkpoint("x" * 400 + "\x07")
        store.session("t").set("a", 1)
        store.delete("t")
        seen = store.admin.audit()
    assert [event.type for event in seen][-1] == "conversation.deleted"
    shown = run("audit")
    assert shown.err == ""
    for words in ("conversation.created", "session.checkpoint", "conversation.deleted", "agent[bold]", "session:t"):
        assert words in shown.out
    assert "\x1b[2J" not in shown.out
    assert "\x07" not in shown.out
    assert "x" * 101 not in shown.out
    mine = run("audit", "--conversation", "t", "--json").out.splitlines()
    assert [json.loads(line)["type"] for line in mine] == ["conversation.created", "conversation.deleted"]
    assert json.loads(mine[0]) == next(event for event in seen if event.conversation_id == "t").to_dict()
    asked = ("audit", "--type", "conversation.*", "--since", "10m", "--until", "2999-01-01", "--json")
    assert lines(run(*asked).out) == 3
    assert "\x1b" not in run(*asked).out
    assert run("audit", "--since", "2999-01-01T00:00:00Z", "--json").out == ""
    assert run("audit", "--until", "1h", "--json").out == ""
    newest = run("audit", "--limit", "1", "--json")
    assert (json.loads(newest.out)["type"], newest.err) == ("conversation.deleted", "")
    page = run("audit", "--after", "oldest", "--limit", "3", "--json")
    cursor = page.err.split("--after ")[1].strip()
    assert lines(run("audit", "--after", cursor, "--json").out) == len(seen) - 3
    assert "deleted" in run("audit", "--subject", "session:t").out


@pytest.mark.parametrize(
    "words", [("--since", "soon"), ("--until", "10"), ("--type", "a b"), ("--after", "x"), ("--conversation", "")]
)
def test_a_bad_question_about_the_past_is_one_line(run: Run, words: tuple[str, ...]) -> None:
    done = run("audit", *words)
    assert (done.code, done.out) == (1, "")
    assert lines(done.err) <= 2
    assert done.err.startswith("error: ")


# The fleet


@pytest.fixture
def fleet(servers: object, archive: str) -> tuple[str, ...]:
    """The options of a store that several processes share."""
    url = servers.redis("valkey").url  # type: ignore[attr-defined]  # the fixture's class is conftest's own
    return "--url", url, "--archive", archive, "--namespace", f"cli-{os.urandom(6).hex()}"


def shared(options: tuple[str, ...]) -> StateStore:
    return StateStore.open(options[1], archive=options[3], namespace=options[5])


def test_commands_take_the_number_of_partitions_from_the_namespace(
    run: Run, fleet: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateStore.open(fleet[1], archive=fleet[3], namespace=fleet[5], partitions=16) as store:
        store.session("s", user="u").write(set={"n": 1}, append=[{"role": "user", "content": "hi"}])
    for command in (
        ("get", "s"), ("history", "s"), ("sessions",), ("audit",), ("leases",), ("replicas",), ("set", "s", "n", "2"),
        ("export", "s"), ("send", "event", "a.b"), ("erase", "--yes", "s"), ("purge", "--yes", "--older-than", "90d"),
    ):  # fmt: skip
        done = run(*fleet, *command)
        assert done.code == 0, (command, done.err)
    assert "16 partitions in namespace" in run(*fleet, "doctor").out
    monkeypatch.setenv("DISTRIBUTED_STATE_PARTITIONS", "32")
    refused = run(*fleet, "get", "s")
    assert refused.code == 1
    assert "has 16 partitions, not 32" in refused.err
    assert "DISTRIBUTED_STATE_PARTITIONS=16" in refused.err


def test_an_empty_list_says_that_commits_are_not_archived_yet(run: Run, fleet: tuple[str, ...]) -> None:
    """And the command leaves them as they are: its list does not depend on how far an archiver of its own comes."""
    with StateStore.open(fleet[1], archive=fleet[3], namespace=fleet[5], archiver=False) as store:
        store.session("s").set("n", 1)
        for _ in range(2):
            done = run(*fleet, "sessions")
            assert "1 commits are not archived yet and not counted here; add --fresh to see them" in done.err
        listed = run(*fleet, "sessions", "--fresh")
        assert re.search(r"\bs\b.*\b1\b", listed.out)
        assert "not archived" not in listed.err
        store.admin.archive()
    assert "not archived" not in run(*fleet, "sessions", "--user", "nobody").err


def test_operators_tell_the_fleet(run: Run, archive: str) -> None:
    assert run("send", "new-conversation", "c1", "--user", "u1").out == "conversation.created c1 version 1\n"
    assert run("send", "new-conversation", "c1").code == 1, "it exists"
    assert run("send", "new-conversation", "c1", "--clear").out == "conversation.cleared c1 version 2\n"
    assert run("send", "switch", "c1", "--previous", "c0", "--client", "web").out.startswith("conversation.switched c1")
    told = json.loads(run("send", "activate", "notes", "--previous", "search", "--client", "web").out)
    assert (told["type"], told["subject"]) == ("agent.switched", "client:web")
    told = [json.loads(run("send", "activate", agent, "--client", "web").out) for agent in ("mail", "notes")]
    assert [each["data"]["previous_agent"] for each in told] == ["notes", "mail"], "the one that this client had"
    assert json.loads(run("send", "directory", "/a", "/b").out)["subject"] == "client:"
    assert json.loads(run("send", "event", "mail.sent", "--data", '{"id": [7]}').out)["data"] == {"id": [7]}
    assert run("send", "delete", "c1").out == "conversation.deleted c1 version 4\n"
    with StateStore.open(archive=archive) as store:
        events = store.admin.audit()
    assert [(each.type, each.data) for each in events] == [
        ("conversation.created", {}),
        ("conversation.cleared", {"messages": True}),
        (
            "conversation.switched",
            {"conversation_id": "c1", "previous_id": "c0", "message_count": 0, "client": "web"},
        ),
        (
            "agent.switched",
            {"previous_agent": "search", "next_agent": "notes", "conversation_id": "", "client": "web"},
        ),
        *[("agent.switched", each["data"]) for each in told],
        ("directory.changed", {"old_path": "/a", "new_path": "/b", "client": ""}),
        ("mail.sent", {"id": [7]}),
        ("conversation.deleted", {}),
    ]


def test_replicas_are_listed(run: Run, fleet: tuple[str, ...]) -> None:
    assert run(*fleet, "replicas", "--json").out == ""
    with shared(fleet) as store:
        store.announce(agent="notes\x1b[2J[bold]")
        deadline = time.monotonic() + 20
        while True:
            # A beat from before the announcement may have been on its way, and come last: the next one repairs that.
            (one,) = [json.loads(line) for line in run(*fleet, "replicas", "--json").out.splitlines() or ["{}"]]
            if one.get("status") or time.monotonic() > deadline:
                break
        assert (one["id"], one["pid"], one["status"]) == (store.replica, os.getpid(), {"agent": "notes\x1b[2J[bold]"})
        shown = run(*fleet, "replicas").out
        assert store.replica in shown
        assert '{"agent": "notes\\u001b[2J[bold]"}' in shown
        assert "\x1b[2J" not in shown
    assert run(*fleet, "replicas", "--json").out == "", "it left"


@pytest.mark.wide
def test_leases_are_listed_and_ended(run: Run, fleet: tuple[str, ...]) -> None:
    with shared(fleet) as store:
        session = store.session("c\x1b[2J")
        session.create({})
        assert run(*fleet, "leases", "--json").out == ""
        lease = session.lock()
        lease.acquire()
        (one,) = [json.loads(line) for line in run(*fleet, "leases", "--json").out.splitlines()]
        assert (one["record_id"], one["kind"], one["token"]) == ("c\x1b[2J", "lock", lease.token)
        shown = run(*fleet, "leases", "--limit", "1")
        assert str(lease.token) in shown.out
        assert store.replica in shown.out
        assert "\x1b[2J" not in shown.out
        assert "--after" in shown.err
        assert run(*fleet, "leases", "--prefix", "x", "--json").out == ""
        wrong = run(*fleet, "end-lease", session.id, str(lease.token + 1))
        assert (wrong.code, "no lease with token" in wrong.err) == (1, True)
        assert run(*fleet, "end-lease", session.id, str(lease.token)).code == 0
        with pytest.raises(Fenced):
            session.set("a", 1)
        lease.release()


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_what_happens_is_shown_as_it_happens(fleet: tuple[str, ...], number: signal.Signals) -> None:
    with shared(fleet) as store:
        store.session("c0").set("a", 1)
        with start(*fleet, "tail", "--json", "--since", "10m", "conversation.*", "resync") as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            assert (first["type"], first["subject"]) == ("conversation.created", "session:c0")
            store.session("c1\x1b[2J").set("a", 1)
            store.emit("mail.sent")
            store.delete("c0")
            lines = [process.stdout.readline() for _ in range(2)]
            # Of two conversations: which comes first is open.
            assert {json.loads(line)["type"] for line in lines} == {"conversation.created", "conversation.deleted"}
            assert "\x1b" not in "".join(lines)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), err
        assert "Traceback" not in err
        position = err.strip().split("--since ")[1]
        store.session("c2").set("a", 1)
        store.session("c1\x1b[2J").clear()
        # Without the mail: it may be behind the position, if the look at its partition came late.
        with start(*fleet, "tail", "conversation.*", "--count", "2", "--since", position) as process:
            out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert lines_of(out) == {"conversation.created": "session:c2", "conversation.cleared": "session:c1%1B[2J"}


def lines_of(text: str) -> dict[str, str]:
    """Type and subject of each line."""
    return {line.split()[1]: line.split()[2] for line in text.splitlines()}


@pytest.mark.wide
def test_one_conversation_is_followed_and_what_was_missed_is_seen(fleet: tuple[str, ...]) -> None:
    with shared(fleet) as store:
        for id in ("c1", "c2"):
            store.session(id).set("a", 1)
        position = f"{store.emit('a.b').partition}=another-epoch@7"
        with start(*fleet, "tail", "--conversation", "c2", "--count", "2", "--since", position) as process:
            out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    kinds = [line.split()[1] for line in out.splitlines()]
    assert sorted(kinds) == ["conversation.created", "resync"]
    assert "events of 1 partitions were missed (epoch)" in out


@pytest.mark.wide
def test_a_reader_that_leaves_ends_it(fleet: tuple[str, ...]) -> None:
    with shared(fleet) as store, start(*fleet, "tail", "--since", "oldest") as process:
        assert process.stdout is not None
        store.emit("a.b")
        process.stdout.readline()
        process.stdout.close()
        store.emit("a.c")
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.wide
def test_a_config_is_given_to_the_fleet_or_to_one_agent(run: Run, archive: str, tmp_path: Path) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text("poll_interval: 5\n")
    assert run("reload-config", str(file)).out == "config of all agents is version 1\n"
    assert run("reload-config", str(file), "--agent", "notes").out == "config of agent notes is version 2\n"
    file.write_text("poll_interval: [5\n")
    broken = run("reload-config", str(file))
    assert (broken.code, lines(broken.err)) == (1, 1)
    assert f"{file}, line 2, column 1" in broken.err.replace("\n", "")
    with StateStore.open(archive=archive) as store:
        record = store.app("agent-config")
        assert [record.get(name)["config"] for name in ("all", "agent:notes")] == [{"poll_interval": 5}] * 2
        told = [(event.type, event.subject, event.data["agent"]) for event in store.admin.audit()]
        assert told == [("config.changed", "app:agent-config", name) for name in ("", "notes")]


def test_the_index_is_made_searched_and_removed(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive, search=False) as store:
        for number in range(3):
            store.session(f"s{number}", user="u1").append({"role": "user", "content": f"a weekend in Oslo {number}"})
        store.user("u1").set("home", {"city": "Oslo"})
    done = run("index")
    assert (done.code, done.out) == (0, "all 4 records are indexed\n")
    done = run("search", "oslo weekend", "--limit", "2")
    assert done.code == 0
    assert done.out.count("a weekend in Oslo") == 2
    done = run("search", "oslo", "--scope", "user", "--json")
    assert [(hit["id"], hit["key"], hit["value"]) for hit in json.loads(done.out)] == [("u1", "home", {"city": "Oslo"})]
    assert run("search", "bergen").out == ""
    with StateStore.open(archive=archive, search=True) as store:
        store.session("s9").append({"role": "user", "content": "\x1b]0;helsinki\x07 \x1b[2J[bold]"})
    done = run("search", "helsinki")
    assert "\\x1b]0;helsinki\\x07 \\x1b[2J[bold]" in done.out
    assert "\x1b" not in done.out
    assert run("index", "--search", "nowhere:at_all").code == 1
    assert run("index", "--remove", "--yes").out == "the index is removed\n"
    assert run("index", "--remove", "--yes").out == "there is no index\n"


def test_old_history_is_packed_and_purged(run: Run, archive: str) -> None:
    with StateStore.open(archive=archive) as store:
        for number in range(8):
            store.session("s").write(set={"n": number}, append=[{"role": "user", "content": str(number)}])
    done = run("compact", "--older-than", "1d")
    assert (done.code, done.out) == (0, "packed 0 changes and 0 messages of 0 records\n")
    refused = run("compact", "--older-than", "1s")
    assert (refused.code, "op_window" in refused.err) == (1, True)
    wrong = run("compact", "--older-than", "yesterday")
    assert (wrong.code, "30m, 12h or 7d" in wrong.err) == (1, True)
    done = run("purge", "--keep-messages", "3", "--yes")
    said = "removed 0 changes, 0 messages and 0 events of 0 records; 5 messages are now hidden"
    assert json.loads(done.out)["message"] == said
    with StateStore.open(archive=archive) as store:
        store.session("s").set("n", 9)
    done = run("purge", "--keep-changes", "1", "--yes")
    assert json.loads(done.out)["message"].startswith("removed 9 changes, 5 messages and 0 events of 1 records")
    assert run("purge", "--yes").code == 1
    with StateStore.open(archive=archive) as store:
        assert [message.content for message in store.session("s").messages()] == ["5", "6", "7"]
