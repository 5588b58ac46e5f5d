"""Keeps the TCP connections of a rank alive across a move: finds them, filters their packets, re-points them.

    flows         addresses, connections and the descriptors that hold them; the vocabulary of this package
    sockets       finds the sockets of a rank, and on this node the peers' sockets
    refusals      names what cannot be moved
    address_plan  the addresses that each socket gets on the target
    places        which address of the target replaces one of the source
    filter        drops the packets of connections while the two sockets disagree
    repoint       gives a live connection of another process new addresses, in place
    forward       redirects new connections from a rank's former addresses to its present one
    mid_stream    one end of a connection without a beginning, to try a path
    reset         resets a socket whose connection cannot be kept
    options       socket options that CRIU does not restore
    timers        time-outs and retransmission during a move

    repoint uses socket_state (a connection on storage), rebuild (a connection from its state), repair (the kernel's repair
    mode), binding (local addresses) and stop_holders. filter and forward use nft, loopback and tracking.

Everything here blocks, and works in the network namespace of the calling thread: in the daemon, the node's own.
"""
