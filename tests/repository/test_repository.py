"""What surrounds the package: workflows, hooks and forms name what is there, and the same checks everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from lowest import floors

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
APART = {"frameworks", "frameworks_crewai", "browser", "site", "artefacts"}  # stages of their own
CI = (ROOT / ".ci" / "run").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: str) -> dict[str, Any]:
    """A file of YAML; GitHub's `on` is YAML's True."""
    document: dict[Any, Any] = yaml.safe_load((ROOT / path).read_text())
    return {("on" if key is True else key): value for key, value in document.items()}


def steps(workflow: str) -> str:
    """All that a workflow runs, one command a line."""
    jobs = read(f".github/workflows/{workflow}.yml")["jobs"].values()
    return "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)


def test_the_workflow_runs_all_checks_on_each_python_that_the_package_names() -> None:
    pythons = read(".github/workflows/ci.yml")["jobs"]["run"]["strategy"]["matrix"]["python"]
    named = [each.rsplit(" ", 1)[1] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert named == pythons
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    assert "bash .ci/run ${{ matrix.stages }}" in steps("ci")


def test_the_workflow_runs_all_stages() -> None:
    stages = read(".github/workflows/ci.yml")["jobs"]["run"]["strategy"]["matrix"]["stages"]
    known = re.search(r"^\[ \$# -gt 0 \] \|\| stages=\((.*)\)$", CI, re.MULTILINE)
    assert known
    assert sorted(" ".join(stages).split()) == sorted(known[1].split())


def test_the_workflow_tests_the_lowest_versions_too() -> None:
    """Each requirement of the package and of the extras that tests use has one."""
    found = floors(PROJECT)
    assert {"redis", "pydantic", "mcp", "langchain-core", "psycopg"} <= found.keys()
    assert found["redis"] == "6.4"
    apart = read(".github/workflows/ci.yml")["jobs"]["apart"]["strategy"]["matrix"]["include"]
    assert {each["stage"] for each in apart} == {"lowest", "artefacts"}
    assert "python3 tools/lowest.py >.venv-lowest/lowest.txt" in CI


def test_a_requirement_without_a_lowest_version_is_found() -> None:
    with pytest.raises(ValueError, match="'redis<9' names no lowest version"):
        floors(PROJECT | {"dependencies": ["redis<9"]})


def test_the_nightly_workflow_runs_every_test_on_every_server() -> None:
    assert ".venv/bin/pytest --full tests/${{ matrix.folder }}" in steps("nightly")
    folders = read(".github/workflows/nightly.yml")["jobs"]["full"]["strategy"]["matrix"]["folder"]
    found = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")} - set(APART)
    assert set(folders) == found


def test_a_release_is_checked_before_it_is_published_and_only_then_may_publish() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert (jobs["publish"]["needs"], jobs["site"]["needs"]) == ("build", "publish")
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "permissions" not in jobs["build"]  # the workflow's own: read
    ran = steps("release").split("\n")
    assert ran.index("bash .ci/run") < ran.index("bash .ci/run artefacts")
    done = ("-m build", "twine check --strict", "check-wheel-contents dist", "check_artefacts", "pytest --artefacts")
    order = [CI.index(each) for each in done]
    assert order == sorted(order)


def test_hooks_run_what_ci_runs() -> None:
    """A commit that its hooks let pass is not refused by a linter later."""
    hooks = {hook["id"]: hook["entry"] for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}
    for hook in ("mypy", "sync-api"):
        assert hooks[hook] in CI
    for hook, command in (("ruff-check", "ruff check"), ("ruff-format", "ruff format")):
        assert command in hooks[hook]
        assert command in CI


@pytest.mark.parametrize("form", ["bug", "idea", "lost"])
def test_a_form_asks_something_that_must_be_answered(form: str) -> None:
    body = read(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]
    assert any(field.get("validations", {}).get("required") for field in body)
    ids = [field["id"] for field in body if "id" in field]
    assert len(ids) == len(set(ids))
