/* Receives the stripe files' descriptors from the daemon. There is no listening socket, and only a process that may trace
 * this one can get the other socket of the pair. No lock of libc is taken, because the job may be parked.
 *
 * Invariant: a child that is forked at any moment finds all inherited descriptors of ours in `open_`. The kernel writes a
 * descriptor's number, here always into `open_`, before the descriptor exists. `open_` lies in one page, so that a child
 * inherits a consistent copy. */
#define _GNU_SOURCE
#include "handover.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "core/shim.h"

#define LOOK_AGAIN_US 500
#define NOTHING (-1)

static struct {
	int sockets[2]; /* ours, the daemon's */
	int files[SNAPSHIM_STRIPES_MAX];
	union { /* of the message that is being received: its descriptors, or NOTHING */
		struct cmsghdr head;
		int words[CMSG_SPACE(sizeof(int) * SNAPSHIM_STRIPES_MAX) / sizeof(int)];
	} control;
} open_ __attribute__((aligned(256))) = {
	.sockets = {NOTHING, NOTHING},
	.files = {[0 ... SNAPSHIM_STRIPES_MAX - 1] = NOTHING},
	.control.words = {[0 ... CMSG_SPACE(sizeof(int) * SNAPSHIM_STRIPES_MAX) / sizeof(int) - 1] = NOTHING},
};
_Static_assert(sizeof(open_) <= 256, "in one page");

/* Identifies the files, because a job may close descriptors that it did not open, and open its own files under their
 * numbers. */
static struct {
	bool known;
	dev_t device;
	ino_t inode;
} identity[SNAPSHIM_STRIPES_MAX];

/* A descriptor after the header of the control message. The kernel writes only one such message. */
static int *received(unsigned int index)
{
	return &open_.control.words[CMSG_LEN(0) / sizeof(int) + index];
}

static void close_descriptor(int *descriptor)
{
	if (*descriptor >= 0)
		KERNEL(SYS_close, *descriptor);
	*descriptor = NOTHING;
}

static void close_sockets(void)
{
	close_descriptor(&open_.sockets[0]);
	close_descriptor(&open_.sockets[1]);
}

bool handover_is_ours(unsigned int stripe)
{
	struct stat about;

	return !identity[stripe].known || (fstat(open_.files[stripe], &about) == 0 &&
					   about.st_dev == identity[stripe].device && about.st_ino == identity[stripe].inode);
}

static void identify(unsigned int stripe)
{
	struct stat about;

	identity[stripe].known = fstat(open_.files[stripe], &about) == 0;
	identity[stripe].device = about.st_dev;
	identity[stripe].inode = about.st_ino;
}

void handover_close(void)
{
	close_sockets();
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++) {
		if (open_.files[i] >= 0 && !handover_is_ours(i))
			open_.files[i] = NOTHING;
		identity[i].known = false;
		close_descriptor(&open_.files[i]);
		close_descriptor(received(i));
	}
}

bool handover_is_open(void)
{
	return open_.sockets[0] >= 0;
}

int handover_file(unsigned int stripe)
{
	return open_.files[stripe];
}

int handover_open(int *theirs)
{
	int status = (int)-KERNEL(SYS_socketpair, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, open_.sockets);

	if (status) {
		open_.sockets[0] = open_.sockets[1] = NOTHING;
		add_text("the process can open no more sockets: raise its limit of open files (ulimit -n)");
		return status;
	}
	*theirs = open_.sockets[1];
	return 0;
}

/* Appends one message's descriptors to the `*count` that were received before. */
static int receive_some(unsigned int wanted, unsigned int *count)
{
	char byte[SNAPSHIM_STRIPES_MAX];
	struct iovec data = {byte, sizeof(byte)};
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = &open_.control, .msg_controllen = sizeof(open_.control)};
	long bytes = KERNEL(SYS_recvmsg, open_.sockets[0], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (bytes <= 0)
		return bytes == -EAGAIN || bytes == -EINTR ? 0 : bytes ? (int)-bytes : ECONNRESET;
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++) {
		if (*received(i) != NOTHING && *count < wanted) {
			open_.files[(*count)++] = *received(i);
			__atomic_signal_fence(__ATOMIC_SEQ_CST);
			*received(i) = NOTHING;
		}
		close_descriptor(received(i));
	}
	return 0;
}

int handover_send(const void *data, size_t bytes, const int *descriptors, unsigned int count)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int) * SNAPSHIM_STRIPES_MAX)];
	} control = {.room = {0}};
	struct iovec text = {(void *)data, bytes};
	struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};
	long sent;

	if (count) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int) * count);
		memcpy(CMSG_DATA(&control.head), descriptors, sizeof(int) * count);
	}
	sent = KERNEL(SYS_sendmsg, open_.sockets[0], &message, MSG_DONTWAIT | MSG_NOSIGNAL);
	/* So many descriptors are on their way that the kernel accepts no more from this user: the daemon takes them. */
	if (sent == -ETOOMANYREFS || sent == -EINTR || sent == -ENOBUFS)
		return EAGAIN;
	/* A stream accepts all of so short a message, or nothing. */
	return sent < 0 ? (int)-sent : (size_t)sent == bytes ? 0 : EPIPE;
}

int handover_take(int *descriptors, unsigned int *count)
{
	char byte;
	struct iovec data = {&byte, sizeof(byte)};
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = &open_.control, .msg_controllen = sizeof(open_.control)};
	long bytes = KERNEL(SYS_recvmsg, open_.sockets[0], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	*count = 0;
	if (bytes <= 0)
		return bytes == -EAGAIN || bytes == -EINTR ? EAGAIN : bytes ? (int)-bytes : ECONNRESET;
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++)
		if (*received(i) != NOTHING) {
			descriptors[(*count)++] = *received(i);
			*received(i) = NOTHING;
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
	for (unsigned int i = 0; i < count; i++)
		identify(i);
	if (status) {
		add_text("the stripes' descriptors have not come: ");
		add_number((long)count);
		add_text(" of ");
		add_number((long)wanted);
		handover_close();
	}
	close_sockets();
	return status;
}
