/* The fault file: reads it, finds the first line that matches, and deletes that line if it says "once". */
#define _GNU_SOURCE
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "node.h"

#define FILE_BYTES 8192

static bool understand(char *action, struct fault *fault)
{
	static const struct {
		const char *name;
		enum fault_action action;
	} actions[] = {{"hang", FAULT_HANG}, {"hang-after", FAULT_HANG_AFTER},
		       {"die", FAULT_DIE},   {"die-after", FAULT_DIE_AFTER},
		       {"kill", FAULT_KILL}, {"lose", FAULT_LOSE},
		       {"fail", FAULT_FAIL}, {"slow", FAULT_SLOW},
		       {"hold", FAULT_HOLD}};
	char *detail = strchr(action, ':');

	if (detail)
		*detail++ = '\0';
	for (size_t i = 0; i < sizeof actions / sizeof *actions; i++) {
		if (strcmp(actions[i].name, action) != 0)
			continue;
		fault->action = actions[i].action;
		fault->error = detail ? error_number(detail) : CUDA_ERROR_UNKNOWN;
		fault->delay_ms = detail ? (unsigned int)atoi(detail) : 0;
		return true;
	}
	return false;
}

/* Whether a line (which is parsed in place) matches this call. */
static bool fits(char *line, const char *operation, int pid, struct fault *fault, bool *once)
{
	char *rest = NULL;
	char *word = strtok_r(line, " :\t\r", &rest);
	char *action = strtok_r(NULL, " \t\r", &rest);

	*once = false;
	if (!word || !action || strcmp(word, operation) != 0)
		return false;
	while ((word = strtok_r(NULL, " \t\r", &rest))) {
		if (strcmp(word, "once") == 0)
			*once = true;
		else if (strncmp(word, "pid=", 4) == 0 && atoi(word + 4) != pid)
			return false;
	}
	return understand(action, fault);
}

struct fault fault_take(const char *operation, int pid)
{
	char path[PATH_BYTES], text[FILE_BYTES], copy[FILE_BYTES];
	struct fault fault = {0};
	ssize_t bytes;
	int file;

	node_beside("FAKE_CUDA_FAULT_FILE", "faults", path);
	file = open(path, O_RDWR | O_CLOEXEC);
	if (file < 0)
		return fault;
	flock(file, LOCK_EX);
	bytes = read(file, text, sizeof text - 1);
	text[bytes > 0 ? bytes : 0] = '\0';
	for (char *line = text, *next; *line; line = next) {
		size_t length = strcspn(line, "\n");
		bool once;

		next = line + length + (line[length] == '\n');
		memcpy(copy, line, length);
		copy[length] = '\0';
		if (!fits(copy, operation, pid, &fault, &once))
			continue;
		if (once) {
			memmove(line, next, strlen(next) + 1);
			(void)!ftruncate(file, 0);
			(void)!pwrite(file, text, strlen(text), 0);
		}
		break;
	}
	close(file);
	return fault;
}

int fault_in_call(const char *operation)
{
	static const struct timespec look_again = {.tv_nsec = 10000000};
	struct fault fault = fault_take(operation, (int)getpid());
	struct timespec delay;

	while (fault.action == FAULT_HOLD) {
		nanosleep(&look_again, NULL);
		fault = fault_take(operation, (int)getpid());
	}
	delay = (struct timespec){.tv_sec = fault.delay_ms / 1000, .tv_nsec = (long)(fault.delay_ms % 1000) * 1000000};
	if (fault.action == FAULT_HANG)
		fault_hang();
	if (fault.action == FAULT_DIE)
		fault_die();
	if (fault.action == FAULT_SLOW)
		while (nanosleep(&delay, &delay) && errno == EINTR)
			; /* a signal does not shorten a call of the driver */
	return fault.action == FAULT_FAIL ? fault.error : CUDA_SUCCESS;
}

void fault_hang(void)
{
	for (;;)
		pause();
}

void fault_die(void)
{
	kill(getpid(), SIGKILL);
	fault_hang();
}
