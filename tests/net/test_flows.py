"""One spelling per address, and flows that survive the journal and the wire."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.net.flows import Address, BadAddress, Flow, Holder
from snapshotd.proc.tree import Process

ADDRESSES = st.builds(Address, st.ip_addresses().map(str), st.integers(0, 0xFFFF))


@pytest.mark.parametrize(
    ("written", "ip"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:0001", "10.0.0.1"),
        ("FD00:0:0::1", "fd00::1"),
        ("::", "::"),
        ("::ffff:0.0.0.0", "0.0.0.0"),
    ],
)
def test_address_has_one_spelling(written: str, ip: str) -> None:
    assert Address(written, 80) == Address(ip, 80)
    assert Address(written, 80).ip == ip


@pytest.mark.parametrize(
    "text",
    ["", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:x", "10.0.0.1:65536", "10.0.0.1:-1", "fd00::1:80", "[fd00::1:80",
     "[10.0.0.1]:80", "[fe80::1%eth0]:80", "host:80", "10.0.0.1:²"],
)  # fmt: skip
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(BadAddress):
        Address.parse(text)


@given(ADDRESSES)
def test_address_survives_encoding(address: Address) -> None:
    assert Address.parse(str(address)) == address


def test_properties_of_addresses() -> None:
    assert Address("127.9.9.9", 1).loopback
    assert Address("::1", 1).loopback
    assert Address("::ffff:127.0.0.1", 1).loopback
    assert not Address("10.0.0.1", 1).loopback
    assert Address("::", 1).wildcard
    assert Address("0.0.0.0", 1).wildcard
    assert not Address("::1", 1).wildcard
    assert Address("fe80::1", 1).link_local
    assert Address("10.0.0.1", 7).at("fd00::2") == Address("fd00::2", 7)
    assert (Address("10.0.0.1", 1).version, Address("fd00::1", 1).version) == (4, 6)


def _flow(remote: Address | None) -> Flow:
    return Flow(
        protocol="tcp",
        family="inet6",
        state="established" if remote else "listen",
        local=Address("::ffff:10.0.0.1", 29500),
        remote=remote,
        inode=77,
        holders=(Holder(12, 3456, 9), Holder(13, 3457, 9)),
        v6only=True,
        device="eth0",
        shutdown="read",
        signed=True,
        unread_bytes=5,
        unacked_bytes=6,
        waiting=7,
    )


@pytest.mark.parametrize("remote", [None, Address("fd00::2", 40000)])
def test_flow_survives_encoding(remote: Address | None) -> None:
    flow = _flow(remote)
    assert Flow.from_json(json.loads(json.dumps(flow.to_json()))) == flow
    assert flow.holders[0].process == Process(12, 3456)


def test_mirrored_pair_is_that_of_the_peer() -> None:
    flow = _flow(Address("10.0.0.2", 40000))
    assert flow.endpoints == (Address("10.0.0.1", 29500), Address("10.0.0.2", 40000))
    assert flow.mirrored() == (Address("10.0.0.2", 40000), Address("10.0.0.1", 29500))
    with pytest.raises(ValueError, match="not connected"):
        _flow(None).mirrored()


@pytest.mark.parametrize(
    "change",
    [{"family": "unix"}, {"local": "nowhere"}, {"local": None}, {"holders": [[1, 2]]}, {"holders": 3}, {"inode": "x"}],
)
def test_invalid_flow_is_refused(change: dict[str, object]) -> None:
    fields = _flow(None).to_json()
    with pytest.raises(ValueError, match=r"."):
        Flow.from_json(fields | change)
    with pytest.raises(ValueError, match="not a connection"):
        Flow.from_json({name: value for name, value in fields.items() if name not in change})
