"""Messages of many partitions in one, and what a relay does when it is late."""

from __future__ import annotations

import pytest

from distributed_state.warm import event_channels
from distributed_state.warm.event_channels import BATCH, batches, messages

pytestmark = pytest.mark.unit

HEARD = [(0, b"3-a 1\nhead\ndata"), (63, b"3-a 7"), (7, b"4-b 2\nh\n*0 5\n\n\xff"), (0, b"3-a 2\nhead\n")]


def test_what_goes_into_a_batch_comes_out_of_it_whatever_bytes_it_has() -> None:
    (batch,) = batches(HEARD)
    assert batch.startswith(BATCH)
    assert list(messages(batch)) == HEARD
    assert list(batches([])) == []


def test_a_batch_that_would_be_large_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_channels, "_BATCH_BYTES", 20)
    found = list(batches(HEARD * 5))
    assert len(found) > 5
    assert [each for batch in found for each in messages(batch)] == HEARD * 5


@pytest.mark.parametrize("batch", [b"*0 5\n123", b"*0", b"*x 1\na", b"*0 1 2\na"])
def test_what_is_no_batch_is_an_error(batch: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(messages(batch))
