/* Devices and contexts: every file /dev/infiniband/uverbsN is one device, fakeibN.
 *
 * A context holds what a real one holds: a descriptor of the device file, a page of it mapped, and a descriptor of
 * asynchronous events. Nothing else of it exists, so a process that has closed all contexts has nothing of the fake.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

#define FOLDER "/dev/infiniband"
#define PAGE_BYTES 4096
#define DEVICES_MAX 32

/* What the kernel writes to the descriptor of asynchronous events. */
struct event {
	uint64_t element;
	uint32_t event_type, reserved;
};

static int by_number(const void *one, const void *other)
{
	const struct ibv_device *const *a = one, *const *b = other;

	return atoi((*a)->dev_name + 6) - atoi((*b)->dev_name + 6);
}

struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(DEVICES_MAX + 1, sizeof(*list));
	DIR *folder = list ? opendir(FOLDER) : NULL;
	struct dirent *entry;
	int found = 0, number;

	while (folder && found < DEVICES_MAX && (entry = readdir(folder))) {
		struct ibv_device *device;

		if (sscanf(entry->d_name, "uverbs%d", &number) != 1)
			continue;
		device = calloc(1, sizeof(*device));
		if (!device)
			break;
		device->node_type = 1;
		snprintf(device->name, sizeof(device->name), "fakeib%d", number);
		snprintf(device->dev_name, sizeof(device->dev_name), "uverbs%d", number);
		list[found++] = device;
	}
	if (folder)
		closedir(folder);
	if (list)
		qsort(list, (size_t)found, sizeof(*list), by_number);
	if (count)
		*count = found;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	for (int i = 0; list && list[i]; i++)
		free(list[i]);
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

static void give_back(struct fake_context *context)
{
	if (context->doorbells != MAP_FAILED)
		munmap(context->doorbells, PAGE_BYTES);
	if (context->seen.cmd_fd >= 0)
		close(context->seen.cmd_fd);
	if (context->seen.async_fd >= 0)
		close(context->seen.async_fd);
	if (context->events >= 0)
		close(context->events);
	free(context);
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct fake_context *context = calloc(1, sizeof(*context));
	char path[sizeof(FOLDER) + sizeof(device->dev_name) + 1];
	int ends[2];

	if (!context)
		return NULL;
	context->device = *device;
	context->seen.device = &context->device;
	context->seen.async_fd = context->events = -1;
	context->doorbells = MAP_FAILED;
	context->seen.num_comp_vectors = 1;
	context->seen.ops.poll_cq = completions_poll;
	context->seen.ops.req_notify_cq = completions_arm;
	context->seen.ops.post_send = post_send;
	context->seen.ops.post_recv = post_receive;
	pthread_mutex_init(&context->seen.mutex, NULL);
	snprintf(path, sizeof(path), FOLDER "/%s", device->dev_name);
	context->seen.cmd_fd = open(path, O_RDWR | O_CLOEXEC);
	if (context->seen.cmd_fd >= 0)
		context->doorbells = mmap(NULL, PAGE_BYTES, PROT_WRITE, MAP_SHARED, context->seen.cmd_fd, 0);
	if (context->doorbells == MAP_FAILED || pipe2(ends, O_CLOEXEC) != 0) {
		give_back(context);
		return NULL;
	}
	madvise(context->doorbells, PAGE_BYTES, MADV_DONTFORK); /* as the kernel's drivers map them */
	context->seen.async_fd = ends[0];
	context->events = ends[1];
	return &context->seen;
}

int ibv_close_device(struct ibv_context *context)
{
	give_back((struct fake_context *)context);
	return 0;
}

/* As in rdma-core: whatever interrupts the read is an error for the caller. */
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct event got;

	if (read(context->async_fd, &got, sizeof(got)) != sizeof(got))
		return -1;
	event->event_type = (int)got.event_type;
	event->element.port_num = (int)got.element;
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

const char *ibv_event_type_str(int type)
{
	return type == 9 ? "port active" : "event of the fake";
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes)
{
	*attributes = (struct ibv_device_attr){.fw_ver = "fake",
					       .max_mr_size = UINT64_MAX,
					       .page_size_cap = PAGE_BYTES,
					       .max_qp = 1 << 16,
					       .max_qp_wr = 1 << 14,
					       .max_sge = 1,
					       .max_sge_rd = 1,
					       .max_cq = 1 << 16,
					       .max_cqe = 1 << 20,
					       .max_mr = 1 << 20,
					       .max_pd = 1 << 16,
					       .max_qp_rd_atom = 16,
					       .max_qp_init_rd_atom = 16,
					       .atomic_cap = IBV_ATOMIC_HCA,
					       .max_pkeys = 1,
					       .phys_port_cnt = 1};
	attributes->node_guid = attributes->sys_image_guid = 0xfa4e0000ULL + (uint64_t)atoi(context->device->dev_name + 6);
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attributes)
{
	(void)context;
	if (port != 1)
		return EINVAL;
	*attributes = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE,
					     .max_mtu = IBV_MTU_4096,
					     .active_mtu = IBV_MTU_4096,
					     .gid_tbl_len = 1,
					     .max_msg_sz = 1 << 30,
					     .pkey_tbl_len = 1,
					     .active_width = 2, /* 4x */
					     .active_speed = 32, /* EDR: 25 Gbit/s each */
					     .link_layer = IBV_LINK_LAYER_ETHERNET};
	return 0;
}

/* The host's address, mapped to IPv6, as the GIDs of RoCE v2 are: $FAKE_VERBS_ADDR, or the first that is not loopback. */
void gid_of_this_host(union ibv_gid *gid)
{
	const char *given = getenv("FAKE_VERBS_ADDR");
	struct in_addr address = {.s_addr = htonl(INADDR_LOOPBACK)};
	struct ifaddrs *all = NULL;

	if (given)
		inet_pton(AF_INET, given, &address);
	else if (getifaddrs(&all) == 0)
		for (struct ifaddrs *one = all; one; one = one->ifa_next)
			if (one->ifa_addr && one->ifa_addr->sa_family == AF_INET && !(one->ifa_flags & IFF_LOOPBACK)) {
				address = ((struct sockaddr_in *)(void *)one->ifa_addr)->sin_addr;
				break;
			}
	if (all)
		freeifaddrs(all);
	memset(gid, 0, sizeof(*gid));
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &address, sizeof(address));
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	(void)context;
	if (port != 1 || index != 0)
		return -1;
	gid_of_this_host(gid);
	return 0;
}

int ibv_fork_init(void)
{
	return 0;
}
