/* The mailbox, which the daemon writes and the rank may overwrite, and the texts of NCCL's commands, while the application
 * creates, uses and ends communicators: core/control.c with everything that it calls, and a stand-in for NCCL.
 *
 * The input is a sequence of steps (enum step). The target's thread is the control thread; threads of the job launch
 * operations and may wait at the gate. Every command is answered, its text is terminated, and its answer is readable.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/control.c"
#include "input.h"
#include "nccl/communicators.c"
#include "nccl/gate.h"
#include "stand_in.h"

#define MOST_COMMS 16
#define MOST_TEXT 2048

enum step { COMMAND, SCRIBBLE, INIT, SPLIT, SHRINK, END, LAUNCH, CHOOSE, SEND_FILES, STEPS };

static ncclComm_t comms[MOST_COMMS];
static pthread_t job_thread;
static bool job_runs;
static int daemons_socket = -1;

static ncclComm_t any_comm(struct input *input)
{
	return comms[take(input, 1) % MOST_COMMS];
}

static ncclComm_t *free_place(void)
{
	for (int i = 0; i < MOST_COMMS; i++)
		if (!comms[i])
			return &comms[i];
	return NULL;
}

/* ---- the daemon */

static int ask(uint32_t command, uint64_t timeout_ms, uint64_t second, uint64_t third)
{
	struct snapshim_mailbox *box = &snapshim_mailbox;

	box->command = command;
	box->argument[0] = timeout_ms;
	box->argument[1] = second;
	box->argument[2] = third;
	STORE(&box->request, box->answer + 1);
	serve();
	EXPECT(box->answer == box->request);
	EXPECT(memchr(box->text, 0, sizeof(box->text)));
	return box->status;
}

static void read_answer(void)
{
	const volatile char *reply = (const char *)(uintptr_t)snapshim_mailbox.result[0];
	char sum = 0;

	for (uint64_t i = 0; i < snapshim_mailbox.result[1]; i++)
		sum ^= reply[i];
	EXPECT(snapshim_mailbox.result[1] == 0 || sum == sum);
}

static void command(struct input *input)
{
	static const uint32_t known[] = {
		SNAPSHIM_PARK,        SNAPSHIM_RELEASE,      SNAPSHIM_EMPTY_CACHE,
		SNAPSHIM_NCCL_ROOM,   SNAPSHIM_NCCL_CLOSE,   SNAPSHIM_NCCL_TARGETS,
		SNAPSHIM_NCCL_REPORT, SNAPSHIM_NCCL_OPEN,    SNAPSHIM_NCCL_DETACH,
		SNAPSHIM_NCCL_NEW_ID, SNAPSHIM_NCCL_FRESH,   SNAPSHIM_NCCL_ATTACH,
		SNAPSHIM_MEMORY_OPEN, SNAPSHIM_MEMORY_READY, SNAPSHIM_MEMORY_OFFLOAD,
		SNAPSHIM_MEMORY_FILL, SNAPSHIM_MEMORY_DROP,  SNAPSHIM_NCCL_CLOSE_DEVICES,
	};
	uint64_t which = take(input, 1), timeout_ms = take(input, 1) % 4, second = take(input, 1), third = 0;
	uint32_t number = which < 0xf0 ? known[which % (sizeof(known) / sizeof(*known))] : (uint32_t)take(input, 4);
	bool has_text = number >= SNAPSHIM_NCCL_ROOM && number <= SNAPSHIM_NCCL_ATTACH;

	if (number == SNAPSHIM_MEMORY_READY)
		third = take(input, 1) % 2 ? take(input, 8) : 4096;
	if (has_text && number != SNAPSHIM_NCCL_ROOM) {
		struct input text = take_bytes(input, MOST_TEXT);

		if (ask(SNAPSHIM_NCCL_ROOM, 1, text.left, 0) == 0 && text.left)
			memcpy((void *)(uintptr_t)snapshim_mailbox.result[0], text.at, text.left);
		/* Now and then more than was written, or than there is room for. */
		second = second < 0xc0 ? text.left : second < 0xe0 ? text.left + second : take(input, 8);
	} else if (number == SNAPSHIM_NCCL_ROOM) {
		second = second < 0xf0 ? second * 16 : take(input, 8);
	}
	/* The application's own calls would wait at a gate that closes later. */
	if (number == SNAPSHIM_NCCL_CLOSE)
		timeout_ms = 10000;
	if (ask(number, timeout_ms, second, third) == 0) {
		if (has_text && number != SNAPSHIM_NCCL_ROOM)
			read_answer();
		if (number == SNAPSHIM_MEMORY_OPEN)
			daemons_socket = (int)snapshim_mailbox.result[0];
	}
	if (number == SNAPSHIM_MEMORY_READY || number == SNAPSHIM_MEMORY_DROP)
		daemons_socket = -1;
}

/* The rank overwrites what it can without harming only itself: its thread ids decide which of its threads are parked. */
static void scribble(struct input *input)
{
	char *box = (char *)&snapshim_mailbox;
	size_t from = offsetof(struct snapshim_mailbox, argument), to = offsetof(struct snapshim_mailbox, exempt);
	size_t at = from + take(input, 2) % (to - from - 8);
	uint64_t value = take(input, 8);

	memcpy(box + at, &value, sizeof(value));
	snapshim_mailbox.text[sizeof(snapshim_mailbox.text) - 1] = 0;
	snapshim_mailbox.cancel = (uint32_t)take(input, 4);
	snapshim_mailbox.device_cancel = (uint32_t)take(input, 1);
}

static void send_files(struct input *input)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int) * 32)];
	} control = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct input text = take_bytes(input, 64);
	unsigned int files = (unsigned int)take(input, 1) % 32;
	struct iovec data = {(void *)text.at, text.left};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
	int file = memfd_create("stripe", MFD_CLOEXEC);

	if (files) {
		control.head.cmsg_len = CMSG_LEN(sizeof(int) * files);
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * files);
		for (unsigned int i = 0; i < files; i++)
			memcpy(CMSG_DATA(&control.head) + i * sizeof(int), &file, sizeof(int));
	}
	if (daemons_socket >= 0)
		sendmsg(daemons_socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	close(file);
}

/* ---- the application */

static void keep(ncclComm_t *place, ncclResult_t result)
{
	if (result != ncclSuccess && result != ncclInProgress)
		*place = NULL;
}

static void init(struct input *input)
{
	ncclUniqueId id = {{0}};
	ncclConfig_t config = {.size = take(input, 2), .blocking = (int)take(input, 1) % 2};
	ncclComm_t *place = free_place();
	int nranks = (int)take(input, 3), rank = (int)take(input, 3);

	memset(id.internal, (int)take(input, 1) % 4, sizeof(id.internal));
	if (!place || atomic_load(&gate_word) == GATE_CLOSED)
		return;
	config.size = config.size % 4 ? 0 : config.size % (sizeof(config) + 1);
	keep(place, ncclCommInitRankConfig(place, nranks, id, rank, config.size ? &config : NULL));
}

static void split(struct input *input)
{
	ncclComm_t parent = any_comm(input), *place = free_place();
	int color = (int)take(input, 1) - 1, key = (int)take(input, 1);

	if (!parent || !place || atomic_load(&gate_word) == GATE_CLOSED)
		return;
	keep(place, ncclCommSplit(parent, color, key, place, NULL));
}

static void shrink(struct input *input)
{
	ncclComm_t parent = any_comm(input), *place = free_place();
	int excluded[8], count = (int)take(input, 1) % 9;

	for (int i = 0; i < 8; i++)
		excluded[i] = (int)take(input, 1);
	if (!parent || !place || atomic_load(&gate_word) == GATE_CLOSED)
		return;
	keep(place, ncclCommShrink(parent, excluded, count, place, NULL, 0));
}

static void end(struct input *input)
{
	unsigned int place = (unsigned int)take(input, 1) % MOST_COMMS, how = (unsigned int)take(input, 1) % 3;
	ncclResult_t ended = ncclSuccess;

	if (!comms[place])
		return;
	if (how == 0)
		ncclCommFinalize(comms[place]);
	else
		ended = how == 1 ? ncclCommDestroy(comms[place]) : ncclCommAbort(comms[place]);
	if (how && ended == ncclSuccess)
		comms[place] = NULL;
}

static struct launch {
	ncclComm_t comm[4];
	int kind[4], peer[4], count;
} launches;

static void *launch_all(void *nothing)
{
	ncclGroupStart();
	for (int i = 0; i < launches.count; i++)
		if (launches.kind[i] % 3 == 0)
			ncclAllReduce(1, 2, 3, 0, 0, (uintptr_t)launches.comm[i], 0);
		else if (launches.kind[i] % 3 == 1)
			ncclSend(1, 2, 0, (uint64_t)(unsigned int)launches.peer[i], (uintptr_t)launches.comm[i], 0);
		else
			ncclRecv(1, 2, 0, (uint64_t)(unsigned int)launches.peer[i], (uintptr_t)launches.comm[i], 0);
	ncclGroupEnd();
	return nothing;
}

/* On another thread, which waits at the gate if that is closed. */
static void launch(struct input *input)
{
	struct launch wanted = {.count = 1 + (int)take(input, 1) % 4};

	for (int i = 0; i < wanted.count; i++) {
		wanted.comm[i] = any_comm(input);
		wanted.kind[i] = (int)take(input, 1);
		wanted.peer[i] = (int)take(input, 1) - 1;
		if (!wanted.comm[i])
			return;
	}
	if (job_runs)
		return;
	launches = wanted;
	job_runs = pthread_create(&job_thread, NULL, launch_all, NULL) == 0;
}

/* ---- after each input: nothing is left of it */

/* Also if a communicator is down. */
static void open_gate(void)
{
	static const char abandon[] = {'a', 'b', 'a', 'n', 'd', 'o', 'n'};

	EXPECT(ask(SNAPSHIM_NCCL_ROOM, 1, sizeof(abandon), 0) == 0);
	memcpy((void *)(uintptr_t)snapshim_mailbox.result[0], abandon, sizeof(abandon));
	EXPECT(ask(SNAPSHIM_NCCL_OPEN, 10000, sizeof(abandon), 0) == 0);
}

static void forget_all(void)
{
	uint64_t before;

	snapshim_mailbox.device_cancel = 0;
	snapshim_mailbox.cancel = snapshim_mailbox.request - 1000;
	stand_in_choose(0);
	snapshim_mailbox.device_offloaded = 0;
	ask(SNAPSHIM_RELEASE, 10000, 0, 0);
	ask(SNAPSHIM_MEMORY_DROP, 10000, 0, 0);
	open_gate();
	if (job_runs)
		pthread_join(job_thread, NULL);
	job_runs = false;
	daemons_socket = -1;
	for (struct nccl_comm *comm = comm_at(0); comm && comm_at((size_t)(comm - table)); comm++)
		if (atomic_load(&comm->state) != UNUSED)
			EXPECT(ncclCommAbort((ncclComm_t)comm) == ncclSuccess);
	memset(comms, 0, sizeof(comms));
	stand_in_forget();
	nccl_lock(&before);
	for (size_t i = 0; i < ended_count && i < ENDED; i++) {
		free(ended[i].peers);
		ended[i].peers = NULL;
	}
	ended_count = 0;
	nccl_unlock(&before);
	memset(snapshim_mailbox.text, 0, sizeof(snapshim_mailbox.text));
	EXPECT(!snapshim_mailbox.parked);
}

/* No other control thread starts with libFuzzer's own thread. */
__attribute__((constructor)) static void claim(void)
{
	claimed = self_pid();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	static void (*const steps[STEPS])(struct input *) = {
		[COMMAND] = command, [SCRIBBLE] = scribble,    [INIT] = init,
		[SPLIT] = split,     [SHRINK] = shrink,        [END] = end,
		[LAUNCH] = launch,   [CHOOSE] = stand_in_take, [SEND_FILES] = send_files,
	};
	struct input input = {data, bytes};

	snapshim_mailbox.thread = self_tid();
	snapshim_mailbox.owner = self_pid();
	for (int i = 0; i < 32 && input.left > 0; i++)
		steps[take(&input, 1) % STEPS](&input);
	forget_all();
	return 0;
}
