/* The identity of this host: name, boot id and address, read once and never updated.
 *
 * NCCL caches the same, which is why a second copy of the library is necessary after a move. A refresh here would hide
 * the errors that the fake must reveal.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "errors.h"
#include "network.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct identity known;
static ncclResult_t outcome;

uint64_t random_number(void)
{
	uint64_t number = 0;

	while (getrandom(&number, sizeof(number), 0) != sizeof(number))
		;
	return number;
}

static uint64_t hashed(uint64_t hash, const char *text)
{
	for (; *text; text++)
		hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
	return hash;
}

static uint64_t host_hash(void)
{
	char text[256] = "";
	uint64_t hash = 0xcbf29ce484222325u;
	const char *given = getenv("NCCL_HOSTID");
	int fd;
	ssize_t got;

	if (given && *given)
		return hashed(hash, given);
	if (gethostname(text, sizeof(text) - 1) == 0)
		hash = hashed(hash, text);
	fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		got = read(fd, text, sizeof(text) - 1);
		text[got > 0 ? got : 0] = 0;
		hash = hashed(hash, text);
		close(fd);
	}
	return hash;
}

static bool parse(const char *text, struct sockaddr_storage *address)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)address;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;

	memset(address, 0, sizeof(*address));
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1)
		v4->sin_family = AF_INET;
	else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1)
		v6->sin6_family = AF_INET6;
	else
		return false;
	return true;
}

static void first_address(struct sockaddr_storage *address)
{
	struct ifaddrs *all, *one;

	parse("127.0.0.1", address);
	if (getifaddrs(&all) != 0)
		return;
	for (one = all; one; one = one->ifa_next) {
		if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET)
			continue;
		if ((one->ifa_flags & (IFF_UP | IFF_LOOPBACK)) != IFF_UP)
			continue;
		memcpy(address, one->ifa_addr, sizeof(struct sockaddr_in));
		break;
	}
	freeifaddrs(all);
}

static void learn(void)
{
	const char *given = getenv("FAKE_NCCL_ADDR");

	known.host = host_hash();
	if (!given || !*given)
		first_address(&known.address);
	else if (!parse(given, &known.address))
		outcome = failed(ncclInvalidUsage, "FAKE_NCCL_ADDR=%s is no address: give an IPv4 or IPv6 address", given);
}

ncclResult_t identity_learn(const struct identity **identity)
{
	pthread_once(&once, learn);
	*identity = &known;
	return outcome;
}
