/* The settings and paths of libcriufiles.so: criu/rank.c. Images of another node and the rank's user choose the paths.
 *
 * The first byte chooses between settings and paths. The oracles decide in other ways than the code does: a path is criu's
 * own only if it is, once it is written without "..", still below /proc, /sys or the images.
 */
#define _GNU_SOURCE
#include "criu/rank.c"
#include "input.h"

#define IMAGES "/var/lib/images"

static gid_t groups[MAX_GROUPS];

static void settings(const char *text)
{
	char again[8192];
	int length;

	if (!read_user(text))
		return;
	EXPECT(rank.user != (uid_t)-1 && rank.group != (gid_t)-1 && rank.count <= MAX_GROUPS);
	/* What was accepted is what the daemon would have written, up to zeros before a number. */
	length = snprintf(again, sizeof(again), "%u:%u:", rank.user, rank.group);
	for (size_t i = 0; i < rank.count && length < (int)sizeof(again) - 16; i++)
		length += snprintf(again + length, 16, i ? ",%u" : "%u", rank.groups[i]);
	for (const char *a = text, *b = again; length < (int)sizeof(again) - 16 && (*a || *b);) {
		int begins = a == text || a[-1] == ':' || a[-1] == ',';

		if (begins && *a == '0' && a[1] >= '0' && a[1] <= '9') {
			a++;
			while (*a == '0' && a[1] >= '0' && a[1] <= '9')
				a++;
			continue;
		}
		EXPECT(*a == *b);
		a++;
		b++;
	}
}

/* The path without "." and "..", as the kernel walks it where there are no links. */
static void walk(const char *path, char *plain)
{
	size_t length = 0;

	for (const char *part = path; *part;) {
		size_t bytes = strcspn(part, "/");

		if (bytes == 2 && part[0] == '.' && part[1] == '.') {
			while (length > 0 && plain[--length] != '/')
				;
		} else if (bytes && !(bytes == 1 && part[0] == '.')) {
			plain[length++] = '/';
			memcpy(plain + length, part, bytes);
			length += bytes;
		}
		part += bytes;
		part += *part == '/';
	}
	plain[length] = 0;
}

static void paths(const char *path)
{
	char *plain = malloc(strlen(path) + 3);
	int own;

	if (!plain)
		abort();
	rank.active = 1;
	own = path[0] == '/' && !is_ranks(AT_FDCWD, path);
	walk(path, plain);
	EXPECT(!own || is_below(plain, "/proc") || is_below(plain, "/sys") || is_below(plain, IMAGES));
	/* The links of /proc that lead anywhere. */
	EXPECT(!own || !is_below(plain, "/proc") ||
	       (!strstr(plain, "/root/") && !strstr(plain, "/cwd/") && !strstr(plain, "/root/..")));
	is_ranks(AT_FDCWD, path);
	is_ranks(-1, path);
	rank.active = 0;
	rank.wanted = 1;
	notice_tree(path);
	EXPECT(!rank.active || (strlen(path) >= 10 && strcmp(path + strlen(path) - 10, "pstree.img") == 0));
	rank.wanted = rank.active = 0;
	free(plain);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct input input = {data, bytes};
	unsigned int which = (unsigned int)take(&input, 1);
	char *text = text_of(input);

	rank.groups = groups;
	strcpy(rank.images, IMAGES);
	if (which % 2)
		settings(text);
	else
		paths(text);
	free(text);
	return 0;
}
