"""Keys of one round: X25519 key pairs, HKDF-SHA256 keys that two clients share, ChaCha20-Poly1305 for their messages.

Every derived key depends on the context of the round, so a message of another round, run or setting cannot be used.
"""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any

from partita.secure_aggregation.encoding import ProtocolError

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


def new_secret() -> bytes:
    """Draw 32 bytes from the operating system: a private X25519 key, or the seed of a mask."""
    return secrets.token_bytes(KEY_BYTES)


def public_key(secret: bytes) -> bytes:
    """Return the public key of a private X25519 key."""
    public: bytes = need().x25519.X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return public


def agree(secret: bytes, public: bytes, context: bytes, purpose: str) -> bytes:
    """Return the 32-byte key that the owners of two key pairs share.

    Args:
        secret: The own private key.
        public: The other's public key.
        context: The context of the round.
        purpose: What the key is for. Keys for different purposes are independent.

    Raises:
        ProtocolError: If the public key is not a valid one.
    """
    x25519 = need().x25519
    try:
        shared = x25519.X25519PrivateKey.from_private_bytes(secret).exchange(
            x25519.X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:  # a point of low order gives a secret that all know
        raise ProtocolError("a public key is not a valid X25519 key") from error
    return derive(shared, context, purpose)


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """Return a 32-byte key from a secret, for one round and purpose."""
    parts = need()
    hkdf = parts.HKDF(algorithm=parts.SHA256(), length=KEY_BYTES, salt=context, info=f"partita {purpose}".encode())
    key: bytes = hkdf.derive(secret)
    return key


def encrypt(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate a text. `about` is authenticated and not sent."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    sealed: bytes = need().ChaCha20Poly1305(key).encrypt(nonce, text, about)
    return nonce + sealed


def decrypt(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Return the text of `encrypt`.

    Raises:
        ProtocolError: If the bytes were not encrypted with this key and `about`.
    """
    parts = need()
    try:
        text: bytes = parts.ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
    except (parts.InvalidTag, ValueError) as error:
        raise ProtocolError(
            "a share cannot be decrypted: it was changed on the way, or its sender has another round or other settings"
        ) from error
    return text


@cache
def need() -> Any:
    """Return the parts of the package `cryptography`, which is optional.

    Raises:
        ProtocolError: If it is not installed.
    """
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, x25519
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError as error:
        raise ProtocolError(
            "secure aggregation needs the package cryptography; pip install 'partita[privacy]'"
        ) from error
    return _Parts(InvalidTag, serialization, ec, x25519, ChaCha20Poly1305, SHA256, HKDF)


class _Parts:
    """What secure aggregation uses of the package."""

    def __init__(
        self, InvalidTag: Any, serialization: Any, ec: Any, x25519: Any, ChaCha20Poly1305: Any, SHA256: Any, HKDF: Any
    ) -> None:
        self.serialization = serialization
        self.InvalidTag, self.ec, self.x25519, self.ChaCha20Poly1305 = InvalidTag, ec, x25519, ChaCha20Poly1305
        self.SHA256, self.HKDF = SHA256, HKDF
