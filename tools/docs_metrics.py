"""The page about metrics and alerts. Law: metrics are read from code, alerts from their rules and manual."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docs_tables import code, table

from distributed_state.programs.service.app import Service
from distributed_state.store.metrics import BY_PARTITION, FIGURES, HISTOGRAMS, PREFIX

OBSERVE = Path(__file__).parents[1] / "deploy" / "observe"
Row = tuple[str, str, str, str]


def metric_page() -> str:
    """Every metric and every alert."""
    parts = [
        "# Metrics and alerts",
        "Prometheus metrics need the extra `telemetry`. A scrape does not call Redis or SQL: it shows values that the "
        "process already has.",
        "::: distributed_state.store.metrics.collector",
        "::: distributed_state.store.metrics.serve",
        "## Metrics",
        table(("metric", "kind", "labels", "what it is"), map(_shown, store_metrics())),
        "## Metrics of requests",
        "A worker (`distributed-state serve`) adds these.",
        table(("metric", "kind", "labels", "what it is"), map(_shown, request_metrics())),
        "## Alerts",
        "These are the rules in `deploy/observe/rules.yml`, which Prometheus can load unchanged.",
    ]
    remedies = what_to_do()
    for rule in rules():
        name = str(rule["alert"])
        how_long = f" for {rule['for']}" if "for" in rule else ""
        parts += [
            f"### {name} {{ #{name} }}",
            f"**{rule['labels']['severity'].capitalize()}.** {_plain(rule['annotations']['summary'])}.",
            f"```text\n{str(rule['expr']).strip()}{how_long}\n```",
            f"**What to do:** {remedies[name]}.",
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


def request_metrics() -> Iterator[Row]:
    """Those of a worker's requests; their labels as the manual has them, since without requests there are none."""
    labels = dict(re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*) \|", _manual(), re.MULTILINE))
    for family in Service().measures.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield name, family.type, labels.get(name, "").strip(), family.documentation


def rules() -> list[dict[str, Any]]:
    """The alerts as Prometheus reads them."""
    loaded = yaml.safe_load((OBSERVE / "rules.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"] if "alert" in rule]


def what_to_do() -> dict[str, str]:
    """Of each alert, by its name, what the manual says."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|$", _manual(), re.MULTILINE)
    return {name: text[:1].upper() + text[1:] for names, text in rows for name in re.findall(r"`(\w+)`", names)}


def _manual() -> str:
    return (OBSERVE / "README.md").read_text()


def _plain(summary: str) -> str:
    """What an alert says, with words in place of Prometheus' braces."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", summary)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "*a value*", text)
