"""The node's GPUs: the CUDA driver's process checkpoint, and what NVML tells.

Both are foreign libraries that can hang or crash, so the daemon loads neither. It speaks to one child
(`python -m snapshotd.cuda.helper`) which loads them and can be killed at any time.
"""
