/* Sends descriptors of exported memory to other processes of the same user, over a socket whose name is in the handle.
 *
 * While something is exported there is a thread of ours, which is never parked, and a socket in the abstract namespace.
 * (pidfd_getfd could copy a descriptor without the process's help, but most containers do not allow it.) Records are reused
 * and never freed, because libc's allocator cannot be used while the job is parked.
 */
#define _GNU_SOURCE
#include "ipc_server.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/shim.h"

#define NOTHING (-1)
#define WAITING 64  /* connections that may wait to be accepted */
#define QUESTION_MS 1000 /* for the request of one client, while others wait */
#define ANSWER_S 30
#define LINGER_MS 500
#define BREATH_US 10000

/* Identifies a descriptor, because a job may close it and open its own file under the same number. */
struct identity {
	dev_t device;
	ino_t inode; /* 0: it is closed */
};

struct offer {
	uint64_t number; /* 0: to be used again */
	int descriptor;
	struct identity identity;
	struct offer *next;
};

struct name {
	struct sockaddr_un address;
	socklen_t bytes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct offer *offers;
static uint64_t last_number;
static unsigned int offered;
static uint64_t open_number; /* 0: closed */
static int open_socket = NOTHING;
static struct identity open_identity;

static struct identity identity_of(int descriptor)
{
	struct identity identity = {0};
	struct stat about;

	if (fstat(descriptor, &about) == 0) {
		identity.device = about.st_dev;
		identity.inode = about.st_ino;
	}
	return identity;
}

static bool is_still(int descriptor, struct identity identity)
{
	struct identity now = identity_of(descriptor);

	return identity.inode && now.inode == identity.inode && now.device == identity.device;
}

static struct name name_of(uint64_t server)
{
	struct name name = {.address.sun_family = AF_UNIX};
	int letters = snprintf(name.address.sun_path + 1, sizeof(name.address.sun_path) - 1, "snapshim-%016llx",
			       (unsigned long long)server);

	name.bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)letters);
	return name;
}

static void set_limits(int connection)
{
	struct timeval limit = {.tv_sec = ANSWER_S};

	setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

/* Names of abstract sockets belong to no user: once a server has ended, any user can take its name. */
static bool is_of_our_user(int connection)
{
	struct ucred other;
	socklen_t bytes = sizeof(other);

	return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 &&
	       (other.uid == geteuid() || other.uid == 0);
}

/* ---------------------------------------------------------------- the server */

static void send_descriptor(int connection, uint64_t number)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct iovec text = {.iov_base = &number, .iov_len = sizeof(number)};
	struct msghdr message = {
		.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

	pthread_mutex_lock(&mutex);
	for (struct offer *offer = offers; offer; offer = offer->next)
		if (offer->number == number && is_still(offer->descriptor, offer->identity)) {
			memcpy(CMSG_DATA(&control.head), &offer->descriptor, sizeof(int));
			sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
			break;
		}
	pthread_mutex_unlock(&mutex);
}

static void serve(int connection)
{
	struct pollfd question = {.fd = connection, .events = POLLIN};
	uint64_t number;

	if (is_of_our_user(connection) && poll(&question, 1, QUESTION_MS) > 0 &&
	    recv(connection, &number, sizeof(number), 0) == sizeof(number) && number)
		send_descriptor(connection, number);
}

/* Called with the lock: whether the server can end, because nothing is offered or the job has closed the socket. */
static bool server_is_done(int server, struct identity identity)
{
	if (offered && is_still(server, identity))
		return false;
	open_number = 0;
	if (is_still(server, identity))
		close(server);
	return true;
}

/* Does not end at once with the last offer, because another often follows soon. */
static void *serve_requests(void *nothing)
{
	struct identity identity;
	bool done = false;
	int server;

	prctl(PR_SET_NAME, "snapshim-ipc");
	pthread_mutex_lock(&mutex);
	identity = open_identity;
	server = open_socket;
	pthread_mutex_unlock(&mutex);
	while (!done) {
		struct pollfd wait = {.fd = server, .events = POLLIN};
		bool asked = poll(&wait, 1, LINGER_MS) > 0 && wait.revents & POLLIN && is_still(server, identity);
		int connection = asked ? accept4(server, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;

		if (connection >= 0) {
			serve(connection);
			shutdown(connection, SHUT_RDWR); /* a child that was forked just now has it too */
			close(connection);
		} else {
			if (asked || wait.revents)
				pause_us(BREATH_US); /* out of descriptors, or the socket cannot be polled */
			pthread_mutex_lock(&mutex);
			done = server_is_done(server, identity);
			pthread_mutex_unlock(&mutex);
		}
	}
	return nothing;
}

static bool start_thread(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	bool started;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	started = create_exempt_thread(&thread, &attributes, serve_requests, NULL) == 0;
	pthread_attr_destroy(&attributes);
	return started;
}

/* Under the lock. */
static bool open_server(void)
{
	uint64_t number = 0;
	struct name name;
	int server;

	if (open_number)
		return true;
	if (KERNEL(SYS_getrandom, &number, sizeof(number), 0) != sizeof(number) || !number)
		return false;
	name = name_of(number);
	server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (server < 0)
		return false;
	open_socket = server;
	open_identity = identity_of(server);
	if (bind(server, (struct sockaddr *)&name.address, name.bytes) == 0 && listen(server, WAITING) == 0 && start_thread())
		STORE(&open_number, number);
	else
		close(server);
	return open_number != 0;
}

uint64_t ipc_server_open(void)
{
	uint64_t number;

	pthread_mutex_lock(&mutex);
	number = open_server() ? open_number : 0;
	pthread_mutex_unlock(&mutex);
	return number;
}

uint64_t ipc_server_number(void)
{
	return LOAD(&open_number);
}

/* Under the lock. */
static struct offer *free_offer(void)
{
	struct offer *offer = offers;

	while (offer && offer->number)
		offer = offer->next;
	if (offer)
		return offer;
	offer = calloc(1, sizeof(*offer));
	if (offer) {
		offer->next = offers;
		STORE(&offers, offer);
	}
	return offer;
}

uint64_t ipc_server_offer(int descriptor)
{
	struct offer *offer;
	uint64_t number = 0;

	pthread_mutex_lock(&mutex);
	offer = open_server() ? free_offer() : NULL;
	if (offer) {
		offer->descriptor = descriptor;
		offer->identity = identity_of(descriptor);
		offer->number = number = ++last_number;
		offered++;
	}
	pthread_mutex_unlock(&mutex);
	return number;
}

void ipc_server_withdraw(uint64_t number)
{
	pthread_mutex_lock(&mutex);
	for (struct offer *offer = offers; offer; offer = offer->next)
		if (offer->number == number) {
			if (is_still(offer->descriptor, offer->identity))
				KERNEL(SYS_close, offer->descriptor);
			offer->number = 0;
			offered--;
			break;
		}
	pthread_mutex_unlock(&mutex);
}

/* In a forked child, which has the descriptors and not the thread. */
void ipc_server_forget(void)
{
	for (struct offer *offer = LOAD(&offers); offer; offer = offer->next)
		if (offer->number && is_still(offer->descriptor, offer->identity))
			KERNEL(SYS_close, offer->descriptor);
	if (open_socket != NOTHING && is_still(open_socket, open_identity))
		KERNEL(SYS_close, open_socket);
	offers = NULL;
	open_socket = NOTHING;
	open_number = 0;
	offered = 0;
	mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* ---------------------------------------------------------------- the client */

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

int ipc_server_ask(uint64_t server, uint64_t number)
{
	struct name name = name_of(server);
	int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	int descriptor = NOTHING, status;

	if (connection < 0)
		return NOTHING;
	set_limits(connection);
	do
		status = connect(connection, (struct sockaddr *)&name.address, name.bytes);
	while (status && errno == EINTR);
	if (!status && is_of_our_user(connection) &&
	    send(connection, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number))
		descriptor = receive_descriptor(connection);
	close(connection);
	return descriptor;
}
