/* The driver inside a process.
 *
 * Two threads have the names of the real ones: cuda-EvtHandlr serves everything except restores, which cuda00000000000
 * serves. They block no signal. Like the real ones they may need the allocator's lock. They wait for no other lock that
 * a thread of the program may hold, because such a thread may be parked in a signal handler anywhere, also at the gate
 * (gate.c).
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "copies.h"
#include "devices.h"
#include "faults.h"
#include "gate.h"
#include "ledger.h"
#include "mailbox.h"
#include "memory.h"

#define POLL_MS 4

/* In .data, not .bss: only then does /proc/PID/maps name its mapping. */
EXPORT struct mailbox fake_cuda_mailbox __attribute__((aligned(MAILBOX_ALIGNMENT))) = {
	.magic = MAILBOX_MAGIC,
	.bytes = sizeof(struct mailbox),
};

static _Atomic int state = PROCESS_RUNNING;
static _Atomic uint64_t busy_until_ns;
static _Atomic bool child_of_cuda_process;
static struct node node;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

void sleep_ms(unsigned int ms)
{
	struct timespec rest = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

	while (nanosleep(&rest, &rest) && errno == EINTR)
		;
}

struct node *process_node(void)
{
	return &node;
}

void process_add_work(uint64_t ns)
{
	uint64_t now = now_ns(), until = busy_until_ns;

	busy_until_ns = (until > now ? until : now) + ns;
}

bool process_busy(void)
{
	return busy_until_ns > now_ns();
}

static CUresult enter(void (*pass)(void))
{
	if (fake_cuda_mailbox.owner == 0)
		return CUDA_ERROR_NOT_INITIALIZED;
	pass();
	if (state == PROCESS_FAILED) {
		gate_leave();
		return CUDA_ERROR_UNKNOWN;
	}
	return CUDA_SUCCESS;
}

CUresult process_enter(void)
{
	return enter(gate_enter);
}

CUresult process_enter_alone(void)
{
	return enter(gate_enter_alone);
}

void process_leave(void)
{
	gate_leave();
}

static CUresult lock(const struct request *request)
{
	uint64_t end_ns = now_ns() + request->timeout_ms * 1000000ULL;

	if (state != PROCESS_RUNNING)
		return CUDA_ERROR_ILLEGAL_STATE;
	gate_shut();
	while (!gate_nobody_inside() || process_busy()) {
		if (request->timeout_ms && now_ns() > end_ns) {
			gate_open();
			return CUDA_ERROR_NOT_READY;
		}
		sleep_ms(1);
	}
	copies_finish(EVERY_STREAM);
	sleep_ms(request->delay_ms);
	state = PROCESS_LOCKED;
	return CUDA_SUCCESS;
}

static CUresult checkpoint(const struct request *request)
{
	CUresult result;

	if (state != PROCESS_LOCKED)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (memory_has_managed() || streams_have_interprocess_events())
		return CUDA_ERROR_NOT_SUPPORTED;
	result = memory_to_host(request->delay_ms);
	if (result != CUDA_SUCCESS)
		return result;
	ledger_drop();
	devices_close();
	state = PROCESS_CHECKPOINTED;
	return CUDA_SUCCESS;
}

/* The node's GPUs in the order of the process's GPU numbers: as given by the pairs, or unchanged. */
static CUresult map_gpus(const struct request *request, struct node *mapped)
{
	bool taken[MAX_GPUS] = {false};

	*mapped = request->node;
	mapped->gpu_count = node.gpu_count;
	for (unsigned int i = 0; i < request->pair_count; i++)
		if (node_find(&node, request->pairs[i].oldUuid.bytes) < 0)
			return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < node.gpu_count; i++) {
		const uint8_t *wanted = request->pair_count ? NULL : node.gpus[i].uuid;
		int found;

		for (unsigned int j = 0; j < request->pair_count; j++)
			if (memcmp(request->pairs[j].oldUuid.bytes, node.gpus[i].uuid, 16) == 0)
				wanted = request->pairs[j].newUuid.bytes;
		found = wanted ? node_find(&request->node, wanted) : -1;
		if (found < 0 || taken[found])
			return CUDA_ERROR_INVALID_VALUE;
		taken[found] = true;
		mapped->gpus[i] = request->node.gpus[found];
	}
	return CUDA_SUCCESS;
}

static CUresult restore(const struct request *request)
{
	static struct node mapped;
	CUresult result;

	if (state != PROCESS_CHECKPOINTED)
		return CUDA_ERROR_ILLEGAL_STATE;
	result = map_gpus(request, &mapped);
	if (result == CUDA_SUCCESS)
		result = memory_to_devices(&mapped, request->delay_ms);
	if (result != CUDA_SUCCESS)
		return result;
	node = mapped;
	devices_open();
	state = PROCESS_LOCKED;
	return CUDA_SUCCESS;
}

static CUresult unlock(const struct request *request)
{
	if (state != PROCESS_LOCKED)
		return CUDA_ERROR_ILLEGAL_STATE;
	sleep_ms(request->delay_ms);
	state = PROCESS_RUNNING;
	gate_open();
	return CUDA_SUCCESS;
}

static CUresult serve(struct request *request)
{
	switch (request->command) {
	case COMMAND_STATE:
		sleep_ms(request->delay_ms);
		request->value = state;
		return CUDA_SUCCESS;
	case COMMAND_LOCK:
		return lock(request);
	case COMMAND_CHECKPOINT:
		return checkpoint(request);
	case COMMAND_RESTORE:
		return restore(request);
	case COMMAND_UNLOCK:
		return unlock(request);
	case COMMAND_LOSE:
		state = PROCESS_FAILED;
		gate_open();
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

/* The oldest request; -1: none. Both threads consider only that one, so that requests are served in order. */
static int oldest(void)
{
	int found = -1;

	for (int i = 0; i < MAX_REQUESTS; i++)
		if (fake_cuda_mailbox.phases[i] == REQUEST_ASKED &&
		    (found < 0 || fake_cuda_mailbox.orders[i] < fake_cuda_mailbox.orders[found]))
			found = i;
	return found;
}

static void *serve_requests(void *restores)
{
	for (;;) {
		int number = oldest();
		struct request *request = &fake_cuda_mailbox.requests[number < 0 ? 0 : number];

		if (number < 0 || (request->command == COMMAND_RESTORE) != (restores != NULL)) {
			sleep_ms(POLL_MS);
			continue;
		}
		request->result = serve(request);
		fake_cuda_mailbox.phases[number] = REQUEST_ANSWERED;
	}
	return NULL;
}

static void *run_events(void *nothing)
{
	pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
	return serve_requests(nothing);
}

static void *run_restores(void *nothing)
{
	char name[16] = "cuda00000000000";

	for (int tid = (int)gettid(), i = 14; tid; tid /= 10, i--)
		name[i] = (char)('0' + tid % 10);
	pthread_setname_np(pthread_self(), name);
	fake_cuda_mailbox.restore_thread = (int)gettid();
	(void)nothing;
	return serve_requests(&node);
}

/* A forked child has no driver threads and no device memory; the real driver refuses it too. */
static void forget_after_fork(void)
{
	if (fake_cuda_mailbox.owner == 0)
		return;
	child_of_cuda_process = true;
	fake_cuda_mailbox.owner = 0;
	memset((void *)fake_cuda_mailbox.phases, 0, sizeof fake_cuda_mailbox.phases);
	gate_forget_after_fork();
	ledger_forget_after_fork();
	memory_forget_after_fork();
	copies_forget_after_fork();
}

CUresult process_init(void)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	CUresult result = CUDA_SUCCESS;
	int fault = fault_in_call("init");
	pthread_t thread;

	if (fault)
		return (CUresult)fault;
	if (child_of_cuda_process)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&once);
	if (fake_cuda_mailbox.owner == 0) {
		if (!node_read(&node) || node.gpu_count == 0) {
			result = CUDA_ERROR_NO_DEVICE;
		} else if (pthread_atfork(NULL, NULL, forget_after_fork) || pthread_create(&thread, NULL, run_events, NULL) ||
			   pthread_detach(thread) || pthread_create(&thread, NULL, run_restores, NULL) ||
			   pthread_detach(thread)) {
			result = CUDA_ERROR_OPERATING_SYSTEM;
		} else {
			devices_open();
			fake_cuda_mailbox.owner = (int32_t)getpid();
		}
	}
	pthread_mutex_unlock(&once);
	return result;
}
