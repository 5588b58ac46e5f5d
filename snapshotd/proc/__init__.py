"""What the kernel reports about processes, cgroups, memory and this machine.

There is one parser for each file of /proc, in a module named after the file. `parse` is pure and returns typed values;
`read` reads the file first. The parsers import nothing but the standard library, so that small child processes can use
them too. tree.py, cgroup.py, memory.py and host.py build on them.
"""
