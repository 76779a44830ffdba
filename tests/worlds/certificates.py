"""Certificates for 127.0.0.1, made here."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SECOND = datetime.timedelta(seconds=1)


@dataclass(frozen=True)
class Issued:
    certificate: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1, valid from an hour ago for a day."""

    def __init__(self, folder: Path, name: str = "authority", addresses: tuple[str, ...] = ("127.0.0.1",)) -> None:
        self._folder, self._addresses = folder, [x509.IPAddress(ipaddress.ip_address(one)) for one in addresses]
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._signed(self._name, self._key.public_key(), authority=True)
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def _signed(self, name: x509.Name, key: ec.EllipticCurvePublicKey, *, authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(True, *[False] * 4, authority, authority, False, False)
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3600 * SECOND)
            .not_valid_after(now + 86400 * SECOND)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName(self._addresses), critical=False)
        )
        return built.sign(self._key, hashes.SHA256())

    def issue(self, name: str, password: bytes | None = None) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        found = Issued(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        made = self._signed(subject, key.public_key(), authority=False)
        found.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        found.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
        return found
