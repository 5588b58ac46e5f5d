/* Reads whose rank criu restores, and decides which paths are the rank's.
 *
 * Paths in /proc, /sys and the images are criu's own, unless they lead out of there. Criu also has paths of its own before it
 * reads the process tree, when it tries out what the kernel can do; so the rights change when it opens that image.
 */
#define _GNU_SOURCE
#include "rank.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

struct rank rank;

/* ---- settings */

/* Reads decimal digits; false: there are none, or the number is none that a user or group can have (the last one means
 * "unchanged" to the kernel). */
static int read_id(const char **text, unsigned int *id)
{
	const char *at = *text;
	unsigned long number = 0;

	while (*at >= '0' && *at <= '9' && number < UINT32_MAX)
		number = number * 10 + (unsigned long)(*at++ - '0');
	if (at == *text || number >= UINT32_MAX)
		return 0;
	*text = at;
	*id = (unsigned int)number;
	return 1;
}

static int read_user(const char *text)
{
	if (!read_id(&text, &rank.user) || *text++ != ':' || !read_id(&text, &rank.group) || *text++ != ':')
		return 0;
	for (rank.count = 0; *text != 0; rank.count++)
		if (rank.count == MAX_GROUPS || (rank.count > 0 && *text++ != ',') ||
		    !read_id(&text, &rank.groups[rank.count]))
			return 0;
	return 1;
}

/* The folders below the images, each named "parent", in which criu looks for pages that an image leaves out. */
static void find_layers(void)
{
	char path[sizeof rank.images + MAX_LAYERS * sizeof "/parent"];
	struct stat *layer = rank.layers_stat;

	strcpy(path, rank.images);
	for (rank.layers = 0; rank.layers < MAX_LAYERS; rank.layers++, layer++)
		if (lstat(strcat(path, "/parent"), layer) != 0 || !S_ISDIR(layer->st_mode) || layer->st_uid != 0)
			break;
}

/* Criu ends if the settings are wrong: it would otherwise act as root for the rank. */
__attribute__((constructor)) static void read_settings(void)
{
	const char *user = getenv("SNAPSHOT_RANK_USER"), *images = getenv("SNAPSHOT_IMAGES");
	if (user == NULL && images == NULL)
		return;
	if (user == NULL || images == NULL || strlen(images) >= sizeof rank.images || stat(images, &rank.images_stat) != 0)
		abort();
	strcpy(rank.images, images);
	rank.groups = calloc(MAX_GROUPS, sizeof *rank.groups);
	rank.own_count = getgroups(0, NULL);
	rank.own_groups = calloc((size_t)(rank.own_count > 0 ? rank.own_count : 1), sizeof *rank.own_groups);
	if (rank.groups == NULL || rank.own_groups == NULL || rank.own_count < 0 ||
	    getgroups(rank.own_count, rank.own_groups) != rank.own_count || !read_user(user))
		abort();
	find_layers();
	rank.wanted = 1;
}

/* ---- which paths are the rank's */

static int is_below(const char *path, const char *folder)
{
	size_t length = strlen(folder);
	return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_part(const char *part, size_t length, const char *name)
{
	return length == strlen(name) && strncmp(part, name, length) == 0;
}

/* Whether a path below one of criu's folders may lead out of it: upwards or, in /proc, through a link to a root or working
 * directory or to a directory that is open. */
static int leads_out(const char *path, int in_proc)
{
	int of_descriptors = 0; /* the part before is "fd", or that and a number */
	for (const char *part = path; *part != 0;) {
		size_t length = strcspn(part, "/");
		if (is_part(part, length, ".."))
			return 1;
		if (length > 0 && in_proc) {
			if (is_part(part, length, "root") || is_part(part, length, "cwd") || of_descriptors == 2)
				return 1;
			of_descriptors = of_descriptors == 1                ? 2 :
					 is_part(part, length, "fd")        ? 1 :
					 is_part(part, length, "map_files") ? 1 :
									      0;
		}
		part += length + (part[length] == '/');
	}
	return 0;
}

enum folder { OTHERS, IN_PROC, OWN };

static int is_same(const struct stat *left, const struct stat *right)
{
	return left->st_dev == right->st_dev && left->st_ino == right->st_ino;
}

static enum folder look_at_folder(int fd)
{
	struct statfs system;
	struct stat here;
	if (fstatfs(fd, &system) != 0 || fstat(fd, &here) != 0)
		return OTHERS;
	if (is_same(&here, &rank.images_stat))
		return OWN;
	for (size_t layer = 0; layer < rank.layers; layer++)
		if (is_same(&here, &rank.layers_stat[layer]))
			return OWN;
	if (system.f_type == PROC_SUPER_MAGIC)
		return IN_PROC;
	return system.f_type == SYSFS_MAGIC || system.f_type == CGROUP2_SUPER_MAGIC ? OWN : OTHERS;
}

static enum folder folder_of(int folder, const char *path)
{
	if (path[0] == '/')
		return is_below(path, "/proc")                               ? IN_PROC :
		       is_below(path, "/sys") || is_below(path, rank.images) ? OWN :
									       OTHERS;
	if (folder != AT_FDCWD)
		return look_at_folder(folder);
	int here = (int)syscall(SYS_openat, AT_FDCWD, ".", O_PATH | O_CLOEXEC, 0);
	enum folder found = here >= 0 ? look_at_folder(here) : OTHERS;
	if (here >= 0)
		close(here);
	return found;
}

int is_ranks(int folder, const char *path)
{
	/* An empty path means the descriptor itself, which criu has opened or made before. */
	if (!rank.active || path == NULL || path[0] == 0)
		return 0;
	enum folder in = folder_of(folder, path);
	return in == OTHERS || leads_out(path, in == IN_PROC);
}

/* Criu opens the process tree's image once it has tried out the kernel and before it uses any path of the rank. */
void notice_tree(const char *path)
{
	if (rank.wanted && !rank.active && path != NULL) {
		const char *name = strrchr(path, '/');
		rank.active = strcmp(name == NULL ? path : name + 1, "pstree.img") == 0;
	}
}
