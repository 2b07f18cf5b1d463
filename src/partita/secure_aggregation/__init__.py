"""Secure aggregation: the server learns the sum of a round's updates, and no single update.

The protocol is SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova: Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead, 2020), which is that of Bonawitz et al. (2017) on a sparse random graph. Each client adds to
its vector a mask that it shares with each neighbor, and one of its own. Masks that two clients share cancel in the sum.
The rest is recovered from shares: the own masks of those that stayed, and the shared masks of those that dropped out.

Everything here is bytes in and bytes out. Engines carry the messages:

    setup = RoundSetup(settings, round_id, layout, fixed_point)     # the same at all parties
    server, client = SecureServer(setup, verify), SecureClient(setup, name)

    server.add_advertisement(name, client.advertise(sign))  # stage 1, each client
    roster = server.roster()
    server.add_shares(name, client.share_keys(roster, verify))  # stage 2
    server.add_checked(name, client.check(server.inbox(name), sign))  # stage 3
    vector = setup.fixed_point.encode(update, setup.layout)         # after training
    server.add_masked(name, client.mask(server.present(), vector))  # stage 4, server.shared only
    server.add_confirmed(name, client.confirm(server.lists(), sign))  # stage 5, server.survivors only
    server.add_unmasked(name, client.unmask(server.signatures(), verify))  # stage 6
    mean = setup.fixed_point.decode(server.sum(), setup.layout, len(server.survivors))

- `SecureClient.to_bytes` and `from_bytes` carry a client's state from process to process. The state holds secrets: it
  belongs in a file that only its owner can read, and is replaced after each stage, never restored from a copy.
- A client that raises, or does not answer, has dropped out. Its later messages of the round are ignored.
- `ProtocolError` is the error of both sides; `TooFewClients`, a kind of it, means that the threshold is not reached.
- `SecureServer.up` and `down` count the bytes of each stage.
- Random secrets come from the operating system, never from the run's seed. Masks cancel exactly, so the result of a
  round does not depend on them.

What it protects: a server that follows the protocol (semi-honest), together with fewer colluding clients than the
threshold, learns nothing beyond the sum, the sum of the weights and the mean loss. The sum itself may reveal something;
differential privacy limits that.

Against a server that does not follow the protocol, clients need long-term keys that they exchanged before
(`signatures.py`). With `sign` and `verify`, the server can neither invent clients nor put its own keys in place of
theirs, and clients unmask a sum only if enough of them signed that they are in the same one. Then every sum that it can
open holds at least as many updates as the threshold, less those of colluding clients (`neighbors.py` says how many it
withstands, and why). Without signatures, such a server opens single updates. In any case it can name a client as
dropped out and so leave it out of the sum. Nobody checks that a client's vector is an honest update: a client can spoil
the sum, within the range of the fixed-point format.
"""
