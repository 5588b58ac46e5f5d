"""Attacks on the daemons, as programs of an unprivileged user or of a node. Each must fail."""
