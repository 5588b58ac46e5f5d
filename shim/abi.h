/* What libsnapshim.so promises to the rest of the product. Raise the version when a promise changes. */
#ifndef SNAPSHIM_ABI_H
#define SNAPSHIM_ABI_H

#define SNAPSHIM_ABI_VERSION 1

#define SNAPSHIM_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* The version the library was built with; how others see that it is in a process, and which one. */
SNAPSHIM_EXPORT extern const unsigned int snapshim_abi_version;

/* libc's syscall(2) wrapper, interposed: io_uring_setup answers ENOSYS, all else passes. */
SNAPSHIM_EXPORT long syscall(long number, ...);

#ifdef __cplusplus
}
#endif

#endif
