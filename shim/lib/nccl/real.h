/* The real NCCL: the instance that the job loaded, and fresh copies of it. */
#ifndef SNAPSHIM_NCCL_REAL_H
#define SNAPSHIM_NCCL_REAL_H

#include "symbols.h"
#include "types.h"

#define MOST_WORDS 12
#define EXIT_FUNCTIONS_MAX 8

struct nccl_instance {
	void *library;
	struct nccl_instance *before; /* the record stays after unloading: a thread may have just read it */
	int number; /* 0: the job's own; then one more for each fresh copy */
	uint64_t text_from, text_to; /* where its code is */
	uint64_t image_from, image_to; /* where all of it is */
	uint32_t released; /* 1: its RDMA devices or its RAS were closed under it, so it must not be used again */
	void (*exit_functions[EXIT_FUNCTIONS_MAX])(void *); /* that it has registered, oldest first; NULL: no more */
	int version; /* from ncclGetVersion */
	void *function[SYMBOLS]; /* NULL: this version has no such symbol */
};

extern const char *const nccl_symbol_names[SYMBOLS];

/* The current instance; NULL if the process has not loaded NCCL. Cheap. */
struct nccl_instance *real_instance(void);
/* The instance whose code contains the address, or NULL. */
struct nccl_instance *real_containing(const void *address);
/* The path of the job's own library; "" before it was found. */
const char *real_path(void);
/* Loads a fresh copy, which is the instance from then on. No communicator may be alive. 0 or an errno, and the reason in
 * `message`. */
int real_load_fresh(char *message, size_t room);

/* Calls `function` with that many words; `word` has MOST_WORDS of them. */
ncclResult_t real_call(void *function, int words, const uint64_t *word);

/* The function, cast to its type; NULL if the library lacks it. */
#define REAL(instance, name, type) ((type)(instance)->function[SYMBOL_##name])

#endif
