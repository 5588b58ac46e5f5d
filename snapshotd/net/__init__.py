"""Connections follow the rank: finding both ends, silencing them, re-pointing them, forwarding newcomers.

    flows     what a connection is: addresses, ends, holders; the words of everything else here
    sockets   finds the sockets of a rank, and the other ends of its connections on this node
    refusals  what cannot be moved, by name
    reset     a socket whose connection cannot follow: its application sees a reset, as if the far host had gone
    options   socket options that criu does not carry
    rehome    re-points a live connection of another process, in place
    filter    silences connections packet by packet while their ends disagree
    forward   new connections to a rank's former addresses reach the present one

All of it blocks and works in the network namespace of the calling thread: the node's own, in the daemon.
"""
