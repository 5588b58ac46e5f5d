"""The per-node daemon: it freezes ranks and sends them to other nodes, and receives and restores them."""

import os

__version__ = "0.2.0"

# gRPC's core reads these variables when it is loaded, so they are set in the package that every module imports. Its log
# lines (about a failed handshake, for example) repeat our errors and would appear inside a terminal's progress bar.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Children are spawned, never forked (snapshotd/runtime/blocking.py), so the fork handlers would only cost time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
