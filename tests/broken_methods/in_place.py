"""A server that changes its tensors in place."""

from partita import Method, ServerRule
from partita.core.server_rule import Server
from partita.core.update import Aggregate


class InPlace(ServerRule):
    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        for name, value in aggregate.delta.items():
            server.params[name].add_(value)
        return server


def broken() -> Method:
    return Method("broken", server_rule=InPlace())
