/* Files in place of /dev/nvidia*, open while the process is not checkpointed. */
#ifndef FAKE_CUDA_DEVICES_H
#define FAKE_CUDA_DEVICES_H

#include <stdint.h>

void devices_open(void);
void devices_close(void);
/* Maps the file nvidia-uvm shared at `address`, with the address as offset. NULL: there is no such file. */
void *devices_map_uvm(uint64_t address, uint64_t bytes);

#endif
