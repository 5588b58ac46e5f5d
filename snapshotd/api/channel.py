"""A connection to a daemon: certificates, and the options both ends agree on.

Invariant: one channel is one TCP connection of its own, never through a proxy, and a peer that went silent is noticed
within about ten seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from snapshotd.api.errors import BadConfig

#: No message is larger, either way; the bulk lane's chunks stay below it too.
MAX_MESSAGE_BYTES = 16 << 20
#: Errors quote CRIU's log; gRPC's own limit of 8 KiB would turn a long quotation into a lost connection.
MAX_METADATA_BYTES = 128 << 10

#: Both ends: a dead peer is noticed within about ten seconds, and an HTTP proxy in the environment is not for us.
COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the one that counts: it is 60 s otherwise, whatever keepalive_timeout says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one channel is one connection: parallel streams count on it
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # which is how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),  # whether a call may be repeated is decided here, not below
)


@dataclass(frozen=True)
class Credentials:
    """Three PEM files: the cluster's CA, and this process's certificate and key."""

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(ca, cert, key), or BadConfig naming the file that cannot be read."""
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
        """Demands a certificate of the same CA from whoever connects."""
        ca, cert, key = self.read()
        return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def open_channel(
    endpoint: str,
    credentials: Credentials | None,
    node: str | None = None,
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """A channel of its own connection to "host:port" (TLS; the certificate must name `node`) or "unix:/path".

    It connects with the first call, so this never fails because of the other side.
    """
    merged: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *options]
    if endpoint.startswith("unix:"):
        return grpc.aio.insecure_channel(endpoint, options=merged)
    if credentials is None:
        raise BadConfig(
            f"no certificate to speak to {node or 'the daemon'} at {endpoint} with",
            remedy="name ca, cert and key in the [tls] table of cluster.toml; `migrator pki` makes them",
        )
    if node is not None:
        merged.append(("grpc.ssl_target_name_override", node))
    return grpc.aio.secure_channel(endpoint, credentials.for_channel(), options=merged)
