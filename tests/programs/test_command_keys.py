"""Keys that the command line is given: what it reads and replaces with them, and that it shows none."""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_state import Encryption, KeyRing, StateStore
from distributed_state.programs import cli
from distributed_state.programs.cli import shell

KEY = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Command]:
    """The command line as a user runs it, with all that it logs."""
    caplog.set_level(logging.DEBUG)
    for name in os.environ:
        if name.startswith("DISTRIBUTED_STATE_"):
            monkeypatch.delenv(name)
    for console in (shell.out, shell.err):
        monkeypatch.setattr(console, "width", 200)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def command(*words: str, **environment: str) -> Done:
        caplog.clear()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            for name, text in environment.items():
                patched.setenv(f"DISTRIBUTED_STATE_{name}", text)
            patched.setattr(sys, "argv", ["distributed-state", "--archive", f"sqlite:///{tmp_path}/a.db", *words])
            cli.main()
        seen = capsys.readouterr()
        return Done(ended.value.code if isinstance(ended.value.code, int) else 0, seen.out, seen.err + caplog.text)

    yield command
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_command_line_reads_writes_and_replaces_keys(command: Command, tmp_path: Path) -> None:
    one, two = f"one:{KEY}", f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    assert command("set", "s", "ssn", '"123-45"', KEYS=one).code == 0
    refused = command("get", "s", "ssn")
    assert refused.code == 1
    assert "field 'ssn' is encrypted with key 'one' and this store has no keys" in " ".join(refused.err.split())
    assert command("get", "s", "ssn", KEYS=one).out == '"123-45"\n'
    planned = command("reencrypt", "--dry-run", KEYS=two)
    assert planned.code == 0, planned.err
    assert planned.out == "1 records: 2 values and 0 copies in Redis to re-encrypt, 0 records unreadable\n"
    done = command("reencrypt", KEYS=two)
    assert done.out == "1 records: 2 values and 0 copies in Redis re-encrypted, 0 records unreadable\n"
    assert "1 records, 2 values" in done.err
    assert command("reencrypt", KEYS=two).out.startswith("1 records: 0 values and 0 copies")
    only = two.partition(",")[2]
    keys = tmp_path / "keys"
    keys.write_text(f"# from November on\n{only}\n")
    assert command("get", "s", "ssn", KEY_FILE=str(keys)).out == '"123-45"\n'
    lost = command("reencrypt", KEYS=one)
    assert lost.code == 1
    assert "1 records unreadable" in lost.out
    without = command("reencrypt")
    assert "no keys" in without.err
    assert without.out == ""
    for each in (refused, planned, done, lost):
        assert KEY not in each.out + each.err
        assert "123-45" not in each.out + each.err


@pytest.mark.wide
def test_replacing_keys_ends_cleanly_at_ctrl_c(command: Command, tmp_path: Path) -> None:
    """What is done is said and stays; the next run does the rest."""
    one, two = KeyRing.parse(f"one:{KEY}"), f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    given = {"archive": f"sqlite:///{tmp_path}/a.db", "durability": "memory", "encryption": Encryption(one)}
    with StateStore.open(**given) as store, store.batch() as batch:
        for number in range(400):
            batch.on(store.session(f"s{number}")).set("a", number)
    environment = os.environ | {"DISTRIBUTED_STATE_KEYS": two}
    call = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{tmp_path}/a.db", "reencrypt"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "100 records, 100 values\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    done = int(out.split()[0])
    assert 100 <= done < 400
    rest = int(command("reencrypt", KEYS=two).out.split()[2])
    # Events come last: the 400 of how these records began are still to be done.
    assert 400 - done - 100 <= rest - 400 <= 400 - done, "of the page that was being done, some are"


def test_keys_that_cannot_be_read_are_not_printed(command: Command) -> None:
    for keys in (KEY, f"one:{KEY[:-4]}", f"one:{KEY}x"):
        refused = command("get", "s", KEYS=keys)
        assert refused.code == 1
        assert "error:" in refused.err
        assert KEY[:20] not in refused.err
