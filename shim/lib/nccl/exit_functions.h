/* Functions that NCCL has registered with atexit: they end what it keeps until the process exits. */
#ifndef SNAPSHIM_NCCL_EXIT_FUNCTIONS_H
#define SNAPSHIM_NCCL_EXIT_FUNCTIONS_H

#include "command.h"

/* Ends the threads that NCCL keeps without a communicator (RAS), if it has registered a function that does it. An instance whose
 * function was called is not used again. */
void exit_functions_release(struct nccl_job *job);

#endif
