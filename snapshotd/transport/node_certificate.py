"""The certificate that the daemon of another node shows, verified by TLS in this process.

The daemon's network process makes all its calls, and could invent what other nodes say. Where that must not be believed, the
daemon makes a TLS handshake with the other node itself, and nothing else is exchanged.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass

from snapshotd.api.credentials import Credentials
from snapshotd.api.errors import Denied
from snapshotd.transport.handshake import peer_node, tls_context

#: For the attempt to connect, and for each read of the handshake. A busy node needs seconds; the rank runs meanwhile.
LIMIT_S = 10.0


@dataclass(frozen=True)
class NodeCertificate:
    der: bytes
    addresses: frozenset[str]  # that it names


def shown_by(node: str, host: str, port: int, credentials: Credentials) -> NodeCertificate:
    """The certificate of `node` that is shown at an address. Blocking.

    Raises OSError if there is no TLS server with a certificate of the cluster's CA for that name, Denied if it belongs to
    another node or was revoked, and BadConfig if this node's own certificate cannot be used.
    """
    context = tls_context(credentials, server_side=False)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=LIMIT_S) as plain,
        context.wrap_socket(plain, server_hostname=node) as connection,
    ):
        if (name := peer_node(connection, credentials)) != f"node:{node}":
            raise Denied(f"the certificate at {host} belongs to {name}, not to node {node}")
        return NodeCertificate(connection.getpeercert(binary_form=True) or b"", frozenset(_addresses(connection)))


def _addresses(connection: ssl.SSLSocket) -> set[str]:
    found = connection.getpeercert() or {}
    names: tuple[tuple[str, str], ...] = found.get("subjectAltName", ())  # type: ignore[assignment]
    return {str(ipaddress.ip_address(value.strip())) for kind, value in names if kind == "IP Address"}
