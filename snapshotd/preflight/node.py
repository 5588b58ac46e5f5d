"""Which CPU features a program can depend on, and whether this node's kernel has what a move needs.

Kernel features are tried rather than derived from the version number: distributions backport, and sandboxes restrict.
"""

from __future__ import annotations

import ctypes
import errno
import functools
from pathlib import Path

from snapshotd.api.version import version_pair
from snapshotd.proc import host, mountinfo

#: CPU flags that programs cannot use, or that only describe the kernel or a hypervisor: they may differ between nodes.
KERNEL_ONLY_FLAGS = frozenset(
    """
    acpi amd_ibpb_ret amd_lbr_v2 amd_ppin aperfmperf apic arat arch_capabilities arch_lbr arch_perfmon art avic
    brs bts bus_lock_detect cat_l2 cat_l3 cdp_l2 cdp_l3 constant_tsc core_perfctr cpb cppc cpuid cpuid_fault cqm
    cqm_llc cqm_mbm_local cqm_mbm_total cqm_occup_llc cr8_legacy dca de debug_swap decodeassists ds_cpl dtes64 dtherm
    dts enqcmd epb ept ept_ad est evtstrm extapic extd_apicid flexpriority flush_l1d flushbyasid fsrm_hint hfi ht
    hw_pstate hwp hwp_act_window hwp_epp hwp_notify hwp_pkg_req hypervisor ibpb ibpb_exit_to_user ibrs ibrs_enhanced
    ibs ibt ida idle_hlt intel_ppin intel_pt invpcid invpcid_single irperf lbrv md_clear mba mca mce monitor msr mtrr
    mwaitx nonstop_tsc nopl nrip_save npt ospke overflow_recov pae pausefilter pat pbe pcid pconfig pdcm pebs
    perfctr_core perfctr_llc perfctr_nb perfmon_v2 pfthreshold pge pks pln proc_feedback pse pse36 pti ptsc pts rapl
    rdt_a rep_good rrsba_ctrl sdbg serialize_hint sev sev_es sev_snp skinit smap smca sme smep split_lock_detect ss
    ssbd stibp stibp_always_on succor svm svm_lock tce tm tm2 topoext tpr_shadow tsc_adjust tsc_deadline_timer
    tsc_known_freq tsc_reliable tsc_scale tsxldtrk tme umip v_spec_ctrl v_vmsave_vmload vgif vmcb_clean vme vmx vnmi
    vpid wdt x2apic x2avic xsaves xtopology xtpr zen
    """.split()  # noqa: SIM905  (a wall of quotes reads worse)
)

_SYS_PIDFD_GETFD = 438  # the same number on every architecture


def program_cpu_features() -> list[str]:
    """The features that every CPU of this node has and that a program can use, sorted."""
    return [name for name in host.cpu_features() if name not in KERNEL_ONLY_FLAGS]


def kernel_problems(cgroup: str = "") -> list[str]:
    """What this kernel lacks; `cgroup` is the v2 path to examine (the root group has neither file)."""
    problems = []
    root = mountinfo.cgroup2_root()
    if root is None:
        problems.append("a mounted cgroup v2")
    else:
        group = root / cgroup.lstrip("/") if cgroup.strip("/") else _any_group(root)
        if group is not None:
            problems += [
                f"{name} in cgroup v2 (Linux {since})"
                for name, since in (("cgroup.freeze", "5.2"), ("cgroup.kill", "5.14"))
                if not (group / name).exists()
            ]
        elif (version_pair(host.kernel()) or (0, 0)) < (5, 14):
            problems.append("cgroup.kill in cgroup v2 (Linux 5.14)")
    if not _has_pidfd_getfd():
        problems.append("pidfd_getfd (Linux 5.6)")
    if not Path("/proc/self/ns/time").exists():
        problems.append("time namespaces (CONFIG_TIME_NS)")
    if not Path("/proc/self/map_files").exists():
        problems.append("/proc/PID/map_files (CONFIG_CHECKPOINT_RESTORE)")
    return problems


def _any_group(root: Path) -> Path | None:
    return next((path for path in root.iterdir() if path.is_dir()), None)


@functools.cache
def _has_pidfd_getfd() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_SYS_PIDFD_GETFD, -1, -1, 0)
    return ctypes.get_errno() == errno.EBADF
