"""The documentation installs what is published, and a release turns it; a wheel without a file is found."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from datetime import date
from pathlib import Path

import pytest
from check_artefacts import missing
from release import CHANGELOG, QUICKSTART, ROOT, UNPUBLISHED, is_published, release

pytestmark = pytest.mark.unit


def test_the_quickstart_says_that_nothing_is_published_until_something_is() -> None:
    assert (UNPUBLISHED in (ROOT / QUICKSTART).read_text()) is not is_published(ROOT)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (CHANGELOG, QUICKSTART, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / CHANGELOG
    changes.write_text("# Changelog\n\n## [0.1.0] - unreleased\n\n- All.\n")
    quickstart = tmp_path / QUICKSTART
    quickstart.write_text(f"## Install\n\n{UNPUBLISHED}It is easy.\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    return tmp_path


def test_a_release_has_its_date_and_is_installed_from_the_index(tree: Path) -> None:
    assert not is_published(tree)
    release(tree, date(2026, 12, 1))
    assert is_published(tree)
    assert "## [0.1.0] - 2026-12-01\n\n- All.\n" in (tree / CHANGELOG).read_text()
    assert (tree / QUICKSTART).read_text() == "## Install\n\nIt is easy.\n"
    with pytest.raises(ValueError, match="has no line '## "):
        release(tree, date(2026, 12, 2))


def test_a_file_that_a_wheel_lacks_or_has_beside_is_found(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "p.whl", tmp_path / "p.tar.gz"
    script, stray = "distributed_state/warm/lua/commit.lua", "distributed_state/notes.txt"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(stray, "")
        archive.writestr("p.dist-info/RECORD", "")
    with tarfile.open(sdist, "w:gz"):
        pass
    assert missing(wheel, sdist, {script}) == [
        f"p.whl has no {script}", f"p.whl has {stray}, which git does not know", f"p.tar.gz has no {script}"
    ]  # fmt: skip
