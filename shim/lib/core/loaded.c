/* Finds libraries that the job has loaded, and CUDA's own functions in them. It never loads a library.
 *
 * RTLD_NEXT alone does not suffice: it does not find libraries that a Python extension module has loaded.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

struct search {
	const char *begins;
	char path[4096];
};

static int is_wanted(struct dl_phdr_info *info, size_t bytes, void *argument)
{
	struct search *search = argument;
	const char *path = info->dlpi_name ? info->dlpi_name : "";
	const char *slash = strrchr(path, '/');
	const char *name = slash ? slash + 1 : path;

	(void)bytes;
	if (strncmp(name, search->begins, strlen(search->begins)) != 0 || strlen(path) >= sizeof(search->path))
		return 0;
	strcpy(search->path, path);
	return 1;
}

/* Opened after the walk, because the walk holds the dynamic linker's lock. */
void *loaded_library(const char *begins)
{
	struct search search = {.begins = begins};

	return dl_iterate_phdr(is_wanted, &search) ? dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
}

static void *in_library(const char *path, const char *name)
{
	void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
	void *found = library ? dlsym(library, name) : NULL;

	if (library)
		dlclose(library); /* it was loaded before, and stays */
	return found;
}

/* Searches where the caller's reference would have been resolved: the global scope after this library; the libraries that
 * the caller was linked with (torch's are not in the global scope); then any loaded library of that name. */
void *cuda_function(const char *name, const char *library_begins, const void *caller)
{
	struct search search = {.begins = library_begins};
	void *found = dlsym(RTLD_NEXT, name);
	Dl_info info;

	if (!found && dladdr(caller, &info) && info.dli_fname)
		found = in_library(info.dli_fname, name);
	if (!found && dl_iterate_phdr(is_wanted, &search))
		found = in_library(search.path, name);
	return found;
}
