"""Transforms: what happens to an update between client and server."""

from __future__ import annotations

from partita.core.plan import NO_NAMES
from partita.core.rng import Key
from partita.core.tensors import Names, Slots
from partita.core.update import Aggregate, Update


class UpdateTransform:
    """What happens to an update between client and server.

    With several transforms, clients call `encode` in the order of `Method.transforms`; the server decodes in reverse.

    Attributes:
        slots: The slots that `encode` may remember. They stay with the client: no message contains them. No other
            transform or client rule of the method can have them.
        hides: Whether the transform protects whole clients. If True, no single client's update norm is recorded, and
            all clients of a round must send the same names.
    """

    slots: Names = NO_NAMES
    hides = False

    def encode(self, update: Update, memory: Slots, key: Key) -> tuple[Update, Slots]:
        """Encode an update at the client, after all `ClientRule.finish` hooks.

        The client stores what it remembers together with its other memory, before the server has seen the update. It
        does not learn whether the update was used: if it is lost or rejected, its content is lost and the memory stays.
        A client that does not reach `encode` in a round (not sampled, dropped out, failed) keeps its memory as it was.

        Dry runs also call it, with a delta of zeros and no memory. So names, shapes and types of what it sends should
        depend on those of the update only.

        Args:
            update: The update. `delta` and `slots` are restricted to the narrowed `plan.up`.
            memory: The slots that this transform remembers, with every name that it has returned for this client so
                far. A slot or name that it has never returned is missing, so it is empty in the client's first round.
            key: The random key of this transform, client and round.

        Returns:
            `(update to send, slots to remember)`. The delta and slots to send may have any tensor type that the wire
            format supports, and there may be additional slots. Slots to remember may use only `self.slots`; any other
            slot is an error. They are restricted to `plan.up` and merged by name into the memory; names that are not
            returned keep their value.
        """
        return update, {}

    def decode_update(self, update: Update) -> Update:
        """Decode one update at the server, as it arrives.

        The input comes from a client and can be malformed. Any exception makes the server reject the update.

        Returns:
            The decoded update. It may contain only names in `plan.up`, with the shapes, types and device of the
            server's parameters, and only the slots of the method's client rules. Anything else is rejected.
        """
        return update

    def decode_aggregate(self, aggregate: Aggregate, key: Key) -> Aggregate:
        """Decode the aggregate at the server, between `ServerRule.reduce` and `ServerRule.apply`.

        Args:
            aggregate: The result of `ServerRule.reduce`, as decoded by the later transforms.
            key: The server's random key of this transform and round; a secret one in a run that has a secret.
        """
        return aggregate
