"""The house rules that a machine can check: doors of drivers, how long a file is, what opens each script."""

from __future__ import annotations

import ast
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

import pytest

import distributed_state
from distributed_state.port import Script
from distributed_state.settings import Settings

pytestmark = pytest.mark.unit

PACKAGE = Path(distributed_state.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(PACKAGE.glob("warm/lua/*.lua"))
INCLUDES = sorted(PACKAGE.glob("warm/lua/include/*.lua"))

# Each driver has one door, or two: the folder that may import it. `programs` are run by themselves, and use what they
# like; adapters read by them what frameworks have of their own.
DOORS = {
    "httpx": "port", "redis": ("port", "adapters"), "hiredis": "port", "fakeredis": "port",
    "sqlalchemy": ("cold", "adapters"), "sqlite3": ("cold", "adapters"),
    "alembic": "cold", "psycopg": ("cold", "adapters"), "filelock": "cold",
    "cryptography": "values", "opentelemetry": "warm", "yaml": "events", "prometheus_client": "store",
    "tiktoken": "formats", "langchain_core": ("formats", "adapters"), "agents": "adapters",
    "google": "adapters", "agno": "adapters", "claude_agent_sdk": "adapters", "pydantic_ai": "adapters",
    "agent_framework": "adapters", "strands": "adapters", "crewai": "adapters",
    "typer": "programs", "rich": "programs", "starlette": "programs", "uvicorn": "programs", "uvloop": "programs",
}  # fmt: skip

# Time and concurrency belong to the port. Three parts stand outside the core: programs; adapters, which use the
# package as any program may; cold/, plain blocking code run in threads that the port lends.
OUTSIDE = {"port", "cold", "programs", "adapters"}

DESIGN = PACKAGE.parent / "docs" / "design"
CORE = {each.parent.name for each in PACKAGE.glob("*/__init__.py")} - {"adapters", "programs"}

LINES = 800
SCRIPT_LINES = 200
FUNCTION_LINES = 70


def name_of(module: Path) -> str:
    """As in `cold.store`; the package's own is `__init__`."""
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def place_of(name: str) -> str:
    return name.split(".")[0]


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


@cache
def imports(module: Path) -> list[str]:
    """Everything imported anywhere in the file, inside functions too; of the package, what its stub says it offers."""
    stub = module.with_suffix(".pyi")
    found: list[str] = []
    for node in ast.walk(tree(stub if stub.exists() else module)):
        if isinstance(node, ast.Import):
            found += (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import hides where it leads"
            found += (f"{node.module}.{each.name}" for each in node.names)
    return found


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test that looks at each file, and names all that break the rule."""

    def of(test: Callable[[Path], None]) -> Callable[[], None]:
        @wraps(test)
        def all_of_them() -> None:
            assert paths
            broken = []
            for path in paths:
                try:
                    test(path)
                except AssertionError as error:
                    broken.append(f"{path.relative_to(PACKAGE)}: {str(error).splitlines()[0]}")
            assert not broken, "\n".join(broken)

        del all_of_them.__wrapped__  # pytest would ask it for the arguments of `test`
        return all_of_them

    return of


@each(MODULES)
def test_agents_stand_on_the_public_store(module: Path) -> None:
    """What they need besides its public methods is in one place."""
    if place_of(name_of(module)) == "agents":
        blocking = name_of(module).startswith("agents.blocking")  # it holds its asyncio counterpart
        below = {"tiers", "_lifecycle"} if blocking else {"tiers", "_lifecycle", "_core"}
        found = below & {node.attr for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)}
        found |= {name for name in imports(module) if name.startswith(f"{PACKAGE.name}.store.lifecycle.")}
        assert not found, f"goes below the store by {found}"


@each(MODULES)
def test_no_import_is_hidden_from_the_running_program(module: Path) -> None:
    assert "TYPE_CHECKING" not in module.read_text()


@each(MODULES)
def test_each_driver_has_one_door(module: Path) -> None:
    place = place_of(name_of(module))
    for name in imports(module):
        doors = DOORS.get(name.split(".")[0], place)
        assert place in ("programs", *((doors,) if isinstance(doors, str) else doors)), f"imports {name}"


@each(MODULES)
def test_time_and_concurrency_belong_to_the_port(module: Path) -> None:
    if place_of(name_of(module)) in OUTSIDE:
        return
    forbidden = {"asyncio", "time", "threading", "concurrent", "multiprocessing", "selectors", "socket", "queue"}
    found = forbidden & {name.split(".")[0] for name in imports(module)}
    assert not found, f"imports {found}"
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.AsyncFunctionDef):
            inner = [inside for inside in ast.walk(node) if isinstance(inside, ast.Yield | ast.YieldFrom)]
            assert not inner, f"{node.name} is an async generator, which cannot be stepped by hand"
        assert not isinstance(node, ast.AsyncFor), "an `async for` needs an async generator"


# A secret, or a name that some framework makes, is drawn elsewhere: it must never come from a seed.
DRAWS = {"values.chance", "values.access_tokens"}


@each(MODULES)
def test_chance_comes_from_one_module(module: Path) -> None:
    if name_of(module) not in DRAWS and place_of(name_of(module)) not in {"adapters", "programs"}:
        found = {"random", "secrets", "uuid"} & {name.split(".")[0] for name in imports(module)}
        assert not found, f"imports {found}: the simulator could not seed it"


@each(MODULES)
def test_nothing_is_decided_by_a_workers_clock(module: Path) -> None:
    """It jumps. What ends or is told apart by time goes by the server's clock; only what is shown may go by this."""
    shown = {"store.doctor", "warm.heartbeat"}  # how far apart the two are; since when a replica runs
    asks = any(isinstance(node, ast.Attribute) and node.attr == "wall" for node in ast.walk(tree(module)))
    assert not asks or name_of(module) in shown, "asks the worker's clock"


@each(MODULES)
def test_no_error_is_swallowed_unseen(module: Path) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            wide = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            assert not (wide and all(isinstance(inside, ast.Pass) for inside in node.body)), f"line {node.lineno}"


@each(MODULES)
def test_a_module_says_what_it_is_for(module: Path) -> None:
    if module.read_text().strip():
        assert ast.get_docstring(tree(module)), "has no docstring"


def sections_of(page: Path) -> set[int]:
    return {int(number) for number in re.findall(r"^## (\d+)\. ", page.read_text(), re.MULTILINE)}


def sections() -> set[int]:
    """The numbers of the sections of docs/design/."""
    return {number for page in DESIGN.glob("*.md") for number in sections_of(page)}


@each(MODULES)
def test_a_module_of_the_core_names_its_section_of_the_design(module: Path) -> None:
    text = module.read_text()
    if place_of(name_of(module)) not in CORE or "migrations" in module.parts or text.startswith("# Generated by"):
        return
    named = re.search(r"^Design: sections? ([\d, ]+)\.$", ast.get_docstring(tree(module)) or "", re.MULTILINE)
    assert named, "names no section of docs/design/"
    unknown = set(map(int, named[1].split(", "))) - sections()
    assert not unknown, f"the design has no section {unknown}"


def test_the_design_names_tests_that_exist() -> None:
    text = "\n".join(page.read_text() for page in DESIGN.glob("*.md"))
    tests = set(re.findall(r"`(\w+/test_\w+\.py)`", text))
    assert len(tests) > 10, "each promise is shown by a test"
    assert not [name for name in tests if not (DESIGN.parent.parent / "tests" / name).exists()]
    assert sections() == set(range(1, max(sections()) + 1))


def test_the_design_begins_with_at_most_thirty_concepts_and_their_modules() -> None:
    first = (DESIGN / "concepts-and-promises.md").read_text().partition("\n## 1. ")[2].partition("\n## ")[0]
    modules = re.findall(r"^\| .* \| `([\w/]+\.py)` \|$", first, re.MULTILINE)
    assert 20 < len(modules) <= 30
    assert not [name for name in modules if not (PACKAGE / name).exists()]


def test_the_index_of_the_design_lists_each_section_with_its_page() -> None:
    rows = re.findall(r"^\| (.+) \| \[.+\]\((.+)\) \|$", (DESIGN / "index.md").read_text(), re.MULTILINE)
    listed = {page: set(map(int, re.findall(r"\b\d+\b", titles))) for titles, page in rows}
    assert listed == {page.name: sections_of(page) for page in DESIGN.glob("*.md") if page.name != "index.md"}


@each(sorted(DESIGN.glob("*.md")))
def test_a_page_of_the_design_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= 2_500


@each([*MODULES, *SCRIPTS, *INCLUDES])
def test_files_are_short_and_finished(path: Path) -> None:
    text = path.read_text()
    lines = len(text.splitlines())
    most = SCRIPT_LINES if path.suffix == ".lua" else LINES
    assert lines <= most or text.startswith("# Generated by"), f"{lines} lines"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text), "is not finished"


def functions(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for inner in ast.iter_child_nodes(node):
        name = f"{inside}.{getattr(inner, 'name', '')}".rstrip(".")
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, inner
        yield from functions(inner, name)


@each(MODULES)
def test_functions_are_short(module: Path) -> None:
    """Without its signature and its docstring, which may say as much as a caller needs."""
    for name, function in functions(tree(module), name_of(module)):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines <= FUNCTION_LINES, f"{name} has {lines} lines"


@each(MODULES)
def test_commands_are_written_in_one_place(module: Path) -> None:
    """Never by hiredis, which a signal handler that raises ends the interpreter in: see port/commands.py."""
    assert not re.search(r"import .*\bpack_command\b", module.read_text())


def test_no_file_is_a_drawer_for_anything() -> None:
    drawers = {"utils", "helpers", "common", "base", "misc"}
    assert not drawers & {part for module in MODULES for part in name_of(module).split(".")}


# Scripts


def sent(script: Path) -> str:
    """The text that the server gets: with its includes."""
    return Script(script.stem).text.decode()


@each(SCRIPTS)
def test_a_script_opens_with_its_contract(script: Path) -> None:
    text = script.read_text()
    header, closed, body = text.partition("]]\n")
    assert text.startswith("--[[\n"), "the header comes first"
    assert closed
    keys = re.search(r"^  KEYS +(.+)$", header, re.MULTILINE)
    assert keys, "the header names the keys"
    assert re.search(r"^  ARGV +\S", header, re.MULTILINE), "the header names the arguments"
    assert re.search(r"^  Returns \{?'", header, re.MULTILINE), "the header says what is returned, in words"
    first = body.splitlines()[0]
    named = re.fullmatch(
        r"local ([\w, ]+) = (KEYS\[\d\](?:, KEYS\[\d\])*(?:, \{unpack\(KEYS, \d\)\})?|unpack\(KEYS\))", first
    )
    assert named, f"the first line names every key: {first}"
    *alone, last = keys[1].removesuffix(" ...").split()
    assert named[1].split(", ") == [*alone, last], "and as the header calls them"
    # The last name may be that of many: all from there on.
    many = keys[1].endswith(" ...")
    places = [f"KEYS[{n + 1}]" for n in range(len(alone))]
    places.append(f"{{unpack(KEYS, {len(alone) + 1})}}" if many else f"KEYS[{len(alone) + 1}]")
    assert named[2] in (", ".join(places), "unpack(KEYS)")
    assert len(re.findall(r"\bKEYS\b", body)) == named[2].count("KEYS"), "keys are used by name from then on"


@each(SCRIPTS)
def test_a_script_returns_only_words_that_its_header_tells(script: Path) -> None:
    header, _, body = sent(script).partition("]]\n")
    told = set(re.findall(r"(?:Returns |\{)'(\w+)[ ']", header[header.index("Returns") :]))
    assert set(re.findall(r"\breturn \{?'(\w+)[ ']", body)) == told


@each(SCRIPTS)
def test_a_script_neither_builds_keys_nor_reads_values(script: Path) -> None:
    body = sent(script).partition("]]\n")[2]
    assert not re.search(r"cjson|cmsgpack|loadstring|os\.|math\.random", body)
    # A key is one of the names of the first line; a word in quotes or a sum of texts there would be a built one.
    keys = set(re.match(r"local ([\w, ]+) =", body)[1].split(", "))  # type: ignore[index]  # the test above
    keys |= {one for one, many in re.findall(r"for \w+, (\w+) in ipairs\((\w+)\)", body) if many in keys}
    for command, key in re.findall(r"call\('(\w+)'(?:, ([^,)]+))?", body):
        if command == "SPUBLISH" or (command, key) == ("EXISTS", "meta .. '?'"):
            key = key.partition(" .. ")[0]  # a channel of some types; a key that is never there: see same_data.lua
        if command not in ("TIME", "PUBSUB", "INFO"):
            assert key in keys, f"{command} {key}"


def test_an_include_opens_with_what_it_expects_and_defines() -> None:
    for include in INCLUDES:
        header, closed, body = include.read_text().partition("]]\n")
        assert header.startswith("--[[\n"), include.name
        assert closed, include.name
        assert re.search(r"^  Expects  \S", header, re.MULTILINE), include.name
        assert re.search(r"^  (Defines|Returns)  \S", header, re.MULTILINE), include.name
        assert ("return {" in body) == ("  Returns  " in header), include.name
        assert "KEYS[" not in body, f"{include.name}: a script names its keys"
        assert "@include" not in body, f"{include.name}: includes are read one deep"


def test_an_include_serves_several_scripts_or_keeps_one_short() -> None:
    users: dict[str, list[Path]] = {include.stem: [] for include in INCLUDES}
    for script in SCRIPTS:
        for name in re.findall(r"-- @include (\w+)$", script.read_text(), re.M):
            users[name].append(script)
    for include in INCLUDES:
        assert users[include.stem], f"{include.name} is not used"
        lines = [len(path.read_text().splitlines()) for path in (include, *users[include.stem])]
        assert len(lines) > 2 or sum(lines) > SCRIPT_LINES, f"{include.name} fits into the only script that uses it"


def test_the_server_gets_the_text_of_an_include_in_place_of_its_name() -> None:
    for script in SCRIPTS:
        assert "@include" not in sent(script), script.name
    assert (PACKAGE / "warm/lua/include/events.lua").read_text() in sent(PACKAGE / "warm/lua/emit.lua")


@pytest.mark.parametrize(
    "line", ["-- @include nothing", "  --@include  nothing", "-- @include", "-- @include clock, events"]
)
def test_an_include_that_is_not_there_is_an_error_when_the_script_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    folder = shutil.copytree(PACKAGE / "warm/lua", tmp_path / "warm/lua")
    monkeypatch.setattr("distributed_state.port.commands.resources.files", lambda package: tmp_path)
    assert Script("claim").text == (folder / "claim.lua").read_bytes(), "the same lines are read from there"
    with (folder / "claim.lua").open("a") as script:
        script.write(f"\n{line}\n")
    with pytest.raises(FileNotFoundError):
        _ = Script("claim").text


def test_each_script_is_named_in_warm_and_used() -> None:
    warm = (PACKAGE / "warm" / "scripts.py").read_text()
    named = dict(re.findall(r'(\w+) = Script\("(\w+)"', warm))
    found = set(re.findall(r'Script\("(\w+)"', warm))
    assert found == {script.stem for script in SCRIPTS}
    assert named
    words = Counter(word for module in MODULES for word in re.findall(r"\w+", module.read_text()))
    for each in found:
        assert words[each.upper()] > 1, f"{each} is never called"


def test_a_script_with_other_constants_is_the_same_but_for_them() -> None:
    """And with those that stand in it, it is itself: the default settings, as in the two files."""
    commit = Script("commit", living=True)
    default = Settings()
    own = {
        "publish_bytes": default.publish_bytes, "journal_entries": default.journal_entries,
        "journal_bytes": default.journal_bytes, "record_bytes": default.max_record_bytes,
        "window_ms": int(default.op_window * 1000), "kept_events": default.kept_events,
    }  # fmt: skip
    assert commit.given(**own) is commit
    other = commit.given(**{**own, "kept_events": 7})
    lines = [pair for pair in zip(commit.text.split(b"\n"), other.text.split(b"\n"), strict=True) if pair[0] != pair[1]]
    assert [after for _, after in lines] == [
        b"local kept_events = 7 -- @constant how many lifecycle events stay in the stream"
    ]
    assert other.sha != commit.sha
    with pytest.raises(ValueError, match="has the constants publish_bytes"):
        commit.given(kept=1)
