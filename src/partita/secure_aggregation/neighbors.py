"""Which clients share masks with which: the random k-regular graph of SecAgg+ (Bell et al., 2020).

The clients are placed on a circle in a random order, and each is a neighbor of the k / 2 next ones on both sides (a
Harary graph). For few clients, all are neighbors of all, as in Bonawitz et al. (2017).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation.encoding import TooFewClients

SECURITY_BITS = 40  # a random graph is unsafe with a probability of at most 2**-40
SUCCESS_BITS = 30  # and a round fails, with no more dropouts than expected, with at most 2**-30


@dataclass(frozen=True)
class Withstood:
    """How many clients of a round may work with the server against the others.

    Attributes:
        obeying: With a server that follows the protocol, in the group of any client.
        lying: With a server that sends what it likes, in the whole round; None if it opens updates without any help.
    """

    obeying: int
    lying: int | None


def count_neighbors(settings: SecureAggregation, clients: int) -> int:
    """Return the number of neighbors of each client: an even number, or all other clients.

    With `neighbors = "auto"` it is about the fewest for which these union bounds over all clients hold, where at most
    the share `collusion` of the clients colludes, and at most the share `dropouts` drops out at random:

    - no server can split the round, see `_inseparable`;
    - the other clients that stay form a connected graph, as in SecAgg+, except with a probability of at most 2**-40: it
      can only fall apart if k / 2 clients in a row collude or drop out;
    - enough neighbors of every client stay, except with a probability of at most 2**-30.

    If no number is enough, all are neighbors of all.

    Args:
        settings: The settings of the run.
        clients: The number of clients in the round.
    """
    everyone = max(0, clients - 1)
    if settings.neighbors != "auto":
        wanted = settings.neighbors + settings.neighbors % 2
        return min(wanted, everyone)
    return _fewest(settings, clients)


def colluding_clients(settings: SecureAggregation, clients: int) -> int:
    """Return how many clients of a round may work with the server: the share `collusion` of the others of a client."""
    return math.ceil(settings.collusion * max(0, clients - 1) - 1e-9)  # 0.1 * 50 is 5, although not in floating point


def withstood(settings: SecureAggregation, clients: int) -> Withstood:
    """Return how many colluding clients a round of so many withstands."""
    group = group_threshold(settings, clients)
    if settings.signers is None:
        return Withstood(group - 1, None)
    neighbors, most = count_neighbors(settings, clients), 2 * threshold_of(settings, clients) - clients
    found = bisect_left(range(most), True, key=lambda many: not _inseparable(settings, clients, neighbors, many))
    return Withstood(group - 1, found - 1)


def describe(settings: SecureAggregation, clients: int) -> str:
    """Say with how many clients on its side a server opens no smaller sum, for people who decide about a run."""
    found, neighbors = withstood(settings, clients), count_neighbors(settings, clients)
    group = clients if neighbors >= clients - 1 else f"any group of {neighbors + 1}"
    obeying = f"with up to {found.obeying} of {group} clients on its side if it follows the protocol"
    if found.lying is None:
        return f"{obeying}; not protected if it does not, because clients do not sign (secure_aggregation.signers)"
    return f"{obeying}, and with up to {found.lying} of {clients} if it does not"


@lru_cache(maxsize=64)
def _fewest(settings: SecureAggregation, clients: int) -> int:
    everyone, colluding = max(0, clients - 1), colluding_clients(settings, clients)
    even = range(2, everyone, 2)

    def enough(neighbors: int) -> bool:
        return _inseparable(settings, clients, neighbors, colluding) and _enough_stay(settings, clients, neighbors)

    return even[bisect_left(even, True, key=enough)] if even and enough(even[-1]) else everyone


def _enough_stay(settings: SecureAggregation, clients: int, neighbors: int) -> bool:
    from scipy.stats import hypergeom  # slow to import, and most runs have no secure aggregation

    others, dropping = clients - 1, math.ceil(settings.dropouts * clients)
    threshold, gone = _of_group(settings, clients, neighbors), colluding_clients(settings, clients) + dropping
    apart = clients * min(1.0, gone / clients) ** (neighbors // 2)
    failed = clients * hypergeom.cdf(threshold - 1, others, others - min(dropping, others), neighbors)
    return bool(apart <= 2.0**-SECURITY_BITS and failed <= 2.0**-SUCCESS_BITS)


def _inseparable(settings: SecureAggregation, clients: int, neighbors: int, colluding: int) -> bool:
    """Whether a server that sends what it likes opens no sum of fewer than T - c honest clients' updates.

    Of n clients, c collude. T is the threshold of the round, t that of a group of g = k + 1. Three conditions suffice:

    - 2 T > n + c: no two views of a round are both confirmed by T signatures, because colluding clients sign both and
      honest ones sign one. If k = n - 1, so that t = T and g = n, this is all.
    - 2 t > g + c_g, with c_g colluding clients in a group: an honest client that did not sign the view is opened only
      with the help of t - c_g that did, and masked with t - c_g honest ones. The two sets meet. So a client that signed
      is in the sum too.
    - t > k / 2 + 1 + c_a, with c_a colluding clients among k / 2 in a row. A client that signed saw all its neighbors,
      so all of them that stayed are in a sum with it. Where a sum ends on the circle, the k / 2 next ones have not
      signed. If one of them is honest and in the sum, at most k / 2 + 1 - c' of its group signed, where c' of the rest
      of its group collude, and c' + c_a help at most: too few. If none is, its neighbor that signed saw at most
      k / 2 + 1 + c_a of its own group stay, and refused.

    So the clients that signed, at least T - c honest ones, are all in every sum. In a random graph, c_g and c_a are
    hypergeometric, and each bound fails with a probability of at most 2**-40 in any group.
    """
    if 2 * threshold_of(settings, clients) <= clients + colluding:
        return False
    if neighbors >= clients - 1:
        return True
    from scipy.stats import hypergeom  # slow to import, and most runs have no secure aggregation

    threshold, others, half = _of_group(settings, clients, neighbors), clients - 1, neighbors // 2
    in_group = hypergeom.sf(2 * threshold - neighbors - 2, others, colluding, neighbors)
    in_a_row = hypergeom.sf(threshold - half - 2, others, colluding, half)
    return bool(clients * max(in_group, in_a_row) <= 2.0**-SECURITY_BITS)


def threshold_of(settings: SecureAggregation, clients: int) -> int:
    """Return how many clients of a round must stay until the end: at least `min_clients`, and more than half."""
    return max(_share(settings, clients), settings.min_clients)


def group_threshold(settings: SecureAggregation, clients: int) -> int:
    """Return how many clients of a group, a client and its neighbors, must stay until the end of a round."""
    return _of_group(settings, clients, count_neighbors(settings, clients))


def _of_group(settings: SecureAggregation, clients: int, neighbors: int) -> int:
    return threshold_of(settings, clients) if neighbors >= clients - 1 else _share(settings, neighbors + 1)


def _share(settings: SecureAggregation, clients: int) -> int:
    share = math.ceil(settings.threshold * clients - 1e-9)  # 0.66 * 50 is 33, although not in floating point
    return max(share, clients // 2 + 1)


def check_size(settings: SecureAggregation, clients: int) -> None:
    """Check that a round of this many clients is possible, and that a server cannot split it.

    The second holds with or without signed keys, so that a run that was tried on one machine works at sites.

    Raises:
        TooFewClients: If it is not.
    """
    needed, neighbors = threshold_of(settings, clients), count_neighbors(settings, clients)
    if needed > clients:
        raise TooFewClients(
            f"a round has {clients} clients, but secure_aggregation.min_clients is {needed}; raise federation.cohort, "
            "or lower min_clients"
        )
    if not _inseparable(settings, clients, neighbors, colluding := colluding_clients(settings, clients)):
        sparse = f" and {group_threshold(settings, clients)} of each {neighbors + 1}" if neighbors < clients - 1 else ""
        more = "secure_aggregation.threshold or neighbors" if sparse else "secure_aggregation.threshold"
        raise TooFewClients(
            f"secure_aggregation: a server could split a round of {clients} clients if {needed} must stay{sparse}, and "
            f"{colluding} may collude; raise {more}, or lower secure_aggregation.collusion"
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
