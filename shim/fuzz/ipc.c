/* What other processes send about shared device memory: handles, questions to the server and its answers (memory/ipc_*.c).
 *
 * The handle's bytes are any; a question and an answer have any length and any number of descriptors. None of those may stay
 * open that the code did not ask for.
 */
#define _GNU_SOURCE
#include <fcntl.h>

#include "input.h"
#include "memory/ipc_server.c"
#define ipc_server_ask ask_really
#include "memory/ipc_client.c"
#undef ipc_server_ask

struct snapshim_mailbox snapshim_mailbox;
static bool inside; /* whether the client is of this rank */
static struct input answers; /* of the driver, and of the server that is asked */

static int ask_input(uint64_t server, uint64_t number, int patience_s)
{
	(void)patience_s;
	(void)server;
	(void)number;
	return take(&answers, 1) < 224 ? dup(2) : NOTHING;
}

#define ipc_server_ask ask_input
#include "memory/ipc_import.c"
#undef ipc_server_ask

int create_exempt_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	(void)thread;
	(void)attributes;
	(void)routine;
	(void)argument;
	return 0; /* the target itself calls serve() */
}

bool sharing_moves(void)
{
	return true;
}

bool sharing_is_inside(int pid)
{
	(void)pid;
	return inside;
}

int64_t now_ns(void)
{
	static int64_t now;

	return now += 1000000000; /* no client waits for long */
}

void pause_us(long us)
{
	(void)us;
}

void memory_enter(void)
{
}

void memory_leave(void)
{
}

bool captures_under_way(void)
{
	return take(&answers, 1) == 1;
}

bool enter_runtime_device(const void *caller)
{
	(void)caller;
	return true;
}

/* ---- the driver: answers what the input says */

static int answer(void)
{
	return take(&answers, 1) < 224 ? 0 : 1;
}

static int get_current(void **context)
{
	*context = &answers;
	return answer();
}

static int set_current(void *context)
{
	(void)context;
	return answer();
}

static int get_device(int *device)
{
	*device = (int)take(&answers, 1) - 1;
	return *device < 0;
}

static int synchronize(void)
{
	return answer();
}

static int import(uint64_t *handle, void *descriptor, int kind)
{
	(void)descriptor;
	(void)kind;
	*handle = 1;
	return answer();
}

static int reserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t where, unsigned long long flags)
{
	static uint64_t next = 0x100000;

	(void)bytes;
	(void)alignment;
	(void)where;
	(void)flags;
	*address = next += 4096;
	return answer();
}

static int map_memory(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
	(void)address;
	(void)bytes;
	(void)offset;
	(void)handle;
	(void)flags;
	return answer();
}

static int unmap_memory(uint64_t address, size_t bytes)
{
	(void)address;
	(void)bytes;
	return answer();
}

static int release_memory(uint64_t handle)
{
	(void)handle;
	return 0;
}

static int set_access(uint64_t address, size_t bytes, const struct cuda_access *access, size_t count)
{
	(void)address;
	(void)bytes;
	EXPECT(count == 1 && access->location.type == ON_DEVICE);
	return answer();
}

static int can_access(int *can, int device, int peer)
{
	(void)peer;
	*can = (int)take(&answers, 1) % 2;
	return device > 3;
}

const struct driver *driver(void)
{
	static const struct driver functions = {
		.cuCtxGetCurrent = get_current,
		.cuCtxSetCurrent = set_current,
		.cuCtxGetDevice = get_device,
		.cuCtxSynchronize = synchronize,
		.cuMemImportFromShareableHandle = import,
		.cuMemAddressReserve = reserve,
		.cuMemAddressFree = unmap_memory,
		.cuMemMap = map_memory,
		.cuMemUnmap = unmap_memory,
		.cuMemRelease = release_memory,
		.cuMemSetAccess = set_access,
		.cuDeviceCanAccessPeer = can_access,
	};

	return &functions;
}

/* ---- descriptors */

static int count_open(void)
{
	int count = 0;

	for (int fd = 0; fd < 64; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void send_message(int to, struct input text, unsigned int descriptors)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int) * 8)];
	} control = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct iovec data = {(void *)text.at, text.left};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};

	if (descriptors) {
		control.head.cmsg_len = CMSG_LEN(sizeof(int) * descriptors);
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors);
		for (unsigned int i = 0; i < descriptors; i++)
			memcpy(CMSG_DATA(&control.head) + i * sizeof(int), &(int){2}, sizeof(int));
	}
	sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A client asks the server. It gets the descriptor only for the number that was offered; one of another rank, not in a move. */
static void question(struct input *input)
{
	int pair[2], copy = dup(2), got;
	unsigned int descriptors = (unsigned int)take(input, 1) % 4;
	struct input text = take_bytes(input, 64);
	uint64_t offer = ipc_server_offer(copy), asked = 0;

	EXPECT(offer && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
	if (text.left >= sizeof(asked))
		memcpy(&asked, text.at, sizeof(asked));
	if (take(input, 1) % 2) { /* the right number */
		text = (struct input){(const uint8_t *)&offer, sizeof(offer)};
		asked = offer;
	}
	inside = take(input, 1) % 2 == 0;
	if (take(input, 1) % 2)
		EXPECT(ipc_server_close_to_others());
	send_message(pair[0], text, descriptors);
	shutdown(pair[0], SHUT_WR);
	serve(pair[1]);
	got = receive_descriptor(pair[0]);
	EXPECT((got >= 0) == (asked == offer && (inside || !only_inside)));
	EXPECT((snapshim_mailbox.ipc_outside != 0) == (got >= 0 && !inside));
	ipc_server_open_to_others();
	if (got >= 0)
		close(got);
	close(pair[0]);
	close(pair[1]);
	ipc_server_withdraw(offer);
}

/* Another process took the server's name, and answers anything. */
static void reply(struct input *input)
{
	int pair[2], got;
	unsigned int descriptors = (unsigned int)take(input, 1) % 8;
	struct input text = take_bytes(input, 64);

	EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
	send_message(pair[0], text, descriptors);
	close(pair[0]);
	got = receive_descriptor(pair[1]);
	EXPECT((got >= 0) == (descriptors == 1 && text.left >= sizeof(uint64_t)));
	if (got >= 0)
		close(got);
	close(pair[1]);
}

/* Handles are opened and closed, in any order. */
static void handles(struct input *input)
{
	uint64_t addresses[8] = {0};
	struct ipc_handle handle = {.mark = IPC_MARK};
	int status = 0;

	while (input->left > 0) {
		unsigned int what = (unsigned int)take(input, 1), slot = what / 4 % 8;

		answers = take_bytes(input, 32);
		handle.server = take(input, 1);
		handle.number = take(input, 1) % 4;
		handle.bytes = take(input, 8);
		if (what % 4 == 0) {
			char bytes[sizeof(handle)] = {0};
			struct input raw = take_bytes(input, sizeof(bytes));

			if (raw.left)
				memcpy(bytes, raw.at, raw.left);
			memory_ipc_open(&addresses[slot], bytes, NULL, &status);
		} else if (what % 4 == 1) {
			memory_ipc_close(addresses[slot], &status);
		} else {
			EXPECT(memory_ipc_open(&addresses[slot], &handle, NULL, &status));
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = {data, bytes};
	unsigned int which = (unsigned int)take(&input, 1);
	int before;

	EXPECT(ipc_server_open());
	before = count_open();
	if (which % 3 == 0)
		question(&input);
	else if (which % 3 == 1)
		reply(&input);
	else
		handles(&input);
	EXPECT(count_open() == before);
	for (struct opened *record = ipc_opened, *next; record; record = next) {
		next = record->next;
		free(record);
	}
	ipc_opened = NULL;
	return 0;
}
