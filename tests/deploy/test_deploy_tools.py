"""Files for other programs, read by these programs where the machine has them."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from below import ROOT

DEPLOY = ROOT / "deploy"
OBSERVE = DEPLOY / "observe"
FILES = [path for path in DEPLOY.glob("k8s/base/*.yaml") if path.stem != "kustomization"]
MANIFESTS = [each for path in FILES for each in yaml.safe_load_all(path.read_text())]
MONITORING = DEPLOY / "k8s/components/monitoring"
OLDEST, NEWEST = "1.28", "1.34"  # releases of Kubernetes against whose schemas the manifests are checked


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


@pytest.mark.wide
@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_a_manifest_is_what_kubernetes_says_its_kind_is(release: str) -> None:
    """By its own schemas, strictly: what no schema knows is refused."""
    if "CI" not in os.environ:
        pytest.importorskip("kubernetes_validate", reason="the extra `manifests` is not installed")
    import kubernetes_validate as kubernetes  # it reads all schemas

    for each in MANIFESTS:
        kubernetes.validate(each, release, strict=True)
    wrong = copy.deepcopy(next(each for each in MANIFESTS if each["kind"] == "Deployment"))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 45
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, release, strict=True)


def test_the_alerts_of_kubernetes_are_those_of_the_rules(tmp_path: Path) -> None:
    (made,) = yaml.safe_load_all((MONITORING / "rules.yaml").read_text())
    assert made["kind"] == "PrometheusRule"
    assert made["spec"] == yaml.safe_load((OBSERVE / "rules.yml").read_text())
    command = [sys.executable, str(ROOT / "tools/generate_prometheus_rule.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_what_is_scraped_of_pods_are_ports_that_they_have() -> None:
    """Under the names of the jobs that the alerts name."""
    probe = yaml.safe_load((DEPLOY / "k8s/components/probe/probe.yaml").read_text())
    deployments = [each for each in (*MANIFESTS, probe) if each["kind"] == "Deployment"]
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in deployments}
    monitors = list(yaml.safe_load_all((MONITORING / "pods.yaml").read_text()))
    jobs = {job["job_name"] for job in yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]}
    assert {each["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] for each in monitors} == jobs
    for each in monitors:
        pod = pods[each["metadata"]["name"]]
        assert each["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        (container,) = pod["spec"]["containers"]
        assert {"name": endpoint["port"], "containerPort": 9464} in container["ports"]


def test_an_overlay_takes_the_monitoring(tmp_path: Path) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(DEPLOY / "k8s", tmp_path / "k8s")
    overlay = tmp_path / "k8s/overlays/production"
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write("components: [../../components/monitoring, ../../components/probe]\n")
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    added = [each for each in built if each["apiVersion"].startswith("monitoring.coreos.com/")]
    assert sorted(each["kind"] for each in added) == [*["PodMonitor"] * 3, "PrometheusRule"]
    (probe,) = [each for each in built if each["metadata"]["name"] == "distributed-state-probe" and each not in added]
    (container,) = probe["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example/"), "the one of the overlay"
    (service,) = [each for each in built if each["kind"] == "Service"]
    assert f"http://{service['metadata']['name']}" in container["args"]
    secret = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert f"generic {secret['name']} --from-file={secret['key']}=" in (ROOT / "docs/running/kubernetes.md").read_text()
    assert {each["metadata"]["namespace"] for each in added} == {"agents"}


def test_alerts_are_sent_to_whom_a_file_names(tmp_path: Path) -> None:
    """And while there is none, Prometheus takes the configuration all the same."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here: apt-get install prometheus")
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(OBSERVE / name, tmp_path)
    (alerting,) = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["alerting"]["alertmanagers"]
    assert alerting["file_sd_configs"] == [{"files": ["alertmanagers/*.yml"]}]
    (tmp_path / "alertmanagers").mkdir()
    named = tmp_path / "alertmanagers" / "ours.yml"
    for text, code in (('- targets: ["alertmanager:9093"]\n', 0), ("- target: [nobody]\n", 1)):
        named.write_text(text)
        done = subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True)
        assert done.returncode == code, done.stderr


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
