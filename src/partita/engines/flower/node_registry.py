"""Which node is which client: a node is asked for its name when it is new, and when it left a job unanswered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from flwr.app import Message, MessageType, RecordDict

from partita.engines.flower import messages
from partita.engines.flower.mailbox import Mailbox
from partita.engines.flower.messages import MessageError, printable_line

_log = logging.getLogger(__name__)
SHOWN = 3  # failures of one node that are logged; it may go on failing at every look


class NodeRegistry:
    def __init__(self, post: Mailbox, population: Sequence[str]) -> None:
        self.post, self.population = post, population
        self.said: dict[int, str] = {}  # node -> the client it says it is, first come first
        self.asked: dict[int, str] = {}  # node -> the message that asks it
        self.first: dict[int, str] = {}  # node -> the first client it said it is: it cannot become another
        self.failures: Counter[int] = Counter()  # by node

    def online(self) -> dict[str, int]:
        """The node of each client that is connected. A newcomer is asked now, and is there once it has answered."""
        online = set(self.post.grid.get_node_ids())
        for node in sorted(online - self.said.keys() - self.asked.keys()):
            if message := self.post.send(RecordDict(), node, MessageType.QUERY):
                self.asked[node] = message
        for node, message in list(self.asked.items()):
            if reply := self.post.peek(message):
                del self.asked[node]
                self._note(node, reply)
        nodes: dict[str, int] = {}
        for node, client in self.said.items():
            if node in online and client in self.population and self.first[node] == client:
                nodes.setdefault(client, node)
        return nodes

    def doubt(self, node: int) -> None:
        """It left a job unanswered. Flower takes a dead node to be online for a minute; it must speak first."""
        self.said.pop(node, None)

    def _note(self, node: int, reply: Message | str) -> None:
        try:
            name = _read(reply)
        except MessageError as error:
            self.failures[node] += 1
            if self.failures[node] <= SHOWN:
                _log.warning("node %d cannot say which client it is, and is asked again: %s", node, error)
            return
        first = self.first.setdefault(node, name)
        if first != name:
            _log.warning(
                "node %d said it is '%s' and now '%s'; it is left out",
                node,
                printable_line(first),
                printable_line(name),
            )
        elif name not in self.population:
            _log.warning(
                "node %d says it is '%s', which is not among the clients; it is left out", node, printable_line(name)
            )
        elif name in self.said.values():
            _log.warning("node %d says it is '%s', as another did; while that one is online, it counts", node, name)
        self.said[node] = name


def _read(reply: Message | str) -> str:
    if isinstance(reply, str):
        raise MessageError(reply)
    if not reply.has_content():
        raise MessageError(printable_line(reply.error.reason) if reply.has_error() else "it is empty")
    if refusal := messages.decode_error(reply.content):
        raise MessageError(refusal.reason)
    return messages.decode_name(reply.content)
