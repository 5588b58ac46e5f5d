"""The source's signature on an image: which files it has sent, of which rank, in which move, to which node.

The source's daemon signs with the key of its node, and the target's daemon checks the signature before it restores anything.
The target's network process, which passes the image's chunks (over gRPC) and the seal on, has no key of the source: it can
invent no image. The target's nonce is part of what is signed, so that no signature is good for a second move.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from snapshotd.api import snapshotd_pb2 as pb
from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import BadConfig
from snapshotd.moves.record import Begin

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import padding

#: TLS signs nothing that begins like this, although it uses the same key.
_PURPOSE = b"snapshotd image seal, version 1\0"
MAX_SIGNATURE_BYTES = 1024


def statement(begin: Begin, files: Iterable[pb.ImageFile]) -> bytes:
    """What is signed."""
    listed = sorted((file.name, file.size, file.chunks, file.digest.hex()) for file in files)
    about = [begin.move, begin.rank_uid, begin.source_node, begin.target_node, begin.nonce, listed]
    return _PURPOSE + json.dumps(about, separators=(",", ":")).encode()


def sign(credentials: Credentials, signed: bytes) -> bytes:
    """The signature by this node's own key. Blocking."""
    return sign_as(credentials, signed)[0]


def sign_as(credentials: Credentials, signed: bytes) -> tuple[bytes, list[bytes]]:
    """The signature by this node's own key, and the certificates (DER) that go with it, the node's first. Blocking."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    _, certificates, key = credentials.read_pair()
    chain = [one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(certificates)]
    return _signature(credentials, key, signed), chain


def _signature(credentials: Credentials, content: bytes, signed: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:
        raise BadConfig(f"{credentials.key} cannot be used: {error}") from error
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(signed, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(signed, _pss(), hashes.SHA256())
    if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
        return key.sign(signed)
    raise BadConfig(f"{credentials.key} is of a kind that cannot sign images; use an EC, RSA or Ed25519 key")


def is_signed_by(certificate: bytes, signed: bytes, signature: bytes) -> bool:
    """Whether the key of a certificate (DER), which is verified already, made this signature. Blocking."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

    if not 0 < len(signature) <= MAX_SIGNATURE_BYTES:
        return False
    key = x509.load_der_x509_certificate(certificate).public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, signed, _pss(), hashes.SHA256())
        elif isinstance(key, ed25519.Ed25519PublicKey | ed448.Ed448PublicKey):
            key.verify(signature, signed)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def _pss() -> padding.PSS:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
