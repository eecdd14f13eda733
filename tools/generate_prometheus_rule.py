"""Writes the alerts of deploy/observe/rules.yml as a PrometheusRule, the kind that Prometheus Operator reads.

    python tools/generate_prometheus_rule.py            write deploy/k8s/components/monitoring/rules.yaml
    python tools/generate_prometheus_rule.py --check    only say whether it is up to date

Law: the file is the rules' own text, two places further in; nothing is decided here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "observe" / "rules.yml"
TARGET = ROOT / "deploy" / "k8s" / "components" / "monitoring" / "rules.yaml"
HEAD = """\
# Made from deploy/observe/rules.yml by tools/generate_prometheus_rule.py: change that, and make this anew.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: distributed-state
spec:
"""


def generated(rules: str) -> str:
    """The manifest with these rules."""
    _, groups, rest = rules.partition("groups:\n")
    return HEAD + "".join(f"  {line}" if line.strip() else line for line in (groups + rest).splitlines(keepends=True))


def main() -> int:
    """Write it, or say whether it is as it would be written."""
    text = generated(RULES.read_text())
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        return 0
    if TARGET.read_text() == text:
        return 0
    sys.stderr.write(f"{TARGET.relative_to(ROOT)} is not what {RULES.relative_to(ROOT)} says: make it anew\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
