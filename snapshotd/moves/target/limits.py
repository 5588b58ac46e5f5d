"""Sets the limits of the job's cgroups on the copy of a rank. Invariant: a copy whose limits cannot be set does not run."""

from __future__ import annotations

from snapshotd.api.errors import Refused, Where
from snapshotd.proc import cgroup_limits
from snapshotd.proc.cgroup import Cgroup


def set_limits(group: Cgroup, limits: dict[str, str]) -> None:
    """The limits of the job's cgroups apply here too. Last, because a restore needs more than the rank does."""
    if not limits:
        return
    try:
        wrong = cgroup_limits.unenforceable(limits, cgroup_limits.available(group.path.parent))
        if wrong:
            raise OSError(f"no controller for {', '.join(wrong)}")
        used_bytes = int((group.path / "memory.current").read_text()) if "memory.max" in limits else 0
        if used_bytes > int(limits.get("memory.max", used_bytes)):
            raise OSError(f"the copy uses {used_bytes} bytes, memory.max is {limits['memory.max']}")
        cgroup_limits.apply(group.path, limits)
    except OSError as error:
        raise Refused(
            f"cgroup-limits: the limits of the rank's cgroups cannot be set on this node: {error}",
            remedy="enable the controllers for the slice of snapshotd.service on the target, or choose another node",
            where=Where.SOURCE_FROZEN,
        ) from error
