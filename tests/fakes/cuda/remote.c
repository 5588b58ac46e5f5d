/* The checkpoint calls: a process sends requests to another, given by pid, through the mailbox of that one (mailbox.h).
 *
 * Not part of the build of an old driver, which has no such symbols.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "faults.h"
#include "mailbox.h"
#include "process.h"

#define POLL_MS 2

/* Another process's mailbox: the process's memory, and the address of the mailbox in it. */
struct remote {
	int memory;
	uint64_t address;
};

static bool peek(const struct remote *remote, size_t offset, void *into, size_t bytes)
{
	return pread(remote->memory, into, bytes, (off_t)(remote->address + offset)) == (ssize_t)bytes;
}

static bool poke(const struct remote *remote, size_t offset, const void *from, size_t bytes)
{
	return pwrite(remote->memory, from, bytes, (off_t)(remote->address + offset)) == (ssize_t)bytes;
}

/* The process's pid in its own pid namespace; -1: it is gone. */
static int inner_pid(int pid)
{
	char path[64], line[512];
	int inner = -1;
	FILE *status;

	snprintf(path, sizeof path, "/proc/%d/status", pid);
	status = fopen(path, "re");
	while (status && fgets(line, sizeof line, status)) {
		char *last;

		if (strncmp(line, "NSpid:", 6) != 0)
			continue;
		last = line + strlen(line);
		while (last > line && isspace((unsigned char)last[-1]))
			*--last = '\0';
		while (last > line && isdigit((unsigned char)last[-1]))
			last--;
		inner = atoi(last);
	}
	if (status)
		fclose(status);
	return inner;
}

/* Looks for the magic at the start of each page of a mapping. */
static bool search(struct remote *remote, uint64_t from, uint64_t to)
{
	char magic[16];

	for (remote->address = from; remote->address < to; remote->address += MAILBOX_ALIGNMENT)
		if (peek(remote, 0, magic, sizeof magic) && memcmp(magic, MAILBOX_MAGIC, sizeof magic) == 0)
			return true;
	return false;
}

static CUresult find_in(int pid, struct remote *remote)
{
	char path[64], line[1024];
	bool found = false, any = false;
	struct mailbox *mailbox = NULL;
	FILE *maps;
	int32_t owner;
	uint32_t bytes;

	snprintf(path, sizeof path, "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps)
		return errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OPERATING_SYSTEM;
	while (!found && fgets(line, sizeof line, maps)) {
		unsigned long from, to;
		char access[8];

		any = true;
		if (sscanf(line, "%lx-%lx %7s", &from, &to, access) == 3 && access[1] == 'w' && strstr(line, "/libcuda.so"))
			found = search(remote, from, to);
	}
	fclose(maps);
	if (!any) /* a zombie has no memory */
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (!found || !peek(remote, offsetof(struct mailbox, bytes), &bytes, sizeof bytes) || bytes != sizeof *mailbox ||
	    !peek(remote, offsetof(struct mailbox, owner), &owner, sizeof owner) || owner == 0)
		return CUDA_ERROR_NOT_INITIALIZED;
	/* A child made by a bare clone has a copy of its parent's mailbox. */
	return owner == inner_pid(pid) ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult find(int pid, struct remote *remote)
{
	char path[64];
	CUresult result;

	snprintf(path, sizeof path, "/proc/%d/mem", pid);
	remote->memory = open(path, O_RDWR | O_CLOEXEC);
	if (remote->memory < 0)
		return errno == EACCES || errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OPERATING_SYSTEM;
	result = find_in(pid, remote);
	if (result != CUDA_SUCCESS)
		close(remote->memory);
	return result;
}

#define NO_PLACE -1
#define GONE -2

/* Puts a request into a free slot; returns its number, NO_PLACE if all slots are in use, or GONE. */
static int claim(const struct remote *remote, const struct request *request)
{
	static const uint32_t asked = REQUEST_ASKED;
	uint32_t phases[MAX_REQUESTS];
	uint64_t orders[MAX_REQUESTS], order = 0;
	int place = -1;

	if (!peek(remote, offsetof(struct mailbox, phases), phases, sizeof phases) ||
	    !peek(remote, offsetof(struct mailbox, orders), orders, sizeof orders))
		return GONE;
	for (int i = 0; i < MAX_REQUESTS; i++) {
		order = orders[i] > order ? orders[i] : order;
		if (phases[i] == REQUEST_FREE)
			place = i;
	}
	/* All slots are in use, so some caller was killed before it read its answer. The oldest answer is reclaimed. */
	for (int i = 0; i < MAX_REQUESTS && (place < 0 || phases[place] != REQUEST_FREE); i++)
		if (phases[i] == REQUEST_ANSWERED && (place < 0 || orders[i] < orders[place]))
			place = i;
	order++;
	if (place < 0)
		return NO_PLACE;
	if (!poke(remote, offsetof(struct mailbox, requests) + (size_t)place * sizeof *request, request, sizeof *request) ||
	    !poke(remote, offsetof(struct mailbox, orders) + (size_t)place * sizeof order, &order, sizeof order) ||
	    !poke(remote, offsetof(struct mailbox, phases) + (size_t)place * sizeof asked, &asked, sizeof asked))
		return GONE;
	return place;
}

/* Allows one caller at a time on the machine, by a lock on the library's file, which the nodes share. */
static int post(const struct remote *remote, const struct request *request)
{
	static pthread_mutex_t one_thread = PTHREAD_MUTEX_INITIALIZER;
	Dl_info here;
	int file, place;

	dladdr((void *)(uintptr_t)post, &here);
	for (;;) {
		pthread_mutex_lock(&one_thread);
		file = open(here.dli_fname, O_RDONLY | O_CLOEXEC);
		flock(file, LOCK_EX);
		place = claim(remote, request);
		close(file);
		pthread_mutex_unlock(&one_thread);
		if (place != NO_PLACE)
			return place;
		sleep_ms(POLL_MS);
	}
}

/* Waits without a limit, unless the process ends. */
static CUresult await(const struct remote *remote, int place, struct request *request)
{
	static const uint32_t vacant = REQUEST_FREE;
	size_t phase_offset = offsetof(struct mailbox, phases) + (size_t)place * sizeof vacant;
	uint32_t phase;

	do {
		sleep_ms(POLL_MS);
		if (!peek(remote, phase_offset, &phase, sizeof phase))
			return CUDA_ERROR_OPERATING_SYSTEM;
	} while (phase != REQUEST_ANSWERED);
	if (!peek(remote, offsetof(struct mailbox, requests) + (size_t)place * sizeof *request, request, sizeof *request))
		return CUDA_ERROR_OPERATING_SYSTEM;
	poke(remote, phase_offset, &vacant, sizeof vacant);
	return (CUresult)request->result;
}

static CUresult ask(const char *operation, int pid, struct request *request)
{
	struct fault fault = fault_take(operation, pid);
	struct remote remote;
	CUresult result;
	int place;

	if (fault.action == FAULT_HANG)
		fault_hang();
	if (fault.action == FAULT_DIE)
		fault_die();
	if (fault.action == FAULT_FAIL)
		return (CUresult)fault.error;
	if (fault.action == FAULT_KILL)
		kill(pid, SIGKILL);
	if (fault.action == FAULT_LOSE)
		request->command = COMMAND_LOSE;
	request->delay_ms = fault.delay_ms;
	result = find(pid, &remote);
	if (result != CUDA_SUCCESS)
		return result;
	place = post(&remote, request);
	if (fault.action == FAULT_DIE_AFTER)
		fault_die();
	result = place < 0 ? CUDA_ERROR_OPERATING_SYSTEM : await(&remote, place, request);
	close(remote.memory);
	if (fault.action == FAULT_HANG_AFTER)
		fault_hang();
	return fault.action == FAULT_LOSE ? CUDA_ERROR_UNKNOWN : result;
}

static bool all_zero(const void *from, size_t bytes)
{
	const char *at = from;

	for (size_t i = 0; i < bytes; i++)
		if (at[i])
			return false;
	return true;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	struct request request = {.command = COMMAND_STATE};
	CUresult result;

	if (!state)
		return CUDA_ERROR_INVALID_VALUE;
	result = ask("state", pid, &request);
	if (result == CUDA_SUCCESS)
		*state = (CUprocessState)request.value;
	return result;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	struct remote remote;
	CUresult result = tid ? find(pid, &remote) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	if (!peek(&remote, offsetof(struct mailbox, restore_thread), tid, sizeof *tid))
		result = CUDA_ERROR_OPERATING_SYSTEM;
	close(remote.memory);
	return result;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args)
{
	struct request request = {.command = COMMAND_LOCK, .timeout_ms = args ? args->timeoutMs : 0};

	if (args && (args->reserved0 || !all_zero(args->reserved1, sizeof args->reserved1)))
		return CUDA_ERROR_INVALID_VALUE;
	return ask("lock", pid, &request);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const CUcheckpointPlainArgs *args)
{
	struct request request = {.command = COMMAND_CHECKPOINT};

	if (args && !all_zero(args, sizeof *args))
		return CUDA_ERROR_INVALID_VALUE;
	return ask("checkpoint", pid, &request);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args)
{
	struct request request = {.command = COMMAND_RESTORE};

	if (!node_read(&request.node))
		return CUDA_ERROR_NO_DEVICE;
	if (args) {
		if (!all_zero(args->reserved, sizeof args->reserved) || args->gpuPairsCount > MAX_GPUS ||
		    (args->gpuPairsCount && !args->gpuPairs) ||
		    (args->gpuPairsCount && node_driver_branch(&request.node) < 580))
			return CUDA_ERROR_INVALID_VALUE;
		request.pair_count = args->gpuPairsCount;
		for (unsigned int i = 0; i < args->gpuPairsCount; i++)
			request.pairs[i] = args->gpuPairs[i];
	}
	return ask("restore", pid, &request);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const CUcheckpointPlainArgs *args)
{
	struct request request = {.command = COMMAND_UNLOCK};

	if (args && !all_zero(args, sizeof *args))
		return CUDA_ERROR_INVALID_VALUE;
	return ask("unlock", pid, &request);
}
