/* The CUDA driver that the job has loaded, for the shim's own operations. Without a driver they use host memory. */
#ifndef SNAPSHIM_NCCL_DEVICE_H
#define SNAPSHIM_NCCL_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

/* Makes the device's primary context the calling thread's. False: no driver, or the job has no context there. */
bool device_enter(int device);
void device_leave(int device);
/* Where CUDA says that the device is on the bus: 0000:1b:00.0. False: no driver, or it does not say. */
bool device_bus_id(int device, char *into, int room);
/* The calling thread's context; NULL: none, or no driver. It decides which device a new communicator belongs to. */
void *device_context(void);
void device_set_context(void *context);
/* Waits for all work on the entered device; 0 or the driver's error. May wait for ever. */
int device_synchronize(void);

/* Two numbers and a stream, on the entered device. Without a device they are in `host`, which NCCL may write to as long as
 * the communicator exists. */
struct device_pair {
	bool on_device;
	uint64_t memory; /* sent, received */
	void *stream;
};
int device_pair_make(struct device_pair *pair, bool on_device, int32_t sent, int32_t host[2]);
/* 1: received, in *value; 0: not yet; -1: the driver reports an error. In host memory completion cannot be observed: there
 * the number counts as received when it has the expected value, and *value is the current one. */
int device_pair_look(struct device_pair *pair, int32_t expected, int32_t *value);
void device_pair_free(struct device_pair *pair);

#endif
