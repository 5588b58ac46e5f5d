"""The node's GPUs: the CUDA driver's process checkpoint, and the inventory from NVML.

Both are foreign libraries that can hang or crash, so the daemon loads neither. It talks to one child process
(`python -m snapshotd.cuda.helper`) that loads them and can be killed at any time.
"""
