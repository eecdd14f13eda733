"""The files of the deployment: they fit one another, the package and its settings, and every image is pinned."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from below import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from distributed_state.port.addresses import read_address
from distributed_state.programs.cli import shell
from distributed_state.programs.service.limits import Limits
from distributed_state.settings import Settings

pytestmark = pytest.mark.unit

DEPLOY = ROOT / "deploy"
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OVERRIDE_TEXTS = {name: (ROOT / f"deploy/{name}.yml").read_text() for name in ("cluster", "sentinel")}
OVERRIDES: dict[str, dict[str, Any]] = {name: yaml.safe_load(text) for name, text in OVERRIDE_TEXTS.items()}
ALL_TEXTS = "".join([COMPOSE_TEXT, *OVERRIDE_TEXTS.values()])
LOCAL = {"VALKEY_ADDRESS", "VALKEY_SENTINELS", "VALKEY_REPLICA_PASSWORD"}  # which start.sh reads only if it is to
OURS = ("migrate", "token", "worker", "archiver", "purge", "loadgen", "probe-token", "probe")
EXAMPLE = (DEPLOY / ".env.example").read_text()
BASE = DEPLOY / "k8s/base"
FILES = sorted(path for path in BASE.glob("*.yaml") if path.stem != "kustomization")
MANIFESTS: list[dict[str, Any]] = [each for path in FILES for each in yaml.safe_load_all(path.read_text())]
SOURCES = "\n".join(
    path.read_text() for folder in ("distributed_state", "deploy/load") for path in (ROOT / folder).rglob("*.py")
)
SHUTDOWN = 5  # seconds that the HTTP server has after the drain

by_service = pytest.mark.parametrize("name", SERVICES)


def known(variable: str) -> bool:
    """Whether the package reads this environment variable."""
    name = variable.removeprefix("DISTRIBUTED_STATE_")
    if name.lower() in Settings.model_fields or f'"{variable}"' in SOURCES:
        return True
    return f'"{name}"' in SOURCES and 'DISTRIBUTED_STATE_{name}"' in SOURCES


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# Compose


def test_the_parts_of_the_fleet_are_there() -> None:
    assert {"valkey", "postgres", *OURS, "prometheus", "grafana"} == SERVICES.keys()
    assert SERVICES["loadgen"]["profiles"] == ["load"]
    assert SERVICES["purge"]["profiles"] == ["maintenance"]
    observing = ("prometheus", "grafana", "probe-token", "probe")
    assert all(SERVICES[name]["profiles"] == ["observe"] for name in observing)
    assert SERVICES["archiver"]["deploy"]["replicas"] == 2
    assert all("profiles" not in SERVICES[name] for name in ("valkey", "postgres", "migrate", "worker", "archiver"))


@by_service
def test_a_service_has_no_more_rights_and_room_for_logs_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}}
    limits = service["deploy"]["resources"]["limits"]
    assert {"cpus", "memory", "pids"} == limits.keys()
    assert name in OURS or service["user"].split(":")[0] not in ("root", "0"), "ours has its user in the image"
    for volume in service.get("volumes", []):
        assert not volume.startswith("./") or volume.endswith(":ro"), f"{volume}: files of the repository are read"


@by_service
def test_an_image_is_pinned(name: str) -> None:
    default = re.fullmatch(r"\$\{\w+:-(.+)\}", SERVICES[name]["image"])
    assert default, "a variable may name another one"
    tag = default[1].rpartition(":")[2]
    assert tag == "local" if name in OURS else re.match(r"v?\d+", tag), default[1]


@by_service
def test_what_is_mounted_from_the_repository_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("./deploy/observe") and not (DEPLOY / "observe").exists():
            continue
        assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"], volume


@by_service
def test_nothing_listens_beyond_this_machine(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"\$\{\w+:-127\.0\.0\.1:[\d-]+\}:\d+", port), port
    assert name not in ("valkey", "postgres") or "ports" not in SERVICES[name]


@pytest.mark.parametrize("name", ["valkey", "postgres", "worker", "archiver", "prometheus", "grafana"])
def test_what_stays_up_has_a_healthcheck(name: str) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "test" in SERVICES[name].get("healthcheck", {}) or (name == "worker" and "HEALTHCHECK" in dockerfile)
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_no_image_says_how_wide_a_line_is() -> None:
    """Logs of containers are a line of JSON each, and tables are as wide as they need to be."""
    assert "COLUMNS" not in ALL_TEXTS + (DEPLOY / "Dockerfile").read_text() + BASE.joinpath("worker.yaml").read_text()


def test_the_order_of_the_start() -> None:
    for name in ("worker", "archiver"):
        waits = SERVICES[name]["depends_on"]
        assert waits["migrate"]["condition"] == "service_completed_successfully"
        assert waits["valkey"]["condition"] == waits["postgres"]["condition"] == "service_healthy"
    assert SERVICES["migrate"]["restart"] == SERVICES["token"]["restart"] == "no"
    for name, other in (("token", "migrate"), ("worker", "token")):
        assert SERVICES[name]["depends_on"][other] == {"condition": "service_completed_successfully"}
    assert SERVICES["worker"]["environment"]["DISTRIBUTED_STATE_MIGRATE"] == "false"


def test_a_worker_drains_within_its_stop_period() -> None:
    needed = Limits().notice + Limits().drain + SHUTDOWN
    assert seconds(SERVICES["worker"]["stop_grace_period"]) > needed
    (worker,) = [each for each in pods() if each["metadata"]["name"] == "distributed-state-worker"]
    pod = worker["spec"]["template"]["spec"]
    pause = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > needed + pause


def options_of_serve(words: list[str]) -> dict[str, Any]:
    """What `serve` makes of its command line."""
    command = typer.main.get_command(shell.app).commands["serve"]  # type: ignore[attr-defined]  # it is a group
    with command.make_context("serve", [*words[1:]]) as context:
        return dict(context.params)


def commands_of_workers() -> dict[str, list[str]]:
    """The command lines with which workers are shipped: compose's, the image's, Kubernetes'."""
    (pod,) = [each for each in pods() if each["metadata"]["name"] == "distributed-state-worker"]
    image = json.loads(re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[0])
    args = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    return {"compose": SERVICES["worker"]["command"], "image": image, "k8s": args}


@pytest.mark.parametrize("place", ["compose", "image", "k8s"])
def test_workers_are_shipped_with_authentication_and_with_health_and_metrics_apart(place: str) -> None:
    given = options_of_serve(commands_of_workers()[place])
    assert given["tokens"] is True
    assert [given[name] for name in ("insecure", "trust_proxy", "allow_host")] == [False, "", ""]
    assert (given["host"], given["port"], given["ops_host"], given["ops_port"]) == ("0.0.0.0", 8080, "0.0.0.0", 9464)


def test_the_port_of_health_and_metrics_is_asked_and_not_published() -> None:
    assert [port.rpartition(":")[2] for port in SERVICES["worker"]["ports"]] == ["8080"]
    (service,) = [each for each in MANIFESTS if each["kind"] == "Service"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    (policy,) = [
        each["spec"] for each in MANIFESTS
        if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "distributed-state-worker")
    ]  # fmt: skip
    who = {rule["ports"][0]["port"]: [*rule["from"][0]] for rule in policy["ingress"]}
    assert who == {8080: ["podSelector"], 9464: ["namespaceSelector"]}


def test_the_image_is_healthy_while_a_worker_is_ready_as_kubernetes_asks() -> None:
    (asked,) = re.findall(r"urlopen\('http://127.0.0.1:(\d+)(\S+)',", (DEPLOY / "Dockerfile").read_text())
    (worker,) = [each for each in pods() if each["metadata"]["name"] == "distributed-state-worker"]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    probe = container["readinessProbe"]["httpGet"]
    assert asked == (ports[probe["port"]], probe["path"])


def test_the_trials_token_is_in_a_volume_and_in_no_command_or_environment() -> None:
    token, load = SERVICES["token"], SERVICES["loadgen"]
    file = token["command"][token["command"].index("--into") + 1]
    assert load["environment"] == {"DISTRIBUTED_STATE_TOKEN_FILE": file}
    assert token["volumes"] == ["tokens:/tokens"]
    assert load["volumes"] == ["tokens:/tokens:ro"]
    assert "admin" not in ",".join(token["command"])
    assert [name for name, each in SERVICES.items() if "'tokens:" in str(each.get("volumes"))] == ["token", "loadgen"]
    image = (DEPLOY / "Dockerfile").read_text().partition("AS distributed-state\n")[2]
    user = re.search(r"^USER (\S+)$", image, re.MULTILINE)[1]  # type: ignore[index]  # it is there
    assert f"--chown={user} --chmod=700 /tokens /tokens" in image, "a new volume is owned as the folder of the image"
    assert "dstate_" not in ALL_TEXTS + image


def test_the_probe_has_a_token_of_its_own_tenant_and_its_start_leaves_the_workers_alone() -> None:
    token, service = SERVICES["probe-token"], SERVICES["probe"]
    assert token["command"][:4] == ["token", "create", "--tenant", "probe"]
    file = token["command"][token["command"].index("--into") + 1]
    assert service["environment"] == {"DISTRIBUTED_STATE_TOKEN_FILE": file}
    assert [token["volumes"], service["volumes"]] == [["probe-token:/tokens"], ["probe-token:/tokens:ro"]]
    assert service["command"][service["command"].index("--conversation") + 1].startswith("probe:")
    assert service["command"][-1] in str(service["healthcheck"]["test"]), "the port that Prometheus scrapes"
    needed, more = set(), ["probe", "prometheus", "grafana"]
    while more:
        needed |= {more[-1]}
        more = [*more[:-1], *SERVICES[more[-1]].get("depends_on", ())]
    assert "worker" not in needed, "`up` would bring their number back to WORKERS"
    assert "--no-recreate prometheus grafana probe " in (ROOT / "docs/running/index.md").read_text()


def test_several_workers_can_have_a_port() -> None:
    first, last = re.search(r"127\.0\.0\.1:(\d+)-(\d+)", SERVICES["worker"]["ports"][0]).groups()  # type: ignore[union-attr]
    assert int(last) - int(first) >= 15
    assert SERVICES["worker"]["command"][-1] == "8080"


def test_the_documented_doctor_runs_without_workers_and_archivers() -> None:
    page = (ROOT / "docs/running/index.md").read_text()
    (name,) = re.findall(r"docker compose (?:run --rm --no-deps|exec)\s+(\w+)\s+(?:distributed-state )?doctor", page)
    assert SERVICES[name]["command"] == ["migrate"]  # which `doctor` replaces
    assert "entrypoint" not in SERVICES[name]
    assert SERVICES[name]["environment"].keys() == SERVICES["archiver"]["environment"].keys()


def test_every_variable_of_the_store_is_one_that_the_package_reads() -> None:
    named = set(re.findall(r"DISTRIBUTED_STATE_[A-Z_]+", ALL_TEXTS + EXAMPLE))
    named |= {name for pod in pods() for name in environment(pod)}
    assert len(named) > 6
    assert {each for each in named if not known(each)} == set()
    assert not known("DISTRIBUTED_STATE_NONSENSE")


def test_the_example_of_an_environment_has_every_variable_with_its_default() -> None:
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
    used = dict(re.findall(r"\$\{([A-Z_]+)(?::-((?:[^${}]|\$\{[^}]*\})*))?\}", ALL_TEXTS))
    used |= dict.fromkeys(["PIP_INDEX_URL", "DISTRIBUTED_STATE_KEYS"], "")  # handed on only if they are set
    used |= dict(re.findall(r"\$\{([A-Z_]+):-([^${}]*)\}", ALL_TEXTS))
    assert example.keys() == used.keys()
    own = {name for name, value in used.items() if "${" in value}
    assert {name: example[name] for name in example.keys() - own} == {name: used[name] for name in used.keys() - own}


def test_the_trial_password_is_said_to_be_one() -> None:
    assert set(re.findall(r"PASSWORD:-([^}]*)\}", ALL_TEXTS)) == {"insecure-trial-password"}
    assert "WITHOUT PASSWORDS IN .env THEY ALL ARE `insecure-trial-password`" in COMPOSE_TEXT
    assert "\n.env\n" in (ROOT / ".gitignore").read_text()


def test_the_warm_tier_is_a_bounded_cache_that_is_written_out() -> None:
    lines = (DEPLOY / "valkey/valkey.conf").read_text().splitlines()
    assert {"appendonly yes", "maxmemory-policy volatile-lru"} <= set(lines)
    start = (DEPLOY / "valkey/start.sh").read_text()
    always, if_set = set(re.findall(r"\$([A-Z_]+)", start)), set(re.findall(r"\$\{([A-Z_]+):-", start))
    assert SERVICES["valkey"]["environment"].keys() == always - if_set - {"VALKEY_ADDRESS"}
    users = "".join((DEPLOY / "valkey" / name).read_text() for name in ("users.acl", "replication.acl"))
    assert set(re.findall(r"@([A-Z]+)@", users)) == set(re.findall(r"@([A-Z]+)@", start))


# Several servers instead of one: the overrides


by_override = pytest.mark.parametrize("name", OVERRIDES)


def added(name: str) -> dict[str, dict[str, Any]]:
    """The services that an override adds."""
    return {each: service for each, service in OVERRIDES[name]["services"].items() if each not in SERVICES}


@by_override
def test_an_override_puts_several_servers_in_the_place_of_one(name: str) -> None:
    services = OVERRIDES[name]["services"]
    assert services["valkey"] == {"profiles": ["single"]}
    expected = {"cluster": 6, "sentinel": 3}[name]
    assert {f"valkey-{n + 1}" for n in range(expected)} == {each for each in added(name) if each.startswith("valkey")}
    if name == "sentinel":
        assert {f"sentinel-{n}" for n in (1, 2, 3)} == {each for each in added(name) if each.startswith("sentinel")}
    assert COMPOSE["services"]["worker"]["depends_on"]["valkey"]["required"] is False, "so it may be left out"


@by_override
def test_services_of_an_override_are_guarded_as_the_others(name: str) -> None:
    guarded = SERVICES["valkey"]
    for each, service in added(name).items():
        for law in ("read_only", "cap_drop", "security_opt", "logging", "image", "user", "tmpfs"):
            assert service[law] == guarded[law], f"{each}: {law}"
        assert {"cpus", "memory", "pids"} == service["deploy"]["resources"]["limits"].keys()
        assert [*service["networks"]] == ["fleet"]
        assert "ports" not in service
        once = service["restart"] == "no"
        assert once or "PONG" in service["healthcheck"]["test"][1], each
        for volume in service["volumes"]:
            source, _, way = volume.partition(":")
            if source.startswith("./"):
                assert way.endswith(":ro")
                assert (ROOT / source).exists()
            else:
                assert source in OVERRIDES[name]["volumes"], each
        script = service["entrypoint"][1].replace("/conf", str(DEPLOY / "valkey"))
        text = Path(script).read_text()
        assert set(re.findall(r"\$([A-Z_]+)", text)) - service["environment"].keys() <= LOCAL, each


@by_override
def test_commands_of_an_override_wait_for_its_servers_and_are_given_their_url(name: str) -> None:
    ends = {"cluster": {"cluster"}, "sentinel": added("sentinel").keys()}[name]
    for ours in [each for each in SERVICES if "DISTRIBUTED_STATE_URL" in SERVICES[each].get("environment", ())]:
        service = OVERRIDES[name]["services"][ours]
        assert service.keys() == {"environment", "depends_on"}
        assert service["depends_on"].keys() == ends
        (url,) = service["environment"].values()
        default = re.sub(r"\$\{VALKEY_PASSWORD:-([\w-]+)\}", r"\1", url).removeprefix("${DISTRIBUTED_STATE_URL:-")
        address = read_address(default.removesuffix("}"))
        assert address.kind == name
        named = {"cluster": "valkey", "sentinel": "sentinel"}[name]
        assert {seed.partition(":")[0] for seed in address.seeds} == {
            each for each in added(name) if each.startswith(f"{named}-")
        }
        assert address.service == ("agents" if name == "sentinel" else "")
        assert name == "cluster" or address.sentinel_options["username"] == "distributed-state"


def rights(file: str, user: str) -> set[str]:
    (line,) = re.findall(rf"^user {user} (.*)$", (DEPLOY / "valkey" / file).read_text(), re.MULTILINE)
    return set(line.split())


def test_nobody_has_more_rights_where_there_are_several_servers_than_they_need() -> None:
    given = {
        name: {
            each["environment"]["MORE_RIGHTS"]
            for each in added(name).values()
            if "MORE_RIGHTS" in each.get("environment", {})
        }
        for name in OVERRIDES
    }
    assert given == {"cluster": {"+asking +cluster|info +cluster|nodes +cluster|slots"}, "sentinel": {"+role"}}
    for file, user in (("replication.acl", "replica"), ("replication.acl", "sentinel"), ("sentinel.acl", "sentinel")):
        assert {"on", "resetkeys", "resetchannels", "-@all"} < rights(file, user)
        assert not {"+@all", "~*", "&*", "nopass"} & rights(file, user)
    assert "off" in rights("sentinel.acl", "default")
    assert {each for each in rights("sentinel.acl", "distributed-state") if each[0] in "+&~"} == {
        "&+switch-master", "&+promoted-slave", "+client|setinfo", "+ping", "+sentinel|ckquorum",
        "+sentinel|get-master-addr-by-name",
        "+sentinel|master", "+sentinel|replicas",
        "+subscribe",
    }  # fmt: skip


# The image


def requirements(name: str) -> dict[str, tuple[Requirement, int]]:
    """What a file of requirements names, each with how many hashes it has."""
    text = (DEPLOY / name).read_text()
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    found = {}
    for line in body.splitlines():
        one, *hashes = line.split("--hash=sha256:")
        assert all(re.fullmatch(r"[0-9a-f]{64}", each.strip()) for each in hashes)
        requirement = Requirement(one)
        found[canonicalize_name(requirement.name)] = requirement, len(hashes)
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt", "requirements-load.txt"])
def test_every_requirement_is_pinned_by_hash_and_no_index_is_named(name: str) -> None:
    assert "://" not in (DEPLOY / name).read_text()
    assert "index" not in (DEPLOY / name).read_text()
    for requirement, hashes in requirements(name).values():
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), requirement
        assert hashes, requirement


def test_the_requirements_satisfy_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # `remote`: the probe is a client of the workers
    shipped = ("postgres", "serve", "mcp", "telemetry", "encryption", "remote")
    wanted = project["dependencies"] + [each for extra in shipped for each in extras[extra]]
    pinned = requirements("requirements.txt")
    for each in map(Requirement, wanted):
        found, _ = pinned[canonicalize_name(each.name)]
        (version,) = found.specifier
        assert each.specifier.contains(version.version), f"{found} is not {each}: compile requirements.txt anew"


def test_the_build_is_what_pyproject_asks_for() -> None:
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    named = (DEPLOY / "requirements-build.in").read_text().splitlines()
    assert [line for line in named if not line.startswith("#")] == system["requires"]
    assert {canonicalize_name(Requirement(each).name) for each in system["requires"]} <= requirements(
        "requirements-build.txt"
    ).keys()


def test_the_load_image_has_what_the_generator_needs_and_nothing_twice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = requirements("requirements-load.txt")
    named = (DEPLOY / "requirements-load.in").read_text().splitlines()
    assert {line for line in named if not line.startswith("#")} < set(project["optional-dependencies"]["load"])
    assert {"hdrhistogram"} <= pinned.keys()
    assert not pinned.keys() & requirements("requirements.txt").keys()


def test_the_image_is_built_in_stages_and_runs_without_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=python:3\.13-slim$", text, re.MULTILINE)
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) >= 3
    last = text.partition("AS distributed-state\n")[2]
    assert re.search(r"^USER \d+:\d+$", last, re.MULTILINE)
    assert "RUN" not in last, "what is shipped is copied"
    assert 'ENTRYPOINT ["distributed-state"]' in last
    assert all("--require-hashes" in line for line in text.splitlines() if "-r requirements" in line)


# Kubernetes


def pods() -> list[dict[str, Any]]:
    jobs = [each | {"spec": each["spec"]["jobTemplate"]["spec"]} for each in MANIFESTS if each["kind"] == "CronJob"]
    return [each for each in MANIFESTS if each["kind"] in ("Deployment", "Job")] + jobs


def test_history_is_removed_by_night_once_somebody_wants_that_and_never_twice_at_once() -> None:
    (job,) = [each["spec"] for each in MANIFESTS if each["kind"] == "CronJob"]
    assert (job["suspend"], job["concurrencyPolicy"]) == (True, "Forbid")
    (container,) = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == SERVICES["purge"]["command"] == ["purge", "--yes"]
    generated = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]
    (retention,) = [each["literals"] for each in generated if each["name"] == "distributed-state-retention"]
    assert {"configMapRef": {"name": "distributed-state-retention"}} in container["envFrom"]
    here = {name: text for name, text in SERVICES["purge"]["environment"].items() if "_PURGE_" in name}
    assert dict(each.split("=") for each in retention) == {
        name: re.fullmatch(r"\$\{\w+:-(\w+)\}", text)[1]
        for name, text in here.items()  # type: ignore[index]
    }
    command = typer.main.get_command(shell.app).commands["purge"]  # type: ignore[attr-defined]  # it is a group
    read = {option.envvar for option in command.params}
    assert here.keys() <= read, "each is an option of the command"


def environment(manifest: dict[str, Any]) -> Iterator[str]:
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        yield from (each["name"] for each in container.get("env", []))
    for generated in yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]:
        yield from (each.partition("=")[0] for each in generated["literals"])


def labels(manifest: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return found


def chosen(selector: dict[str, str]) -> list[str]:
    return [each["metadata"]["name"] for each in pods() if selector.items() <= labels(each).items()]


by_pod = pytest.mark.parametrize("manifest", pods(), ids=lambda each: each["metadata"]["name"])


def test_every_manifest_is_in_the_base() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in FILES]
    kinds = [each["kind"] for each in MANIFESTS]
    assert {"Deployment", "Job", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"} < {
        *kinds
    }


def test_selectors_find_what_they_are_for() -> None:
    for each in MANIFESTS:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "Service":
            assert chosen(spec["selector"]) == ["distributed-state-worker"]
        elif each["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert chosen(spec["selector"]["matchLabels"]) == [name]
        elif each["kind"] == "NetworkPolicy":
            found = chosen(spec["podSelector"]["matchLabels"])
            assert found == ([name] if name != "distributed-state" else [p["metadata"]["name"] for p in pods()])
        elif each["kind"] == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            (scaled,) = [p for p in pods() if (p["kind"], p["metadata"]["name"]) == (target["kind"], target["name"])]
            assert "replicas" not in scaled["spec"], "two would say how many there are"


@by_pod
def test_a_pod_runs_without_rights_and_with_limits(manifest: dict[str, Any]) -> None:
    pod = manifest["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"USER {pod['securityContext']['runAsUser']}:" in (DEPLOY / "Dockerfile").read_text()
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] in [
        each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "ServiceAccount"
    ]
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["cpu"]
        assert container["image"] == "distributed-state", "the overlay says which"


@by_pod
def test_a_pod_is_given_its_servers_by_a_secret(manifest: dict[str, Any]) -> None:
    documented = (ROOT / "docs/running/kubernetes.md").read_text()
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        given = {each["name"]: each for each in container["env"]}
        assert {"DISTRIBUTED_STATE_URL", "DISTRIBUTED_STATE_ARCHIVE"} <= given.keys()
        assert container["envFrom"][0] == {"configMapRef": {"name": "distributed-state"}}
        for each in given.values():
            assert "value" in each or each["valueFrom"].keys() == {"secretKeyRef"}
            if "valueFrom" in each:
                secret = each["valueFrom"]["secretKeyRef"]
                assert f"create secret generic {secret['name']}" in documented
                assert f"--from-literal={secret['key']}=" in documented


@by_pod
def test_probes_ask_for_what_is_served(manifest: dict[str, Any]) -> None:
    application = (ROOT / "distributed_state/programs/service/app.py").read_text()
    for container in manifest["spec"]["template"]["spec"]["containers"]:
        ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
        probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
        for probe in probes.values():
            path = probe["path"].partition("?")[0]
            assert f'Route("{path}"' in application
            assert str(ports[probe["port"]]) in container["args"]
        if manifest["metadata"]["name"] == "distributed-state-worker":
            assert {"startupProbe", "livenessProbe", "readinessProbe"} == probes.keys()
            assert probes["livenessProbe"]["path"] == "/healthz", "a server that is down is no reason to be ended"


def test_the_network_is_open_for_what_is_used_only() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in MANIFESTS if each["kind"] == "NetworkPolicy"}
    assert policies["distributed-state"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policies["distributed-state"]
    for pod in pods():
        (container,) = pod["spec"]["template"]["spec"]["containers"]
        opened = policies.get(pod["metadata"]["name"], {}).get("ingress", [])
        served = {each["containerPort"] for each in container.get("ports", [])}
        assert {port["port"] for rule in opened for port in rule["ports"]} == served


# Upgrades


def test_an_upgrade_leaves_as_many_workers_as_there_were() -> None:
    """A new one is ready before an old one goes, which still serves while it is taken off the list of those asked."""
    by_kind = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in MANIFESTS if "spec" in each}
    worker = by_kind["Deployment", "distributed-state-worker"]
    assert worker["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert worker["strategy"]["rollingUpdate"]["maxSurge"] not in (0, "0%")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"].startswith("/readyz")
    assert int(container["lifecycle"]["preStop"]["exec"]["command"][1]) >= 2
    least = by_kind["HorizontalPodAutoscaler", "distributed-state-worker"]["minReplicas"]
    assert least > 1
    base = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    assert f"DISTRIBUTED_STATE_EXPECTED_WORKERS={least}" in base, "fewer are reported"
    own = yaml.safe_load((DEPLOY / "k8s/overlays/production/kustomization.yaml").read_text())
    (said,) = re.findall(r"minReplicas, value: (\d+)", str(own["patches"]))
    assert f"DISTRIBUTED_STATE_EXPECTED_WORKERS={said}" in own["configMapGenerator"][0]["literals"]
    for name in ("distributed-state-worker", "distributed-state-archiver"):
        assert by_kind["PodDisruptionBudget", name]["maxUnavailable"] == 1


def test_the_commands_of_an_upgrade_name_what_there_is() -> None:
    upgrading = (ROOT / "docs/running/upgrades.md").read_text().partition("## A roll under load")[0]
    commands = "\n".join(re.findall(r"```sh[^\n]*\n(.*?)```", upgrading, re.DOTALL))
    things = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in MANIFESTS}
    named = re.findall(r"\b(?:job|deployment)[/ ][\w-]+", commands)
    assert len(named) == 4
    assert {each.replace(" ", "/") for each in named} <= things
    composed = re.findall(r"docker compose (build|run|up)\b([^\n#&]*)", commands)
    assert [words.split()[-1:] for _, words in composed] == [[], ["migrate"], ["archiver"]]
    assert {"migrate", "worker", "archiver"} <= SERVICES.keys()
    assert re.search(r"\bmigrate &&\s+deploy/roll\.py &&[^\n]*\n\s+docker compose up", commands), (
        "each only after the one before"
    )
    assert os.access(DEPLOY / "roll.py", os.X_OK)
    first, last = re.findall(r"(\d+)-(\d+)\}", SERVICES["worker"]["ports"][0])[0]
    assert f"{int(last) - int(first) + 1} ports" in upgrading
    assert f"{SERVICES['worker']['stop_grace_period'].removesuffix('s')} s to drain" in upgrading
