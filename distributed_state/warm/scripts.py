"""The scripts that run in Redis, one for each thing that is done there. Law: a script is named once, here.

Design: section 4.
"""

from __future__ import annotations

from distributed_state.port import Script

COMMIT = Script("commit", living=True)
READ = Script("read", living=True)
ITEMS = Script("items", living=True)
LIST_ITEMS = Script("list_items", living=True)
UNCHANGED = Script("unchanged", living=True)
HYDRATE = Script("hydrate", living=True)
SETTLE = Script("settle", living=True)
TRIM = Script("trim", living=True)
MARK = Script("mark", living=True)
TAIL = Script("tail", living=True)
CLAIM = Script("claim")
JOIN = Script("join")
MINT = Script("mint", living=True)
INSTALL = Script("install", living=True)
RENAME = Script("rename", living=True)
RESERVE = Script("reserve", living=True)
DISCARD = Script("discard", living=True)
DROP = Script("drop")
REWRITE = Script("rewrite")
EMIT = Script("emit", living=True)
RELAY = Script("relay")
INTEREST = Script("interest")
ADVANCE = Script("advance")
BEAT = Script("beat")
ROLL = Script("roll")
PRUNE = Script("prune")
DUE = Script("due")
DEFER = Script("defer")
FILL = Script("fill")
REDACT = Script("redact")
ACQUIRE = Script("acquire", living=True)
RELEASE = Script("release")
RENEW = Script("renew", living=True)
SHED = Script("shed")
PROBE = Script("probe", living=True)
CONFIRM = Script("confirm", living=True)
