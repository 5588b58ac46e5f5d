/* Asks the server of another process (ipc_server.c) for a descriptor of memory that it has exported. */
#define _GNU_SOURCE
#include "ipc_server.h"

#include <errno.h>
#include <string.h>

#include "core/shim.h"
#include "ipc_socket.h"

#define ANSWER_S 30
#define AGAIN_US 20000

static void set_limits(int connection)
{
	struct timeval limit = {.tv_sec = ANSWER_S};

	setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

/* The other process may send more than was asked for: every descriptor that came is kept by the caller or closed. */
static int receive_descriptor(int connection)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	uint64_t number;
	struct iovec text = {.iov_base = &number, .iov_len = sizeof(number)};
	struct msghdr message = {
		.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
	struct cmsghdr *head;
	int descriptor = NOTHING;
	ssize_t bytes;

	do
		bytes = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
	while (bytes < 0 && errno == EINTR);
	head = bytes >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
	if (bytes == sizeof(number) && !head && number == 0)
		return LATER;
	if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
		return NOTHING;
	/* The buffer's padding has room for a second one. */
	for (size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
		int one;

		memcpy(&one, CMSG_DATA(head) + at, sizeof(int));
		if (bytes == sizeof(number) && head->cmsg_len == CMSG_LEN(sizeof(int)))
			descriptor = one;
		else
			close(one);
	}
	return descriptor;
}

static int ask_once(uint64_t server, uint64_t number)
{
	struct ucred other;
	struct name name = name_of(server);
	int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	int descriptor = NOTHING, status;

	if (connection < 0)
		return NOTHING;
	set_limits(connection);
	do
		status = connect(connection, (struct sockaddr *)&name.address, name.bytes);
	while (status && errno == EINTR);
	if (!status && is_of_our_user(connection, &other) &&
	    send(connection, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number))
		descriptor = receive_descriptor(connection);
	close(connection);
	return descriptor;
}

int ipc_server_ask(uint64_t server, uint64_t number, int patience_s)
{
	int64_t until_ns = now_ns() + patience_s * 1000000000LL;
	int descriptor = ask_once(server, number);

	while (descriptor == LATER && now_ns() < until_ns) {
		pause_us(AGAIN_US);
		descriptor = ask_once(server, number);
	}
	return descriptor == LATER ? NOTHING : descriptor;
}
