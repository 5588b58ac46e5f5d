/* Hands out descriptors of exported memory to other processes of the same user, over a socket whose name is in the handle.
 *
 * It is there while something is exported: a thread of ours, which is never parked, and a socket without a place in the file
 * system. (The kernel could fetch a descriptor out of a process without its help, pidfd_getfd, but not in most containers.)
 * Records are used again and never freed: libc's allocator is out of reach while the job is parked.
 */
#define _GNU_SOURCE
#include "desk.h"

#include <errno.h>
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

#include "../shim.h"

#define NOTHING (-1)
#define WAITING 64 /* who may wait at the desk at once; more wait before it */
#define ANSWER_S 10
#define BREATH_US 10000

struct offer {
	uint64_t number; /* 0: to be used again */
	int descriptor;
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

static struct name name_of(uint64_t desk)
{
	struct name name = {.address.sun_family = AF_UNIX};
	int letters = snprintf(name.address.sun_path + 1, sizeof(name.address.sun_path) - 1, "snapshim-%016llx",
			       (unsigned long long)desk);

	name.bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)letters);
	return name;
}

static void set_limits(int connection)
{
	struct timeval limit = {.tv_sec = ANSWER_S};

	setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

/* ---------------------------------------------------------------- behind the desk */

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
		if (offer->number == number) {
			memcpy(CMSG_DATA(&control.head), &offer->descriptor, sizeof(int));
			sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
			break;
		}
	pthread_mutex_unlock(&mutex);
}

static void serve(int connection)
{
	struct ucred asker;
	socklen_t bytes = sizeof(asker);
	uint64_t number;

	set_limits(connection);
	if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &asker, &bytes) == 0 && (asker.uid == geteuid() || asker.uid == 0) &&
	    recv(connection, &number, sizeof(number), 0) == sizeof(number) && number)
		send_descriptor(connection, number);
}

/* A job may close descriptors that it does not know, and get one of its own under the number. */
static ino_t inode_of(int descriptor)
{
	struct stat about;

	return fstat(descriptor, &about) == 0 && S_ISSOCK(about.st_mode) ? about.st_ino : 0;
}

static void *keep_the_desk(void *given)
{
	int desk = (int)(intptr_t)given;
	ino_t inode = inode_of(desk);

	prctl(PR_SET_NAME, "snapshim-desk");
	while (inode && inode_of(desk) == inode) {
		int connection = accept4(desk, NULL, NULL, SOCK_CLOEXEC);

		if (connection >= 0) {
			serve(connection);
			close(connection);
		} else if (errno == EINVAL || errno == EBADF || errno == ENOTSOCK) {
			break; /* closed */
		} else if (errno != EINTR && errno != ECONNABORTED) {
			pause_us(BREATH_US); /* no descriptors left: they come back */
		}
	}
	pthread_mutex_lock(&mutex);
	if (open_socket == desk) { /* nobody has closed it, but it cannot be reached any more */
		open_socket = NOTHING;
		open_number = 0;
	}
	if (inode && inode_of(desk) == inode)
		close(desk);
	pthread_mutex_unlock(&mutex);
	return NULL;
}

static bool start_thread(int desk)
{
	pthread_attr_t attributes;
	pthread_t thread;
	bool started;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	started = create_exempt_thread(&thread, &attributes, keep_the_desk, (void *)(intptr_t)desk) == 0;
	pthread_attr_destroy(&attributes);
	return started;
}

uint64_t desk_open(void)
{
	uint64_t number = 0;
	struct name name;
	int desk;

	pthread_mutex_lock(&mutex);
	if (!open_number && KERNEL(SYS_getrandom, &number, sizeof(number), 0) == sizeof(number) && number) {
		name = name_of(number);
		desk = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
		if (desk >= 0 && bind(desk, (struct sockaddr *)&name.address, name.bytes) == 0 && listen(desk, WAITING) == 0 &&
		    start_thread(desk)) {
			open_socket = desk;
			open_number = number;
		} else if (desk >= 0) {
			close(desk);
		}
	}
	number = open_number;
	pthread_mutex_unlock(&mutex);
	return number;
}

uint64_t desk_number(void)
{
	uint64_t number;

	pthread_mutex_lock(&mutex);
	number = open_number;
	pthread_mutex_unlock(&mutex);
	return number;
}

uint64_t desk_offer(int descriptor)
{
	struct offer *offer;
	uint64_t number = 0;

	pthread_mutex_lock(&mutex);
	for (offer = offers; offer && offer->number;)
		offer = offer->next;
	if (!offer) {
		offer = calloc(1, sizeof(*offer));
		if (offer) {
			offer->next = offers;
			STORE(&offers, offer);
		}
	}
	if (offer) {
		offer->descriptor = descriptor;
		offer->number = number = ++last_number;
		offered++;
	}
	pthread_mutex_unlock(&mutex);
	return number;
}

/* The last one closes the desk: its thread hears of it, and closes the socket. */
void desk_withdraw(uint64_t number)
{
	pthread_mutex_lock(&mutex);
	for (struct offer *offer = offers; offer; offer = offer->next)
		if (number && offer->number == number) {
			KERNEL(SYS_close, offer->descriptor);
			offer->number = 0;
			offered--;
		}
	if (!offered && open_number) {
		KERNEL(SYS_shutdown, open_socket, SHUT_RDWR);
		open_socket = NOTHING;
		open_number = 0;
	}
	pthread_mutex_unlock(&mutex);
}

/* In a forked child, which has the descriptors and not the thread. */
void desk_forget(void)
{
	for (struct offer *offer = LOAD(&offers); offer; offer = offer->next)
		if (offer->number) {
			KERNEL(SYS_close, offer->descriptor);
			offer->number = 0;
		}
	if (open_socket != NOTHING)
		KERNEL(SYS_close, open_socket);
	open_socket = NOTHING;
	open_number = 0;
	offered = 0;
	mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* ---------------------------------------------------------------- before it */

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
	head = bytes > 0 ? CMSG_FIRSTHDR(&message) : NULL;
	if (head && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(&descriptor, CMSG_DATA(head), sizeof(int));
	return descriptor;
}

int desk_ask(uint64_t desk, uint64_t number)
{
	struct name name = name_of(desk);
	int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	int descriptor = NOTHING, status;

	if (connection < 0)
		return NOTHING;
	set_limits(connection);
	do
		status = connect(connection, (struct sockaddr *)&name.address, name.bytes);
	while (status && errno == EINTR);
	if (!status && send(connection, &number, sizeof(number), MSG_NOSIGNAL) == sizeof(number))
		descriptor = receive_descriptor(connection);
	close(connection);
	return descriptor;
}
