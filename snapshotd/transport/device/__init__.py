"""Device memory on its way: one file per stripe, sent while it grows, by one process and one connection each.

Reading, digesting, sealing and sending take a core per stripe at either end, and threads of one process would wait for
each other at the interpreter's lock. A process per stripe scales with the cores. The daemons stay out of the data's
way: they open the connections, prove to each other that they hold the lane's key, and hand both ends to their children
with the keys that seal what travels.
"""
