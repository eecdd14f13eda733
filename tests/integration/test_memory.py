"""What writers remember of their acknowledged commits: until they are archived, and byte for byte as the journal has them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
import redis
from below import until
from faces import core

from distributed_state import Encryption
from distributed_state.values.journal import JournalEntry


def memory_of(store: Any) -> Any:
    return core(store).tiers().memory


async def journal_of(store: Any, partition: int) -> list[JournalEntry]:
    """Its entries, as the archiver reads them, without the size that the journal had."""
    tiers = core(store).tiers()
    journal = (await tiers.warm.partitions.journals([(tiers.keys.partition(partition), 0)], 1000))[0]
    return [replace(entry, total_bytes=0) for entry in journal.onward if entry.record]
