"""The house rules that a machine can check: what may import what, and the contract in each script's header."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import distributed_state

PACKAGE = Path(distributed_state.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(PACKAGE.glob("lua/*.lua"))

# From the ground up; an import leads to a lower floor. A folder stands for all that is in it.
FLOORS = [
    {"errors"},
    {"model", "deadlines"},
    {"keys", "codec", "settings", "lineage", "servers", "acting"},
    {"port", "sealing", "access", "telemetry"},
    {"patience"},
    {"clock"},
    {"op_ids"},
    {"warm", "hot", "link", "cold", "merging", "ephemeral", "sanitizing"},
    {"waiters"},
    {"lease", "changes"},
    {"shares", "stream"},
    {"archiver", "transaction", "schema", "feed", "presence"},
    {"tiers"},
    {"record", "doctor", "events"},
    {"timeline", "upkeep", "reencryption", "backup", "applying", "audit", "lifetimes"},
    {"erasing", "import_record"},
    {"lifecycle", "reaper"},
    {"agent"},
    {"records"},
    {"session"},
    {"typed"},
    {"handles", "batch"},
    {"fleet"},
    {"store"},
    {"bodies"},
    {"sync_records"},
    {"sync_fleet"},
    {"sync"},
    {"__init__"},
    {"replay", "demo", "metrics"},
    {"adapters", "service"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}

DOORS = {
    "redis": "port", "hiredis": "port", "fakeredis": "port",
    "sqlalchemy": "cold", "alembic": "cold", "psycopg": "cold", "sqlite3": "cold",
    "tiktoken": "agent", "yaml": "agent", "langchain_core": "agent",
    "typer": "cli", "rich": "cli", "cryptography": "sealing",
    "starlette": "service", "uvicorn": "service", "uvloop": "service", "prometheus_client": "metrics",
    "opentelemetry": "telemetry",
}  # fmt: skip

# Time and concurrency belong to the port. Three parts stand outside the core: programs and servers that are run beside
# it; adapters, which use it as any program may; cold/, plain blocking code run in threads that the port lends.
OUTSIDE = {"port", "cold", "cli", "replay", "demo", "servers", "adapters", "service"}
ALSO_FOR = {("cli", "replay", "demo"): {"typer", "rich"}, ("service",): {"prometheus_client"}}


def name_of(module: Path) -> str:
    """As in `cold.store`; the package's own is `__init__`."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def place_of(name: str) -> str:
    return name.split(".")[0]


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def imports(module: Path) -> Iterator[str]:
    """Everything imported anywhere in the file, inside functions too."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import hides where it leads"
            yield from (f"{node.module}.{each.name}" for each in node.names)


def own_imports(module: Path) -> set[str]:
    """The modules of this package that a module imports, by the names of `name_of`."""
    names = {name_of(each) for each in MODULES}
    found = set()
    for each in imports(module):
        top, _, rest = each.partition(".")
        if top == "distributed_state":
            while rest and rest not in names:
                rest = rest.rpartition(".")[0]
            found.add(rest or "__init__")
    return found


by_name = pytest.mark.parametrize("module", MODULES, ids=name_of)


@by_name
def test_imports_point_down(module: Path) -> None:
    place = place_of(name_of(module))
    assert place in HEIGHT, f"say on which floor {place} stands"
    for other in own_imports(module):
        if place_of(other) != place:
            assert HEIGHT[place_of(other)] < HEIGHT[place], f"{name_of(module)} imports {other}"


@by_name
def test_an_adapter_uses_public_names_only(module: Path) -> None:
    name = name_of(module)
    others = {other for other in own_imports(module) if place_of(other) == "adapters"}
    if place_of(name) == "adapters":
        assert own_imports(module) - others <= {"__init__"}
        framework = name.split(".")[:2]
        assert all(other.split(".")[:2] == framework for other in others), "adapters do not know one another"
    elif others:
        assert place_of(name) == "cli", f"{name} imports {others}"


def test_no_circle_is_hidden_inside_a_folder() -> None:
    graph = {name_of(module): own_imports(module) - {name_of(module)} for module in MODULES}
    while graph:
        free = {name for name, needed in graph.items() if not needed & graph.keys()}
        assert free, f"these import one another: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


@by_name
def test_no_import_is_hidden_from_the_running_program(module: Path) -> None:
    assert "TYPE_CHECKING" not in module.read_text()


@by_name
def test_each_driver_has_one_door(module: Path) -> None:
    place = place_of(name_of(module))
    for each in imports(module):
        top = each.split(".")[0]
        allowed = {DOORS.get(top, place)} | {
            other for others, tops in ALSO_FOR.items() if top in tops for other in others
        }
        assert place in allowed, f"{name_of(module)} imports {each}"


@by_name
def test_time_and_concurrency_belong_to_the_port(module: Path) -> None:
    if place_of(name_of(module)) in OUTSIDE:
        return
    forbidden = {"asyncio", "time", "threading", "concurrent", "multiprocessing", "selectors", "socket", "queue"}
    assert not forbidden & {each.split(".")[0] for each in imports(module)}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.AsyncFunctionDef):
            inner = [each for each in ast.walk(node) if isinstance(each, ast.Yield | ast.YieldFrom)]
            assert not inner, f"{node.name} is an async generator, which cannot be stepped by hand"
        assert not isinstance(node, ast.AsyncFor), "an `async for` needs an async generator"


@by_name
def test_nothing_is_decided_by_a_workers_clock(module: Path) -> None:
    """It jumps. What ends or is told apart by time goes by the server's clock; only what is shown may go by this."""
    shown = {"doctor", "presence"}  # how far apart the two are; since when a replica runs
    asks = any(isinstance(node, ast.Attribute) and node.attr == "wall" for node in ast.walk(tree(module)))
    assert not asks or name_of(module) in shown


@by_name
def test_no_error_is_swallowed_unseen(module: Path) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            assert not (wide and all(isinstance(each, ast.Pass) for each in node.body)), f"line {node.lineno}"


@by_name
def test_a_module_says_what_it_is_for(module: Path) -> None:
    if module.read_text().strip():
        assert ast.get_docstring(tree(module)), module


def docstring_lines(module: Path) -> int:
    """How many lines of a module are docstrings of its classes and functions."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree(module)) if isinstance(node, kinds)]
    return sum(len(text.splitlines()) for text in found)


@pytest.mark.parametrize("path", [*MODULES, *SCRIPTS], ids=lambda path: path.name)
def test_files_are_short_and_finished(path: Path) -> None:
    text = path.read_text()
    described = docstring_lines(path) if path.suffix == ".py" else 0  # a limit must not be kept by saying less
    assert len(text.splitlines()) - described <= 460 or text.startswith("# Generated by")
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


def test_no_file_is_a_drawer_for_anything() -> None:
    drawers = {"utils", "helpers", "common", "base", "misc"}
    assert not drawers & {part for module in MODULES for part in name_of(module).split(".")}


# Scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_opens_with_its_contract(script: Path) -> None:
    text = script.read_text()
    header, closed, body = text.partition("]]\n")
    assert text.startswith("--[[\n"), "the header comes first"
    assert closed
    keys = re.search(r"^  KEYS +(.+)$", header, re.MULTILINE)
    assert keys, "the header names the keys"
    assert re.search(r"^  ARGV +\S", header, re.MULTILINE), "the header names the arguments"
    assert re.search(r"^  Returns \{'", header, re.MULTILINE), "the header says what is returned, in words"
    first = body.splitlines()[0]
    named = re.fullmatch(r"local ([\w, ]+) = (KEYS\[\d\](?:, KEYS\[\d\])*)", first)
    assert named, f"the first line names every key: {first}"
    assert named[1].split(", ") == keys[1].split(), "and as the header calls them"
    assert named[2].split(", ") == [f"KEYS[{n + 1}]" for n in range(len(keys[1].split()))]
    assert body.count("KEYS[") == len(keys[1].split()), "keys are used by name from then on"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_returns_only_words_that_its_header_tells(script: Path) -> None:
    header, _, body = script.read_text().partition("]]\n")
    told = set(re.findall(r"\{'(\w+)'", header[header.index("Returns") :]))
    assert set(re.findall(r"return \{'(\w+)'", body)) == told


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_neither_builds_keys_nor_reads_values(script: Path) -> None:
    body = script.read_text().partition("]]\n")[2]
    assert not re.search(r"cjson|cmsgpack|loadstring|os\.|math\.random", body)
    # A key is one of the names of the first line; a word in quotes or a sum of texts there would be a built one.
    keys = set(re.match(r"local ([\w, ]+) =", body)[1].split(", "))  # type: ignore[index]  # the test above
    for command, key in re.findall(r"call\('(\w+)'(?:, ([^,)]+))?", body):
        if command not in ("TIME", "PUBSUB"):
            assert key in keys, f"{command} {key}"


def test_each_script_is_named_in_warm_and_used() -> None:
    warm = (PACKAGE / "warm.py").read_text()
    named = dict(re.findall(r'(\w+) = Script\("(\w+)"\)', warm.replace("), Script", ")\nX = Script")))
    found = set(re.findall(r'Script\("(\w+)"\)', warm))
    assert found == {script.stem for script in SCRIPTS}
    assert named
    everything = "\n".join(module.read_text() for module in MODULES)
    for each in found:
        assert len(re.findall(rf"\b{each.upper()}\b", everything)) > 1, f"{each} is never called"
