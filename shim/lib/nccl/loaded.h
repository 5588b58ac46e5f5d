/* Libraries that the job has loaded, wherever in the dynamic linker's scopes: RTLD_NEXT does not see what an extension
 * module brought in. */
#ifndef SNAPSHIM_NCCL_LOADED_H
#define SNAPSHIM_NCCL_LOADED_H

/* The handle of a loaded library whose file name begins with `name` ("libcudart.so"); NULL: none. Loads nothing. */
void *loaded_library(const char *name);

#endif
