"""A site's folder, certificates, and a server that can be wrong in every way that the doctor looks for."""

from __future__ import annotations

import http.server
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from partita.experiment.config import load, shared_digest
from partita.site.config import load_site
from partita.site.doctor.checks import Examined

EXPERIMENT = """
label = "wards"
rounds = 2
[method]
name = "fedavg"
[data]
name = "synthetic"
examples = 60
test_examples = 12
classes = 3
size = 4
[split]
name = "site"
sites = ["north", "south"]
[model]
name = "vit"
layers = 1
width = 8
heads = 2
patch = 2
"""
LOOPBACK = "127.0.0.1"


def make_key(folder: Path, name: str = "north") -> Path:
    """Write a node key as ssh-keygen does, and its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(mode=0o700, exist_ok=True)
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private


def make_site(folder: Path, experiment: str = EXPERIMENT, port: int = 1, settings: str = "") -> Path:
    """Write the folder of the site 'north'."""
    folder.mkdir(exist_ok=True)
    (folder / "experiment.toml").write_text(experiment)
    (folder / "site.toml").write_text(f'name = "north"\n[server]\naddress = "{LOOPBACK}:{port}"\n{settings}')
    # Own code is never approved here, because approving it by its digest would run it first.
    approved = "" if ".py:" in experiment else f'"{shared_digest(load(folder / "experiment.toml"))}"'
    (folder / "policy.toml").write_text(f'experiments = [{approved}]\n[leave]\nroles = ["*"]\nscores = true\n')
    (folder / "state").mkdir(mode=0o700)
    make_key(folder / "keys")
    return folder


def examined_site(folder: Path) -> Examined:
    """Return a site whose settings are read."""
    examined = Examined(folder)
    examined.site = load_site(folder)
    return examined


@dataclass(frozen=True)
class Authority:
    """A certificate authority of a test."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def save(self, file: Path) -> None:
        file.write_bytes(self.certificate.public_bytes(Encoding.PEM))

    def issue(self, folder: Path, name: str = LOOPBACK, first: int = -1, last: int = 365) -> Path:
        """Write the certificate of a server with its key, valid from day `first` to day `last`, counted from today."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject: x509.GeneralName
        try:
            subject = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            subject = x509.DNSName(name)
        built = _builder("server", key, first, last).issuer_name(self.certificate.subject)
        built = built.add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        signed = built.sign(self.key, hashes.SHA256())
        file = folder / "server.pem"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file.write_bytes(signed.public_bytes(Encoding.PEM) + private)
        return file


def make_authority(last: int = 3650, name: str = "hospital group") -> Authority:
    """Make a certificate authority that is valid until day `last`, counted from today."""
    key = ec.generate_private_key(ec.SECP256R1())
    built = _builder(name, key, -1, last).issuer_name(_name(name))
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return Authority(key, built.sign(key, hashes.SHA256()))


@contextmanager
def https_server(certificate: Path | None, clock: float | None = 0.0) -> Iterator[int]:
    """Serve on a free port of the loopback and yield the port.

    Args:
        certificate: The server's certificate and key; None for a server without TLS.
        clock: Seconds by which the server's clock is ahead; None for a server that sends no date.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(200)
            if clock is not None:
                self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(seconds=clock), usegmt=True))
            self.end_headers()

        def log_message(self, *given: object) -> None: ...

    server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
    server.handle_error = lambda *given: None  # type: ignore[method-assign]
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def is_root() -> bool:
    """Whether this process may write to every folder."""
    return os.geteuid() == 0


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(name: str, key: ec.EllipticCurvePrivateKey, first: int, last: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=first))
        .not_valid_after(now + timedelta(days=last))
    )
