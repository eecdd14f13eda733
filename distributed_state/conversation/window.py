"""What of a conversation a model is sent: the newest whole turns that fit, and a summary of what does not.

Law: nothing is read that is not needed to decide that (`window_reading`), and raw messages are never changed.

Design: section 11.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from distributed_state.conversation.fit_window import choose, with_calls
from distributed_state.conversation.tokens import Counter, counted, estimate
from distributed_state.errors import CorruptState, InvalidValue
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.model import Message

M = TypeVar("M", bound=Message | dict[str, Any])
Strategy = Literal["drop", "summarize"]
Summarizer = Callable[[list[Message], str | None], str | Awaitable[str]]
_TITLE = "Summary of the conversation so far:\n"


@dataclass(frozen=True, slots=True)
class Summary:
    """The text that stands for the messages with the numbers `start` to `stop` (exclusive)."""

    text: str
    start: int
    stop: int

    def message(self) -> Message:
        """As a model is shown it."""
        return Message(role="system", content=_TITLE + self.text, metadata={"summary": [self.start, self.stop]})

    def pack(self, record_codec: Codec) -> bytes:
        """As it is stored."""
        return record_codec.encode({"text": self.text, "start": self.start, "stop": self.stop}, "#summary")

    @classmethod
    def parse(cls, data: bytes, record_codec: Codec) -> Summary:
        """Read back what `pack` wrote."""
        fields = record_codec.decode(data, "#summary")
        try:
            return cls(str(fields["text"]), int(fields["start"]), int(fields["stop"]))
        except (KeyError, TypeError, ValueError) as error:
            text = f"#summary: {len(data)} stored bytes are not a summary"
            raise CorruptState(text, field="#summary", data=data) from error


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a conversation that fits a budget of tokens.

    `messages`: system messages of its beginning, then the summary (a system message) if there is one, then the newest
    turns, oldest first. `tokens`: what they count. `dropped`: how many messages of the conversation are not among
    them, summarized ones included. `read` and `read_bytes`: how many stored messages were looked at, and their size.
    """

    messages: tuple[Message, ...]
    tokens: int
    dropped: int
    summary: Summary | None
    read: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a window may hold. Raises InvalidValue when made of anything that makes no sense."""

    max_tokens: int
    keep_last: int = 6
    keep_system: bool = True
    counter: Counter = estimate
    strategy: Strategy = "drop"
    summarizer: Summarizer | None = None
    wait: float = 60.0

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise InvalidValue(f"max_tokens is an int from 1 on, not {self.max_tokens!r:.80}")
        if type(self.keep_last) is not int or self.keep_last < 0:
            raise InvalidValue(f"keep_last is a number of turns, an int from 0 on, not {self.keep_last!r:.80}")
        if not isinstance(self.keep_system, bool):
            raise InvalidValue(f"keep_system is a bool, not {self.keep_system!r:.80}")
        if not callable(self.counter):
            raise InvalidValue(f"counter is a callable Message -> int, not {self.counter!r:.80}")
        if self.strategy not in get_args(Strategy):
            raise InvalidValue(f"strategy is one of {', '.join(get_args(Strategy))}, not {self.strategy!r:.80}")
        if self.strategy == "summarize" and not callable(self.summarizer):
            raise InvalidValue(
                "strategy 'summarize' takes summarizer=, a callable (messages, previous summary or None) -> text, "
                f"not {self.summarizer!r:.80}"
            )
        if self.strategy == "drop" and self.summarizer is not None:
            raise InvalidValue("strategy 'drop' calls no summarizer; give strategy='summarize'")
        if isinstance(self.wait, bool) or not isinstance(self.wait, (int, float)) or not self.wait >= 0:
            raise InvalidValue(f"wait is a number of seconds from 0 on, not {self.wait!r:.80}")


def is_system(message: Message) -> bool:
    """Whether it instructs the model."""
    return message.role in ("system", "developer")


def truncate_history(
    messages: Sequence[M], max_tokens: int = 100_000, *, keep_last: int = 1, counter: Counter = estimate
) -> list[M]:
    """Choose of a plain list what fits in `max_tokens`: its system messages, and the newest whole turns.

    As `session.window` chooses, for messages that are kept elsewhere; they come back as they are, dicts or Messages, in
    their order. The last `keep_last` turns and all system messages are kept even if they do not fit.
    """
    bounds = Bounds(max_tokens, keep_last, counter=counter)
    read = [
        each if isinstance(each, Message) else codec.as_message(each, f"messages[{place}]")
        for place, each in enumerate(messages)
    ]
    counts = [counted(bounds.counter, message) for message in read]
    head = [place for place, message in enumerate(read) if is_system(message)]
    rest = [place for place, message in enumerate(read) if not is_system(message)]
    said = [read[place] for place in rest]
    room = max_tokens - sum(counts[place] for place in head)
    cut = choose(said, [counts[place] for place in rest], room=room, keep_last=keep_last, complete=True)
    kept = [rest[cut or 0 :][each] for each in with_calls(said[cut or 0 :])]
    return [messages[place] for place in sorted([*head, *kept])]
