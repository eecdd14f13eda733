"""The complete examples of Opperator's own documents, with only the module of their import changed.

The documents are not part of this repository: without them these tests are skipped. The programs of the pages
docs/coming-from/opperator.md and opperator-lifecycle.md, which behave alike, are always tested, as every page's are.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from below import ROOT
from daemon import started

DOCUMENTS = ROOT.parent / "shared" / "seeds"

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not DOCUMENTS.is_dir(), reason="../shared/seeds is not there; tests/documentation runs the pages' programs"
    ),
]


def example_of(kind: str) -> str:
    """The program in the documents that defines this class, with the import of this package."""
    for file in sorted(DOCUMENTS.glob("*.txt")):
        found = re.search(
            rf"^from opperator_agent import [^\n]*\n(?=(?:import|from|\n)[\s\S]*?^class {kind}\()",
            file.read_text(),
            re.M,
        )
        if found:
            rest = file.read_text()[found.start() :]
            program = re.split(r"^(?:Best Practices|Event Flow Examples)\n", rest, maxsplit=1, flags=re.M)[0]
            program = program.replace(
                "from opperator_agent import", "from distributed_state.adapters.opperator import", 1
            )
            return program if re.search(r"^    def ", program, re.M) else indented(program)
    raise AssertionError(f"no document has {kind}")


def indented(program: str) -> str:
    """A program that lost its indentation: each block has one statement, but for one that an `else` ends."""
    lines, found, open_blocks, depth, brackets, quoted = program.splitlines(), list[str](), list[str](), 0, 0, False
    base = 0
    for number, line in enumerate(lines):
        if not brackets and not quoted:
            if line.startswith(("class ", "if __name__")):
                base, open_blocks = 0, []
            elif line.startswith("def "):
                base, open_blocks = 1, []
            elif line.startswith(("else:", "except ")):
                while not open_blocks[-1].startswith("if " if line.startswith("else") else "try"):
                    open_blocks.pop()
                open_blocks.pop()
        depth = base + len(open_blocks)
        found.append("    " * depth + line)
        quoted ^= line.count('"""') % 2 == 1
        begun = brackets
        brackets += (
            sum(line.count(each) for each in "([{") - sum(line.count(each) for each in ")]}") if not quoted else 0
        )
        if brackets or quoted or not line or line.startswith("#"):
            continue
        if line.startswith(("def ", "class ", "if __name__")) or (
            begun and base == 1 and not open_blocks and line == "):"
        ):
            base = 2 if line.startswith("def ") or line == "):" else 1
        elif line.endswith(":"):
            open_blocks.append(line)
        else:
            while open_blocks and not _goes_on(open_blocks[-1], lines[number + 1 :]):
                open_blocks.pop()
    return "\n".join(found) + "\n"


def _goes_on(block: str, later: list[str]) -> bool:
    """Whether a block has more statements: an `else` or `except` of its own is still to come."""
    for line in later:
        if line.startswith(("def ", "class ", "# ")) and not block.startswith("try"):
            return False
        if line.startswith("def "):
            return False
        if line.startswith("except "):
            return block.startswith("try")
        if line.startswith("else:"):
            return block.startswith("if ")
        if line.startswith("if ") and not block.startswith("try"):
            return False
    return False


def test_the_agent_that_takes_notes_runs_under_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text(example_of("NoteAgent"))
    with started(tmp_path, "notes.py") as (daemon, process):
        daemon.until("sidebar_section", lambda data: "Ready" in data["content"])
        assert daemon.ask("add_note", {"note": "lost"}) == {"error": "No active conversation"}
        sent = {}
        for number in range(50):
            place = f"conversation-{number % 5}"
            event = "new_conversation" if number < 5 else "conversation_switched"
            daemon.tell(event, conversation_id=place, previous_id="", message_count=number, is_clear=False)
            sent[daemon.command("add_note", {"note": f"{number} for {place}"})] = place
        for number, id in enumerate(sent):
            assert daemon.answer(id)["result"] == {"added": f"{number} for {sent[id]}", "total": number // 5 + 1}
        wanted = [f"{number} for conversation-4" for number in range(4, 50, 5)]
        assert daemon.ask("list_notes") == {"notes": wanted}
        daemon.tell("new_conversation", conversation_id="conversation-4", is_clear=True)
        assert daemon.ask("list_notes") == {"notes": []}
        process.send_signal(signal.SIGUSR1)
        status = daemon.until("log", lambda data: data["message"] == "Status")
        assert status["fields"]["total_notes"] == 40
        daemon.tell("conversation_deleted", conversation_id="conversation-0")
        daemon.hang_up()
        assert process.wait(30) == 0
        assert not [data for data in daemon.of("log") if data["level"] in ("error", "warning")]
    with started(tmp_path, "notes.py") as (daemon, process):
        daemon.tell("conversation_switched", conversation_id="conversation-1", previous_id="", message_count=3)
        assert len(daemon.ask("list_notes")["notes"]) == 10, "another process has them from its file"


def test_the_agent_of_all_lifecycle_events_runs_under_a_daemon(tmp_path: Path) -> None:
    (tmp_path / "lifecycle.py").write_text(example_of("LifecycleAgent"))
    (tmp_path / "agents.yaml").write_text("poll_interval: 5\n")
    words = ("-m", "distributed_state", "opperator", "lifecycle:LifecycleAgent")
    with started(tmp_path, *words) as (daemon, process):

        def shows(section: str, *texts: str) -> None:
            def fits(data: dict[str, str]) -> bool:
                return data["section_id"] == section and all(text in data["content"] for text in texts)

            daemon.until("sidebar_section", fits)

        shows("status", "Running")
        daemon.tell("new_conversation", conversation_id="monday", is_clear=False)
        shows("context", "New conversation", "monday")
        daemon.tell("agent_activated", previous_agent=None, conversation_id="monday")
        shows("status", "Active", "None")
        daemon.until("system_prompt", lambda data: "Active conversations: 1" in data["prompt"])
        daemon.tell("new_conversation", conversation_id="monday", is_clear=True)
        shows("context", "Cleared conversation")
        daemon.tell("conversation_switched", conversation_id="tuesday", previous_id="monday", message_count=4)
        shows("context", "Switched", "monday", "tuesday", "4")
        daemon.tell("invocation_directory_changed", old_path="/home/ann", new_path="/home/ann/notes")
        shows("context", "directory changed", "ann", "notes")
        daemon.tell("agent_deactivated", next_agent="writer")
        shows("status", "Inactive", "writer")
        daemon.tell("conversation_deleted", conversation_id="monday")
        daemon.until("log", lambda data: data["message"] == "Conversation deleted")
        (tmp_path / "agents.yaml").write_text("poll_interval: 7\n")
        process.send_signal(signal.SIGHUP)
        updated = daemon.until("log", lambda data: data["message"] == "Config updated")
        assert updated["fields"] == {"config": {"poll_interval": 7}}
        process.send_signal(signal.SIGUSR1)
        status = daemon.until("log", lambda data: data["message"] == "Status check")
        assert status["fields"]["active"] is False
        daemon.hang_up()
        assert process.wait(30) == 0
        assert not [data for data in daemon.of("log") if data["level"] in ("error", "warning")]
