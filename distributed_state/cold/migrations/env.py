"""Run migrations on the caller's connection and in its transaction. Law: no connection is opened here."""

from __future__ import annotations

from alembic import context

from distributed_state.cold.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
