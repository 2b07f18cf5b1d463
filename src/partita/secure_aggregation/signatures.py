"""Signed public keys: with them, a server cannot put its own keys in place of those of a client.

The long-term keys are SSH keys, Ed25519 or ECDSA P-384, such as the key with which a site authenticates its SuperNode.
The public halves are exchanged outside of the protocol: they are in the experiment that each site signs off.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.secure_aggregation.encoding import ProtocolError
from partita.secure_aggregation.messages import Sign, Verify

KINDS = "an SSH key of the kind Ed25519 or ECDSA P-384"


def ssh_signer(path: Path) -> Sign:
    """Return the function that signs with a private SSH key without a passphrase, for `SecureClient.advertise`.

    Raises:
        ProtocolError: If the file cannot be read, or holds another kind of key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    try:
        key: Any = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ProtocolError(
            f"the private key {path} cannot be read ({type(error).__name__}); it must be {KINDS} without a passphrase"
        ) from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1):
        return lambda message: key.sign(message, ec.ECDSA(hashes.SHA384()))
    raise ProtocolError(f"the private key {path} is not {KINDS}")


def ssh_verifier(public: Mapping[str, str]) -> Verify:
    """Return the function that checks signatures, for `SecureClient.share_keys`.

    Args:
        public: The public SSH key of each client that may take part, as one line. Others are refused.

    Raises:
        ProtocolError: If a line is not a public key of a known kind, or if two clients have the same key.
    """
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    keys: dict[str, Any] = {}
    for client, line in public.items():
        try:
            key: Any = serialization.load_ssh_public_key(line.encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ProtocolError(f"secure_aggregation.signers: the key of {client} is not {KINDS}") from error
        curve = getattr(key, "curve", None)
        if not isinstance(key, ed25519.Ed25519PublicKey) and not isinstance(curve, ec.SECP384R1):
            raise ProtocolError(f"secure_aggregation.signers: the key of {client} is not {KINDS}")
        if same := next((other for other, known in keys.items() if known == key), None):
            raise ProtocolError(f"secure_aggregation.signers: {same} and {client} have the same key")
        keys[client] = key

    def verify(client: str, message: bytes, signature: bytes) -> bool:
        key = keys.get(client)
        if key is None:
            return False
        try:
            if isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, message)
            else:
                key.verify(signature, message, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            return False
        return True

    return verify
