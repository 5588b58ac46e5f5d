"""Whether the limit for copies of snapshots (`copy_limit`) is one. Blocks."""

from __future__ import annotations

from snapshotd.api.addresses import split_address
from snapshotd.config import Config
from snapshotd.net import link_speed
from snapshotd.selfcheck.finding import Finding, ok, warning
from snapshotd.transport.pace import Limit

_CHECK = "copy-limit"


def copy_limit(config: Config) -> list[Finding]:
    """A finding for each link; none if there is no limit."""
    if not config.copy_limit:
        return []
    limit = Limit.parse(config.copy_limit)
    if not limit.percent:
        return [ok(_CHECK, f"copies of snapshots leave with {limit.bytes_per_s / 1e9:.3g} GB/s at most")]
    links, found = link_speed.links(), []
    for host in config.data_addresses or (split_address(config.advertise)[0],):
        link = links.get(link_speed.normal(host))
        if link is not None and link.bytes_per_s:
            speed = limit.of_link(link.bytes_per_s) / 1e9
            found.append(ok(_CHECK, f"copies of snapshots leave {link.interface} with {speed:.3g} GB/s at most"))
        else:
            name = link.interface if link is not None else f"the link of {host}"
            text = f"copies of snapshots have no limit: it is {config.copy_limit}, and the speed of {name} is not known"
            found.append(warning(_CHECK, text, 'set copy_limit to a speed, such as "2GB/s"'))
    return found
