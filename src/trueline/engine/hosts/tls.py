"""The certificates of one launch: a CA that signs one certificate, and whose key is then dropped. They last a year."""

import datetime
import hashlib
import importlib.util
import ssl
from typing import NamedTuple

from trueline.engine.hosts.messages import CERTIFICATE_NAME
from trueline.errors import MissingPackage

_VALID = datetime.timedelta(days=365)
_SKEW = datetime.timedelta(days=2)
"""Certificates are valid from before their making, for hosts whose clock is behind."""


class LaunchCertificates(NamedTuple):
    """PEM texts. The key is that of `master`."""

    ca: bytes
    master: bytes
    key: bytes


def make_certificates(job: str) -> LaunchCertificates:
    """A CA for the launch of `job`, and the master's certificate. Raises MissingPackage."""
    if importlib.util.find_spec("cryptography") is None:
        raise MissingPackage(
            "other hosts need certificates, and cryptography is not installed", hint="pip install 'trueline[train]'"
        )
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def begin(subject: str, key: ec.EllipticCurvePrivateKey, *, signs: bool) -> x509.CertificateBuilder:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])
        usage = x509.KeyUsage(
            digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"trueline {job}"[:64])]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
            .add_extension(usage, critical=True)
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = begin(f"trueline {job}", ca_key, signs=True).sign(ca_key, hashes.SHA256())
    master = (
        begin(CERTIFICATE_NAME, key, signs=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return LaunchCertificates(ca.public_bytes(pem), master.public_bytes(pem), private)


def fingerprint(certificate: str) -> str:
    """`sha256:` and the digest of a certificate in PEM. Raises ValueError."""
    return f"sha256:{hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.strip())).hexdigest()}"


def find_clock_fault(certificate: str, now: float) -> str:
    """Why a host whose clock says `now` (seconds since 1970) refuses a certificate in PEM; empty: it does not."""
    from cryptography import x509

    made = x509.load_pem_x509_certificate(certificate.encode())
    here = datetime.datetime.fromtimestamp(now, datetime.UTC)
    first, last = made.not_valid_before_utc, made.not_valid_after_utc
    if first <= here <= last:
        return ""
    return (
        f"the clock of this host says {here:%Y-%m-%d %H:%M} UTC, and the job's certificate is valid from "
        f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"
    )
