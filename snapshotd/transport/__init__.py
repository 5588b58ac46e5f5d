"""The two data channels of a move, image and device memory, and what both share: the port (listener.py), sockets,
and connections that are encrypted (sealed.py). handshake.py lets two daemons agree on the keys."""
