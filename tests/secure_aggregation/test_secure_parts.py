"""The parts of the protocol: fixed point, secret sharing, graph, keys and masks."""

from __future__ import annotations

import math
import secrets
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch
from scipy.stats import hypergeom
from secure_fixtures import SORTED, names, random_update

from partita.core.secure_settings import SecureAggregation
from partita.secure_aggregation import curve, key_agreement
from partita.secure_aggregation.encoding import ProtocolError, TooFewClients
from partita.secure_aggregation.fixed_point import FixedPoint, Layout, OutOfRange, cast_like
from partita.secure_aggregation.masks import add_mask
from partita.secure_aggregation.neighbors import (
    SECURITY_BITS,
    Withstood,
    check_size,
    colluding_clients,
    count_neighbors,
    describe,
    neighborhoods,
    threshold_of,
    withstood,
)
from partita.secure_aggregation.secret_sharing import draw, recover, value


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [1, 3, 7, 1000])
@pytest.mark.parametrize("max_weight", [1.0, 60.0])
@pytest.mark.parametrize("max_value", [0.01, 3.0, 100.0])
def test_largest_values_of_all_clients_do_not_overflow(
    bits: int, clients: int, max_weight: float, max_value: float
) -> None:
    fixed = FixedPoint(bits, clients, max_weight, max_value)  # type: ignore[arg-type]
    layout = Layout((("delta", "a", (2,)),), True)
    update = replace(
        random_update("c", 0, max_weight),
        delta={"a": torch.tensor([max_value, -max_value], dtype=torch.float64)},
        slots={},
        loss=max_value,
    )
    one = fixed.encode(update, layout)
    assert update.delta["a"].tolist() == [max_value, -max_value]  # not changed in place
    total = torch.stack([one] * clients).sum(0, dtype=fixed.dtype)
    mean = fixed.decode(total, layout, clients)
    assert mean.weight == pytest.approx(clients * max_weight)
    assert torch.allclose(mean.aggregate.delta["a"], update.delta["a"], atol=mean.resolution, rtol=1e-15)
    # The exponent is the largest one: with the next, the sum of so many clients could overflow.
    largest, half = Fraction(max_weight) * Fraction(max(1.0, max_value)), Fraction(1, 2)
    assert clients * (largest * Fraction(fixed.scale) + half) <= 2 ** (bits - 1) - 1
    assert clients * (largest * 2 * Fraction(fixed.scale) + half) > 2 ** (bits - 1) - 1


def test_values_out_of_range_name_the_parameter_its_value_and_the_key() -> None:
    fixed = FixedPoint(64, 3, 50.0, 2.0)
    update = random_update("c", 0)
    update = replace(update, delta={name: value.clamp(-1, 1) for name, value in update.delta.items()}, loss=1.0)
    update = replace(update, slots={"control": {"b": update.slots["control"]["b"].clamp(-1, 1)}})
    fixed.encode(update, SORTED)
    spoiled = {**update.delta, "a": update.delta["a"].clone().fill_(2.5)}
    with pytest.raises(OutOfRange, match=r"'a' of its delta has the value 2\.5.*secure_aggregation\.max_value"):
        fixed.encode(replace(update, delta=spoiled), SORTED)
    for bad in (float("nan"), float("inf")):
        spoiled = {**update.delta, "a": update.delta["a"].clone().fill_(bad)}
        with pytest.raises(OutOfRange, match=r"'a' of its delta has the value (nan|inf)"):
            fixed.encode(replace(update, delta=spoiled), SORTED)
    with pytest.raises(OutOfRange, match="its loss has the value 9"):
        fixed.encode(replace(update, loss=9.0), SORTED)
    for weight in (51.0, -1.0, float("nan")):
        with pytest.raises(OutOfRange, match="its weight is"):
            fixed.encode(replace(update, weight=weight), SORTED)
    with pytest.raises(ProtocolError, match="other names or shapes"):
        fixed.encode(replace(update, slots={}), SORTED)
    with pytest.raises(ProtocolError, match="reports no loss"):
        fixed.encode(replace(update, loss=None), SORTED)


def test_formats_without_room_are_refused_with_the_remedy() -> None:
    with pytest.raises(ProtocolError, match=r"50 clients with up to 1e\+07 examples.*bits = 64"):
        FixedPoint(32, 50, 10_000_000, 100.0)
    with pytest.raises(ProtocolError, match=r"lower secure_aggregation\.max_value"):
        FixedPoint(64, 10**9, 10_000_000, 10_000.0)


def test_impossible_sum_of_weights_is_an_error() -> None:
    fixed = FixedPoint(64, 3, 50.0, 2.0)
    for weight in (0, -5, 2**62):
        vector = torch.zeros(SORTED.length, dtype=torch.int64)
        vector[0] = weight
        with pytest.raises(ProtocolError, match="impossible"):
            fixed.decode(vector, SORTED, 3)


def test_mean_is_cast_to_the_types_of_a_mean_in_clear() -> None:
    fixed = FixedPoint(64, 1, 50.0, 100.0)
    mean = fixed.decode(fixed.encode(random_update("c", 1), SORTED), SORTED, 1).aggregate
    like = {"a": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.float64)}
    cast = cast_like(mean, like)
    assert cast.delta["a"].dtype == torch.float32
    assert cast.slots["control"]["b"].dtype == torch.float64


def shares_of(secret: int, count: int, threshold: int) -> dict[int, bytes]:
    terms = draw(secret, threshold)
    return {place: value(terms, place).to_bytes(32, "big") for place in range(1, count + 1)}


@pytest.mark.parametrize("secret", [0, curve.ORDER - 1, 12345])
def test_any_threshold_shares_give_the_secret(secret: int) -> None:
    shares = shares_of(secret, 5, 3)
    for chosen in combinations(shares, 3):
        assert recover({place: shares[place] for place in chosen}, 3) == secret.to_bytes(32, "big")
    with pytest.raises(ProtocolError, match="2 shares of a secret arrived, and 3 are needed"):
        recover({1: shares[1], 2: shares[2]}, 3)


def test_fewer_shares_fit_every_secret() -> None:
    """Perfect secrecy: for any two shares and any secret, there is a polynomial through all three points."""
    first, second = (int.from_bytes(share, "big") for share in list(shares_of(12345, 5, 3).values())[:2])
    for other in (0, 7):
        # The value at 3 that, together with the two shares, gives the other secret.
        third = (other - 3 * first + 3 * second) % curve.ORDER
        given = {1: first, 2: second, 3: third}
        assert (
            int.from_bytes(recover({at: share.to_bytes(32, "big") for at, share in given.items()}, 3), "big") == other
        )


@pytest.mark.slow
def test_sums_of_points_are_those_of_the_library() -> None:
    numbers = [1, 2, curve.ORDER - 1, *(secrets.randbelow(curve.ORDER) for _ in range(2))]
    for one, other in product(numbers, numbers):
        points = [curve.public_point(number.to_bytes(32, "big")) for number in (one, other)]
        a, b = secrets.randbits(128), secrets.randbits(128)
        total = (a * one + b * other) % curve.ORDER
        assert curve.is_sum(total, [(a, points[0]), (b, points[1])])
        assert not curve.is_sum(total + 1, [(a, points[0]), (b, points[1])])
        assert curve.is_sum((one + other) % curve.ORDER, [(1, points[0]), (1, points[1])]), "double, and opposite, too"
    for bad in (bytes(33), b"\x02" + b"\xff" * 32, b"\x02" + bytes(31) + b"\x01", b""):
        with pytest.raises(ProtocolError, match="not a point of P-256"):
            curve.check_point(bad)
    for number in (bytes(32), curve.ORDER.to_bytes(32, "big")):
        with pytest.raises(ProtocolError, match="not one of P-256"):
            curve.public_point(number)


def test_keys_from_numbers_are_symmetric_and_bound_to_round_and_purpose() -> None:
    a, b = curve.new_number(), curve.new_number()
    key = curve.agree_on(a, curve.public_point(b), b"round 1", "mask")
    assert key == curve.agree_on(b, curve.public_point(a), b"round 1", "mask")
    assert key != curve.agree_on(a, curve.public_point(b), b"round 2", "mask")
    assert key != curve.agree_on(a, curve.public_point(b), b"round 1", "shares")


@pytest.mark.parametrize(("count", "neighbors"), [(7, 4), (20, 6), (21, 8), (5, 4), (3, 2), (2, 1)])
def test_graph_is_regular_symmetric_and_random(count: int, neighbors: int) -> None:
    graph = neighborhoods(names(count), neighbors, b"seed")
    assert graph == neighborhoods(names(count)[::-1], neighbors, b"seed")
    for name, others in graph.items():
        assert len(set(others)) == len(others) == neighbors
        assert name not in others
        assert all(name in graph[other] for other in others)
    if neighbors < count - 1:
        assert graph != neighborhoods(names(count), neighbors, b"other seed")


def test_number_of_neighbors_grows_slowly_and_is_all_for_few_clients() -> None:
    """It grows with the number of clients that may collude, and falls with the threshold."""
    settings = SecureAggregation(threshold=0.75)
    assert [count_neighbors(settings, count) for count in (2, 3, 10, 50)] == [1, 2, 9, 49]
    by_size = {count: count_neighbors(settings, count) for count in (1000, 10_000, 100_000)}
    assert all(neighbors % 2 == 0 and neighbors < 400 for neighbors in by_size.values()), by_size
    assert by_size[1000] <= by_size[10_000] <= by_size[100_000] < 2 * by_size[1000]
    assert [count_neighbors(SecureAggregation(), count) for count in (500, 10_000)] == [499, 1566]
    assert count_neighbors(replace(settings, collusion=0.3), 1000) > count_neighbors(settings, 1000)
    assert count_neighbors(replace(settings, collusion=0.1, neighbors=65), 100) == 66  # even: as many on both sides
    # The bounds by hand: on colluding clients in a group, in half of its neighbors, and on falling apart.
    for clients, neighbors in by_size.items():
        threshold, colluding = math.ceil(0.75 * (neighbors + 1)), math.ceil(0.2 * (clients - 1))
        drawn = [(neighbors, 2 * threshold - neighbors - 2), (neighbors // 2, threshold - neighbors // 2 - 2)]
        for count, most in drawn:
            assert clients * hypergeom.sf(most, clients - 1, colluding, count) <= 2.0**-SECURITY_BITS
        assert clients * 0.3 ** (neighbors // 2) <= 2.0**-SECURITY_BITS


def test_threshold_is_the_share_of_the_group_and_more_than_half() -> None:
    settings = SecureAggregation()
    assert [threshold_of(settings, group) for group in (3, 10, 50)] == [3, 7, 33]
    assert threshold_of(replace(settings, min_clients=2), 3) == 2
    assert threshold_of(replace(settings, threshold=0.1), 50) == 26
    assert threshold_of(replace(settings, threshold=1.0), 50) == 50


def test_rounds_of_too_few_clients_are_refused() -> None:
    check_size(SecureAggregation(), 3)
    with pytest.raises(TooFewClients, match=r"a round has 2 clients.*min_clients is 3"):
        check_size(SecureAggregation(), 2)
    with pytest.raises(TooFewClients, match="of 100 clients if 66 must stay and 4 of each 5, and 20 may"):
        check_size(SecureAggregation(neighbors=4, min_clients=6), 100)


def test_settings_with_which_a_server_could_split_a_round_are_refused() -> None:
    for clients in range(3, 300):
        check_size(SecureAggregation(), clients)
        check_size(SecureAggregation(threshold=0.5, collusion=0.0), clients)
    with pytest.raises(TooFewClients, match="10 clients if 6 must stay, and 2 may collude; raise"):
        check_size(SecureAggregation(threshold=0.6), 10)
    check_size(SecureAggregation(threshold=0.6, collusion=0.1), 10)
    with pytest.raises(TooFewClients, match=r"4 of each 7, and 0 may collude; raise .*threshold or neighbors"):
        check_size(SecureAggregation(threshold=0.5, collusion=0.0, neighbors=6), 100)


def test_number_of_colluding_clients_that_a_round_withstands() -> None:
    """At least those that may collude, and as many as the inequality allows; nothing is sure if keys are not signed."""
    signed = SecureAggregation(signers={})
    found = [withstood(signed, clients) for clients in (3, 10, 50)]
    assert found == [Withstood(2, 2), Withstood(6, 3), Withstood(32, 15)]
    assert withstood(SecureAggregation(), 10) == Withstood(6, None)
    assert describe(signed, 10).endswith(
        "6 of 10 clients on its side if it follows the protocol, and with up to 3 of 10 if it does not"
    )
    assert "not protected if it does not, because clients do not sign" in describe(SecureAggregation(), 10)
    assert "any group of 841" in describe(signed, 1000)
    for clients in (3, 6, 10, 100, 1000):
        most = withstood(signed, clients).lying
        assert most is not None
        assert most >= colluding_clients(signed, clients)
        if clients <= 100:  # all are neighbors of all
            needed = threshold_of(signed, clients)
            assert clients + most < 2 * needed <= clients + most + 1


def test_key_agreement_is_symmetric_and_bound_to_round_and_purpose() -> None:
    a, b = key_agreement.new_secret(), key_agreement.new_secret()
    public_a, public_b = key_agreement.public_key(a), key_agreement.public_key(b)
    key = key_agreement.agree(a, public_b, b"round 1", "mask")
    assert key == key_agreement.agree(b, public_a, b"round 1", "mask")
    assert key != key_agreement.agree(a, public_b, b"round 2", "mask")
    assert key != key_agreement.agree(a, public_b, b"round 1", "shares")
    sealed = key_agreement.encrypt(key, b"text", b"about")
    assert key_agreement.decrypt(key, sealed, b"about") == b"text"
    for wrong in (
        (key, sealed, b"other"),
        (bytes(32), sealed, b"about"),
        (key, sealed[:-1], b"about"),
        (key, b"", b""),
    ):
        with pytest.raises(ProtocolError, match="cannot be decrypted"):
            key_agreement.decrypt(*wrong)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_masks_cancel_and_cross_pieces(dtype: torch.dtype) -> None:
    vector = torch.arange(200_000, dtype=dtype)
    masked = vector.clone()
    add_mask(masked, bytes(range(32)), 1)
    assert float((masked == vector).double().mean()) < 0.001
    add_mask(masked, bytes(range(32)), -1)
    assert torch.equal(masked, vector)


def test_mask_is_the_stream_of_the_cipher() -> None:
    from partita.core.chacha import _cipher_stream

    masked = torch.zeros(100_000, dtype=torch.int64)
    add_mask(masked, bytes(range(32)), 1)
    assert masked.numpy().tobytes() == _cipher_stream(bytes(range(32)), 12_500)


def test_error_names_the_extra_when_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    key_agreement.need.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    try:
        with pytest.raises(ProtocolError, match=r"partita\[privacy\]"):
            key_agreement.public_key(bytes(32))
    finally:
        key_agreement.need.cache_clear()
