"""The fake libibverbs has rdma-core's binary interface, and its queue pairs carry the data of the fake NCCL."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes import nccl_build, verbs_fake
from tests.shim.jobs import compile_c

#: As rdma-core 44's own header gives them, on x86-64 and arm64 alike.
LAYOUT = {
    "ibv_device_attr": 232,
    "ibv_async_event": 16,
    "ibv_wc": 48,
    "ibv_pd": 16,
    "ibv_mr": 48,
    "ibv_global_route": 24,
    "ibv_ah_attr": 32,
    "ibv_qp_init_attr": 64,
    "ibv_qp_attr": 144,
    "ibv_sge": 16,
    "ibv_send_wr": 128,
    "ibv_recv_wr": 32,
    "ibv_comp_channel": 16,
    "ibv_ece": 12,
    "ibv_device": 664,
}
OFFSETS = {
    ("ibv_device_attr", "phys_port_cnt"): 227,
    ("ibv_port_attr", "link_layer"): 46,
    ("ibv_wc", "wc_flags"): 36,
    ("ibv_mr", "rkey"): 40,
    ("ibv_qp_attr", "ah_attr"): 56,
    ("ibv_qp_attr", "port_num"): 129,
    ("ibv_send_wr", "wr.rdma.rkey"): 48,
    ("ibv_send_wr", "wr.atomic.rkey"): 64,
    ("ibv_qp", "qp_num"): 52,
    ("ibv_cq", "cqe"): 28,
    ("ibv_device", "dev_name"): 88,
    ("ibv_context", "cmd_fd"): 264,
    ("ibv_context", "async_fd"): 268,
    ("ibv_context", "ops.poll_cq"): 96,
    ("ibv_context", "ops.req_notify_cq"): 104,
    ("ibv_context", "ops.post_send"): 208,
    ("ibv_context", "ops.post_recv"): 216,
}
VERSIONS = {
    "ibv_open_device": "IBVERBS_1.1",
    "ibv_query_port": "IBVERBS_1.1",
    "ibv_create_comp_channel": "IBVERBS_1.0",
    "ibv_reg_mr_iova2": "IBVERBS_1.8",
    "ibv_query_ece": "IBVERBS_1.10",
    "ibv_reg_dmabuf_mr": "IBVERBS_1.12",
}


def test_layout_is_that_of_rdma_core(tmp_path: Path) -> None:
    claims = [f'_Static_assert(sizeof(struct {name}) == {size}, "{name}");' for name, size in LAYOUT.items()]
    claims += [
        f'_Static_assert(offsetof(struct {of}, {name}) == {at}, "{of}.{name}");' for (of, name), at in OFFSETS.items()
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join(['#include "verbs_abi.h"', *claims, "int main(void) { return 0; }", ""]))
    compile_c(source, tmp_path / "layout", f"-I{verbs_fake.SOURCES}")


def test_symbols_have_the_versions_of_rdma_core() -> None:
    library = ctypes.CDLL(str(verbs_fake.build() / "libibverbs.so"))
    dlvsym = ctypes.CDLL(None).dlvsym
    dlvsym.restype, dlvsym.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    for name, version in VERSIONS.items():
        assert dlvsym(library._handle, name.encode(), version.encode()), f"{name}@{version}"
    assert not dlvsym(library._handle, b"ibv_open_device", b"IBVERBS_1.8")


@pytest.mark.root
def test_queue_pairs_carry_the_data_of_communicators() -> None:
    """All operations of the fake NCCL, four ranks, over two devices."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(verbs_fake.build()),
        "FAKE_NCCL_NET": "IB",
        "FAKE_NCCL_ADDR": "127.0.0.1",
        "FAKE_VERBS_ADDR": "127.0.0.1",
    }
    program = nccl_build.build() / "check_ranks"
    done = subprocess.run([*verbs_fake.with_devices(2), program, "4"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.root
def test_without_a_device_rdma_fails() -> None:
    """So the test above did not fall back to sockets."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(verbs_fake.build()),
        "FAKE_NCCL_NET": "IB",
        "FAKE_NCCL_ADDR": "127.0.0.1",
    }
    command = [*verbs_fake.with_devices(0), str(nccl_build.build() / "check_ranks"), "2"]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode != 0
