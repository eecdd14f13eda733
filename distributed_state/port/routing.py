"""Commands and scripts, each to the server that has its keys; the same on both faces.

Each server has a script cache of its own, which is empty after a restart, a failover and SCRIPT FLUSH: of the scripts
of one exchange it may know the second and not the first. Law: each script runs after all that stand before it in its
exchange for the same server. What ran too early is sent once more after those whose text the server had to be sent; so
every script that is sent with others is one that may be repeated.

Design: sections 4, 19.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Call, Script, Words, lives
from distributed_state.port.commands import ELSEWHERE, ONE_OF_A_CLUSTER, ReplyError, filled, translate
from distributed_state.port.connections import Connections
from distributed_state.port.lives import KnownReplicas, Life, SentinelAnswer
from distributed_state.port.topology import with_host

_TOGETHER = 1000  # answers of one exchange wait in the server's memory until all commands are sent
_REDIRECTIONS = 5
_ASKING: Words = (b"ASKING",)
_EVAL = (b"EVALSHA", b"EVAL")
_REDIRECTED = ("MOVED", "ASK")


class Router:
    """What a port can do beside sending to one server."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._place = connections.place
        self._embedded = connections.embedded
        self._topology = connections.topology
        self._timeout = connections.timeout

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        raise AssertionError("the face's own")

    async def exchange_apart(self, node: str, commands: Sequence[Words]) -> list[Any]:
        """As `exchange_with`, on a connection where whoever waits holds up no other command."""
        raise AssertionError("the face's own")

    async def exchange_with_all(self, groups: dict[str, list[Words]]) -> dict[str, list[Any] | WarmUnavailable]:
        raise AssertionError("the face's own")

    async def look(self) -> None:
        raise AssertionError("the face's own")

    @property
    def several(self) -> bool:
        return self._topology.several

    @property
    def is_cluster(self) -> bool:
        return self._topology.kind == "cluster"

    async def relocate(self) -> None:
        self._topology.doubt()
        if self._topology.doubted:
            await self.look()

    def node_of(self, key: bytes) -> str:
        return self._topology.node_of(key)

    def nodes(self) -> list[str]:
        return self._topology.nodes()

    async def life_of(self, node: str) -> Life:
        if self._embedded is not None:
            return lives.EMBEDDED
        try:
            life = lives.read((await self.exchange_with(node, (lives.INFO,)))[0])
        except ReplyError as error:
            raise translate(error, self._place) from error
        self._connections.met(node, life)
        return life

    async def lives_elsewhere(self, name: str, node: str) -> bool:
        if not self.is_cluster:
            return False  # no slots move: another server in that life was replaced, and does not know it yet
        lives = False
        for other in sorted({*self.nodes(), *self._connections.lives} - {node}):
            try:
                life = await self.life_of(other)
            except StateError:
                continue  # it is away, and says nothing
            if life.follows(name):
                return False  # its replica was promoted, perhaps with older data
            lives = lives or life.name == name
        return lives

    def known_life(self, node: str) -> str:
        return lives.EMBEDDED.name if self._embedded is not None else self._connections.lives.get(node, "")

    def sentinels(self) -> list[SentinelAnswer]:
        return self._connections.sentinels()

    def replicas(self, node: str) -> KnownReplicas | None:
        return self._connections.replicas(node)

    def _refused(self, node: str, text: str) -> ReplyError:
        """The error of an answer that is one. Only errors come here, so that answers need not be searched for them."""
        error = ReplyError(text)
        if error.word not in _REDIRECTED:
            if error.word in ELSEWHERE or error.demoted:
                self._topology.doubt()
            if error.demoted:
                # A replica: when it is promoted, its data may be older than what was acknowledged on this connection.
                self._topology.drop(node)
        elif self._topology.only is not None:
            # A plain address that is a server of a cluster, and was not allowed to say so.
            if self._topology.unix:
                return ReplyError(ONE_OF_A_CLUSTER)
            self._redirected(error, self._topology.only)
        return error

    async def exchange(self, commands: Sequence[Words]) -> list[Any]:
        topology = self._topology
        if topology.doubted:
            await self.look()
        if topology.only is not None:
            return await self.exchange_with(topology.only, commands)
        if len(commands) == 1:
            # The short way, which is nearly always the whole of it.
            node = self._node_for(commands[0])
            answers = await self.exchange_with(node, commands)
            if not isinstance(answers[0], ReplyError) or answers[0].word not in _REDIRECTED:
                return answers
            return await self._exchange_routed(commands, self._redirected(answers[0], node))
        return await self._exchange_routed(commands)

    async def _exchange_routed(self, commands: Sequence[Words], once: str = "") -> list[Any]:
        """Each command to the server that has its key, or first to the one given; followed where that sends it.

        The answers of a server that cannot be reached are WarmUnavailable, in their places; raised if it is all.
        """
        answers: list[Any] = [None] * len(commands)
        waiting = dict.fromkeys(range(len(commands)), once)  # with the server to be asked this once, "": the owner
        for _ in range(_REDIRECTIONS):
            groups: dict[str, list[int]] = {}
            for at, once in sorted(waiting.items()):
                try:
                    groups.setdefault(once or self._node_for(commands[at]), []).append(at)
                except WarmUnavailable as error:
                    answers[at] = error
            sent = {
                node: [each for at in group for each in self._asked(commands[at], waiting[at])]
                for node, group in groups.items()
            }
            found = await self.exchange_with_all(sent)
            waiting = {}
            for node, group in groups.items():
                part = found[node]
                if isinstance(part, WarmUnavailable):
                    part = [part] * len(sent[node])
                kept = [answer for words, answer in zip(sent[node], part, strict=True) if words is not _ASKING]
                for at, answer in zip(group, kept, strict=True):
                    answers[at] = answer
                    if isinstance(answer, ReplyError) and answer.word in _REDIRECTED:
                        waiting[at] = self._redirected(answer, node)
            if not waiting:
                break
        else:
            self._topology.doubt()
        if answers and all(isinstance(answer, WarmUnavailable) for answer in answers):
            raise answers[0]
        return answers

    def _asked(self, words: Words, once: str) -> tuple[Words, ...]:
        """A command as it is sent to its owner, or `once` to the server to which its slot is on its way."""
        if not once:
            return (words,)
        # Until the slot is handed over, its data is in the life of its owner.
        return _ASKING, filled(words, self.known_life(self._node_for(words)))

    def _redirected(self, answer: ReplyError, node: str) -> str:
        """Who is to be asked this once for a slot on its way, "" if another server has it for good."""
        word, slot, target = str(answer).split(" ")[:3]
        if word == "ASK":
            return with_host(target, node)
        self._topology.moved(int(slot), target, node)
        return ""

    def _node_for(self, words: Words) -> str:
        """The server that a command goes to: that of its first key; of one without a key any."""
        if words[0] in _EVAL:
            key = words[3]
        elif len(words) > 1:
            key = words[1]
        elif nodes := self._topology.nodes():
            return nodes[0]
        else:
            key = b""
        return self._topology.node_of(key if isinstance(key, bytes) else str(key).encode())

    async def command(self, *words: Any) -> Any:
        return self._checked((await self.exchange((words,)))[0])

    async def command_with(self, node: str, *words: Any) -> Any:
        return self._checked((await self.exchange_with(node, (words,)))[0])

    async def commands(self, commands: Sequence[Words]) -> list[Any]:
        return [self._checked(answer) for answer in await self.exchange(commands)]

    async def script(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        words = script.call(keys, arguments)
        answer = (await self.exchange((words,)))[0]
        if isinstance(answer, Exception):
            if isinstance(answer, ReplyError) and answer.word == "NOSCRIPT":
                return self._checked((await self.exchange((script.first_call(words),)))[0])
            raise translate(answer, self._place) from answer
        return answer

    async def scripts(self, calls: Sequence[Call]) -> list[Any]:
        words = [script.call(keys, arguments) for script, keys, arguments in calls]
        answers = await self._together(words)
        # Again and again, as the cache may be emptied meanwhile; each time the first that was unknown is done.
        while again := self._again(calls, words, answers):
            for at, answer in zip(again, await self._together(list(again.values())), strict=True):
                answers[at] = answer
        return [translate(each, self._place) if isinstance(each, Exception) else each for each in answers]

    async def apart(self, node: str, calls: Sequence[Call], behind: Sequence[Words]) -> list[Any]:
        words = [script.call(keys, arguments) for script, keys, arguments in calls]
        answers = await self.exchange_apart(node, [*words, *behind])
        if any(isinstance(answer, ReplyError) and answer.word == "NOSCRIPT" for answer in answers):
            # Together, as they are one question: what stands behind the scripts waits for all of them.
            words = [script.first_call(each) for (script, _, _), each in zip(calls, words, strict=True)]
            answers = await self.exchange_apart(node, [*words, *behind])
        for answer in answers:
            if isinstance(answer, ReplyError) and answer.word == "MOVED":
                self._redirected(answer, node)
        return [translate(each, self._place) if isinstance(each, Exception) else each for each in answers]

    def _again(self, calls: Sequence[Call], words: Sequence[Words], answers: Sequence[Any]) -> dict[int, Words]:
        """What is sent again because a server did not know a script: on that server, all from there on."""
        known: dict[str, set[Script]] = {}  # what servers were sent, from their first unknown script on
        again: dict[int, Words] = {}
        refused = [isinstance(answer, ReplyError) and answer.word == "NOSCRIPT" for answer in answers]
        for at, (script, keys, _) in enumerate(calls) if any(refused) else ():
            if isinstance(answers[at], WarmUnavailable):
                continue
            node = self._topology.node_of(keys[0])
            if refused[at]:
                known.setdefault(node, set())
            if node in known:
                # The first call of each script brings its text; those after it find it there.
                again[at] = words[at] if script in known[node] else script.first_call(words[at])
                known[node].add(script)
        return again

    async def _together(self, words: Sequence[Words]) -> list[Any]:
        answers: list[Any] = []
        for at in range(0, len(words), _TOGETHER):
            answers += await self.exchange(words[at : at + _TOGETHER])
        return answers

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise translate(answer, self._place) from answer
        return answer
