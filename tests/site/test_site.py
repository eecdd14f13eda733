"""The documentation's site: it is made without a warning, its links lead somewhere, and the search finds every name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import build_site
import docs_metrics
import docs_python
import docs_servers
import docs_tables
import pytest
import yaml
from docs_looking import Site
from generate_blocking import INNER
from public_names import PUBLIC, members

from distributed_state import Settings
from distributed_state.events.types import TYPES
from distributed_state.values import keys
from distributed_state.values.model import Ref

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)  # the site takes ten seconds of a core, which others may want, too


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """All of it, made as the manual says."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/build_site.py"), "--into", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Site(folder)


def test_every_link_leads_somewhere(site: Site) -> None:
    assert len(site.pages) > 30
    assert not list(site.broken())


def test_every_alert_leads_to_its_runbook(site: Site) -> None:
    address = yaml.safe_load(build_site.CONFIG.read_text())["site_url"]
    for rule in docs_metrics.rules():
        page, _, place = rule["annotations"]["runbook_url"].removeprefix(address).partition("#")
        assert place in site.pages[site.root / page / "index.html"].ids, rule["alert"]


def test_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    assert not list(site.foreign())


def names() -> Iterator[str]:
    """Every public name and every public method, as the page of its class has them."""
    for name, kind in PUBLIC.items():
        home = docs_python.homes()[name]
        yield home
        if isinstance(kind, type) and kind.__module__.startswith("distributed_state"):
            inner = {each for parent in kind.__mro__ for each in INNER.get(parent.__name__, ())}
            # A method without a docstring is one of a base that is not ours, or does what everybody knows.
            yield from (f"{home}.{member}" for member, each in members(kind) if member not in inner and each.__doc__)


def lacking(found: Sequence[str]) -> set[str]:
    """The public names that nothing in the index leads to."""
    anchors = {place.partition("#")[2] for place in found}
    return {each for each in names() if each not in anchors and each != "distributed_state.settings.Settings"} - {
        # its fields are rows of the settings' table
        f"distributed_state.settings.Settings.{each}"
        for each in [*Settings.model_fields, "settings_customise_sources"]
    }


def test_the_search_finds_every_public_name(site: Site) -> None:
    found = site.found()
    assert not lacking(list(found))
    assert len(set(names())) > 400, "methods of both APIs are among them"
    titles = {str(each["title"]).partition("<")[0].strip() for each in found.values()}
    assert {*PUBLIC, "AsyncSession.append", "Session.append"} <= titles


WORDS = (
    "approval", "semantic", "GDPR", "troubleshooting", "runbooks", "high availability", "streaming", "time travel",
    "alternatives", "human in the loop", "rate limits", "webhooks", "reminders", "dead letter", "undo", "multi-tenancy",
)  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_the_search_knows_everyday_words(site: Site, word: str) -> None:
    assert any(word.lower() in each["text"].lower() for each in site.search["items"])


def test_the_description_of_the_interface_is_published(site: Site) -> None:
    described = json.loads((site.root / "reference/openapi.json").read_text())
    assert "/conversations/{id}/turns" in described["paths"]


def test_the_search_lacks_a_name_that_no_page_has(site: Site) -> None:
    place = next(each for each in site.found() if each.endswith("AsyncSession.append"))
    assert lacking([each for each in site.found() if each != place]) == {place.partition("#")[2]}


def test_the_search_finds_settings_events_errors_metrics_alerts_and_commands(site: Site) -> None:
    text = " ".join(f"{each['title']} {each['text']}" for each in site.found().values())
    wanted = [*Settings.model_fields, *(each.name for each in TYPES), *docs_python.errors()]
    wanted += [row[0] for row in (*docs_metrics.store_metrics(), *docs_metrics.other_metrics())]
    wanted += [str(rule["alert"]) for rule in docs_metrics.rules()]
    wanted += ["distributed-state serve", "distributed-state adopt langgraph", "commit.lua", "message_blocks"]
    assert not [each for each in wanted if each not in text]


def test_nothing_of_the_reference_is_without_words() -> None:
    """What the code does not say of itself would be an empty cell."""
    for error in docs_tables.raised()[1:]:
        assert all(docs_tables.cause_and_remedy(error)), error
    source = Path(docs_servers.inspect.getfile(docs_servers.tables)).read_text()
    assert not [each for each in docs_servers.tables.metadata.tables if not docs_servers.comment_of(each, source)]


def test_every_key_in_redis_has_its_row() -> None:
    sample, page = keys.Keys("NAMESPACE", 1), docs_servers.key_page()
    record, partition = sample.of(Ref("session", "ID")), sample.partition(0)
    named = [getattr(each, name) for each in (record, partition) for name in each.__dataclass_fields__]
    named += [sample.link(0, "REPLICA"), sample.probe(0), sample.gathered(0, "TOKEN"), *sample.group(0, "GROUP")]
    named += [sample.team("GROUP"), sample.replica("REPLICA"), sample.store, sample.roll]
    for each in named:
        if isinstance(each, bytes) and each.startswith(b"NAMESPACE"):
            shown = each.decode().replace("{0.0}", "{p}").replace("session:ID", "SCOPE:ID")
            assert f"| `{shown}` |" in page


# How it is judged: each of these mistakes must be found. Of small sites, without the reference.


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "index.md").write_text("# Welcome\n\n[Other](other.md#there)\n")
    (folder / "other.md").write_text("# Other\n\n## There\n")
    (folder / "contributing.md").write_text("# Contributing\n")  # else that of .github, which links to other pages
    return folder


def made(docs: Path, nav: Sequence[Any] = ("index.md", "*")) -> Site:
    into = docs.parent / "site"
    prepared = build_site.Prepared(docs)
    prepared.read(())
    build_site.build(into, prepared, nav=list(nav), extra_css=[], extra_javascript=[])
    return Site(into)


def test_a_site_without_mistakes_is_made(docs: Path) -> None:
    site = made(docs)
    assert not list(site.broken())
    assert not list(site.foreign())


@pytest.mark.parametrize(
    "text",
    [
        "[gone](gone.md)",
        "[gone](other.md#nowhere)",
        '<a href="#lost">1</a>',
        "![gone](gone.png)",
        "[gone](../../gone/README.md)",
        "[root](/x)",
    ],
)
def test_a_broken_link_fails_the_build(docs: Path, text: str) -> None:
    (docs / "other.md").write_text(f"# Other\n\n## There\n\n{text}\n")
    with pytest.raises(build_site.Wrong, match=r"is not there|does not exist"):
        made(docs)


def test_a_page_that_is_nowhere_in_the_navigation_fails_the_build(docs: Path) -> None:
    (docs / "lost.md").write_text("# Lost\n")
    with pytest.raises(build_site.Wrong, match=r"not in the navigation of site\.yml: lost\.md"):
        made(docs, ["index.md", "other.md", "contributing.md"])


@pytest.mark.parametrize(
    "text", ["```python bth\n1\n```", "```python both\nx = 1\n```", "```sh no-run:\nls\n```", "```console\n$ ls\n```"]
)
def test_a_block_that_nobody_understands_fails_the_build(docs: Path, text: str) -> None:
    (docs / "other.md").write_text(f"# Other\n\n## There\n\n{text}\n")
    with pytest.raises(ValueError, match=r"docs/other\.md:5: "):
        made(docs)


def test_a_block_of_both_apis_is_two_tabs(docs: Path) -> None:
    (docs / "other.md").write_text(
        "# Other\n\n## There\n\n```python both\nx = await f()\n```\n\n```text output\n1\n```\n"
    )
    page = made(docs).root.joinpath("other/index.html").read_text()
    assert page.index(">asyncio<") < page.index(">blocking<") < page.index(">Output<")
    assert page.count("await") == 1
    assert "both" not in page


def test_what_leads_out_of_the_documentation_is_named_and_a_picture_comes_along(docs: Path) -> None:
    text = "[rules](../deploy/observe/rules.yml) ![bench](../deploy/load/bench.png) [lost](../deploy/lost.yml)"
    (docs / "other.md").write_text(f"# Other\n\n## There\n\n{text.rpartition(' ')[0]}\n")
    site = made(docs)
    assert "rules (<code>deploy/observe/rules.yml</code>)" in (site.root / "other/index.html").read_text()
    assert (site.root / "repository/deploy/load/bench.png").exists()
    assert not list(site.broken())


def test_a_site_with_mistakes_is_seen_to_have_them(docs: Path) -> None:
    """Those that the generator does not look for: in HTML, and of what is loaded."""
    html = (
        '<a href="../lost/">1</a> <a href="https://">3</a> <a href="htp://x.org">4</a>'
        '<img src="https://x.org/a.png"> <script src="//x.org/a.js"></script>'
    )
    (docs / "other.md").write_text(f"# Other\n\n## There\n\n{html}\n")
    (docs / "own.css").write_text("@import 'https://x.org/a.css'; a { background: url(http://x.org/b.png) }")
    site = made(docs)
    assert [each.rpartition(": ")[2] for each in site.broken()] == ["../../lost/", "https://", "htp://x.org"]
    assert sorted(each.rpartition(": ")[2] for each in site.foreign()) == [
        "//x.org/a.js", "http://x.org/b.png", "https://x.org/a.css", "https://x.org/a.png",
    ]  # fmt: skip
