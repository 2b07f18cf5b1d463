"""Settings of secure aggregation, which server and clients share before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from partita.core.options import MAX_NUMBER, Positive, PositiveShare, Range


@dataclass(frozen=True)
class SecureAggregation:
    """The `[secure_aggregation]` table: the server learns the sum of a round's updates and no single one."""

    bits: Annotated[
        Literal[32, 64], "size of a masked number; 32 halves the bytes and the time, at a coarser resolution"
    ] = 64
    max_value: Annotated[
        Positive, "largest absolute value of a parameter's change, a slot or a loss; a larger one is the client's error"
    ] = 100.0
    threshold: Annotated[
        PositiveShare,
        "share of the clients, and of each client's group (its neighbors and itself), that must stay until the end of "
        "a round; if some may collude, more than (1 + `collusion`) / 2",
    ] = 0.66
    min_clients: Annotated[
        Annotated[int, Range(low=2, high=MAX_NUMBER)], "fewest clients in a sum; with fewer, nothing is unmasked"
    ] = 3
    neighbors: Annotated[
        Annotated[int, Range(low=2, high=MAX_NUMBER)] | Literal["auto"],
        "clients with which each client shares masks; `auto` computes the fewest that `collusion` and `dropouts` allow",
    ] = "auto"
    collusion: Annotated[
        Annotated[float, Range(low=0, below=1)],
        "largest share of a round's other clients that may work together with the server against a client; their noise "
        "does not count, and settings with which they could split a round are refused",
    ] = 0.2
    dropouts: Annotated[
        Annotated[float, Range(low=0, below=1)], "`auto`: largest share of clients that may drop out of a round"
    ] = 0.1
    signers: Annotated[
        Mapping[str, str] | None,
        "on Flower: the public SSH key of each client (Ed25519 or ECDSA P-384, a line such as `ssh-ed25519 AAAA...`), "
        "with which the others check its keys and who is in the sum; left out: nothing is signed, and a server that "
        "does not follow the protocol opens single updates",
    ] = field(default=None, hash=False)
