/* Takes the stripe files' descriptors from the daemon. Nothing listens anywhere, and nobody but who may trace this process gets at
 * the other end; no lock of libc's is taken, because the job may be parked. */
#define _GNU_SOURCE
#include "handover.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "../shim.h"

#define LOOK_AGAIN_US 500

static int sockets[2] = {-1, -1}; /* ours, the daemon's */
static int files[SNAPSHIM_STRIPES_MAX] = {[0 ... SNAPSHIM_STRIPES_MAX - 1] = -1};

static void close_descriptor(int *descriptor)
{
	if (*descriptor >= 0)
		KERNEL(SYS_close, *descriptor);
	*descriptor = -1;
}

static void close_sockets(void)
{
	close_descriptor(&sockets[0]);
	close_descriptor(&sockets[1]);
}

void handover_close(void)
{
	close_sockets();
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++)
		close_descriptor(&files[i]);
}

bool handover_is_open(void)
{
	return sockets[0] >= 0;
}

int handover_file(unsigned int stripe)
{
	return files[stripe];
}

int handover_open(int *theirs)
{
	int status = (int)-KERNEL(SYS_socketpair, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets);

	if (status) {
		sockets[0] = sockets[1] = -1;
		say("the process can open no more sockets: raise its limit of open files (ulimit -n)");
		return status;
	}
	*theirs = sockets[1];
	return 0;
}

/* One message's descriptors go behind the `*count` that are there. */
static int receive_some(unsigned int wanted, unsigned int *count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * SNAPSHIM_STRIPES_MAX)];
	} control;
	char byte[SNAPSHIM_STRIPES_MAX];
	struct iovec data = {byte, sizeof(byte)};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	long received = KERNEL(SYS_recvmsg, sockets[0], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (received <= 0)
		return received == -EAGAIN || received == -EINTR ? 0 : received ? (int)-received : ECONNRESET;
	for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
		size_t bytes = head->cmsg_len - CMSG_LEN(0);

		if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < bytes / sizeof(int); i++) {
			int descriptor;

			memcpy(&descriptor, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
			if (*count < wanted)
				files[(*count)++] = descriptor;
			else
				close_descriptor(&descriptor);
		}
	}
	return 0;
}

int handover_receive(unsigned int wanted, int64_t until_ns)
{
	unsigned int count = 0;
	int status = 0;

	while (!status && count < wanted) {
		status = receive_some(wanted, &count);
		if (!status && count < wanted) {
			if (now_ns() >= until_ns)
				status = ETIMEDOUT;
			pause_us(LOOK_AGAIN_US);
		}
	}
	if (status) {
		say("the stripes' descriptors have not come: ");
		say_number((long)count);
		say(" of ");
		say_number((long)wanted);
		handover_close();
	}
	close_sockets();
	return status;
}
