"""Certificates for the servers of tests, and the servers' options that name them."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# Debian's server knows TLS, the wheel's does not; where the system's has to be there, conftest demands it.
TLS = pytest.mark.skipif(shutil.which("redis-server") is None, reason="the server of the wheel knows no TLS")


def signed_certificates(folder: Path) -> Path:
    """Fill a folder: `ca.crt` signed `server.crt` and `client.crt`; `other.crt` is an authority that signed neither."""
    authority, key = signed(folder, "ca", None)
    signed(folder, "other", None)
    for name in ("server", "client"):
        signed(folder, name, (authority, key))
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def signed(folder: Path, name: str, by: tuple[x509.Certificate, Any] | None) -> tuple[x509.Certificate, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    issuer = by[1] if by else key
    usage = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
    ).add_extension(
        x509.KeyUsage(
            digital_signature=True, key_encipherment=False, key_cert_sign=by is None, crl_sign=by is None, **usage
        ),
        critical=True,
    )
    certificate = builder.sign(issuer, hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, key


def tls_words(folder: Path, port: int, *, clients: str = "no") -> tuple[str, ...]:
    given = {
        "tls-port": str(port),
        "tls-cert-file": str(folder / "server.crt"),
        "tls-key-file": str(folder / "server.key"),
        "tls-ca-cert-file": str(folder / "ca.crt"),
        "tls-auth-clients": clients,
    }
    return tuple(word for name, value in given.items() for word in (f"--{name}", value))
