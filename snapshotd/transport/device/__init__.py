"""The device-memory channel: one file or ring per stripe, sent while it is written, by one process and one connection each.

Reading, digesting, encrypting and sending take a core per stripe on either node, and threads of one process would contend for
the interpreter's lock. One process per stripe scales with the cores. The daemons stay out of the data path: they open the
connections, shake hands (handshake.py), and pass each connection to a child process together with the keys that encrypt it.
"""
