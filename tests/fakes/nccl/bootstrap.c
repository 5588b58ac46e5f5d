/* Connects the members of a new communicator with each other: two sockets for every pair.
 *
 * Invariant: on success every link is open; on failure comm_free closes the open ones. In both cases the listeners of
 * the ids that this process created are gone.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "communicator.h"
#include "rendezvous.h"

#define HELLO_MAGIC 0x6e636865u

enum channel { DATA, CONTROL, CHANNELS };

struct hello {
	uint32_t magic;
	uint32_t channel;
	int32_t rank;
	uint32_t padding;
	uint64_t id;
};

ncclResult_t member_self(struct member *self, int *listener)
{
	const struct identity *identity;
	ncclResult_t result = identity_learn(&identity);

	if (result != ncclSuccess)
		return result;
	*self = (struct member){.host = identity->host};
	return network_listen(listener, &self->address);
}

static ncclResult_t make_links(struct ncclComm *comm)
{
	int peer;

	comm->data = calloc((size_t)comm->nranks, sizeof(*comm->data));
	comm->control = calloc((size_t)comm->nranks, sizeof(*comm->control));
	if (!comm->data || !comm->control) {
		free(comm->data);
		free(comm->control);
		comm->data = comm->control = NULL; /* their descriptors are not -1 yet */
		return failed(ncclSystemError, "out of memory");
	}
	for (peer = 0; peer < comm->nranks; peer++)
		comm->data[peer].fd = comm->control[peer].fd = -1;
	return ncclSuccess;
}

static ncclResult_t call_on(struct ncclComm *comm, int peer, enum channel channel, const struct cancel *cancel)
{
	struct hello hello = {.magic = HELLO_MAGIC, .channel = channel, .rank = comm->rank, .id = comm->id};
	struct link *link = channel == DATA ? &comm->data[peer] : &comm->control[peer];
	ncclResult_t result = network_connect(&link->fd, &comm->members[peer].address, cancel);

	return result == ncclSuccess ? network_send(link->fd, &hello, sizeof(hello), cancel) : result;
}

/* Accepts one connection. One that belongs to another communicator is closed and does not count. */
static ncclResult_t answer(struct ncclComm *comm, int listener, const struct cancel *cancel, int *missing)
{
	struct hello hello;
	struct link *link;
	int fd;
	ncclResult_t result = network_accept(&fd, listener, cancel);

	if (result != ncclSuccess)
		return result;
	result = network_receive(fd, &hello, sizeof(hello), cancel);
	if (result != ncclSuccess || hello.magic != HELLO_MAGIC || hello.id != comm->id || hello.channel >= CHANNELS ||
	    hello.rank <= comm->rank || hello.rank >= comm->nranks) {
		close(fd);
		return result;
	}
	link = hello.channel == DATA ? &comm->data[hello.rank] : &comm->control[hello.rank];
	if (link->fd >= 0) {
		close(fd);
		return ncclSuccess;
	}
	link->fd = fd;
	--*missing;
	return ncclSuccess;
}

/* Pairs are joined in the order of the lower rank, then of the higher one, so no two ranks wait for each other. */
static ncclResult_t make_streams(struct ncclComm *comm, const struct cancel *cancel)
{
	ncclResult_t result = ncclSuccess;
	struct ibv_context *context;
	int peer;

	if (comm->nranks == 1) /* NCCL opens the devices for a communicator of one rank, too */
		return ib_next_device(&context);
	for (peer = 0; peer < comm->nranks && result == ncclSuccess; peer++)
		if (peer != comm->rank)
			result = ib_stream_open(&comm->data[peer].stream, comm->data[peer].fd, cancel);
	return result;
}

ncclResult_t bootstrap_mesh(struct ncclComm *comm, int listener, const struct cancel *cancel)
{
	int missing = CHANNELS * (comm->nranks - 1 - comm->rank), peer;
	ncclResult_t result = make_links(comm);

	for (peer = 0; peer < comm->rank && result == ncclSuccess; peer++) {
		result = call_on(comm, peer, DATA, cancel);
		if (result == ncclSuccess)
			result = call_on(comm, peer, CONTROL, cancel);
	}
	while (missing && result == ncclSuccess)
		result = answer(comm, listener, cancel, &missing);
	if (result == ncclSuccess && ib_wanted())
		result = make_streams(comm, cancel);
	return result;
}

static bool read_id(const ncclUniqueId *id, struct unique_id *read, struct sockaddr_storage *address)
{
	memcpy(read, id, sizeof(*read));
	memset(address, 0, sizeof(*address));
	memcpy(address, read->address, sizeof(struct sockaddr_in6));
	return read->magic == RENDEZVOUS_MAGIC;
}

static ncclResult_t join_by_id(const ncclUniqueId *id, int rank, int nranks, const struct member *self,
			       struct member *members, const struct cancel *cancel)
{
	struct join message = {.magic = RENDEZVOUS_MAGIC, .rank = rank, .nranks = nranks, .self = *self};
	struct sockaddr_storage address;
	struct unique_id read;
	struct reply reply;
	ncclResult_t result;
	int fd;

	if (!read_id(id, &read, &address))
		return failed(ncclInvalidArgument, "the id was not made by this library's ncclGetUniqueId");
	message.number = read.number;
	if ((result = network_connect(&fd, &address, cancel)) != ncclSuccess)
		return result;
	result = network_send(fd, &message, sizeof(message), cancel);
	if (result == ncclSuccess)
		result = network_receive(fd, &reply, sizeof(reply), cancel);
	if (result == ncclSuccess && reply.refused > 0)
		result = failed(ncclInvalidUsage, "this rank speaks of %d ranks and the others of %d: all must say the same",
				nranks, reply.refused);
	else if (result == ncclSuccess && reply.refused)
		result = failed(ncclInvalidUsage, "rank %d has joined already: every rank joins once", rank);
	if (result == ncclSuccess)
		result = network_receive(fd, members, sizeof(*members) * (size_t)nranks, cancel);
	close(fd);
	return result;
}

static void release(const ncclUniqueId *id, const struct cancel *cancel)
{
	struct join message = {.magic = RENDEZVOUS_MAGIC, .rank = RELEASE};
	struct sockaddr_storage address;
	struct unique_id read;
	int fd;

	if (!read_id(id, &read, &address))
		return;
	message.number = read.number;
	if (network_connect(&fd, &address, cancel) != ncclSuccess)
		return; /* its creator has already released it */
	network_send(fd, &message, sizeof(message), cancel);
	close(fd);
}

ncclResult_t bootstrap_by_ids(struct ncclComm *comm, const ncclUniqueId *ids, int nids, const struct cancel *cancel)
{
	struct member self;
	int listener = -1, i;
	ncclResult_t result = member_self(&self, &listener);

	comm->members = calloc((size_t)comm->nranks, sizeof(*comm->members));
	if (result == ncclSuccess && !comm->members)
		result = failed(ncclSystemError, "out of memory");
	if (result == ncclSuccess) /* the fake needs only one rendezvous: all ranks use the first id */
		result = join_by_id(&ids[0], comm->rank, comm->nranks, &self, comm->members, cancel);
	for (i = 1; i < nids && comm->rank == 0; i++)
		release(&ids[i], cancel);
	if (result == ncclSuccess)
		result = bootstrap_mesh(comm, listener, cancel);
	if (listener >= 0)
		close(listener);
	rendezvous_settle(rendezvous_number(&ids[0]), result != ncclSuccess);
	for (i = 1; i < nids; i++)
		rendezvous_settle(rendezvous_number(&ids[i]), true);
	return result;
}
