/* Sends descriptors of exported memory to other processes of the same user, over a socket whose name is in the handle.
 *
 * While something is exported there is a thread of ours, which is never parked, and a socket in the abstract namespace.
 * (pidfd_getfd could copy a descriptor without the process's help, but most containers do not allow it.) Records are reused
 * and never freed, because libc's allocator cannot be used while the job is parked.
 *
 * A dump contains the socket and the thread, and no descriptor: while memory is away its offer has none. The socket is known
 * by its name, because it is another one in a restored process.
 */
#define _GNU_SOURCE
#include "ipc_server.h"
#include "ipc_socket.h"

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
#include "sharing/sharing.h"

#define WAITING 64  /* connections that may wait to be accepted */
#define QUESTION_MS 1000 /* for the request of one client, while others wait */
#define LINGER_MS 500
#define BREATH_US 10000

/* Identifies a descriptor, because a job may close it and open its own file under the same number. */
struct identity {
	dev_t device;
	ino_t inode; /* 0: it is closed */
};

struct offer {
	uint64_t number; /* 0: to be used again */
	int descriptor; /* NOTHING: the memory is away */
	struct identity identity;
	struct offer *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct offer *offers;
static uint64_t last_number;
static unsigned int offered;
static uint64_t open_number; /* 0: closed */
static int open_socket = NOTHING;
static bool only_inside; /* a move: processes of other ranks are told to ask later */

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

/* Whether it is the server's socket still: the job may have closed it. */
static bool is_server(int descriptor, uint64_t number)
{
	struct name wanted = name_of(number), bound = {.bytes = sizeof(bound.address)};

	return descriptor >= 0 && getsockname(descriptor, (struct sockaddr *)&bound.address, &bound.bytes) == 0 &&
	       bound.bytes == wanted.bytes && memcmp(&bound.address, &wanted.address, wanted.bytes) == 0;
}

/* What has left for another rank is noted before, so that no check between the two finds nothing. */
static void send_descriptor(int connection, uint64_t number, bool inside)
{
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
	struct iovec text = {.iov_base = &number, .iov_len = sizeof(number)};
	struct msghdr message = {
		.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

	pthread_mutex_lock(&mutex);
	if (!inside && LOAD(&only_inside)) {
		uint64_t later = 0;

		send(connection, &later, sizeof(later), MSG_NOSIGNAL | MSG_DONTWAIT);
		pthread_mutex_unlock(&mutex);
		return;
	}
	for (struct offer *offer = offers; offer; offer = offer->next)
		if (offer->number == number && is_still(offer->descriptor, offer->identity)) {
			if (!inside)
				STORE(&snapshim_mailbox.ipc_outside, 1);
			memcpy(CMSG_DATA(&control.head), &offer->descriptor, sizeof(int));
			sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
			break;
		}
	pthread_mutex_unlock(&mutex);
}

static void serve(int connection)
{
	struct pollfd question = {.fd = connection, .events = POLLIN};
	struct ucred other;
	uint64_t number;

	if (is_of_our_user(connection, &other) && poll(&question, 1, QUESTION_MS) > 0 &&
	    recv(connection, &number, sizeof(number), 0) == sizeof(number) && number)
		send_descriptor(connection, number, sharing_is_inside(other.pid));
}

/* Called with the lock: whether the server can end, because nothing is offered or the job has closed the socket. */
static bool server_is_done(int server, uint64_t number)
{
	if (offered && is_server(server, number))
		return false;
	STORE(&open_number, 0);
	STORE(&snapshim_mailbox.ipc_server, 0);
	if (is_server(server, number))
		close(server);
	return true;
}

/* Does not end at once with the last offer, because another often follows soon. */
static void *serve_requests(void *nothing)
{
	bool done = false;
	uint64_t number;
	int server;

	prctl(PR_SET_NAME, "snapshim-ipc");
	pthread_mutex_lock(&mutex);
	number = open_number;
	server = open_socket;
	pthread_mutex_unlock(&mutex);
	while (!done) {
		struct pollfd wait = {.fd = server, .events = POLLIN};
		bool asked = poll(&wait, 1, LINGER_MS) > 0 && wait.revents & POLLIN && is_server(server, number);
		int connection = asked ? accept4(server, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;

		if (connection >= 0) {
			serve(connection);
			shutdown(connection, SHUT_RDWR); /* a child that was forked just now has it too */
			close(connection);
		} else {
			if (asked || wait.revents)
				pause_us(BREATH_US); /* out of descriptors, or the socket cannot be polled */
			pthread_mutex_lock(&mutex);
			done = server_is_done(server, number);
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
	open_number = number; /* for the thread, which begins when the lock is free */
	if (bind(server, (struct sockaddr *)&name.address, name.bytes) == 0 && listen(server, WAITING) == 0 && start_thread())
		STORE(&snapshim_mailbox.ipc_server, number);
	else {
		STORE(&open_number, 0);
		close(server);
	}
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
			if (--offered == 0)
				STORE(&snapshim_mailbox.ipc_outside, 0);
			break;
		}
	pthread_mutex_unlock(&mutex);
}

void ipc_server_replace(uint64_t number, int descriptor)
{
	pthread_mutex_lock(&mutex);
	for (struct offer *offer = offers; offer; offer = offer->next)
		if (offer->number == number) {
			if (is_still(offer->descriptor, offer->identity))
				KERNEL(SYS_close, offer->descriptor);
			offer->descriptor = descriptor;
			offer->identity = identity_of(descriptor);
		}
	pthread_mutex_unlock(&mutex);
}

bool ipc_server_close_to_others(void)
{
	bool closed;

	pthread_mutex_lock(&mutex);
	STORE(&only_inside, true);
	closed = !LOAD(&snapshim_mailbox.ipc_outside);
	pthread_mutex_unlock(&mutex);
	return closed;
}

/* Without the lock, which a thread that is parked in spite of all may hold. */
void ipc_server_open_to_others(void)
{
	STORE(&only_inside, false);
}

bool ipc_server_has(uint64_t number)
{
	bool found = false;

	pthread_mutex_lock(&mutex);
	for (struct offer *offer = offers; offer; offer = offer->next)
		found |= offer->number == number && is_still(offer->descriptor, offer->identity);
	pthread_mutex_unlock(&mutex);
	return found;
}

/* In a forked child, which has the descriptors and not the thread. */
void ipc_server_forget(void)
{
	for (struct offer *offer = LOAD(&offers); offer; offer = offer->next)
		if (offer->number && is_still(offer->descriptor, offer->identity))
			KERNEL(SYS_close, offer->descriptor);
	if (open_number && is_server(open_socket, open_number))
		KERNEL(SYS_close, open_socket);
	offers = NULL;
	open_socket = NOTHING;
	open_number = 0;
	offered = 0;
	only_inside = false;
	mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
