/* The CUDA driver as the job has loaded it, for the shim's own work; a process without one works in host memory. */
#ifndef SNAPSHIM_NCCL_DEVICE_H
#define SNAPSHIM_NCCL_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

/* Makes the device's primary context the calling thread's. False: no driver, or the job has no context there. */
bool device_enter(int device);
void device_leave(int device);
/* Waits for all work on the entered device; 0 or the driver's error. May wait for ever. */
int device_synchronize(void);

/* Two numbers and a stream. On the entered device, or without one in `host`, which NCCL may write to for as long as the
 * communicator lives. */
struct device_pair {
	bool on_device;
	uint64_t memory; /* sent, received */
	void *stream;
};
int device_pair_make(struct device_pair *pair, bool on_device, int32_t sent, int32_t host[2]);
/* 1: received, in *value; 0: not yet; -1: the driver reports an error. In host memory nothing shows whether it is complete:
 * there it is received when it is what is expected, and *value is what is there now. */
int device_pair_look(struct device_pair *pair, int32_t expected, int32_t *value);
void device_pair_free(struct device_pair *pair);

#endif
