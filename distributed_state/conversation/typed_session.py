"""A session whose fields are those of a pydantic model. Law: it adds nothing to its two parents.

Design: section 13.
"""

from __future__ import annotations

from distributed_state.conversation.session import AsyncSession
from distributed_state.port.waited import bounded
from distributed_state.records.schema import M
from distributed_state.records.typed import AsyncTypedRecord


@bounded()
class AsyncTypedSession(AsyncTypedRecord[M], AsyncSession):
    """A session whose fields are those of a pydantic model: `store.session("c1", schema=Trip)`."""
