/* Finds the NCCL that the job loaded and, after a restore on another node, loads a fresh copy beside it.
 *
 * A library instance of NCCL keeps the host's identity and its interfaces' addresses, so a rank that was moved needs another
 * instance. The copy is loaded from a memfd, because the dynamic linker does not load the same file twice. Invariant:
 * nothing is ever loaded into a process that did not load NCCL itself.
 */
#define _GNU_SOURCE
#include "real.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/shim.h"
#include "own_threads.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U
#endif

#define X(name, ...) [SYMBOL_##name] = #name,
const char *const nccl_symbol_names[SYMBOLS] = {NCCL_LAUNCHED(X) NCCL_REFUSED(X) NCCL_ASKED(X) NCCL_WRITTEN(X)};
#undef X

static struct nccl_instance *_Atomic current;
static char path[4096];

static int note_text(struct dl_phdr_info *info, size_t size, void *context)
{
	struct nccl_instance *instance = context;
	struct link_map *map;

	(void)size;
	if (dlinfo(instance->library, RTLD_DI_LINKMAP, &map) != 0 || map->l_addr != info->dlpi_addr)
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		uint64_t from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, to = from + info->dlpi_phdr[i].p_memsz;

		if (info->dlpi_phdr[i].p_type != PT_LOAD)
			continue;
		if (info->dlpi_phdr[i].p_flags & PF_X) {
			instance->text_from = from;
			instance->text_to = to;
		}
		if (!instance->image_to || from < instance->image_from)
			instance->image_from = from;
		if (to > instance->image_to)
			instance->image_to = to;
	}
	return 1;
}

static struct nccl_instance *instance_of(void *library, int number)
{
	struct nccl_instance *instance = calloc(1, sizeof(*instance));

	if (!instance)
		return NULL;
	instance->library = library;
	instance->number = number;
	dl_iterate_phdr(note_text, instance);
	for (int i = 0; i < SYMBOLS; i++)
		instance->function[i] = dlsym(library, nccl_symbol_names[i]);
	if (REAL(instance, ncclGetVersion, ncclResult_t (*)(int *)))
		REAL(instance, ncclGetVersion, ncclResult_t (*)(int *))(&instance->version);
	return instance;
}

static void *find(void)
{
	void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);

	if (!library)
		library = loaded_library("libnccl.so");
	if (library && !dlsym(library, "ncclCommInitRank")) {
		dlclose(library);
		library = NULL;
	}
	return library;
}

struct nccl_instance *real_instance(void)
{
	struct nccl_instance *instance = atomic_load_explicit(&current, memory_order_acquire), *none = NULL;
	struct link_map *map;
	void *library;

	if (__builtin_expect(instance != NULL, 1))
		return instance;
	library = find();
	instance = library ? instance_of(library, 0) : NULL;
	if (!instance)
		return NULL;
	if (!atomic_compare_exchange_strong(&current, &none, instance)) { /* another thread was faster */
		free(instance);
		return none;
	}
	if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0)
		snprintf(path, sizeof(path), "%s", map->l_name);
	return instance;
}

struct nccl_instance *real_containing(const void *address)
{
	for (struct nccl_instance *instance = atomic_load(&current); instance; instance = instance->before)
		if ((uintptr_t)address >= instance->text_from && (uintptr_t)address < instance->text_to)
			return instance;
	return NULL;
}

bool nccl_contains(const void *address)
{
	return real_containing(address) != NULL;
}

const char *real_path(void)
{
	return path;
}

static int copy_to(int copy, char *message, size_t room)
{
	struct stat about;
	int file = open(path, O_RDONLY | O_CLOEXEC);
	off_t at = 0;

	if (file < 0 || fstat(file, &about) != 0) {
		int reason = errno;

		snprintf(message, room, "cannot read %s, the NCCL of this job: %s; the target needs the same file", path,
			 strerror(reason));
		if (file >= 0)
			close(file);
		return reason;
	}
	while (at < about.st_size) {
		ssize_t sent = sendfile(copy, file, &at, (size_t)(about.st_size - at));

		if (sent <= 0) {
			int reason = sent < 0 ? errno : EIO;

			snprintf(message, room, "cannot copy %s: %s", path, strerror(reason));
			close(file);
			return reason;
		}
	}
	close(file);
	return 0;
}

/* Since Linux 6.3 a node may make memory files that cannot be executed, unless they ask to be. Older kernels do not know it. */
static int memory_file(const char *name)
{
	int file = memfd_create(name, MFD_CLOEXEC | MFD_EXEC);

	return file < 0 && errno == EINVAL ? memfd_create(name, MFD_CLOEXEC) : file;
}

/* A descriptor of the file under which no copy was loaded: the dynamic linker compares names before it opens a file, and the
 * copies of earlier moves had the same few numbers. -1: there is none. The caller closes it, if it is another one. */
static int unused_name(int copy, char *name, size_t room)
{
	int file = copy;

	while (file >= 0) {
		void *known;
		int next;

		snprintf(name, room, "/proc/self/fd/%d", file);
		known = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
		if (!known)
			return file;
		dlclose(known);
		next = fcntl(copy, F_DUPFD_CLOEXEC, file + 1);
		if (file != copy)
			close(file);
		file = next;
	}
	return -1;
}

/* Loads a copy of the library from a memfd. If its inode has the number of that of an earlier copy, which was perhaps made on
 * another node, the dynamic linker returns that copy. Then another memfd is tried. */
static void *load_copy(char *message, size_t room, int *failed)
{
	int copies[8], tries = 0, named = -1;
	void *library = NULL, *known = NULL;
	char name[64];

	do {
		int copy = copies[tries] = memory_file("libnccl.so.2");

		if (copy < 0 || (named = unused_name(copy, name, sizeof(name))) < 0) {
			*failed = errno;
			snprintf(message, room, "no memory file for a fresh copy of NCCL: %s", strerror(*failed));
			if (copy >= 0)
				close(copy);
			break;
		}
		tries++;
		*failed = copy_to(copy, message, room);
		known = *failed ? NULL : dlopen(name, RTLD_NOW | RTLD_NOLOAD);
		if (known) {
			dlclose(known);
		} else if (!*failed) {
			library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
			if (!library) {
				*failed = ELIBACC;
				snprintf(message, room, "a fresh copy of %s does not load: %s", path, dlerror());
			}
		}
		if (named != copy)
			close(named);
	} while (known && tries < (int)(sizeof(copies) / sizeof(*copies)));
	while (tries > 0)
		close(copies[--tries]);
	return library;
}

/* Closes the copies that no thread executes any more. A thread of NCCL may end long after its communicator, and that of an
 * unused unique id never does. Only copies can be closed; the job loaded the library itself. */
static void close_unused(struct nccl_instance *newest)
{
	for (struct nccl_instance *old = newest->before; old; old = old->before) {
		int unseen = 0;

		if (old->number == 0 || !old->text_to)
			continue;
		if (threads_inside(old, &unseen) == 0 && !unseen) {
			dlclose(old->library);
			old->text_from = old->text_to = 0;
		}
	}
}

int real_load_fresh(char *message, size_t room)
{
	struct nccl_instance *old = real_instance(), *fresh;
	void *library;
	int failed = 0;

	if (!old) {
		snprintf(message, room, "the process has loaded no NCCL");
		return ENOENT;
	}
	library = load_copy(message, room, &failed);
	if (failed)
		return failed;
	fresh = library ? instance_of(library, old->number + 1) : NULL;
	if (!fresh) {
		snprintf(message, room, "a fresh copy of %s does not load: %s", path,
			 library ? "out of memory" : "the dynamic linker takes it for an earlier one");
		return ELIBACC;
	}
	fresh->before = old;
	atomic_store_explicit(&current, fresh, memory_order_release);
	close_unused(fresh);
	return 0;
}

ncclResult_t real_call(void *function, int words, const uint64_t *w)
{
#define W uint64_t
	switch (words) {
	case 1:
		return ((ncclResult_t (*)(W))function)(w[0]);
	case 2:
		return ((ncclResult_t (*)(W, W))function)(w[0], w[1]);
	case 3:
		return ((ncclResult_t (*)(W, W, W))function)(w[0], w[1], w[2]);
	case 4:
		return ((ncclResult_t (*)(W, W, W, W))function)(w[0], w[1], w[2], w[3]);
	case 5:
		return ((ncclResult_t (*)(W, W, W, W, W))function)(w[0], w[1], w[2], w[3], w[4]);
	case 6:
		return ((ncclResult_t (*)(W, W, W, W, W, W))function)(w[0], w[1], w[2], w[3], w[4], w[5]);
	case 7:
		return ((ncclResult_t (*)(W, W, W, W, W, W, W))function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6]);
	case 8:
		return ((ncclResult_t (*)(W, W, W, W, W, W, W, W))function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]);
	default:
		return ((ncclResult_t (*)(W, W, W, W, W, W, W, W, W, W, W, W))function)(w[0], w[1], w[2], w[3], w[4], w[5],
											w[6], w[7], w[8], w[9], w[10], w[11]);
	}
#undef W
}
