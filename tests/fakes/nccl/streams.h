/* Streams of the fake devices: the order in which work runs, and waiting for it.
 *
 * They are a separate library (libfakestreams.so.1) because streams are CUDA's, not NCCL's: a process that loads a
 * second copy of libnccl.so.2 still has the same streams, and waiting for one waits for the work of both copies.
 */
#ifndef FAKE_NCCL_STREAMS_H
#define FAKE_NCCL_STREAMS_H

#include <stdatomic.h>
#include <stdint.h>

#define STREAM_EXPORT __attribute__((visibility("default")))

struct fake_ticket; /* the position of one piece of work on a stream */

/* For tests: waits until all present work of the stream is done. A failed operation stays until its communicator is
 * aborted, like a kernel that waits for a dead peer. Always returns 0. */
STREAM_EXPORT int fakeNcclStreamSynchronize(void *stream);
/* For tests: 0 when the stream is empty, 7 (ncclInProgress) when it is not. */
STREAM_EXPORT int fakeNcclStreamQuery(void *stream);
/* For tests: the calling thread's device, which its next communicators belong to: that of its CUDA context, if there is
 * one, or 0, until another one is chosen (-1: none). The default streams (the pointers 0, 1 and 2) are one per device. */
STREAM_EXPORT int fakeNcclSetDevice(int device); /* always returns 0 */
STREAM_EXPORT int fakeNcclGetDevice(void);
STREAM_EXPORT int fakeNcclChosenDevice(void);

/* For libnccl: takes the next position on the stream. Tickets of one unit (one fused launch) do not wait for each
 * other. NULL if there is no memory. */
STREAM_EXPORT struct fake_ticket *fakeNcclTicketTake(int device, void *stream, const void *unit);
/* Waits until nothing of another unit is ahead: 1 when it is this ticket's turn, 0 when *cancelled became true. */
STREAM_EXPORT int fakeNcclTicketAwait(struct fake_ticket *ticket, const atomic_bool *cancelled);
/* Releases the position, whether the work is done or not, and frees the ticket. */
STREAM_EXPORT void fakeNcclTicketLeave(struct fake_ticket *ticket);
/* Makes every fakeNcclTicketAwait check its flag again. */
STREAM_EXPORT void fakeNcclTicketsWake(void);

#endif
