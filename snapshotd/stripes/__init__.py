"""Device memory on its way: one file per stripe, sent while it grows, by one process and one connection each.

Python's TLS hands over one record of 16 KiB per call under the interpreter's lock: all threads of one process together
reach little more than one alone. A process per stripe scales with the cores. The daemons stay out of the data's way:
they open the connections, prove to each other that they hold the lane's key, and hand both ends to their children.
"""
