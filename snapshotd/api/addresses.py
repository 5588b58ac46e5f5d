"""Addresses as texts: host and port."""

from __future__ import annotations

import ipaddress
import re

NODE_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?"


def join_address(host: str, port: int) -> str:
    """What `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """("10.0.0.1", 7070) from "10.0.0.1:7070"; IPv6 in brackets. Raises ValueError with the reason."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f'{address!r} is not an address with a port, like "10.0.0.1:7070"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{address!r}: {host!r} is not an IPv6 address") from None
        return host, int(port)
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"{address!r}: {host!r} is not an IPv4 address") from None
    elif not re.fullmatch(NODE_NAME, host):
        raise ValueError(f"{address!r}: {host!r} is neither an IP address nor a host name (write IPv6 in brackets)")
    return host, int(port)
