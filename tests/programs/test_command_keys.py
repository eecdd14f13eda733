"""Keys that the command line is given: what it reads and replaces with them, and that it shows none."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_state import Encryption, KeyRing, StateStore

KEY = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DISTRIBUTED_STATE_")}
    given = {f"DISTRIBUTED_STATE_{name}": text for name, text in environment.items()}
    call = [sys.executable, "-m", "distributed_state", "--archive", f"sqlite:///{folder}/a.db", "--log-level", "debug"]
    return subprocess.run([*call, *words], env=clean | given, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.wide
def test_the_command_line_reads_writes_and_replaces_keys(tmp_path: Path) -> None:
    one, two = f"one:{KEY}", f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    assert command(tmp_path, "set", "s", "ssn", '"123-45"', KEYS=one).returncode == 0
    refused = command(tmp_path, "get", "s", "ssn")
    assert refused.returncode == 1
    assert "field 'ssn' is encrypted with key 'one' and this store has no keys" in " ".join(refused.stderr.split())
    assert command(tmp_path, "get", "s", "ssn", KEYS=one).stdout == '"123-45"\n'
    planned = command(tmp_path, "reencrypt", "--dry-run", KEYS=two)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout == "1 records: 2 values and 0 copies in Redis to re-encrypt, 0 records unreadable\n"
    done = command(tmp_path, "reencrypt", KEYS=two)
    assert done.stdout == "1 records: 2 values and 0 copies in Redis re-encrypted, 0 records unreadable\n"
    assert "1 records, 2 values" in done.stderr
    assert command(tmp_path, "reencrypt", KEYS=two).stdout.startswith("1 records: 0 values and 0 copies")
    only = two.partition(",")[2]
    keys = tmp_path / "keys"
    keys.write_text(f"# from November on\n{only}\n")
    assert command(tmp_path, "get", "s", "ssn", KEY_FILE=str(keys)).stdout == '"123-45"\n'
    lost = command(tmp_path, "reencrypt", KEYS=one)
    assert lost.returncode == 1
    assert "1 records unreadable" in lost.stdout
    without = command(tmp_path, "reencrypt")
    assert "no keys" in without.stderr
    assert without.stdout == ""
    for each in (refused, planned, done, lost):
        assert KEY not in each.stdout + each.stderr
        assert "123-45" not in each.stdout + each.stderr


@pytest.mark.wide
def test_replacing_keys_ends_cleanly_at_ctrl_c(tmp_path: Path) -> None:
    """What is done is said and stays; the next run does the rest."""
    one, two = KeyRing.parse(f"one:{KEY}"), f"one:{KEY},two:{base64.b64encode(b'2' * 32).decode()}"
    given = {"archive": f"sqlite:///{tmp_path}/a.db", "durability": "memory", "encryption": Encryption(one)}
    with StateStore.open(**given) as store, store.batch() as batch:
        for number in range(500):
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
    assert 100 <= done < 500
    rest = int(command(tmp_path, "reencrypt", KEYS=two).stdout.split()[2])
    # Events come last: the 500 of how these records began are still to be done.
    assert 500 - done - 100 <= rest - 500 <= 500 - done, "of the page that was being done, some are"


@pytest.mark.wide
def test_keys_that_cannot_be_read_are_not_printed(tmp_path: Path) -> None:
    for keys in (KEY, f"one:{KEY[:-4]}", f"one:{KEY}x"):
        refused = command(tmp_path, "get", "s", KEYS=keys)
        assert refused.returncode == 1
        assert "error:" in refused.stderr
        assert KEY[:20] not in refused.stderr
