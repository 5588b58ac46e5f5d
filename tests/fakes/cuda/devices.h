/* Files that play /dev/nvidia*, for as long as the process is not checkpointed. */
#ifndef FAKE_CUDA_DEVICES_H
#define FAKE_CUDA_DEVICES_H

#include <stdint.h>

void devices_open(void);
void devices_close(void);
/* A shared mapping of the file nvidia-uvm at `address`, its offset the same number; NULL: there is no such file. */
void *devices_map_uvm(uint64_t address, uint64_t bytes);

#endif
