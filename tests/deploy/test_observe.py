"""What deploy/observe shows and alerts on exists, and its README names every metric."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from distributed_state.programs.cli.probe import Noted
from distributed_state.programs.service.app import Service
from distributed_state.store.metrics import BY_PARTITION, FIGURES, HISTOGRAMS, PREFIX

pytestmark = pytest.mark.unit

OBSERVE = Path(__file__).parents[2] / "deploy" / "observe"
DASHBOARD = OBSERVE / "grafana" / "dashboards" / "distributed-state.json"
PROMETHEUS_OWN = {"up", "ALERTS"}
PROCESS = {
    f"process_{name}" for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
}  # of a process on Linux
WORDS = {
    "and",
    "by",
    "or",
    "sum",
    "max",
    "min",
    "rate",
    "increase",
    "histogram_quantile",
    "topk",
    "bottomk",
    "vector",
    "count",
    "absent",
    "last_over_time",
    "on",
    "time",
    "timestamp",
    "unless",
}


def http() -> dict[str, set[str]]:
    """The series that a worker tells of its own requests, and their labels."""
    service = Service()
    # refused, as there is no store yet, and counted
    TestClient(service.app, base_url="http://localhost").get("/v1/conversations")
    samples = [each for family in service.measures.registry.collect() for each in family.samples]
    told = [each for each in samples if each.name.startswith(PREFIX) and not each.name.endswith("_created")]
    assert {each.name for each in samples if not each.name.startswith(PREFIX)} > PROCESS or sys.platform != "linux"
    return {each.name: set(each.labels) for each in told}


HTTP = http()
PROBE = {
    each.name: set(each.labels)
    for family in Noted(1.0).registry.collect()
    for each in family.samples
    if not each.name.endswith("_created")
}


def exported() -> dict[str, set[str]]:
    """Every series that a scrape may bring, and its labels."""
    found = HTTP | PROBE
    for figure in FIGURES + BY_PARTITION:
        found[PREFIX + figure.name + ("_total" if figure.kind == "counter" else "")] = set(figure.labels)
    for name, _, labels in HISTOGRAMS:
        found |= {f"{PREFIX}{name}_{part}": {*labels} for part in ("count", "sum")}
        found[f"{PREFIX}{name}_bucket"] = {*labels, "le"}
    return found


def unknown(expression: str) -> set[str]:
    """What an expression names that no replica exports: metrics, and labels of those it has."""
    known = exported() | {name: set() for name in PROMETHEUS_OWN | PROCESS}
    wrong = set()
    bare = re.sub(r'"[^"]*"', '""', expression)
    grouped = {label for part in re.findall(r"\bby \(([^)]*)\)", bare) for label in re.split(r"\W+", part) if label}
    series = re.findall(r"\b([a-zA-Z_]\w*)\s*(?:\{([^}]*)\})?", re.sub(r"\bby \([^)]*\)|\[[^\]]*\]", "", bare))
    allowed = {"instance", "job"}
    for name, selectors in series:
        if name in WORDS:
            continue
        if name not in known:
            wrong.add(name)
        allowed |= known.get(name, set())
        wrong |= set(re.findall(r"(\w+)\s*[=!]~?", selectors)) - known.get(name, set()) - {"instance", "job"}
    return wrong | (grouped - allowed)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
        for query in re.findall(r'query "([^"]*)"', rule["annotations"]["summary"]):
            yield rule["alert"], query
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_what_is_shown_is_exported(place: str, expression: str) -> None:
    assert not unknown(expression), place


def test_a_misspelt_metric_or_label_would_be_found() -> None:
    assert unknown("sum(rate(distributed_state_hot_hit_total[5m]))") == {"distributed_state_hot_hit_total"}
    assert unknown('distributed_state_refused_writes_total{raeson="fenced"}') == {"raeson"}
    assert unknown("sum by (operatoin) (distributed_state_hot_hits_total)") == {"operatoin"}
    assert unknown("sum by (code) (distributed_state_http_requests_total)") == {"code"}
    assert unknown("distributed_state_http_running") == {"distributed_state_http_running"}


def test_every_metric_is_shown_or_alerted_on() -> None:
    """A metric that nobody looks at is not worth its cost."""
    everything = " ".join(expression for _, expression in expressions())
    for figure in FIGURES + BY_PARTITION:
        assert re.search(rf"\b{PREFIX}{figure.name}(_total)?\b", everything), figure.name
    for name, _, _ in HISTOGRAMS:
        assert f"{PREFIX}{name}_bucket" in everything
    for name in HTTP | PROBE:
        if not name.endswith(("_seconds_count", "_seconds_sum")):
            assert name in everything, name


def test_an_alert_says_how_bad_it_is_and_what_was_seen() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))


def test_each_alert_is_seen_to_fire_and_to_be_silent() -> None:
    """By promtool, which test_deploy_tools runs."""
    cases = yaml.safe_load((OBSERVE / "rules.test.yml").read_text())["tests"]
    seen = [(each["alertname"], bool(each.get("exp_alerts"))) for case in cases for each in case["alert_rule_test"]]
    assert set(seen) == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}


def metrics_table() -> str:
    """The metrics as the README shows them."""
    lines = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for figure in FIGURES + BY_PARTITION:
        name = figure.name + ("_total" if figure.kind == "counter" else "")
        lines.append(f"| `{PREFIX}{name}` | {figure.kind} | {', '.join(figure.labels)} | {figure.help} |")
    for name, text, labels in HISTOGRAMS:
        lines.append(f"| `{PREFIX}{name}` | histogram | {', '.join(labels)} | {text} |")
    return "\n".join(lines)


def test_every_metric_is_documented() -> None:
    text = (OBSERVE / "README.md").read_text()
    assert metrics_table() in text
    told = dict(re.findall(rf"\| `({PREFIX}(?:http|probe)_\w+)` \| \w+ \| ([^|]*) \|", text))
    assert {name: set(labels.split(", ")) - {""} for name, labels in told.items()} == {
        name.removesuffix("_count"): labels
        for name, labels in (HTTP | PROBE).items()
        if not name.endswith(("_bucket", "_sum"))
    }


def test_metrics_are_named_as_prometheus_wants_it() -> None:
    for figure in FIGURES + BY_PARTITION:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", figure.name)
        assert not figure.name.endswith("_total")  # the client adds it
        assert figure.help[0].isupper()
        assert not figure.help.endswith(".")
        assert not re.search(r"_(ms|s|kb|percent)$", figure.name), "base units: seconds, bytes, ratio"


def test_what_is_shown_is_of_all_instances_together() -> None:
    """A fleet of forty is one line, and perhaps one for its worst; who wants one instance chooses it above."""
    for panel in panels():
        for target in panel["targets"]:
            summed = re.match(r"\(?(sum|max|min|count|topk|bottomk|histogram_quantile)\b", target["expr"])
            assert summed, panel["title"]
            assert "instance" not in re.findall(r"by \(([^)]*)\)", target["expr"]), panel["title"]


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    datasource = yaml.safe_load((OBSERVE / "grafana/provisioning/datasources/prometheus.yml").read_text())
    provider = yaml.safe_load((OBSERVE / "grafana/provisioning/dashboards/dashboards.yml").read_text())
    uid = datasource["datasources"][0]["uid"]
    ids = [each["id"] for each in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for each in dashboard["panels"]:
        place = each["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{each['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == uid
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == uid for target in panel["targets"])
    assert provider["providers"][0]["options"]["path"]


def test_prometheus_scrapes_workers_and_archivers_by_name() -> None:
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    found = {
        job["job_name"]: (job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"])
        for job in config["scrape_configs"]
    }
    assert found == {"worker": (["worker"], 9464), "archiver": (["archiver"], 9464), "probe": (["probe"], 9464)}
