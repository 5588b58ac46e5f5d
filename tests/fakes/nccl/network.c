/* TCP with waits that end when the communicator is aborted. Invariant: no call here blocks without watching the cancel
 * descriptors, and every descriptor is closed on exec.
 */
#define _GNU_SOURCE
#include "network.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "errors.h"

#define BACKLOG 1024

socklen_t address_bytes(const struct sockaddr_storage *address)
{
	return address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

static const char *spelled(const struct sockaddr_storage *address, char *text, size_t bytes)
{
	char host[INET6_ADDRSTRLEN] = "?";
	unsigned port;

	if (address->ss_family == AF_INET6) {
		const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;

		inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
		port = ntohs(v6->sin6_port);
	} else {
		const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;

		inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
		port = ntohs(v4->sin_port);
	}
	snprintf(text, bytes, "%s port %u", host, port);
	return text;
}

bool cancelled(const struct cancel *cancel)
{
	struct pollfd watched[MAX_CANCELS];
	int i;

	for (i = 0; i < cancel->count; i++)
		watched[i] = (struct pollfd){.fd = cancel->fds[i], .events = POLLIN};
	return cancel->count > 0 && poll(watched, (nfds_t)cancel->count, 0) > 0;
}

static ncclResult_t await(int fd, short events, const struct cancel *cancel)
{
	struct pollfd watched[1 + MAX_CANCELS];
	int i;

	watched[0] = (struct pollfd){.fd = fd, .events = events};
	for (i = 0; i < cancel->count; i++)
		watched[1 + i] = (struct pollfd){.fd = cancel->fds[i], .events = POLLIN};
	for (;;) {
		if (poll(watched, 1 + (nfds_t)cancel->count, -1) < 0) {
			if (errno == EINTR)
				continue;
			return failed(ncclSystemError, "poll: %s", strerror(errno));
		}
		for (i = 0; i < cancel->count; i++)
			if (watched[1 + i].revents)
				return failed(ncclInternalError, "aborted while waiting for another rank");
		if (watched[0].revents)
			return ncclSuccess;
	}
}

static void prepare(int fd)
{
	int on = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

ncclResult_t network_listen(int *listener, struct sockaddr_storage *address)
{
	const struct identity *identity;
	socklen_t bytes = sizeof(*address);
	ncclResult_t result = identity_learn(&identity);
	char text[96];

	if (result != ncclSuccess)
		return result;
	*address = identity->address;
	*listener = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (*listener < 0)
		return failed(ncclSystemError, "socket: %s", strerror(errno));
	if (bind(*listener, (struct sockaddr *)address, address_bytes(address)) != 0 || listen(*listener, BACKLOG) != 0 ||
	    getsockname(*listener, (struct sockaddr *)address, &bytes) != 0) {
		result = failed(ncclSystemError,
				"cannot listen on %s: %s. The library keeps the address that the host had when it was "
				"first used; on another host a fresh copy must be loaded",
				spelled(address, text, sizeof(text)), strerror(errno));
		close(*listener);
		*listener = -1;
	}
	return result;
}

ncclResult_t network_accept(int *fd, int listener, const struct cancel *cancel)
{
	for (;;) {
		ncclResult_t result = await(listener, POLLIN, cancel);

		if (result != ncclSuccess)
			return result;
		*fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (*fd >= 0) {
			prepare(*fd);
			return ncclSuccess;
		}
		if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
			return failed(ncclSystemError, "accept: %s", strerror(errno));
	}
}

ncclResult_t network_connect(int *fd, const struct sockaddr_storage *address, const struct cancel *cancel)
{
	ncclResult_t result = ncclSuccess;
	int error = 0;
	socklen_t bytes = sizeof(error);
	char text[96];

	*fd = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (*fd < 0)
		return failed(ncclSystemError, "socket: %s", strerror(errno));
	prepare(*fd);
	if (connect(*fd, (const struct sockaddr *)address, address_bytes(address)) != 0) {
		if (errno != EINPROGRESS && errno != EINTR) {
			error = errno;
		} else {
			result = await(*fd, POLLOUT, cancel);
			if (result == ncclSuccess)
				getsockopt(*fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
		}
	}
	if (error)
		result = failed(ncclSystemError, "cannot connect to %s: %s. Does the rank that made the id still run?",
				spelled(address, text, sizeof(text)), strerror(error));
	if (result != ncclSuccess) {
		close(*fd);
		*fd = -1;
	}
	return result;
}

ncclResult_t network_send(int fd, const void *bytes, size_t count, const struct cancel *cancel)
{
	const char *at = bytes;

	while (count) {
		ssize_t sent = send(fd, at, count, MSG_NOSIGNAL);
		ncclResult_t result;

		if (sent > 0) {
			at += sent;
			count -= (size_t)sent;
		} else if (errno == EAGAIN) {
			if ((result = await(fd, POLLOUT, cancel)) != ncclSuccess)
				return result;
		} else if (errno != EINTR) {
			return failed(ncclRemoteError, "another rank closed its connection: %s", strerror(errno));
		}
	}
	return ncclSuccess;
}

ncclResult_t network_receive(int fd, void *bytes, size_t count, const struct cancel *cancel)
{
	char *at = bytes;

	while (count) {
		ncclResult_t result = await(fd, POLLIN, cancel);
		ssize_t got;

		if (result != ncclSuccess)
			return result;
		got = recv(fd, at, count, 0);
		if (got > 0) {
			at += got;
			count -= (size_t)got;
		} else if (got == 0) {
			return failed(ncclRemoteError, "another rank closed its connection");
		} else if (errno != EINTR && errno != EAGAIN) {
			return failed(ncclRemoteError, "another rank closed its connection: %s", strerror(errno));
		}
	}
	return ncclSuccess;
}

ncclResult_t cancel_open(int *fd)
{
	*fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return *fd >= 0 ? ncclSuccess : failed(ncclSystemError, "eventfd: %s", strerror(errno));
}

void cancel_signal(int fd)
{
	uint64_t one = 1;

	/* The only failure is a full counter, which is readable as well. */
	if (write(fd, &one, sizeof(one)) < 0)
		return;
}
