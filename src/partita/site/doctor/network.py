"""Checks of the way to the server: port, certificate and clock."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from partita.site.config import SiteConfig
from partita.site.doctor.checks import Examined, Outcome, failed, ok, warning

TIMEOUT = 10.0  # seconds to wait for the server
WARN_DAYS = 30  # a certificate that expires sooner is a warning
MAX_CLOCK_DIFFERENCE = 60.0  # seconds
# Codes of OpenSSL's verification.
NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAME = (62, 64)  # host name, address
OTHER_AUTHORITY = (7, 18, 19, 20, 21, 30)  # signature, self-signed, unknown issuer, key identifier


def check_port(examined: Examined) -> Outcome:
    """Check that the server's port accepts TCP connections from here."""
    host, port = server_of(examined.site)
    where, began = f"{host}, port {port}", time.perf_counter()
    try:
        with socket.create_connection((host, port), TIMEOUT):
            return ok(f"{where} answers in {1000 * (time.perf_counter() - began):.0f} ms")
    except socket.gaierror:
        return failed(f"the name {host} is unknown here", "correct server.address in site.toml, or add the name to DNS")
    except TimeoutError:
        return failed(
            f"{where} did not answer in {TIMEOUT:g} s", f"allow outgoing TCP {port} to {host} in this site's firewall"
        )
    except ConnectionRefusedError:
        return failed(
            f"{where} refuses connections",
            "ask the server's operator whether the SuperLink runs, and compare the port with server.address",
        )
    except OSError as error:
        return failed(f"{where} cannot be reached ({error.strerror})", "check this machine's network and its routes")


def check_certificate(examined: Examined) -> Outcome:
    """Check that the server proves its name with a certificate of the group's authority."""
    site = examined.site
    host, port = server_of(site)
    try:
        context = tls_context(site)
    except FileNotFoundError:
        return failed(
            f"{site.root_certificates} does not exist",
            "ask the server's operator for the group's certificate authority",
        )
    except (ssl.SSLError, OSError):
        return failed(
            f"{site.root_certificates} holds no certificate that can be read",
            "ask the server's operator for a new copy",
        )
    try:
        end = _expiry(context, host, port)
    except ssl.SSLCertVerificationError as error:
        return _refused(context, error, host, port)
    except ssl.SSLError:
        return failed(
            f"{host}, port {port} does not speak TLS",
            "ask the server's operator to start the SuperLink with its certificate, never with --insecure",
        )
    except (TimeoutError, ConnectionError):
        return failed(
            f"{host}, port {port} closes the connection before it shows a certificate",
            "ask the server's operator, and whoever runs a proxy between here and there",
        )
    authority = min(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs())
    days = (min(end, authority) - time.time()) / 86400
    whose = "the server's certificate" if end <= authority else "the group's certificate authority"
    if days < WARN_DAYS:
        return warning(f"{whose} expires in {days:.0f} days", "ask the server's operator for its successor now")
    return ok(f"the group's authority vouches for {host}; {whose} expires in {days:.0f} days")


def check_clock(examined: Examined) -> Outcome:
    """Compare this machine's clock with the `Date` of an answer of the server's."""
    site = examined.site
    host, port = server_of(site)
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=tls_context(site))
    try:
        before = time.time()
        connection.request("HEAD", "/health")
        date = connection.getresponse().getheader("Date")
        here = (before + time.time()) / 2
    except (OSError, http.client.HTTPException) as error:
        return failed(
            f"the server does not answer an HTTPS request ({type(error).__name__})",
            "ask the server's operator whether the SuperLink runs behind this port",
        )
    finally:
        connection.close()
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError):
        return warning("the server's answer has no date, so the clocks were not compared", "compare them by hand")
    difference = here - there
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


def tls_context(site: SiteConfig) -> ssl.SSLContext:
    """Return settings for TLS that trust the group's authority alone."""
    return ssl.create_default_context(cafile=str(site.root_certificates))


def _expiry(context: ssl.SSLContext, host: str, port: int) -> float:
    """Return when the server's certificate expires, in seconds since 1970."""
    with (
        socket.create_connection((host, port), TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        shown = secure.getpeercert()
        assert shown is not None
        return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _refused(context: ssl.SSLContext, error: ssl.SSLCertVerificationError, host: str, port: int) -> Outcome:
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    if error.verify_code in (EXPIRED, NOT_YET_VALID):
        state = "has expired" if error.verify_code == EXPIRED else "is not valid yet"
        return failed(
            f"a certificate of {host} {state}, by this machine's clock, which says {today}",
            "correct the clock if that is wrong, else ask the server's operator for a new certificate",
        )
    if error.verify_code in OTHER_NAME:
        return failed(
            f"the server's certificate is for {_names(context, host, port)}, not for {host}",
            "use one of these names in server.address, or ask the server's operator to add this one",
        )
    if error.verify_code in OTHER_AUTHORITY:
        return failed(
            f"the certificate of {host} is not from the group's authority",
            "do not connect: compare the fingerprint of ca.crt with the server's operator by phone; if it is right, "
            "someone between here and there (a proxy that opens TLS?) shows another certificate",
        )
    return failed(
        f"the certificate of {host} is refused: {error.verify_message}", "ask the server's operator for a new one"
    )


def _names(context: ssl.SSLContext, host: str, port: int) -> str:
    """Return the names in the server's certificate, which the group's authority has signed."""
    context.check_hostname = False
    with (
        socket.create_connection((host, port), TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        shown: Any = secure.getpeercert()
        names = [str(name) for _, name in shown.get("subjectAltName", ())]
    return ", ".join(names) or "no name at all"
