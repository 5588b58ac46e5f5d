/* Moves blocks between this rank and its peers, all at once, over one socket per peer.
 *
 * A receiver sends a READY frame, and the sender answers with DATA. Invariant: payload is sent only for a posted
 * receive, so only small READY frames can arrive early; they are kept. Sends and receives between two ranks match in
 * the order in which they were posted.
 */
#define _GNU_SOURCE
#include "links.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "errors.h"

#define MAGIC 0x6e63666bu

static bool agree(const struct signature *a, const struct signature *b)
{
	return a->opcode == b->opcode && a->datatype == b->datatype && a->reduction == b->reduction && a->root == b->root &&
	       a->count == b->count;
}

static ncclResult_t disagree(int peer, const struct signature *theirs, const struct signature *ours)
{
	return failed(ncclInvalidUsage,
		      "rank %d runs %s (count %llu, type %u, operator %u, root %d) where this rank runs %s (count %llu, "
		      "type %u, operator %u, root %d): all ranks must launch the same operations in the same order",
		      peer, opcode_name(theirs->opcode), (unsigned long long)theirs->count, theirs->datatype,
		      theirs->reduction, theirs->root, opcode_name(ours->opcode), (unsigned long long)ours->count,
		      ours->datatype, ours->reduction, ours->root);
}

static void finish(struct link *link, struct transfer *transfer)
{
	if (!transfer->done) {
		transfer->done = true;
		link->unfinished--;
	}
}

static void give_out(struct link *link, struct transfer *transfer)
{
	transfer->next_out = NULL;
	if (link->out_tail)
		link->out_tail->next_out = transfer;
	else
		link->out_head = transfer;
	link->out_tail = transfer;
}

/* Assigns one READY frame to the oldest send that waits for one. */
static ncclResult_t match_ready(struct link *link, const struct frame *frame)
{
	struct transfer *send = link->sends;

	if (!agree(&frame->signature, &send->signature) || frame->bytes != send->bytes)
		return disagree(send->peer, &frame->signature, &send->signature);
	link->sends = send->next_of_kind;
	give_out(link, send);
	return ncclSuccess;
}

static ncclResult_t keep_early(struct link *link, const struct frame *frame)
{
	if (link->nearly == link->early_room) {
		size_t room = link->early_room ? 2 * link->early_room : 8;
		struct frame *grown = realloc(link->early, room * sizeof(*grown));

		if (!grown)
			return failed(ncclSystemError, "out of memory");
		link->early = grown;
		link->early_room = room;
	}
	link->early[link->nearly++] = *frame;
	return ncclSuccess;
}

static ncclResult_t take_early(struct link *link)
{
	size_t taken = 0;
	ncclResult_t result = ncclSuccess;

	while (taken < link->nearly && link->sends && result == ncclSuccess)
		result = match_ready(link, &link->early[taken++]);
	if (taken) { /* so that `early` may still be NULL when nothing was ever kept */
		link->nearly -= taken;
		memmove(link->early, link->early + taken, link->nearly * sizeof(*link->early));
	}
	return result;
}

static ncclResult_t take_frame(struct link *link, int peer)
{
	const struct frame *frame = &link->in;
	struct transfer *receive = link->receives, *ours = receive ? receive : link->sends;

	if (frame->magic != MAGIC)
		return failed(ncclInternalError, "what arrived is no frame of this library");
	if (frame->type == FRAME_READY)
		return link->sends ? match_ready(link, frame) : keep_early(link, frame);
	if (frame->type == FRAME_REFUSED && ours && !agree(&frame->signature, &ours->signature))
		return disagree(peer, &frame->signature, &ours->signature);
	if (frame->type == FRAME_REFUSED)
		return failed(ncclInvalidUsage, "rank %d gave %s up, because another rank launched something else there",
			      peer, opcode_name(frame->signature.opcode));
	if (!receive)
		return failed(ncclInternalError, "unexpected data arrived");
	if (!agree(&frame->signature, &receive->signature) || frame->bytes != receive->bytes)
		return disagree(peer, &frame->signature, &receive->signature);
	link->receives = receive->next_of_kind;
	link->in_into = receive;
	link->in_payload = 0;
	return ncclSuccess;
}

static ncclResult_t lost(ssize_t outcome, int peer)
{
	return failed(ncclRemoteError, "rank %d closed its connection: %s", peer,
		      outcome == 0 ? "end of stream" : strerror(errno));
}

/* What the peer sends for a later run stays in the socket: it is neither read nor polled for. */
static bool wants_input(const struct link *link)
{
	return link->sends || link->receives || link->in_into;
}

static ssize_t take(struct link *link, void *into, size_t bytes)
{
	return link->stream ? ib_stream_receive(link->stream, into, bytes) : recv(link->fd, into, bytes, 0);
}

static ssize_t give(struct link *link, struct iovec *parts, int count)
{
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};

	return link->stream ? ib_stream_send(link->stream, parts, count) : sendmsg(link->fd, &message, MSG_NOSIGNAL);
}

static ncclResult_t read_link(struct link *link, int peer)
{
	while (wants_input(link)) {
		struct transfer *into = link->in_into;
		ncclResult_t result;
		ssize_t got;

		if (into && link->in_payload == into->bytes) {
			link->in_into = NULL;
			finish(link, into);
			continue;
		}
		if (into)
			got = take(link, (char *)into->data + link->in_payload, into->bytes - link->in_payload);
		else
			got = take(link, (char *)&link->in + link->in_have, sizeof(link->in) - link->in_have);
		if (got < 0 && (errno == EAGAIN || errno == EINTR))
			return ncclSuccess;
		if (got <= 0)
			return lost(got, peer);
		if (into) {
			link->in_payload += (size_t)got;
			continue;
		}
		link->in_have += (size_t)got;
		if (link->in_have < sizeof(link->in))
			continue;
		link->in_have = 0;
		if ((result = take_frame(link, peer)) != ncclSuccess)
			return result;
	}
	return ncclSuccess;
}

static ncclResult_t write_link(struct link *link, int peer)
{
	while (link->out_head) {
		struct transfer *transfer = link->out_head;
		size_t payload = transfer->sending ? transfer->bytes : 0, header;
		struct iovec parts[2];
		ssize_t sent;

		if (!link->out_begun) {
			link->out = (struct frame){.magic = MAGIC,
						   .type = transfer->sending ? FRAME_DATA : FRAME_READY,
						   .signature = transfer->signature,
						   .bytes = transfer->bytes};
			link->out_done = 0;
			link->out_begun = true;
		}
		header = link->out_done < sizeof(link->out) ? link->out_done : sizeof(link->out);
		parts[0].iov_base = (char *)&link->out + header;
		parts[0].iov_len = sizeof(link->out) - header;
		parts[1].iov_base = payload ? (char *)transfer->data + (link->out_done - header) : NULL;
		parts[1].iov_len = payload - (link->out_done - header);
		sent = give(link, parts, 2);
		if (sent < 0 && (errno == EAGAIN || errno == EINTR))
			return ncclSuccess;
		if (sent < 0)
			return lost(sent, peer);
		link->out_done += (size_t)sent;
		if (link->out_done < sizeof(link->out) + payload)
			continue;
		link->out_begun = false;
		link->out_head = transfer->next_out;
		if (!link->out_head)
			link->out_tail = NULL;
		if (transfer->sending)
			finish(link, transfer);
	}
	return ncclSuccess;
}

static void abandon(struct link *link)
{
	link->sends = link->receives = link->in_into = link->out_head = link->out_tail = NULL;
	link->out_begun = false;
	link->unfinished = 0;
}

static ncclResult_t begin(struct link *links, int nlinks, struct transfer *transfers, size_t count)
{
	ncclResult_t result = ncclSuccess;
	size_t i;
	int peer;

	for (i = count; i-- > 0;) { /* backwards, so that each list ends up in its order */
		struct link *link = &links[transfers[i].peer];
		struct transfer **kind = transfers[i].sending ? &link->sends : &link->receives;

		transfers[i].done = false;
		transfers[i].next_of_kind = *kind;
		*kind = &transfers[i];
		link->unfinished++;
	}
	for (i = 0; i < count; i++)
		if (!transfers[i].sending)
			give_out(&links[transfers[i].peer], &transfers[i]);
	for (peer = 0; peer < nlinks && result == ncclSuccess; peer++)
		result = take_early(&links[peer]);
	return result;
}

static ncclResult_t serve(struct link *link, int peer, bool leaving)
{
	ncclResult_t result =
		link->fd < 0 ? failed(ncclRemoteError, "no connection to rank %d", peer) : write_link(link, peer);

	if (result == ncclSuccess)
		result = read_link(link, peer);
	if (result == ncclSuccess && link->out_head)
		result = write_link(link, peer); /* the frames just read may have requested data */
	if (result == ncclRemoteError && leaving) {
		abandon(link);
		result = ncclSuccess;
	}
	return result;
}

/* Notifies all peers of a run that failed because of a mismatch. Best effort: nothing can be sent in the middle of
 * another frame, and the peer then notices when this rank aborts. */
static void refuse_all(struct link *links, int nlinks, const struct transfer *transfers)
{
	struct frame frame = {.magic = MAGIC, .type = FRAME_REFUSED, .signature = transfers[0].signature};
	struct iovec part = {.iov_base = &frame, .iov_len = sizeof(frame)};
	int peer;

	for (peer = 0; peer < nlinks; peer++)
		if (links[peer].fd >= 0 && links[peer].unfinished && !links[peer].out_begun)
			(void)!give(&links[peer], &part, 1);
}

static ncclResult_t run(struct link *links, int nlinks, bool leaving, const struct cancel *cancel, struct pollfd *watched)
{
	ncclResult_t result;
	nfds_t nwatched;
	int peer;

	for (;;) {
		for (peer = 0; peer < cancel->count; peer++)
			watched[peer] = (struct pollfd){.fd = cancel->fds[peer], .events = POLLIN};
		nwatched = (nfds_t)cancel->count;
		for (peer = 0; peer < nlinks; peer++) {
			struct link *link = &links[peer];

			if (!link->unfinished)
				continue;
			if ((result = serve(link, peer, leaving)) != ncclSuccess)
				return result;
			if (link->unfinished && link->stream)
				watched[nwatched++] = (struct pollfd){.fd = ib_stream_fd(link->stream), .events = POLLIN};
			if (link->unfinished && link->stream) /* its end */
				watched[nwatched++] = (struct pollfd){.fd = link->fd, .events = POLLIN};
			else if (link->unfinished)
				watched[nwatched++] = (struct pollfd){.fd = link->fd,
								      .events = (wants_input(link) ? POLLIN : 0) |
										(link->out_head ? POLLOUT : 0)};
		}
		if (nwatched == (nfds_t)cancel->count)
			return ncclSuccess;
		if (poll(watched, nwatched, -1) < 0 && errno != EINTR)
			return failed(ncclSystemError, "poll: %s", strerror(errno));
		if (cancelled(cancel))
			return failed(ncclInternalError, "aborted while waiting for another rank");
	}
}

ncclResult_t links_run(struct link *links, int nlinks, struct transfer *transfers, size_t count, bool leaving,
		       const struct cancel *cancel)
{
	struct pollfd *watched = calloc(2 * (size_t)nlinks + MAX_CANCELS, sizeof(*watched));
	ncclResult_t result;

	if (!watched)
		return failed(ncclSystemError, "out of memory");
	result = begin(links, nlinks, transfers, count);
	if (result == ncclSuccess)
		result = run(links, nlinks, leaving, cancel, watched);
	if (result == ncclInvalidUsage)
		refuse_all(links, nlinks, transfers);
	free(watched);
	return result;
}

void links_close(struct link *links, int nlinks, bool drain)
{
	int peer;

	for (peer = 0; peer < nlinks; peer++) {
		if (links[peer].stream)
			ib_stream_close(links[peer].stream, drain);
		links[peer].stream = NULL;
		if (links[peer].fd >= 0)
			close(links[peer].fd);
		links[peer].fd = -1;
		free(links[peer].early);
		links[peer].early = NULL;
		links[peer].nearly = links[peer].early_room = 0;
	}
}
