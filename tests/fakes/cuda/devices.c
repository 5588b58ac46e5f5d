/* Opens and maps the files nvidiactl, nvidia-uvm and nvidia0 in the folder FAKE_CUDA_DEVICE_DIR as the driver does with
 * its devices. So a dump of a process that is not checkpointed can be made to fail, and a forked child inherits the files. */
#define _GNU_SOURCE
#include "devices.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "node.h"

#define COUNT 3
#define UVM 1
#define UVM_ADDRESS 0x204a00000ULL
#define UVM_BYTES (2 << 20)
#define PAGE_BYTES 65536 /* the largest page of any machine this runs on */

static const char *const names[COUNT] = {"nvidiactl", "nvidia-uvm", "nvidia0"};
static struct {
	int file; /* 0: not open */
	void *mapping;
	size_t bytes;
} devices[COUNT];

static void *map_at(int file, uint64_t address, uint64_t bytes, uint64_t offset)
{
	struct stat status;
	void *place;

	if (fstat(file, &status) || (S_ISREG(status.st_mode) && (uint64_t)status.st_size < offset + bytes &&
				     ftruncate(file, (off_t)(offset + bytes))))
		return NULL;
	place = mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (address ? MAP_FIXED_NOREPLACE : 0), file,
		     (off_t)offset);
	return place == MAP_FAILED ? NULL : place;
}

void devices_open(void)
{
	const char *folder = getenv("FAKE_CUDA_DEVICE_DIR");
	char path[PATH_BYTES];

	for (int i = 0; folder && *folder && i < COUNT; i++) {
		int file;

		snprintf(path, sizeof path, "%s/%s", folder, names[i]);
		file = open(path, O_RDWR | O_CLOEXEC);
		if (file <= 0)
			continue;
		devices[i].file = file;
		devices[i].bytes = i == UVM ? UVM_BYTES : PAGE_BYTES;
		devices[i].mapping = map_at(file, i == UVM ? UVM_ADDRESS : 0, devices[i].bytes, 0);
	}
}

void devices_close(void)
{
	for (int i = 0; i < COUNT; i++) {
		if (devices[i].mapping)
			munmap(devices[i].mapping, devices[i].bytes);
		if (devices[i].file)
			close(devices[i].file);
		devices[i].mapping = NULL;
		devices[i].file = 0;
	}
}

void *devices_map_uvm(uint64_t address, uint64_t bytes)
{
	return devices[UVM].file ? map_at(devices[UVM].file, address, bytes, address) : NULL;
}
