"""A gRPC connection to a daemon: certificates, and the options of client and server.

Invariant: each channel is one separate TCP connection, never through a proxy, and a peer that stops responding is
detected within about ten seconds.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import grpc.aio

from snapshotd.api.errors import BadConfig

log = logging.getLogger(__name__)

#: The largest message in either direction.
MAX_MESSAGE_BYTES = 16 << 20
#: Errors quote CRIU's log; with gRPC's default limit of 8 KiB a long quotation would break the connection.
MAX_METADATA_BYTES = 128 << 10

#: For client and server: a dead peer is detected within about ten seconds.
COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the effective one: its default is 60 s, regardless of keepalive_timeout
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one channel is one connection: parallel streams depend on it
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),  # this program decides whether a call may be repeated
)


@dataclass(frozen=True)
class Credentials:
    """Three PEM files: the cluster's CA, and this process's certificate and key."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(ca, cert, key). Raises BadConfig with the name of a file that cannot be read."""
        contents = []
        for path in (self.ca, self.cert, self.key):
            try:
                contents.append(Path(path).read_bytes())
            except OSError as error:
                raise BadConfig(f"{path} cannot be read: {error.strerror}") from error
        return contents[0], contents[1], contents[2]

    def for_channel(self) -> grpc.ChannelCredentials:
        ca, cert, key = self.read()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def for_server(self) -> grpc.ServerCredentials:
        """Requires a certificate of the same CA from every client. Files that were replaced are used for new connections."""
        latest = [self._stamp()]

        def replaced() -> grpc.ServerCertificateConfiguration | None:
            try:
                if (stamp := self._stamp()) == latest[0]:
                    return None
                found = self._server_files()
            except (BadConfig, OSError) as error:  # such as a certificate whose key is still being copied
                log.warning("the certificate that was replaced is not used yet: %s", error)
                return None
            latest[0] = stamp
            log.info("%s is used for new connections", self.cert)
            return found

        # The type stubs do not know that None means: as before.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", replaced)
        return grpc.dynamic_ssl_server_credentials(self._server_files(), fetch, require_client_authentication=True)

    def _server_files(self) -> grpc.ServerCertificateConfiguration:
        ca, cert, key = self.read()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes ssl.SSLError
            raise BadConfig(f"{self.cert} and {self.key} cannot be used: {error}") from error
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = (path.stat() for path in (self.ca, self.cert, self.key))
        return tuple((about.st_ino, about.st_mtime_ns, about.st_size) for about in found)


def open_channel(
    endpoint: str,
    credentials: Credentials | None,
    node: str | None = None,
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """A new connection to "host:port" (TLS; the certificate must name `node`) or "unix:/path".

    It connects with the first call, so this does not fail if the daemon is unreachable.
    """
    merged: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *options]
    if endpoint.startswith("unix:"):
        return grpc.aio.insecure_channel(endpoint, options=merged)
    if credentials is None:
        raise BadConfig(
            f"connecting to {node or 'the daemon'} at {endpoint} requires a certificate",
            remedy="set ca, cert and key in the [tls] table of cluster.toml; `migrator pki` creates them",
        )
    if node is not None:
        merged.append(("grpc.ssl_target_name_override", node))
    return grpc.aio.secure_channel(endpoint, credentials.for_channel(), options=merged)
