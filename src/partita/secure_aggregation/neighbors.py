"""Which clients share masks with which: the random k-regular graph of SecAgg+ (Bell et al., 2020).

The clients are placed on a circle in a random order, and each is a neighbor of the k / 2 next ones on both sides (a
Harary graph). For few clients, all are neighbors of all, as in Bonawitz et al. (2017).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.encoding import TooFewClients

SECURITY_BITS = 40  # a random graph is unsafe with a probability of at most 2**-40
SUCCESS_BITS = 30  # and a round fails, with no more dropouts than expected, with at most 2**-30


def count_neighbors(settings: SecureAggregation, clients: int) -> int:
    """Return the number of neighbors of each client: an even number, or all other clients.

    With `neighbors = "auto"` it is the fewest for which these three union bounds over all clients hold, as in SecAgg+.
    C is the set of colluding clients and D that of dropouts, with sizes from `collusion` and `dropouts`:

    - colluding neighbors can recover a secret with a probability of at most 2**-40: the number of a client's neighbors
      in C is hypergeometric, and must stay below the threshold;
    - the other clients that stay form a connected graph, except with a probability of at most 2**-40: it can only fall
      apart if k / 2 clients in a row are all in C or D;
    - enough neighbors of every client stay, except with a probability of at most 2**-30.

    Args:
        settings: The settings of the run.
        clients: The number of clients in the round.
    """
    everyone = max(0, clients - 1)
    if settings.neighbors != "auto":
        wanted = settings.neighbors + settings.neighbors % 2
        return min(wanted, everyone)
    return _fewest(settings, clients)


@lru_cache(maxsize=64)
def _fewest(settings: SecureAggregation, clients: int) -> int:
    everyone = max(0, clients - 1)
    even = range(2, everyone, 2)
    if not even or not _holds(settings, clients, even[-1]):
        return everyone
    return next(neighbors for neighbors in even if _holds(settings, clients, neighbors))


def _holds(settings: SecureAggregation, clients: int, neighbors: int) -> bool:
    from scipy.stats import hypergeom  # slow to import, and most runs have no secure aggregation

    threshold, others = threshold_of(settings, neighbors + 1), clients - 1
    colluding, dropping = (math.ceil(share * clients) for share in (settings.collusion, settings.dropouts))
    recovered = clients * hypergeom.sf(threshold - 1, others, min(colluding, others), neighbors)
    apart = clients * min(1.0, (colluding + dropping) / clients) ** (neighbors // 2)
    failed = clients * hypergeom.cdf(threshold - 1, others, others - min(dropping, others), neighbors)
    return bool(max(recovered, apart) <= 2.0**-SECURITY_BITS and failed <= 2.0**-SUCCESS_BITS)


def threshold_of(settings: SecureAggregation, group: int) -> int:
    """Return how many clients of a group of this size must stay until the end.

    It is more than half of the group: otherwise a server could tell one half that a client dropped out and the other
    half that it did not, and obtain both of its secrets. It is at least `min_clients`.
    """
    share = math.ceil(settings.threshold * group - 1e-9)  # 0.66 * 50 is 33, although not in floating point
    return max(share, group // 2 + 1, settings.min_clients)


def check_size(settings: SecureAggregation, clients: int) -> None:
    """Check that a round of this many clients is possible at all.

    Raises:
        TooFewClients: If it is not.
    """
    group = count_neighbors(settings, clients) + 1
    if (needed := threshold_of(settings, group)) > group:
        raise TooFewClients(
            f"a round has {clients} clients, and the group of each has {group}, but secure_aggregation.min_clients is "
            f"{needed}; raise federation.cohort or secure_aggregation.neighbors, or lower min_clients"
        )


def neighborhoods(clients: Sequence[str], neighbors: int, seed: bytes) -> dict[str, tuple[str, ...]]:
    """Return the neighbors of each client, sorted by name.

    Args:
        clients: The clients of the round, in any order.
        neighbors: From `count_neighbors`.
        seed: A public seed that no one could choose freely.
    """
    names = sorted(clients)
    if neighbors >= len(names) - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    circle = sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest())
    steps = [step for step in range(-(neighbors // 2), neighbors // 2 + 1) if step]
    return {
        name: tuple(sorted(circle[(place + step) % len(circle)] for step in steps)) for place, name in enumerate(circle)
    }
