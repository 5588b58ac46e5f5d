/* Reads gpus.json: flat objects, keys that are unique in the file except for those of a GPU, strings without escapes. */
#define _GNU_SOURCE
#include "node.h"

#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_BYTES 32768
#define MIB (1024 * 1024ULL)

/* The path in an environment variable, or `name` in the folder from which this library was loaded (that of the link,
 * not of its target, because the nodes share one build). */
void node_beside(const char *variable, const char *name, char path[PATH_BYTES])
{
	const char *given = getenv(variable);
	Dl_info here;
	const char *slash;

	path[0] = '\0';
	if (given && *given) {
		snprintf(path, PATH_BYTES, "%s", given);
		return;
	}
	if (!dladdr((void *)(uintptr_t)node_beside, &here) || !here.dli_fname)
		return;
	slash = strrchr(here.dli_fname, '/');
	snprintf(path, PATH_BYTES, "%.*s/%s", slash ? (int)(slash - here.dli_fname) : 1, slash ? here.dli_fname : ".", name);
}

/* The first character of the value of `key` between two positions; NULL: not found. */
static const char *value_of(const char *key, const char *from, const char *to)
{
	char quoted[64];
	int bytes = snprintf(quoted, sizeof quoted, "\"%s\"", key);
	const char *at = memmem(from, (size_t)(to - from), quoted, (size_t)bytes);

	if (!at)
		return NULL;
	at += bytes;
	while (at < to && (isspace((unsigned char)*at) || *at == ':'))
		at++;
	return at < to ? at : NULL;
}

static void text_of(const char *key, const char *from, const char *to, char *into, size_t bytes)
{
	const char *at = value_of(key, from, to);
	const char *end = at && *at == '"' ? strchr(at + 1, '"') : NULL;

	if (end)
		snprintf(into, bytes, "%.*s", (int)(end - at - 1), at + 1);
}

static long long number_of(const char *key, const char *from, const char *to, long long otherwise)
{
	const char *at = value_of(key, from, to);

	if (!at)
		return otherwise;
	if (strncmp(at, "true", 4) == 0)
		return 1;
	if (strncmp(at, "false", 5) == 0)
		return 0;
	if (strncmp(at, "null", 4) == 0)
		return -1;
	return strtoll(at, NULL, 10);
}

bool uuid_parse(const char *text, uint8_t uuid[16])
{
	int digits = 0;

	if (strncmp(text, "GPU-", 4) == 0)
		text += 4;
	memset(uuid, 0, 16);
	for (; *text && digits < 32; text++) {
		if (*text == '-')
			continue;
		if (!isxdigit((unsigned char)*text))
			return false;
		int digit = isdigit((unsigned char)*text) ? *text - '0' : tolower((unsigned char)*text) - 'a' + 10;
		uuid[digits / 2] = (uint8_t)(uuid[digits / 2] << 4 | digit);
		digits++;
	}
	return digits == 32 && !*text;
}

void uuid_print(const uint8_t uuid[16], char text[48])
{
	char *at = text + sprintf(text, "GPU");

	for (int i = 0; i < 16; i++)
		at += sprintf(at, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

static void read_health(struct gpu *gpu, const char *from, const char *to)
{
	gpu->lost = (int)number_of("lost", from, to, 0);
	gpu->ecc_corrected = (unsigned long long)number_of("ecc_corrected", from, to, 0);
	gpu->ecc_uncorrected = (unsigned long long)number_of("ecc_uncorrected", from, to, 0);
	gpu->remapped_corrected = (unsigned int)number_of("remapped_corrected", from, to, 0);
	gpu->remapped_uncorrected = (unsigned int)number_of("remapped_uncorrected", from, to, 0);
	gpu->remap_pending = (unsigned int)number_of("remap_pending", from, to, 0);
	gpu->remap_failed = (unsigned int)number_of("remap_failed", from, to, 0);
	gpu->temperature_c = (unsigned int)number_of("temperature_c", from, to, 40);
	gpu->slow_reasons = (unsigned long long)number_of("slow_reasons", from, to, 0);
	gpu->pcie_replays = (unsigned int)number_of("pcie_replays", from, to, 0);
	gpu->pcie_width = (unsigned int)number_of("pcie_width", from, to, 16);
	gpu->nvlinks = (unsigned int)number_of("nvlinks", from, to, 0);
	gpu->nvlinks_down = (unsigned int)number_of("nvlinks_down", from, to, 0);
	gpu->nvlink_errors = (unsigned long long)number_of("nvlink_errors", from, to, 0);
}

static bool read_gpu(struct gpu *gpu, int index, const char *from, const char *to)
{
	char uuid[64] = "", capability[16] = "9.0";

	snprintf(gpu->name, sizeof gpu->name, "Stand-in GPU");
	text_of("name", from, to, gpu->name, sizeof gpu->name);
	text_of("uuid", from, to, uuid, sizeof uuid);
	text_of("compute_capability", from, to, capability, sizeof capability);
	sscanf(capability, "%d.%d", &gpu->capability_major, &gpu->capability_minor);
	gpu->memory_bytes = (uint64_t)number_of("memory_mib", from, to, 1024) * MIB;
	gpu->minor = (int)number_of("minor", from, to, index);
	gpu->mig = (int)number_of("mig", from, to, 0);
	gpu->mps = (int)number_of("mps", from, to, 0);
	gpu->virtual_memory = (int)number_of("virtual_memory", from, to, 1);
	read_health(gpu, from, to);
	return uuid_parse(uuid, gpu->uuid);
}

bool node_read(struct node *node)
{
	char path[PATH_BYTES], text[FILE_BYTES];
	const char *at, *end;
	ssize_t bytes = -1;
	int file;

	memset(node, 0, sizeof *node);
	node_beside("FAKE_GPU_FILE", "gpus.json", path);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file >= 0) {
		bytes = read(file, text, sizeof text - 1);
		close(file);
	}
	if (bytes < 0)
		return false;
	text[bytes] = '\0';
	end = text + bytes;
	snprintf(node->folder, sizeof node->folder, "%s", path);
	*(strrchr(node->folder, '/') ? strrchr(node->folder, '/') : strcpy(node->folder, ".") + 1) = '\0';
	text_of("ledger_dir", text, end, node->folder, sizeof node->folder); /* elsewhere: where the node's own files are */
	snprintf(node->driver_version, sizeof node->driver_version, "580.159.04");
	text_of("driver_version", text, end, node->driver_version, sizeof node->driver_version);
	node->cuda_version = (int)number_of("cuda_version", text, end, node_driver_branch(node) < 580 ? 12080 : 13000);
	node->no_peers = (int)number_of("no_peers", text, end, 0);
	node->context_bytes = (uint64_t)number_of("context_mib", text, end, 64) * MIB;
	at = value_of("gpus", text, end);
	while (at && (at = strchr(at, '{')) && node->gpu_count < MAX_GPUS) {
		const char *close = strchr(at, '}');
		int index = (int)node->gpu_count;

		if (!close || !read_gpu(&node->gpus[index], index, at, close))
			return false;
		node->gpu_count++;
		at = close;
	}
	return true;
}

int node_find(const struct node *node, const uint8_t uuid[16])
{
	for (unsigned int i = 0; i < node->gpu_count; i++)
		if (memcmp(node->gpus[i].uuid, uuid, 16) == 0)
			return (int)i;
	return -1;
}

int node_driver_branch(const struct node *node)
{
	return atoi(node->driver_version);
}
