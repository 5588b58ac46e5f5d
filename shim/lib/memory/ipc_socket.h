/* What the server of memory that processes share (ipc_server.c) and its clients (ipc_client.c) agree on. */
#ifndef SNAPSHIM_MEMORY_IPC_SOCKET_H
#define SNAPSHIM_MEMORY_IPC_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NOTHING (-1)
#define LATER (-2) /* its rank is being moved: the answer is a number 0, and no descriptor */

struct name {
	struct sockaddr_un address;
	socklen_t bytes;
};

static inline struct name name_of(uint64_t server)
{
	struct name name = {.address.sun_family = AF_UNIX};
	int letters = snprintf(name.address.sun_path + 1, sizeof(name.address.sun_path) - 1, "snapshim-%016llx",
			       (unsigned long long)server);

	name.bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)letters);
	return name;
}

/* Names of abstract sockets belong to no user: once a server has ended, any user can take its name. */
static inline bool is_of_our_user(int connection, struct ucred *other)
{
	socklen_t bytes = sizeof(*other);

	return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, other, &bytes) == 0 &&
	       (other->uid == geteuid() || other->uid == 0);
}

#endif
