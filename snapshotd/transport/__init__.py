"""The two data channels of a move, image and device memory, and what both share: sockets.py and listener.py."""
