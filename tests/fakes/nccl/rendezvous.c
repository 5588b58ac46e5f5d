/* Unique ids: each is the address of a listener, which a thread of the process that created the id serves.
 *
 * The thread collects one join message per rank, answers each with the addresses of all ranks, and ends. Invariant:
 * once all ranks have joined, or the id was released, neither the thread nor any of its sockets is left.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "communicator.h"
#include "faults.h"
#include "rendezvous.h"

struct guest {
	int fd;
	size_t have;
	struct join join;
	bool seated;
};

struct rendezvous {
	struct rendezvous *next;
	uint64_t number;
	int listener, give_up_fd;
	pthread_t thread;
	bool done; /* under library_lock */

	struct guest *guests;
	int nguests, nranks, nseated;
	bool released;
};

static struct rendezvous *all; /* under library_lock */

static void dismiss(struct rendezvous *meeting, int index)
{
	close(meeting->guests[index].fd);
	meeting->nseated -= meeting->guests[index].seated;
	meeting->guests[index] = meeting->guests[--meeting->nguests];
}

static void refuse(struct rendezvous *meeting, int index, int why)
{
	const struct cancel cancel = {.fds = {meeting->give_up_fd}, .count = 1};
	struct reply reply = {.magic = RENDEZVOUS_MAGIC, .refused = why};

	network_send(meeting->guests[index].fd, &reply, sizeof(reply), &cancel);
	dismiss(meeting, index);
}

static void enlist(struct rendezvous *meeting, int index)
{
	struct guest *guest = &meeting->guests[index];
	const struct join *join = &guest->join;
	int other;

	if (join->magic != RENDEZVOUS_MAGIC || join->number != meeting->number) {
		dismiss(meeting, index); /* a stray connection */
		return;
	}
	if (join->rank == RELEASE) {
		meeting->released = true;
		return;
	}
	if (!meeting->nranks)
		meeting->nranks = join->nranks;
	if (join->nranks != meeting->nranks) {
		refuse(meeting, index, meeting->nranks);
		return;
	}
	for (other = 0; other < meeting->nguests; other++) {
		if (meeting->guests[other].seated && meeting->guests[other].join.rank == join->rank) {
			refuse(meeting, index, -1);
			return;
		}
	}
	guest->seated = true;
	meeting->nseated++;
}

static void admit(struct rendezvous *meeting)
{
	struct guest *grown;
	int fd = accept4(meeting->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return;
	grown = realloc(meeting->guests, (size_t)(meeting->nguests + 1) * sizeof(*grown));
	if (!grown) {
		close(fd);
		return;
	}
	meeting->guests = grown;
	meeting->guests[meeting->nguests++] = (struct guest){.fd = fd};
}

static void listen_to(struct rendezvous *meeting, int index)
{
	struct guest *guest = &meeting->guests[index];
	char extra;
	ssize_t got;

	if (guest->seated) { /* it sends nothing more, so this is the end of its connection */
		got = recv(guest->fd, &extra, sizeof(extra), 0);
	} else {
		got = recv(guest->fd, (char *)&guest->join + guest->have, sizeof(guest->join) - guest->have, 0);
		if (got > 0)
			guest->have += (size_t)got;
	}
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0)
		dismiss(meeting, index);
	else if (!guest->seated && guest->have == sizeof(guest->join))
		enlist(meeting, index);
}

static void introduce(struct rendezvous *meeting)
{
	const struct cancel cancel = {.fds = {meeting->give_up_fd}, .count = 1};
	struct member *members = calloc((size_t)meeting->nranks, sizeof(*members));
	struct reply reply = {.magic = RENDEZVOUS_MAGIC};
	int i;

	if (!members)
		return;
	for (i = 0; i < meeting->nguests; i++)
		if (meeting->guests[i].seated)
			members[meeting->guests[i].join.rank] = meeting->guests[i].join.self;
	for (i = 0; i < meeting->nguests; i++) {
		if (!meeting->guests[i].seated)
			continue;
		if (network_send(meeting->guests[i].fd, &reply, sizeof(reply), &cancel) == ncclSuccess)
			network_send(meeting->guests[i].fd, members, sizeof(*members) * (size_t)meeting->nranks, &cancel);
	}
	free(members);
}

static void *host(void *argument)
{
	struct rendezvous *meeting = argument;

	while (!meeting->released && (!meeting->nranks || meeting->nseated < meeting->nranks)) {
		struct pollfd watched[2 + meeting->nguests];
		int i;

		watched[0] = (struct pollfd){.fd = meeting->listener, .events = POLLIN};
		watched[1] = (struct pollfd){.fd = meeting->give_up_fd, .events = POLLIN};
		for (i = 0; i < meeting->nguests; i++)
			watched[2 + i] = (struct pollfd){.fd = meeting->guests[i].fd, .events = POLLIN};
		if (poll(watched, (nfds_t)2 + (nfds_t)meeting->nguests, -1) < 0)
			continue;
		if (watched[1].revents)
			break;
		for (i = meeting->nguests; i-- > 0;) /* backwards: a dismissed guest's place is taken by the last one */
			if (watched[2 + i].revents)
				listen_to(meeting, i);
		if (watched[0].revents)
			admit(meeting);
	}
	if (meeting->nranks && meeting->nseated == meeting->nranks)
		introduce(meeting);
	while (meeting->nguests)
		dismiss(meeting, 0);
	close(meeting->listener);
	free(meeting->guests);
	pthread_mutex_lock(&library_lock); /* rendezvous_settle may just be about to write to it */
	close(meeting->give_up_fd);
	meeting->done = true;
	pthread_mutex_unlock(&library_lock);
	return NULL;
}

/* Removes a listener from the list and waits for its end. Number 0: any that has already ended. */
void rendezvous_settle(uint64_t number, bool give_up)
{
	struct rendezvous **place, *meeting = NULL;

	pthread_mutex_lock(&library_lock);
	for (place = &all; *place; place = &(*place)->next) {
		if (number ? (*place)->number == number : (*place)->done) {
			meeting = *place;
			*place = meeting->next;
			break;
		}
	}
	if (meeting && give_up && !meeting->done)
		cancel_signal(meeting->give_up_fd);
	pthread_mutex_unlock(&library_lock);
	if (!meeting)
		return;
	pthread_join(meeting->thread, NULL);
	free(meeting);
	if (!number)
		rendezvous_settle(0, false);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	struct rendezvous *meeting;
	struct sockaddr_storage address;
	struct unique_id made = {.magic = RENDEZVOUS_MAGIC, .version = FAKE_NCCL_VERSION};
	ncclResult_t result = fault_at("getuniqueid", -1, NULL);

	if (result != ncclSuccess)
		return result;
	if (!id)
		return failed(ncclInvalidArgument, "nowhere to put the id");
	rendezvous_settle(0, false);
	if (!(meeting = calloc(1, sizeof(*meeting))))
		return failed(ncclSystemError, "out of memory");
	meeting->listener = meeting->give_up_fd = -1;
	result = network_listen(&meeting->listener, &address);
	if (result == ncclSuccess)
		result = cancel_open(&meeting->give_up_fd);
	made.number = meeting->number = random_number() | 1;
	pthread_mutex_lock(&library_lock); /* the thread must not be done before it is listed */
	if (result == ncclSuccess && !start_thread(&meeting->thread, host, meeting, "nccl-id"))
		result = failed(ncclSystemError, "cannot start a thread");
	if (result == ncclSuccess) {
		meeting->next = all;
		all = meeting;
	}
	pthread_mutex_unlock(&library_lock);
	if (result != ncclSuccess) {
		if (meeting->listener >= 0)
			close(meeting->listener);
		if (meeting->give_up_fd >= 0)
			close(meeting->give_up_fd);
		free(meeting);
		return result;
	}
	memcpy(made.address, &address, address_bytes(&address));
	memcpy(id, &made, sizeof(*id));
	return ncclSuccess;
}

uint64_t rendezvous_number(const ncclUniqueId *id)
{
	struct unique_id read;

	memcpy(&read, id, sizeof(read));
	return read.number;
}
