/* The rank that criu restores: whose it is, and which paths are its own. */
#ifndef CRIU_RANK_H
#define CRIU_RANK_H

#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

#define MAX_GROUPS 65536
#define MAX_LAYERS 64 /* as in snapshotd/criu/below.py */

extern struct rank {
	int wanted; /* the settings name a user */
	int active; /* and criu has read the process tree */
	uid_t user;
	gid_t group;
	size_t count;
	gid_t *groups;
	int own_count; /* criu's own groups */
	gid_t *own_groups;
	char images[4096];
	struct stat images_stat;
	size_t layers;
	struct stat layers_stat[MAX_LAYERS];
} rank __attribute__((visibility("hidden")));

/* Whether criu must use the path, relative to the open folder, with the rights of the rank's user. */
int is_ranks(int folder, const char *path) __attribute__((visibility("hidden")));
/* Called with every path that criu opens. */
void notice_tree(const char *path) __attribute__((visibility("hidden")));

#endif
