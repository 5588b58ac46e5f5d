"""The per-node daemon: it freezes ranks, streams them away, receives and restores them."""

import os

__version__ = "0.1.0"

# Read by gRPC's core when it is first loaded, so they belong where every import of ours passes. Its log lines (a failed
# handshake, say) repeat in C++ what our errors say in words, and land in the middle of a terminal's progress bar.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Children are spawned, never forked (snapshotd/runtime/blocking.py): the fork handlers would only wait for its threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
