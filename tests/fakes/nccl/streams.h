/* Streams of the pretended devices: the order in which work runs, and waiting for it.
 *
 * They are a library of their own (libfakestreams.so.1) because streams are CUDA's, not NCCL's: a process that loads a
 * second copy of libnccl.so.2 still has the same streams, and waiting for one waits for the work of both copies.
 */
#ifndef FAKE_NCCL_STREAMS_H
#define FAKE_NCCL_STREAMS_H

#include <stdatomic.h>
#include <stdint.h>

#define STREAM_EXPORT __attribute__((visibility("default")))

struct fake_ticket; /* one piece of work's place on a stream */

/* For tests: waits until all work that is on the stream now has left it. A failed operation stays until its
 * communicator is aborted, as a kernel that waits for a dead peer does. Always answers 0. */
STREAM_EXPORT int fakeNcclStreamSynchronize(void *stream);
/* For tests: 0 when the stream is empty, 7 (ncclInProgress) when it is not. */
STREAM_EXPORT int fakeNcclStreamQuery(void *stream);
/* For tests: the calling thread's device, which its next communicators belong to; 0 at first. The default streams (the
 * pointers 0, 1 and 2) are one per device. Always answers 0. */
STREAM_EXPORT int fakeNcclSetDevice(int device);
STREAM_EXPORT int fakeNcclGetDevice(void);

/* For libnccl: takes the next place on the stream. Tickets of one unit (one fused launch) do not wait for each other.
 * NULL when memory is out. */
STREAM_EXPORT struct fake_ticket *fakeNcclTicketTake(int device, void *stream, const void *unit);
/* Waits until nothing of another unit is ahead: 1 when it is this ticket's turn, 0 when *cancelled became true. */
STREAM_EXPORT int fakeNcclTicketAwait(struct fake_ticket *ticket, const atomic_bool *cancelled);
/* Gives the place up, done or not, and frees the ticket. */
STREAM_EXPORT void fakeNcclTicketLeave(struct fake_ticket *ticket);
/* Makes every fakeNcclTicketAwait look at its flag again. */
STREAM_EXPORT void fakeNcclTicketsWake(void);

#endif
