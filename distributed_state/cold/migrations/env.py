"""Run migrations on the connection, and in the transaction, of whoever called Alembic. Law: it opens nothing itself."""

from __future__ import annotations

from alembic import context

from distributed_state.cold.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
