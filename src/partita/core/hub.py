"""Whether the Hugging Face Hub can be reached. Its library would retry for half a minute before it says no."""

from __future__ import annotations

import os
import socket
import threading
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HUB = "https://huggingface.co"
WAIT = 3.0  # seconds
TRUE = ("1", "ON", "YES", "TRUE")  # as the library of the Hub reads its environment variables


def offline_reason() -> str | None:
    """Return why the Hub cannot be used, or None if it can be reached."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE:
        return "HF_HUB_OFFLINE is set"
    host, port = _address(os.environ.get("HF_ENDPOINT") or HUB)
    return None if _reachable(host, port) else f"{host} cannot be reached"


def _address(endpoint: str) -> tuple[str, int]:
    """Return the host and port to connect to: those of the endpoint, or of the proxy that leads to it."""
    parts = urlsplit(endpoint)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)


@cache
def _reachable(host: str, port: int) -> bool:
    """Return whether the host answers in time. Asked once per process."""
    answered: list[bool] = []
    # In a thread, because looking up a name has no time limit of its own.
    probe = threading.Thread(target=lambda: answered.append(_connects(host, port)), daemon=True)
    probe.start()
    probe.join(WAIT)
    return any(answered)


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=WAIT).close()
    except (OSError, UnicodeError):  # a host name that cannot be encoded is a UnicodeError
        return False
    return True
