/* One file per process in the folder "use" beside gpus.json, with a POSIX record lock held while the process exists.
 *
 * The kernel releases the lock when the process ends, so a killed process frees its device memory. A process that
 * queries the lock gets the holder's pid in its own pid namespace. A record lock is also released when its process
 * closes any other descriptor of the file, so a process never opens its own entry twice.
 */
#define _GNU_SOURCE
#include "ledger.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct {
	int entry; /* descriptor, 0: none */
	int folder_lock;
	char path[PATH_BYTES + 64];
	struct holder holder;
} own;

static bool lock_whole(int file)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	int done;

	do
		done = fcntl(file, F_SETLKW, &lock);
	while (done && errno == EINTR);
	return done == 0;
}

/* Whether a process holds the entry, and its pid. */
static bool held(int file, int *pid)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	if (fcntl(file, F_GETLK, &lock) || lock.l_type == F_UNLCK)
		return false;
	*pid = lock.l_pid > 0 ? lock.l_pid : 0;
	return true;
}

static int read_others(const char *folder, struct holder *holders, int room, bool clean)
{
	char path[PATH_BYTES + 320];
	struct dirent *entry;
	DIR *listing;
	int count = 0;

	snprintf(path, sizeof path, "%s/use", folder);
	listing = opendir(path);
	if (!listing)
		return 0;
	while ((entry = readdir(listing)) && count < room) {
		int file;

		if (strncmp(entry->d_name, "process-", 8) != 0)
			continue;
		snprintf(path, sizeof path, "%s/use/%s", folder, entry->d_name);
		if (own.entry && strcmp(path, own.path) == 0)
			continue;
		file = open(path, O_RDONLY | O_CLOEXEC);
		if (file < 0)
			continue;
		if (!held(file, &holders[count].pid)) {
			if (clean)
				unlink(path);
		} else if (pread(file, holders[count].holdings, sizeof holders[count].holdings, 0) ==
			   sizeof holders[count].holdings) {
			count++;
		}
		close(file);
	}
	closedir(listing);
	return count;
}

int ledger_others(const struct node *node, struct holder *holders, int room)
{
	return read_others(node->folder, holders, room, false);
}

const struct holder *ledger_own(void)
{
	return &own.holder;
}

static bool create_entry(const char *folder)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	snprintf(own.path, sizeof own.path, "%.500s/use/process-%d-%lx%lx", folder, (int)getpid(), (long)now.tv_sec,
		 (long)now.tv_nsec);
	own.entry = open(own.path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (own.entry <= 0) {
		own.entry = 0;
		return false;
	}
	return lock_whole(own.entry);
}

static bool enter_folder(const char *folder)
{
	char path[PATH_BYTES + 16];

	snprintf(path, sizeof path, "%s/use", folder);
	if (mkdir(path, 01777) == 0 && chmod(path, 01777))
		return false;
	snprintf(path, sizeof path, "%s/use/lock", folder);
	own.folder_lock = open(path, O_RDWR | O_CLOEXEC);
	if (own.folder_lock < 0) {
		own.folder_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
		if (own.folder_lock >= 0)
			(void)!fchmod(own.folder_lock, 0666);
	}
	return own.folder_lock >= 0 && lock_whole(own.folder_lock);
}

static void leave_folder(void)
{
	if (own.folder_lock > 0)
		close(own.folder_lock);
	own.folder_lock = 0;
}

static enum ledger_result hold_locked(const struct node *node, const uint64_t bytes[MAX_GPUS])
{
	static struct holder others[256];
	struct holding wanted[MAX_GPUS] = {0};
	int count = read_others(node->folder, others, 256, true);

	for (unsigned int i = 0; i < node->gpu_count; i++) {
		uint64_t used = bytes[i];

		memcpy(wanted[i].uuid, node->gpus[i].uuid, 16);
		wanted[i].bytes = bytes[i];
		for (int j = 0; j < count; j++)
			for (int k = 0; k < MAX_GPUS; k++)
				if (memcmp(others[j].holdings[k].uuid, wanted[i].uuid, 16) == 0)
					used += others[j].holdings[k].bytes;
		if (used > node->gpus[i].memory_bytes && bytes[i] > own.holder.holdings[i].bytes)
			return LEDGER_FULL;
	}
	if (!own.entry && !create_entry(node->folder))
		return LEDGER_BROKEN;
	if (pwrite(own.entry, wanted, sizeof wanted, 0) != sizeof wanted)
		return LEDGER_BROKEN;
	memcpy(own.holder.holdings, wanted, sizeof wanted);
	own.holder.pid = (int)getpid();
	return LEDGER_DONE;
}

enum ledger_result ledger_hold(const struct node *node, const uint64_t bytes[MAX_GPUS])
{
	enum ledger_result result = enter_folder(node->folder) ? hold_locked(node, bytes) : LEDGER_BROKEN;

	leave_folder();
	return result;
}

void ledger_drop(void)
{
	if (own.entry) {
		unlink(own.path);
		close(own.entry);
	}
	memset(&own, 0, sizeof own);
}

void ledger_forget_after_fork(void)
{
	if (own.entry)
		close(own.entry);
	leave_folder();
	memset(&own, 0, sizeof own);
}
