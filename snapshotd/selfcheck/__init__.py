"""`snapshotd --check`: starts every part of the daemon once, on the node where it will run.

A configuration can be right, and the daemon still end at its start or refuse every move: a package is missing, the kernel
lacks a feature, a port is taken. Each check here does the thing itself, as the daemon does it, and says what to do if that
fails.

Invariant: no check touches a rank or a file of a running daemon, and each removes what it made.

imports          every module of the program can be imported
criu             CRIU starts as for a dump, and the kernel has what it needs (`criu check`)
shim             the libraries for ranks and for CRIU can be loaded, and speak the daemon's version of their interface
gpu              the CUDA helper starts; NVML lists the GPUs, and the driver can be initialised
certificates     how long the node's certificate is valid
network          the network process starts as its user, with the certificates, and can listen on its ports
images           the place of images is in memory, and can be written to
snapshot-disk    snapshots for which there is no memory can be written to the disk that is configured for them
cgroup           a cgroup of version 2 can be made, frozen and killed
kernel           other features that a move needs
time-namespace   a time namespace can be made, in which the clocks of a moved rank continue
descriptors      how many files the daemon may open
"""
