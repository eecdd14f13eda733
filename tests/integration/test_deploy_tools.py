"""Files for other programs, read by these programs where the machine has them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from below import ROOT

DEPLOY = ROOT / "deploy"
OBSERVE = DEPLOY / "observe"
FILES = [path for path in DEPLOY.glob("k8s/base/*.yaml") if path.stem != "kustomization"]
MANIFESTS = [each for path in FILES for each in yaml.safe_load_all(path.read_text())]


def test_compose_itself_reads_the_file(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    for extra in ([], ["--env-file", str(DEPLOY / ".env.example")]):
        command = [docker, "compose", *extra, "-f", str(ROOT / "docker-compose.yml"), "--profile", "*", "config", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_the_overlay_is_built() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None or subprocess.run([kubectl, "kustomize", "--help"], capture_output=True, check=False).returncode:
        pytest.skip("kubectl is not installed")
    for folder in sorted(DEPLOY.glob("k8s/overlays/*")):
        done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = list(yaml.safe_load_all(done.stdout))
        assert len(built) == len(MANIFESTS) + 2, "and the ConfigMaps, of the store and of how long what is old is kept"
        configs = {each["metadata"]["name"] for each in built if each["kind"] == "ConfigMap"}
        assert len(configs) == 2
        for each in built:
            if each["kind"] in ("Deployment", "Job"):
                (container,) = each["spec"]["template"]["spec"]["containers"]
                assert container["envFrom"][0]["configMapRef"]["name"] in configs
                assert re.search(r":\d", container["image"])


@pytest.mark.parametrize(
    "command", ["check rules rules.yml", "check config prometheus.yml", "test rules rules.test.yml"]
)
def test_promtool_agrees(command: str) -> None:
    """Where there is one; the tests above check the same files without it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert os.environ.get("CI") != "true", "CI checks the rules with promtool: install prometheus"
        pytest.skip("there is no promtool here: apt-get install prometheus")
    done = subprocess.run([promtool, *command.split()], cwd=OBSERVE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
