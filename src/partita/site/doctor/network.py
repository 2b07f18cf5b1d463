"""Checks of the way to the server: its port, its certificate and its clock."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from email.utils import parsedate_to_datetime

from partita.site.config import SiteConfig
from partita.site.doctor.checks import Examined, Outcome, failed, ok

TIMEOUT = 10.0  # seconds to wait for the server
WARN_DAYS = 30  # a certificate that expires sooner is a warning
MAX_CLOCK_DIFFERENCE = 60.0  # seconds
ASK = "ask the server's operator"
# What may be wrong with the connection, special errors first, and the remedy.
FAULTS: tuple[tuple[type[Exception], str, str], ...] = (
    (socket.gaierror, "the name {host} is unknown here", "correct server.address, or add the name to DNS"),
    (
        TimeoutError,
        f"{{host}}, port {{port}} did not answer in {TIMEOUT:g} s",
        "allow outgoing TCP {port} to {host} in this site's firewall",
    ),
    (
        ConnectionRefusedError,
        "{host}, port {port} refuses connections",
        f"{ASK} whether the SuperLink runs, and compare the port with server.address",
    ),
    (
        ssl.SSLError,
        "{host}, port {port} does not speak TLS",
        f"{ASK} to start the SuperLink with its certificate, never with --insecure",
    ),
    (OSError, "{host}, port {port} cannot be reached ({error})", f"check this machine's network; {ASK}"),
)
# The same for OpenSSL's verification, by its codes.
OTHER_AUTHORITY = (
    "the certificate of {host} is not from the group's authority",
    f"do not connect, and {ASK} by phone for the fingerprint of ca.crt; a proxy may open TLS",
)
OUT_OF_DATE = (
    "a certificate of {host} is out of date ({reason})",
    f"correct this machine's clock if it is wrong, or {ASK} for a new certificate",
)
OTHER_NAME = (
    "the server's certificate is for another name than {host}",
    f"{ASK} for a name in the certificate, and use it in server.address",
)
REFUSALS = {
    **dict.fromkeys((7, 18, 19, 20, 21, 30), OTHER_AUTHORITY),
    **dict.fromkeys((9, 10), OUT_OF_DATE),
    **dict.fromkeys((62, 64), OTHER_NAME),
}
REFUSED = ("the certificate of {host} is refused: {reason}", f"{ASK} for a new one")


def check_server(examined: Examined) -> Outcome:
    """Check that the server answers, and proves its name with a certificate of the group's authority."""
    host, port = server_of(examined.site)
    authority = examined.site.root_certificates
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (ssl.SSLError, OSError):
        return failed(f"{authority} holds no certificate that can be read", f"{ASK} for the group's ca.crt")
    try:
        with (
            socket.create_connection((host, port), TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificates = [secure.getpeercert() or {}, *context.get_ca_certs()]
    except ssl.SSLCertVerificationError as error:
        sentence, remedy = REFUSALS.get(error.verify_code, REFUSED)
        return failed(sentence.format(host=host, reason=error.verify_message), remedy)
    except OSError as error:
        sentence, remedy = next((fault[1], fault[2]) for fault in FAULTS if isinstance(error, fault[0]))
        return failed(sentence.format(host=host, port=port, error=error), remedy.format(host=host, port=port))
    end = min(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in certificates)  # of the server, its authority
    days = (end - time.time()) / 86400
    shown = f"the group's authority vouches for {host}; the first certificate expires in {days:.0f} days"
    return Outcome("warning", shown, f"{ASK} for its successor now") if days < WARN_DAYS else ok(shown)


def check_clock(examined: Examined) -> Outcome:
    """Compare this machine's clock with the `Date` of an answer of the server's."""
    host, port = server_of(examined.site)
    context = ssl.create_default_context(cafile=str(examined.site.root_certificates))
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    try:
        before = time.time()
        connection.request("HEAD", "/health")
        date = connection.getresponse().getheader("Date")
        there = parsedate_to_datetime(date or "").timestamp()
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
        return failed(f"the server's answer has no date ({type(error).__name__})", f"{ASK} whether the SuperLink runs")
    finally:
        connection.close()
    difference = (before + time.time()) / 2 - there
    if abs(difference) > MAX_CLOCK_DIFFERENCE:
        return failed(
            f"this clock is {abs(difference):,.0f} s {'ahead of' if difference > 0 else 'behind'} the server's",
            "set the clock by NTP (chrony, systemd-timesyncd) on the machine that is wrong",
        )
    return ok(f"within {max(1, round(abs(difference)))} s of the server's")


def server_of(site: SiteConfig) -> tuple[str, int]:
    """Return host and port of the server."""
    host, _, port = site.server.address.rpartition(":")
    return host.strip("[]"), int(port)
