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

/* Identifies files and sockets, because a job may close descriptors that it did not open, and open its own under their
 * numbers. */
struct identity {
	bool known;
	dev_t device;
	ino_t inode;
};
static struct identity files_are[SNAPSHIM_STRIPES_MAX], sockets_are[2];

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

static void identify(int descriptor, struct identity *identity)
{
	struct stat about;

	identity->known = fstat(descriptor, &about) == 0;
	identity->device = about.st_dev;
	identity->inode = about.st_ino;
}

static bool is_still(int descriptor, const struct identity *identity)
{
	struct stat about;

	return !identity->known ||
	       (fstat(descriptor, &about) == 0 && about.st_dev == identity->device && about.st_ino == identity->inode);
}

static void close_ours(int *descriptor, struct identity *identity)
{
	if (*descriptor >= 0 && !is_still(*descriptor, identity))
		*descriptor = NOTHING;
	identity->known = false;
	close_descriptor(descriptor);
}

static void close_sockets(void)
{
	close_ours(&open_.sockets[0], &sockets_are[0]);
	close_ours(&open_.sockets[1], &sockets_are[1]);
}

bool handover_is_ours(unsigned int stripe)
{
	return is_still(open_.files[stripe], &files_are[stripe]);
}

void handover_is_taken(void)
{
	close_ours(&open_.sockets[1], &sockets_are[1]);
}

/* 0, or the job has closed it. */
static int check_socket(void)
{
	return open_.sockets[0] >= 0 && is_still(open_.sockets[0], &sockets_are[0]) ? 0 : EBADF;
}

void handover_close(void)
{
	close_sockets();
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++) {
		close_ours(&open_.files[i], &files_are[i]);
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

int handover_open(int *theirs, uint64_t *inode)
{
	int status = (int)-KERNEL(SYS_socketpair, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, open_.sockets);

	if (status) {
		open_.sockets[0] = open_.sockets[1] = NOTHING;
		add_text("the process can open no more sockets: raise its limit of open files (ulimit -n)");
		return status;
	}
	identify(open_.sockets[0], &sockets_are[0]);
	identify(open_.sockets[1], &sockets_are[1]);
	*theirs = open_.sockets[1];
	*inode = sockets_are[1].inode;
	return 0;
}

/* One message. The descriptors are in `open_.control`; they are closed if not all came. 0 or an errno. */
static int receive(void *data, size_t most, size_t *bytes)
{
	struct iovec vector = {data, most};
	struct msghdr message = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &open_.control, .msg_controllen = sizeof(open_.control)};
	int status = check_socket();
	long got = status ? 0 : KERNEL(SYS_recvmsg, open_.sockets[0], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (status)
		return status;
	if (got <= 0)
		return got == -EAGAIN || got == -EINTR ? EAGAIN : got ? (int)-got : ECONNRESET;
	*bytes = (size_t)got;
	if (!(message.msg_flags & MSG_CTRUNC))
		return 0;
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++)
		close_descriptor(received(i));
	return EMFILE;
}

/* Appends one message's descriptors to the `*count` that were received before. */
static int receive_some(unsigned int wanted, unsigned int *count)
{
	char byte[SNAPSHIM_STRIPES_MAX];
	size_t bytes;
	int status = receive(byte, sizeof(byte), &bytes);

	if (status)
		return status == EAGAIN ? 0 : status;
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

	if (check_socket())
		return EBADF;
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

int handover_take(struct snapshim_held_block *records, int *descriptors, unsigned int *count)
{
	size_t bytes;
	int status = receive(records, SNAPSHIM_STRIPES_MAX * sizeof(*records), &bytes);

	*count = 0;
	if (status)
		return status;
	for (unsigned int i = 0; i < SNAPSHIM_STRIPES_MAX; i++)
		if (*received(i) != NOTHING) {
			descriptors[(*count)++] = *received(i);
			*received(i) = NOTHING;
		}
	if (bytes == *count * sizeof(*records))
		return 0;
	for (unsigned int i = 0; i < *count; i++)
		close_descriptor(&descriptors[i]);
	*count = 0;
	return EBADMSG;
}

int handover_answer(void)
{
	char byte;
	size_t bytes;

	return receive(&byte, sizeof(byte), &bytes);
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
		identify(open_.files[i], &files_are[i]);
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
