"""What the tests of CrewAI's adapter share: an environment that no other framework fits in. Law: nothing is sent."""

from __future__ import annotations

import os
import warnings

from frameworks.conftest import archive as archive

# Before CrewAI is imported: by default it sends traces to its makers.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}

# Its modules warn when they are loaded; what it warns of later fails a test.
with warnings.catch_warnings(action="ignore"):
    import crewai  # noqa: F401
