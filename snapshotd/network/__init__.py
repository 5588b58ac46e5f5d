"""The network process: everything of the daemon that parses bytes from other machines, without any privilege.

    other daemons, operators <-- TLS, HTTP/2, gRPC --> network process <-- link --> snapshotd (root)

In the network process: process.py (its main), server.py and inbound.py (calls from outside), outbound.py (calls to other
daemons). In the daemon: child.py (starts and watches it), dispatch.py (runs the servicers), link_channel.py.
Between them: frames.py and link.py. The daemon itself never loads gRPC, and the network process loads nothing that handles
ranks.
"""
