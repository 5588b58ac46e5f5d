/* Passes ncclGetUniqueId to the current instance, because an id contains the address of the host that created it. */
#define _GNU_SOURCE
#include "ids.h"

#include "calls.h"

#define IDS 1024 /* of those that are not used: each has a thread and a socket */

static _Atomic uint64_t made[IDS]; /* hashes; 0: used, or none */

static uint64_t hash_of(const ncclUniqueId *id)
{
	return hash_bytes(0, id, sizeof(*id)) | 1;
}

void id_made(const ncclUniqueId *id)
{
	for (int i = 0; i < IDS; i++) {
		uint64_t none = 0;

		if (atomic_compare_exchange_strong(&made[i], &none, hash_of(id)))
			return;
	}
}

void id_used(const ncclUniqueId *ids, size_t count)
{
	for (size_t k = 0; k < count; k++) {
		uint64_t hash = hash_of(&ids[k]);

		for (int i = 0; i < IDS; i++)
			if (atomic_load(&made[i]) == hash)
				atomic_store(&made[i], 0);
	}
}

int ids_unused(void)
{
	int count = 0;

	for (int i = 0; i < IDS; i++)
		count += atomic_load(&made[i]) != 0;
	return count;
}

PROFILED(ncclResult_t, ncclGetUniqueId, ncclUniqueId *id)
{
	struct nccl_thread *thread = thread_self();
	struct nccl_instance *instance;
	bool inside = thread_inside(thread);
	ncclResult_t result;

	if (!inside) {
		atomic_store_explicit(&thread->function, "ncclGetUniqueId", memory_order_relaxed);
		atomic_store(&thread->calling, CALLING);
	}
	instance = real_instance();
	if (instance)
		result = REAL(instance, ncclGetUniqueId, ncclResult_t (*)(ncclUniqueId *))(id);
	else
		result = answer_missing(thread, SYMBOL_ncclGetUniqueId);
	if (!inside)
		ask_end(thread);
	if (!inside && result == ncclSuccess)
		id_made(id);
	return result;
}
