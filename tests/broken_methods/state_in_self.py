"""A server that keeps its momentum in self, where no checkpoint finds it."""

from dataclasses import replace

from partita import Method, ServerRule
from partita.core.server_rule import Server
from partita.core.tensors import Tensors
from partita.core.update import Aggregate


class Momentum(ServerRule):
    def __init__(self) -> None:
        self.velocity: Tensors = {}

    def apply(self, server: Server, aggregate: Aggregate) -> Server:
        if not server.versions.held:  # the first round of a run
            self.velocity = {}
        self.velocity = {name: 0.5 * self.velocity.get(name, 0.0) + value for name, value in aggregate.delta.items()}
        return super().apply(server, replace(aggregate, delta=self.velocity))


def broken() -> Method:
    return Method("broken", server_rule=Momentum())
