"""The page about metrics and alerts. Law: metrics are read from code, alerts from their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docs_tables import code, table
from prometheus_client import CollectorRegistry

from distributed_state.programs.cli.probe import Noted
from distributed_state.programs.service.app import Service
from distributed_state.store.metrics import BY_PARTITION, FIGURES, HISTOGRAMS, PREFIX

OBSERVE = Path(__file__).parents[1] / "deploy" / "observe"
Row = tuple[str, str, str, str]


def metric_page() -> str:
    """Every metric and every alert."""
    parts = [
        "# Metrics and alerts",
        "Prometheus metrics need the extra `telemetry`. The collector does not call Redis or SQL: it shows values that "
        "the process already has. A worker also probes its servers to show whether it is ready.",
        "::: distributed_state.store.metrics.collector",
        "::: distributed_state.store.metrics.serve",
        "## Metrics",
        table(("metric", "kind", "labels", "what it is"), map(_shown, store_metrics())),
        "## Metrics of requests",
        "A worker (`distributed-state serve`) adds these.",
        table(("metric", "kind", "labels", "what it is"), map(_shown, _manual_rows(Service().measures.registry))),
        "## Metrics of the probe",
        "`distributed-state probe --every 10s --metrics-port 9464` has these.",
        table(("metric", "kind", "labels", "what it is"), map(_shown, _manual_rows(Noted(1.0).registry))),
        "## Alerts",
        "These are the rules in `deploy/observe/rules.yml`, which Prometheus can load unchanged.",
    ]
    for rule in rules():
        name = str(rule["alert"])
        how_long = f" for {rule['for']}" if "for" in rule else ""
        parts += [
            f"### {name} {{ #{name} }}",
            f"**{rule['labels']['severity'].capitalize()}.** {_plain(rule['annotations']['summary'])}.",
            f"```text\n{str(rule['expr']).strip()}{how_long}\n```",
            f"[Runbook](../running/alerts.md#{name.lower()})",
        ]
    return "\n\n".join(parts)


def _shown(row: Row) -> Row:
    name, kind, labels, text = row
    return f'<span id="{name}"></span>{code(name)}', kind, labels, text


def store_metrics() -> Iterator[Row]:
    """Those of a store, in the order of the code."""
    for figure in FIGURES + BY_PARTITION:
        name = PREFIX + figure.name + ("_total" if figure.kind == "counter" else "")
        yield name, figure.kind, ", ".join(figure.labels), figure.help
    for name, text, labels in HISTOGRAMS:
        yield PREFIX + name, "histogram", ", ".join(labels), text


def other_metrics() -> Iterator[Row]:
    """Those of a worker's requests, and of the probe."""
    yield from _manual_rows(Service().measures.registry)
    yield from _manual_rows(Noted(1.0).registry)


def _manual_rows(registry: CollectorRegistry) -> Iterator[Row]:
    """The metrics of a registry; their labels as the manual has them, since without requests there are none."""
    labels = dict(re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) \|", _manual(), re.MULTILINE))
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, labels.get(name, "").strip(), family.documentation


def rules() -> list[dict[str, Any]]:
    """The alerts as Prometheus reads them."""
    loaded = yaml.safe_load((OBSERVE / "rules.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"] if "alert" in rule]


def _manual() -> str:
    return (OBSERVE / "README.md").read_text()


def _plain(summary: str) -> str:
    """What an alert says, with words in place of Prometheus' braces."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", summary)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "*a value*", text)
