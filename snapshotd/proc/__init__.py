"""What the kernel says: processes, cgroups, memory and this machine."""
