"""What `distributed-state opperator` runs, and where its config comes from. Law: an error is one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from below import ROOT, until
from daemon import Here, started

from distributed_state import ConfigurationError
from distributed_state.adapters.opperator import CommandExposure, LogLevel, OpperatorAgent, SecretError

embedded = pytest.mark.only(api="blocking", warm="fake", cold="memory")


def command(name: str, *options: str) -> tuple[str, ...]:
    return ("-m", "distributed_state", "opperator", f"opperator_kinds:{name}", *options)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["Own", "Taking", "Coroutines", "instance", "factory"])
def test_a_class_an_instance_and_a_factory_run_with_the_config_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "agents.yaml").write_text("poll_interval: 5\n")
    with started(tmp_path, *command(name)) as (daemon, process):
        answer = name.lower()
        kept = "own" if name in ("instance", "factory") else answer
        assert daemon.ask("who") == [answer, kept, {"poll_interval": 5}]
        (tmp_path / "agents.yaml").write_text("poll_interval: 7\n")
        process.send_signal(signal.SIGHUP)
        daemon.until("log", lambda data: data["message"] == "config file read")
        assert daemon.ask("who")[2] == {"poll_interval": 7}
        daemon.hang_up()
        assert process.wait(30) == 0


@pytest.mark.wide
async def test_an_agent_of_the_command_line_is_listed_with_the_fleets_replicas(tmp_path: Path) -> None:
    with started(tmp_path, *command("Own")) as (daemon, _):
        await until(lambda: daemon.ask("fleet") == ["own"], every=0.1)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "'opperator_kinds:number' is an object of type int: name a class of agents"),
        ("coroutine", "'opperator_kinds:coroutine' returned an object of type coroutine: name a class of agents"),
        ("Needing", "is called without arguments: missing a required argument: 'database'"),
    ],
)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, name: str, words: str) -> None:
    with started(tmp_path, *command(name)) as (_, process):
        assert process.wait(30) == 1
        said = " ".join((tmp_path / "errors").read_text().split())  # a narrow terminal breaks the line
        assert said.startswith("error: ")
        assert words in said
        assert "Traceback" not in said


@pytest.mark.wide
def test_signals_before_the_agent_runs_do_not_end_it_and_are_answered(tmp_path: Path) -> None:
    with started(tmp_path, *command("Early"), EARLY_SIGNALS="1") as (daemon, process):
        daemon.until("ready")
        daemon.hook("status")
        said = daemon.until("log", lambda data: "no config file to read again" in data["message"])
        assert said["level"] == "warning"
        daemon.hang_up()
        assert process.wait(30) == 0


SCRIPT = """
import sys
from distributed_state.adapters.opperator import CommandArgument, LogLevel, OpperatorAgent

class Notes(OpperatorAgent):
    def __init__(self):
        super().__init__(name="notes", version="2.1")
        self.seen = 0

    def initialize(self):
        self.register_command("add", self.add, arguments=[CommandArgument("note", "string", "Text", required=True)])

    def add(self, args):
        print("output of the agent's own code")
        self.seen += 1
        return {"running": self.running, "seen": self.seen, "note": args["note"], "config": self.config}

    def cleanup(self):
        self.log(LogLevel.FATAL, "cleaned up")
        super().cleanup()

if __name__ == "__main__":
    agent = Notes()
    agent.run()
"""


@pytest.mark.wide
def test_a_script_that_imports_it_runs_under_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text('{"from": "the sdk"}')
    with started(tmp_path, "agent.py") as (daemon, process):
        assert daemon.until("ready") == {"pid": process.pid, "version": "2.1"}
        answer = daemon.ask("add", {"note": "x"})
        assert answer == {"running": True, "seen": 1, "note": "x", "config": {"from": "the sdk"}}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        daemon.until("log", lambda data: (data["message"], data["level"]) == ("cleaned up", "fatal"))


ENDING = SCRIPT.replace("def cleanup", "def main_loop(self):\n        pass\n\n    def cleanup")


def alone(folder: Path, stdin: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the script in this folder to its end."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "agent.py"], cwd=folder, stdin=stdin, capture_output=True, timeout=60,
        env=os.environ | {"PYTHONPATH": path, "DISTRIBUTED_STATE_ARCHIVE": "memory"},
    )  # fmt: skip


@pytest.mark.wide
def test_a_script_runs_alone_where_its_input_is_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ENDING)
    ran = alone(tmp_path, stdin=subprocess.DEVNULL)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"cleaned up\n")


@pytest.mark.wide
def test_a_script_serves_the_messages_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    (tmp_path / "messages").write_text(json.dumps({"type": "command", "data": {"command": "__list_commands"}}) + "\n")
    with (tmp_path / "messages").open() as messages:
        ran = alone(tmp_path, stdin=messages)
    assert ran.returncode == 0
    assert b'"response"' in ran.stdout


@pytest.mark.wide
def test_a_script_says_in_a_terminal_that_it_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ENDING)
    master, terminal = os.openpty()
    try:
        ran = alone(tmp_path, stdin=terminal)
    finally:
        os.close(master)
        os.close(terminal)
    assert (ran.returncode, ran.stdout) == (0, b"")
    line, _ = ran.stderr.decode().splitlines()
    assert line == "notes: standard input is a terminal, not a daemon's pipe: the agent runs alone, until Ctrl-C"


HANGING = """
import time
from distributed_state.adapters.opperator import OpperatorAgent

class Hanging(OpperatorAgent):
    def initialize(self):
        self.register_command("hang", self.hang)

    def hang(self):
        self.log("INFO", "hangs")
        time.sleep(600)

    def cleanup(self):
        open("cleaned", "w").close()

Hanging().run()
"""


@pytest.mark.wide
def test_an_agent_with_a_hanging_command_cleans_up_before_its_daemon_kills_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(HANGING)
    with started(tmp_path, "agent.py") as (daemon, process):
        daemon.command("hang")
        daemon.until("log", lambda data: data["message"] == "hangs")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert (tmp_path / "cleaned").exists()
        assert time.monotonic() - began < OpperatorAgent.shutdown_timeout + 10
    assert OpperatorAgent.shutdown_timeout < 3, "the daemon's patience"


class Pasted(OpperatorAgent):
    """Its author uses names that the adapter uses, too."""

    pause_when_inactive = True

    def __init__(self, store: Any) -> None:
        super().__init__("pasted", store=store)
        self.paused = False
        self.requests: list[str] = []
        self.errors: dict[str, str] = {}
        self.status = self.wait = "a text"  # type: ignore[assignment, method-assign]
        self._context = self._commands = None
        self.name = "Pasted"
        self.monitors = False

    def initialize(self) -> None:
        self.register_command("go", self.go)

    def go(self) -> list[Any]:
        self.requests.append("go")
        return [self.requests, self.errors, self._context, self.paused, self.monitors]

    def stop(self) -> None:  # type: ignore[override]
        raise AssertionError("not the adapter's to call")

    pause = resume = follow = run_command = _run_command = _activate = _change_directory = _model = stop  # type: ignore[assignment]

    def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> None:
        if self.paused:
            self.paused = False
            self.monitors = True

    def on_agent_deactivated(self, next_agent: str | None) -> None:
        if self.pause_when_inactive:
            self.paused = True
            self.monitors = False


@embedded
async def test_names_that_the_author_also_uses_are_the_authors(store: Any) -> None:
    with Here(Pasted(store.it)) as daemon:
        assert daemon.ask("go") == [["go"], {}, None, False, False]
        daemon.tell("conversation_switched", conversation_id="c", previous_id="", message_count=0)
        daemon.tell("agent_activated", previous_agent=None, conversation_id="c")
        daemon.tell("agent_deactivated", next_agent=None)
        assert daemon.ask("go")[3:] == [True, False]
        daemon.tell("agent_activated", previous_agent=None, conversation_id="c")
        assert daemon.ask("go")[3:] == [False, True], "the hook found the agent paused, and resumed its own work"
        assert not [each for each in daemon.of("log") if each["level"] in ("error", "warning")]
    assert daemon.failed is None


@embedded
async def test_none_is_taken_where_the_sdk_takes_it(store: Any) -> None:
    agent = OpperatorAgent("plain", store=store.it)
    agent.register_command("go", lambda: None, title=None, description=None, arguments=None, expose_as=None)
    agent.set_description(None)
    agent.set_system_prompt(None)
    assert (agent.visible["description"], agent.visible["system_prompt"]) == ("", "")
    assert agent.visible["commands"] == [{"name": "go", "description": "", "arguments": []}]


@embedded
@pytest.mark.parametrize("name", ["client", "config", "conversation_id", "listeners", "store"])
async def test_an_attribute_that_cannot_be_set_is_named(store: Any, name: str) -> None:
    agent = OpperatorAgent("plain", store=store.it)
    with pytest.raises(ConfigurationError, match=rf"OpperatorAgent\.{name} .* give your own attribute another name"):
        setattr(agent, name, None)


@contextmanager
def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Iterator[list[Any]]:
    """A daemon's socket, which gives each request the next of these answers; what it was asked."""
    path, asked = folder / "d.sock", list[Any]()
    monkeypatch.setenv("OPPERATOR_SOCKET_PATH", str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as lines:
                    asked.append(json.loads(lines.readline()))
                    connection.sendall(answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield asked
        thread.join(10)


@embedded
async def test_the_daemon_is_asked_for_secrets_and_for_its_users_folder(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Secretive(OpperatorAgent):
        def initialize(self) -> None:
            self.register_command("where", self.get_invocation_directory, expose_as=CommandExposure.SLASH_COMMAND)
            self.log(LogLevel.INFO, "at", folder=self.get_invocation_directory())

    answers = [
        {"success": True, "secret": "s3cret"}, {"success": False, "error": "no such secret"}, b"nonsense\n",
        {"success": True, "invocation_dir": "/home/ann"},
    ]  # fmt: skip
    agent = Secretive("secretive", store=store.it)
    with answering(tmp_path, monkeypatch, *answers) as asked:
        assert agent.get_secret("key") == "s3cret"
        for words in ("no such secret", "does not answer"):
            with pytest.raises(SecretError, match=words):
                agent.get_secret("key")
        with Here(agent) as daemon:
            assert daemon.ask("where") == "/home/ann"
            assert daemon.of("command_registry")[-1]["commands"][0]["expose_as"] == ["slash_command"]
            agent.running = False
    assert asked[0] == {"type": "secret_get", "secret_name": "key"}
    assert asked[-1] == {"type": "get_invocation_dir"}
    assert not agent.running
    monkeypatch.setenv("OPPERATOR_SOCKET_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SecretError, match="does not answer"):
        agent.get_secret("key")
