/* What NCCL's features keep when the last communicator is destroyed, on demand: FAKE_NCCL_LEAVES, a list of
 *   ras     the thread and the sockets of RAS: one for other ranks at a free port, one for clients at NCCL_RAS_ADDR or port
 *           28028 of the loopback address, if that is free; not with NCCL_RAS_ENABLE=0. A function that is registered with
 *           atexit ends them, as in NCCL from 2.28 on
 *   old-ras the same without that function
 *   memory  shared memory of a transport; not with NCCL_SHM_DISABLE=1
 *   thread  a thread that waits
 *   socket  a Unix socket by which ranks pass handles; not with NCCL_CUMEM_ENABLE=0
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/un.h>
#include <unistd.h>

#include "communicator.h"

#define MEMORY_BYTES 65536
#define RAS_PORT 28028

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct pollfd watched[3] = {{.fd = -1}, {.fd = -1}, {.fd = -1}}; /* of RAS; poll ignores negative ones */
static pthread_t ras_thread;
static int ras_pipe[2] = {-1, -1};

static bool is_set(const char *name, const char *value)
{
	const char *given = getenv(name);

	return given && !strcmp(given, value);
}

static void *watch(void *unused)
{
	while (poll(watched, 3, -1) < 0 || !(watched[0].revents | watched[2].revents))
		;
	return unused;
}

static int listen_for_clients(void)
{
	const char *given = getenv("NCCL_RAS_ADDR"), *port = given ? strrchr(given, ':') : NULL;
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons((uint16_t)(port ? atoi(port + 1) : RAS_PORT)),
		.sin_addr = {htonl(INADDR_LOOPBACK)},
	};
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(listener, 16) == 0)
		return listener;
	close(listener); /* another process of the host has it */
	return -1;
}

static pthread_t keep_thread(void)
{
	pthread_t thread;

	if (!start_thread(&thread, watch, NULL, "left"))
		abort();
	return thread;
}

/* At the exit of the process, or earlier; a second call does nothing. */
static void end_ras(void)
{
	if (ras_pipe[1] < 0)
		return;
	if (write(ras_pipe[1], "", 1) != 1)
		abort();
	pthread_join(ras_thread, NULL);
	for (int i = 0; i < 3; i++)
		if (watched[i].fd >= 0)
			close(watched[i].fd);
	close(ras_pipe[1]);
	ras_pipe[1] = -1;
}

/* As NCCL's function for its plugin of the environment, which is registered before that of RAS and not meant to run earlier. */
static void end_environment(void)
{
	if (getenv("FAKE_NCCL_ENDS"))
		dprintf(2, "environment ended\n");
}

static void keep_ras(bool ends)
{
	struct sockaddr_storage address;

	if (network_listen(&watched[0].fd, &address) != ncclSuccess || pipe2(ras_pipe, O_CLOEXEC) != 0)
		abort();
	watched[1].fd = listen_for_clients();
	watched[2].fd = ras_pipe[0];
	for (int i = 0; i < 3; i++)
		watched[i].events = POLLIN;
	ras_thread = keep_thread();
	if (ends)
		atexit(end_ras);
}

static void keep_memory(void)
{
	char path[] = "/dev/shm/nccl-XXXXXX";
	int file = mkstemp(path);

	if (file < 0 || ftruncate(file, MEMORY_BYTES) != 0 ||
	    mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED)
		abort();
	unlink(path);
	close(file);
}

static void keep_socket(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int bound = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	/* NCCL replaces the first byte of the path, so that the name is an abstract one. */
	snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "tmp/nccl-socket-0-%lx", (unsigned long)random_number());
	if (bind(bound, (struct sockaddr *)&address, sizeof(address)) != 0)
		abort();
}

static void keep(void)
{
	const char *given = getenv("FAKE_NCCL_LEAVES");

	atexit(end_environment);
	if (!given)
		return;
	if (strstr(given, "ras") && !is_set("NCCL_RAS_ENABLE", "0"))
		keep_ras(!strstr(given, "old-ras"));
	if (strstr(given, "memory") && !is_set("NCCL_SHM_DISABLE", "1"))
		keep_memory();
	if (strstr(given, "thread"))
		pthread_detach(keep_thread());
	if (strstr(given, "socket") && !is_set("NCCL_CUMEM_ENABLE", "0"))
		keep_socket();
}

void keep_leavings(void)
{
	pthread_once(&once, keep);
}
