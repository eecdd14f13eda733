"""What a tool of an agent is. Law: it names the right that it needs, and the session that it is about is checked first.

A tool is the model of its arguments: their descriptions are what the agent's model reads, and its docstring what the
tool is for.

Design: section 25.
"""

from __future__ import annotations

from functools import cache
from inspect import cleandoc
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import AccessDenied, InvalidValue
from distributed_state.programs.service import requests
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.routes import SESSION, Asked
from distributed_state.values.access_tokens import Right

_WRONG = 5  # arguments that are named in one error


class Tool(BaseModel):
    """A tool, with its arguments when it runs."""

    model_config = ConfigDict(extra="forbid")

    name: ClassVar[str]
    right: ClassVar[Right]

    async def run(self, asked: Asked) -> Any:
        """What the agent reads, as JSON. Raises StateError."""
        raise NotImplementedError

    @classmethod
    def description(cls) -> str:
        """What the tool is for."""
        return cleandoc(cls.__doc__ or "")

    @classmethod
    @cache
    def schema_of_arguments(cls) -> dict[str, Any]:
        """JSON schema of the arguments; it is made once, and not to be changed."""
        schema = cls.model_json_schema()
        return {name: part for name, part in schema.items() if name not in ("title", "description")}

    @classmethod
    def read(cls, given: dict[str, Any] | None) -> Tool:
        """The tool with these arguments. Raises InvalidValue that says which do not fit, for the model to correct."""
        try:
            return cls.model_validate(given or {})
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)[:_WRONG]
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg'][:200]}" for each in found)
            raise InvalidValue(f"{cls.name}: {wrong}; it takes {', '.join(cls.model_fields)}") from error


class OfSession(Tool):
    """A tool that is about one session."""

    session: str | None = Field(
        None, description="Id of the session. It may be left out where the client names one for all calls."
    )

    def chosen(self, asked: Asked) -> AsyncSession:
        """The session. Raises AccessDenied for another tenant's, before a server is asked."""
        return asked.store.session(records.within(asked, self.session or default_session(asked)))


def default_session(asked: Asked) -> str:
    """The session that the header names. Raises InvalidValue if none is named."""
    named = requests.header(asked.request, SESSION)
    if not named:
        raise InvalidValue("name the session: give its id as `session`, or let the client send the header X-Session-Id")
    return named


def allow(asked: Asked, right: Right) -> None:
    """Raise AccessDenied unless the caller has the right."""
    if right not in asked.caller.rights:
        raise AccessDenied(f"{asked.caller.actor!r:.80} has no right to {right}")
