"""A server that changes its tensors in place."""

from partita import Aggregate, Method, Server, ServerRule


class InPlace(ServerRule):
    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        for name, value in aggregate.delta.items():
            server.params[name].add_(value)
        return server


def broken() -> Method:
    return Method("broken", server_rule=InPlace())
