"""The scripts that run in Redis, one for each thing that is done there. Law: a script is named once, here.

Design: section 4.
"""

from __future__ import annotations

from distributed_state.port import Script

COMMIT = Script("commit")
READ = Script("read")
HYDRATE = Script("hydrate")
SETTLE = Script("settle")
TRIM = Script("trim")
MARK = Script("mark")
TAIL = Script("tail")
CLAIM = Script("claim")
JOIN = Script("join")
MINT = Script("mint")
INSTALL = Script("install")
DROP = Script("drop")
REWRITE = Script("rewrite")
EMIT = Script("emit")
ADVANCE = Script("advance")
BEAT = Script("beat")
ROLL = Script("roll")
PRUNE = Script("prune")
DUE = Script("due")
DEFER = Script("defer")
FILL = Script("fill")
REDACT = Script("redact")
ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
SHED = Script("shed")
PROBE = Script("probe")
CONFIRM = Script("confirm")
