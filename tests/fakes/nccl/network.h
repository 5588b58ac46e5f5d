/* Sockets on which every wait can be cancelled, and the identity of the host that they are bound to. */
#ifndef FAKE_NCCL_NETWORK_H
#define FAKE_NCCL_NETWORK_H

#include <stdbool.h>
#include <sys/socket.h>

#include "nccl_abi.h"

#define MAX_CANCELS 2

/* Event descriptors: as soon as one is readable, waiting calls fail with ncclInternalError. */
struct cancel {
	int fds[MAX_CANCELS];
	int count;
};

/* The identity of the host, read at first use. It is never updated, even if it becomes wrong: a process that moved to
 * another node must load a fresh copy of the library, as with NCCL. */
struct identity {
	struct sockaddr_storage address; /* port 0 */
	uint64_t host;
};

ncclResult_t identity_learn(const struct identity **identity);
uint64_t random_number(void);

socklen_t address_bytes(const struct sockaddr_storage *address);
/* Listens on the identity's address at a free port, and returns the port. */
ncclResult_t network_listen(int *listener, struct sockaddr_storage *address);
ncclResult_t network_accept(int *fd, int listener, const struct cancel *cancel);
ncclResult_t network_connect(int *fd, const struct sockaddr_storage *address, const struct cancel *cancel);
ncclResult_t network_send(int fd, const void *bytes, size_t count, const struct cancel *cancel);
ncclResult_t network_receive(int fd, void *bytes, size_t count, const struct cancel *cancel);
bool cancelled(const struct cancel *cancel);
ncclResult_t cancel_open(int *fd);
void cancel_signal(int fd);

#endif
