"""Sends commands and scripts to the servers that have their keys; the same for sync and asyncio.

Each server has a script cache of its own, which is empty after a restart, a failover and SCRIPT FLUSH: it may know the
second script of an exchange and not the first. Law: each script runs after all earlier scripts of its exchange for the
same server. If the server did not know an earlier script, the later ones ran too early, and are sent again after it; so
every script that is sent with others may run twice.

Design: sections 4, 19.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Call, Script, Words, identities
from distributed_state.port.commands import ELSEWHERE, ONE_OF_A_CLUSTER, ReplyError, filled, translate
from distributed_state.port.connections import Connections
from distributed_state.port.identities import KnownReplicas, SentinelAnswer, ServerIdentity
from distributed_state.port.topology import with_host

_TOGETHER = 1000  # replies of one exchange wait in the server's memory until all commands are sent
_REDIRECTIONS = 5
_ASKING: Words = (b"ASKING",)
_EVAL = (b"EVALSHA", b"EVAL")
_REDIRECTED = ("MOVED", "ASK")


class Router:
    """The part of a port that finds the server for each command."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._place = connections.place
        self._embedded = connections.embedded
        self._topology = connections.topology
        self._timeout = connections.timeout
        self._limits = connections.limits

    async def exchange_with(self, node: str, commands: Sequence[Words]) -> list[Any]:
        raise AssertionError("the subclass's own")

    async def exchange_apart(self, node: str, commands: Sequence[Words]) -> list[Any]:
        """Like `exchange_with`, on a connection where blocking commands delay no others."""
        raise AssertionError("the subclass's own")

    async def exchange_with_all(self, groups: dict[str, list[Words]]) -> dict[str, list[Any] | WarmUnavailable]:
        raise AssertionError("the subclass's own")

    async def look(self) -> None:
        raise AssertionError("the subclass's own")

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

    async def identity_of(self, node: str) -> ServerIdentity:
        if self._embedded is not None:
            return identities.EMBEDDED
        try:
            server = identities.read((await self.exchange_with(node, (identities.INFO,)))[0])
        except ReplyError as error:
            raise translate(error, self._place) from error
        self._connections.met(node, server)
        return server

    async def has_data_elsewhere(self, data_id: str, node: str) -> bool:
        if not self.is_cluster:
            return (
                False  # slots do not move here: another server with that data id was replaced, and does not know it yet
            )
        found = False
        for other in sorted({*self.nodes(), *self._connections.data_ids} - {node}):
            try:
                server = await self.identity_of(other)
            except StateError:
                continue  # this server is down
            if server.follows(data_id):
                return False  # the server's replica was promoted, perhaps with older data
            found = found or server.data_id == data_id
        return found

    def known_data_id(self, node: str) -> str:
        return identities.EMBEDDED.data_id if self._embedded is not None else self._connections.data_ids.get(node, "")

    def sentinels(self) -> list[SentinelAnswer]:
        return self._connections.sentinels()

    def replicas(self, node: str) -> KnownReplicas | None:
        return self._connections.replicas(node)

    def _refused(self, node: str, text: str) -> ReplyError:
        """Make the error of an error reply. Only errors come here, so that replies need not be searched for them."""
        error = ReplyError(text)
        if error.word not in _REDIRECTED:
            if error.word in ELSEWHERE or error.demoted:
                self._topology.doubt()
            if error.demoted:
                # A replica: after its promotion its data may be older than writes that were acknowledged on this
                # connection.
                self._topology.drop(node)
        elif self._topology.only is not None:
            # A plain address can be a server of a cluster that was not allowed to report this.
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
            # The fast path, nearly always taken.
            node = self._node_for(commands[0])
            answers = await self.exchange_with(node, commands)
            if not isinstance(answers[0], ReplyError) or answers[0].word not in _REDIRECTED:
                return answers
            return await self._exchange_routed(commands, self._redirected(answers[0], node))
        return await self._exchange_routed(commands)

    async def _exchange_routed(self, commands: Sequence[Words], once: str = "") -> list[Any]:
        """Send each command to the server that has its key, or first to `once`; follow redirections.

        Replies of an unreachable server are WarmUnavailable, in their places; raised if all are.
        """
        answers: list[Any] = [None] * len(commands)
        waiting = dict.fromkeys(range(len(commands)), once)  # with the server to ask this time; "": the owner
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
        """Return a command for its owner, or for the server `once` to which its slot is moving."""
        if not once:
            return (words,)
        # Until the slot has moved, its data has the data id of its owner.
        return _ASKING, filled(words, self.known_data_id(self._node_for(words)))

    def _redirected(self, answer: ReplyError, node: str) -> str:
        """Return the server to ask this time for a slot that is moving, "" if another server has it permanently."""
        word, slot, target = str(answer).split(" ")[:3]
        if word == "ASK":
            return with_host(target, node)
        self._topology.moved(int(slot), target, node)
        return ""

    def _node_for(self, words: Words) -> str:
        """Return the server of a command: that of its first key; any server for a command without a key."""
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
        # Repeated, because the cache may be emptied meanwhile; each time the first unknown script is executed.
        while again := self._again(calls, words, answers):
            for at, answer in zip(again, await self._together(list(again.values())), strict=True):
                answers[at] = answer
        return [translate(each, self._place) if isinstance(each, Exception) else each for each in answers]

    async def apart(self, node: str, calls: Sequence[Call], behind: Sequence[Words]) -> list[Any]:
        words = [script.call(keys, arguments) for script, keys, arguments in calls]
        answers = await self.exchange_apart(node, [*words, *behind])
        if any(isinstance(answer, ReplyError) and answer.word == "NOSCRIPT" for answer in answers):
            # Sent together, because the commands after the scripts wait for all of them.
            words = [script.first_call(each) for (script, _, _), each in zip(calls, words, strict=True)]
            answers = await self.exchange_apart(node, [*words, *behind])
        for answer in answers:
            if isinstance(answer, ReplyError) and answer.word == "MOVED":
                self._redirected(answer, node)
        return [translate(each, self._place) if isinstance(each, Exception) else each for each in answers]

    def _again(self, calls: Sequence[Call], words: Sequence[Words], answers: Sequence[Any]) -> dict[int, Words]:
        """Return the calls to repeat because a server did not know a script: on that server, all from there on."""
        known: dict[str, set[Script]] = {}  # by server: the scripts sent to it from the first unknown one on
        again: dict[int, Words] = {}
        refused = [isinstance(answer, ReplyError) and answer.word == "NOSCRIPT" for answer in answers]
        for at, (script, keys, _) in enumerate(calls) if any(refused) else ():
            if isinstance(answers[at], WarmUnavailable):
                continue
            node = self._topology.node_of(keys[0])
            if refused[at]:
                known.setdefault(node, set())
            if node in known:
                # The first call of each script contains its text; later calls find it loaded.
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
