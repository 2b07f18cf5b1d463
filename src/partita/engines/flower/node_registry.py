"""Maps Flower nodes to clients. A node is asked for its name when it is new and after an unanswered job.

A node whose key is registered under a name (`flwr supernode register KEY --name north`) can only be that client, and no
other node can. Without registered names, as on one machine, a node is the client that it first says it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from flwr.app import Message, MessageType, RecordDict

from partita.engines.flower import messages
from partita.engines.flower.mailbox import Mailbox
from partita.engines.flower.messages import MessageError, printable_line

_log = logging.getLogger(__name__)
MAX_LOGGED = 3  # failures per node that are logged; a node may fail at every poll


class NodeRegistry:
    """The nodes that are online and the clients they claim to be.

    Args:
        mailbox: The mailbox.
        population: The names of all clients.
    """

    def __init__(self, mailbox: Mailbox, population: Sequence[str]) -> None:
        self.mailbox, self.population = mailbox, population
        self.claims: dict[int, str] = {}  # node -> the client it claims to be, in the order of the claims
        self.pending: dict[int, str] = {}  # node -> id of the pending message that asks for its name
        self.first_claims: dict[int, str] = {}  # node -> the first client it claimed to be, which it cannot change
        self.registered: dict[int, str] = {}  # node -> the name under which its key is registered
        self.failures: Counter[int] = Counter()  # node -> failed answers

    def online(self) -> dict[str, int]:
        """Return the node of each connected client. New nodes are asked now and count once they have answered."""
        infos = {info.node_id: info.name for info in self.mailbox.grid.get_nodes()}
        online = infos.keys()
        self.registered |= {node: name for node, name in infos.items() if name}
        for node in sorted(online - self.claims.keys() - self.pending.keys()):
            if message := self.mailbox.send(RecordDict(), node, MessageType.QUERY):
                self.pending[node] = message
        for node, message in list(self.pending.items()):
            if reply := self.mailbox.peek(message):
                del self.pending[node]
                self._record(node, reply)
        nodes: dict[str, int] = {}
        for node, client in self.claims.items():
            if node in online and client in self.population and self._may_be(node, client):
                nodes.setdefault(client, node)
        return nodes

    def _may_be(self, node: int, client: str) -> bool:
        if name := self.registered.get(node):
            return client == name
        return client == self.first_claims[node] and client not in self.registered.values()

    def forget(self, node: int) -> None:
        """Ask a node for its name again after an unanswered job: Flower reports a dead node as online for a minute."""
        self.claims.pop(node, None)

    def _record(self, node: int, reply: Message | str) -> None:
        try:
            name = _name_in(reply)
        except MessageError as error:
            self.failures[node] += 1
            if self.failures[node] <= MAX_LOGGED:
                _log.warning("node %d did not report its client name and is asked again: %s", node, error)
            return
        first = self.first_claims.setdefault(node, name)
        if first != name:
            _log.warning(
                "node %d said it is '%s' and now '%s'; it is ignored",
                node,
                printable_line(first),
                printable_line(name),
            )
        elif name not in self.population:
            _log.warning(
                "node %d says it is '%s', which is not a client of this run; it is ignored", node, printable_line(name)
            )
        elif not self._may_be(node, name):
            _log.warning(
                "node %d says it is '%s', but %s; it is refused",
                node,
                name,
                f"its key is registered as '{printable_line(self.registered[node])}'"
                if node in self.registered
                else "another key is registered under that name",
            )
        elif name in self.claims.values():
            _log.warning(
                "node %d says it is '%s', like another node; the other one is used while it is online", node, name
            )
        self.claims[node] = name


def _name_in(reply: Message | str) -> str:
    if isinstance(reply, str):
        raise MessageError(reply)
    if not reply.has_content():
        raise MessageError(printable_line(reply.error.reason) if reply.has_error() else "it is empty")
    if refusal := messages.decode_error(reply.content):
        raise MessageError(refusal.reason)
    return messages.decode_name(reply.content)
