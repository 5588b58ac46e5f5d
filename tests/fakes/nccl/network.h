/* Sockets whose every wait can be cancelled, and the host's identity that they are bound to. */
#ifndef FAKE_NCCL_NETWORK_H
#define FAKE_NCCL_NETWORK_H

#include <stdbool.h>
#include <sys/socket.h>

#include "nccl_abi.h"

#define MAX_CANCELS 2

/* Event descriptors; as soon as one is readable, whoever waits gives up with ncclInternalError. */
struct cancel {
	int fds[MAX_CANCELS];
	int count;
};

/* What the library learnt about its host at first use. Kept for the life of the library, right or wrong: a process that
 * came to another node must load a fresh copy, as with NCCL. */
struct identity {
	struct sockaddr_storage address; /* port 0 */
	uint64_t host;
};

ncclResult_t identity_learn(const struct identity **identity);
uint64_t random_number(void);

socklen_t address_bytes(const struct sockaddr_storage *address);
/* Listens on the identity's address at a free port and tells which. */
ncclResult_t network_listen(int *listener, struct sockaddr_storage *address);
ncclResult_t network_accept(int *fd, int listener, const struct cancel *cancel);
ncclResult_t network_connect(int *fd, const struct sockaddr_storage *address, const struct cancel *cancel);
ncclResult_t network_send(int fd, const void *bytes, size_t count, const struct cancel *cancel);
ncclResult_t network_receive(int fd, void *bytes, size_t count, const struct cancel *cancel);
bool cancelled(const struct cancel *cancel);
ncclResult_t cancel_open(int *fd);
void cancel_signal(int fd);

#endif
