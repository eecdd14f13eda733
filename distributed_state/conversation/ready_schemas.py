"""Ready schemas for what agents keep beside conversations. Law: plain pydantic models; your own do as well.

Design: section 13.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, JsonValue


class TaskState(BaseModel):
    """A piece of work: `store.task("t1", schema=TaskState)`. Steps are counted, `data` is what was found so far."""

    goal: str
    status: Literal["pending", "in_progress", "waiting", "done", "failed"] = "pending"
    steps_completed: int = Field(default=0, ge=0)
    steps_remaining: int = Field(default=0, ge=0)
    current_step: str | None = None
    data: dict[str, JsonValue] = Field(default_factory=dict)


class UserState(BaseModel):
    """What is known of a user in all sessions: `store.user("u1", schema=UserState)`."""

    preferences: dict[str, JsonValue] = Field(default_factory=dict)
    history: dict[str, list[JsonValue]] = Field(default_factory=dict)
