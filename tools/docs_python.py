"""The pages about the Python interface, from the docstrings. Law: every public name is on exactly one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from generate_blocking import FILES

import distributed_state

STUB = Path(distributed_state.__file__).with_name("__init__.pyi")


@dataclass(frozen=True, slots=True)
class PythonPage:
    """A page: its title, what it says first, and the names that it is about, the asyncio API first."""

    place: str
    title: str
    about: str
    names: str


PAGES = (
    PythonPage(
        "stores", "Stores", "A program opens one store, which gives access to every record and to operations on all.",
        "AsyncStateStore StateStore AsyncAdmin Admin records.transaction.AsyncBatch store.blocking.Batch",
    ),
    PythonPage(
        "records", "Records", "A handle on one record: each method is a read or a commit.",
        "AsyncRecord Record records.record.RecordView Transaction ABSENT PRESENT merge",
    ),
    PythonPage(
        "typed-records", "Typed records", "Records that follow a pydantic model.",
        "Schema AsyncTypedRecord TypedRecord AsyncTypedSession TypedSession TaskState UserState",
    ),
    PythonPage(
        "items", "Items", "Large collections of a record.",
        "AsyncItems Items Item ItemPage PutItem DeleteItem",
    ),
    PythonPage("leases", "Leases", "Exclusive access to a record.", "AsyncLease Lease"),
    PythonPage(
        "sessions", "Sessions and messages", "Conversations: records with messages.",
        "AsyncSession Session Message Context Window Summary truncate_history formats",
    ),
    PythonPage(
        "turns", "Turns, tools and workflows", "One request and one commit, with the tools and workflows of an agent.",
        "AsyncTurn Turn Tool tool TOOLBOX ToolCall WorkingMemory Workflow AgentState AgentPhase "
        "Role StateMachine DEFAULT REASONING_MACHINE TASK_MACHINE",
    ),
    PythonPage(
        "agents", "Agents", "Agents that react to events of the fleet.",
        "AsyncAgent Agent AsyncHost Host CommandArgument LogLevel Limits Status",
    ),
    PythonPage(
        "notices", "Events in Python", "Streams of events: each yields an `Event`, see Results.",
        "events.consumer.AsyncEvents store.blocking_events.Events",
    ),
    PythonPage(
        "search", "Searching", "Find messages, fields and items.",
        "Search SearchHit SearchQuery SearchMatch SearchIndex SearchDocument SearchRemoval",
    ),
    PythonPage(
        "access", "Encryption and access", "Encryption keys, and policies for access.",
        "Encryption KeyRing Policy Request",
    ),
    PythonPage(
        "remote", "The remote client", "The same names over HTTP.",
        "AsyncRemoteStore RemoteStore remote.record.AsyncRemoteRecord remote.blocking.RemoteRecord "
        "remote.session.AsyncRemoteSession remote.blocking.RemoteSession remote.record.AsyncRemoteItems "
        "remote.blocking.RemoteItems remote.record.RemoteTransaction remote.session.AsyncRemoteTurn "
        "remote.blocking.RemoteTurn remote.session.AsyncRemoteOutput remote.blocking.RemoteOutput",
    ),
    PythonPage("results", "Results", "The classes of the values that methods return.", "results"),
)  # fmt: skip
# Objects of these are got from others: how they are made is nobody's affair. Agents are classes of one's own.
WRITTEN = {
    name: instead or name.removeprefix("Async")
    for file in FILES
    for name, _, instead in (each.partition(":")[2].partition(" as ") for each in file.classes)
}
SUBCLASSED = {"AsyncAgent", "Agent"}

# On pages that are made otherwise, of each with its docstring.
ELSEWHERE = {"Settings": "settings", "Event": "results", "fold": "results"}

# The classes for other frameworks; their names are none of the package's own.
ADAPTERS: dict[str, str] = {
    "LangGraph": "langgraph",
    "OpenAI Agents": "openai_agents",
    "Google ADK": "adk",
    "Agno": "agno",
    "Microsoft Agent Framework": "agent_framework",
    "Strands Agents": "strands",
    "CrewAI": "crewai",
    "LangChain": "langchain",
    "Claude Agent SDK": "claude_agent_sdk",
    "Pydantic AI": "pydantic_ai",
    "Opperator": "opperator",
}


@cache
def homes() -> dict[str, str]:
    """Each public name and the module that defines it, as the stub says."""
    found: dict[str, str] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def errors() -> list[str]:
    """The names of the errors, which have a page of their own."""
    return [name for name, home in homes().items() if home.startswith("distributed_state.errors.")]


def missing() -> set[str]:
    """The public names that are on no page, and those on two."""
    names = [name for page in PAGES for name in page.names.split() if "." not in name] + list(ELSEWHERE) + errors()
    return {name for name in {*names, *distributed_state.__all__} if names.count(name) != 1}


def python_pages() -> Iterator[tuple[str, str]]:
    """Each page of the reference of Python, as Markdown for mkdocstrings."""
    if missing():
        raise ValueError(f"docs_python.PAGES: not on exactly one page: {', '.join(sorted(missing()))}")
    for page in PAGES:
        described = [_described(name) for name in page.names.split()]
        yield page.place, "\n\n".join([f"# {page.title}", page.about, *described])
    parts = ["# Frameworks", "Each needs the extra of its framework."]
    for title, module in ADAPTERS.items():
        parts += [f"## {title}", adapter(f"distributed_state.adapters.{module}")]
    yield "frameworks", "\n\n".join(parts)


def overview() -> str:
    """Every public name, by the page that it is on."""
    parts = [
        "# Python",
        "Each class exists twice with the same methods: `AsyncRecord` for asyncio, `Record` for sync code. Import all "
        "names from the package: `from distributed_state import StateStore`. The classes of returned values are in its "
        "module `results`, the conversions of messages in `formats`.",
    ]
    for page in PAGES:
        names = [name for name in page.names.split() if "." not in name]
        parts += [f"## [{page.title}]({page.place}.md)", page.about, ", ".join(map(_reference, names)) + "."]
    parts += ["## [Errors](errors.md)", ", ".join(map(_reference, errors())) + "."]
    parts += ["## [Settings](settings.md)", "`Settings`, which `open()` takes as keyword arguments."]
    return "\n\n".join([*parts, "## [Frameworks](frameworks.md)", f"Adapters for {', '.join(ADAPTERS)}."])


def _reference(name: str) -> str:
    return f"[`{name}`][{homes()[name]}]"


def _described(name: str) -> str:
    """What mkdocstrings reads: a name of the package's own, or one by its module."""
    made_by_us = name not in SUBCLASSED and name.rpartition(".")[2] in {*WRITTEN, *WRITTEN.values()}
    options = "\n    options:\n      merge_init_into_class: false" if made_by_us else ""
    return f"::: {homes().get(name, f'distributed_state.{name}')}{options}"


def adapter(module: str) -> str:
    """What an adapter offers, one by one."""
    path = Path(distributed_state.__file__).parents[1].joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    tree = ast.parse(text)
    about = (ast.get_docstring(tree) or "").split("\n\n")[0]
    names = next(
        (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_all(node)),
        [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")],
    )
    options = "    options:\n      heading_level: 3"
    return "\n\n".join([about, *(f"::: {module}.{name}\n{options}" for name in names)])


def _is_all(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
