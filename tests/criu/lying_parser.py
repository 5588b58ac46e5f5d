"""Answers what the child that examines images never answers."""

from __future__ import annotations

import os
import socket

line = socket.socket(fileno=os.dup(0))
line.recv(1)
line.send(b"\x81\xa5check\xa5roots")
line.recv(1)
