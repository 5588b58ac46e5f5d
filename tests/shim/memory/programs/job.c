/* A job with device memory. It reads commands from its standard input, one per line, and answers each with a line.
 *
 * Every block has a number. Each of its 8-byte words is made of that number and the word's index, which `check` verifies.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>

#define MIB (1 << 20)
#define BLOCKS 512
#define SEGMENT_BYTES (4 * MIB)
#define SEGMENTS 8

enum { TO_DEVICE = 1, TO_HOST = 2 };

extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaMemcpy(void *, const void *, size_t, int);
extern int cudaGetLastError(void), cudaSetDevice(int), cudaDeviceReset(void), cudaMemGetInfo(size_t *, size_t *);
extern int cudaDeviceEnablePeerAccess(int, unsigned int), cudaDeviceDisablePeerAccess(int);
struct shared {
	unsigned char bytes[64];
};
extern int cudaIpcGetMemHandle(struct shared *, void *), cudaIpcOpenMemHandle(void **, struct shared, unsigned int);
extern int cudaIpcCloseMemHandle(void *);
extern int cudaEventCreateWithFlags(void **, unsigned int), cudaEventRecord(void *, void *), cudaEventDestroy(void *);
extern int cudaEventQuery(void *), cudaIpcGetEventHandle(struct shared *, void *);
extern int cudaIpcOpenEventHandle(void **, struct shared);
extern int cuStreamBeginCapture_v2(void *, int), cuStreamEndCapture(void *, void **);
extern int cuModuleLoadData(void **, const void *), cuModuleGetFunction(void **, void *, const char *);
extern int cuLaunchKernel(void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			  unsigned int, void *, void **, void **);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned int, unsigned long long, int *);
extern int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t);

/* Defined in lacking.c and not in the stand-ins, and not linked everywhere. */
extern int cuMemGetHandleForAddressRange(int *, uint64_t, size_t, int, unsigned long long) __attribute__((weak));
extern int cudaStreamBeginCapture(void *, int) __attribute__((weak));
extern int cudaStreamEndCapture(void *, void **) __attribute__((weak));

struct property {
	int type, handle_types, location[2];
	void *windows;
	unsigned char flags[8];
};
struct access {
	int location[2], flags;
};

static struct {
	char *address;
	size_t bytes;
	uint64_t number;
} blocks[BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t numbers;

static int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long), (*unreserve)(uint64_t, size_t);
static int (*create)(uint64_t *, size_t, const struct property *, unsigned long long), (*release)(uint64_t);
static int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long), (*unmap)(uint64_t, size_t);
static int (*set_access)(uint64_t, size_t, const struct access *, size_t);
static int (*get_access)(unsigned long long *, const int *, uint64_t), (*retain)(uint64_t *, uint64_t);
static uint64_t range, handles[SEGMENTS];

static void must(int status, const char *what)
{
	if (status) {
		printf("%s answers %d\n", what, status);
		exit(3);
	}
}

static void write_block(int place)
{
	uint64_t *words = malloc(blocks[place].bytes);

	for (size_t i = 0; i < blocks[place].bytes / 8; i++)
		words[i] = blocks[place].number << 32 | i;
	must(cudaMemcpy(blocks[place].address, words, blocks[place].bytes, TO_DEVICE), "cudaMemcpy");
	free(words);
}

static int block_differs(int place)
{
	uint64_t *words = malloc(blocks[place].bytes);
	int differs = 0;

	must(cudaMemcpy(words, blocks[place].address, blocks[place].bytes, TO_HOST), "cudaMemcpy");
	for (size_t i = 0; i < blocks[place].bytes / 8; i++)
		differs |= words[i] != (blocks[place].number << 32 | i);
	free(words);
	return differs;
}

static int keep(void *address, size_t bytes)
{
	int place = 0;

	pthread_mutex_lock(&lock);
	while (blocks[place].address)
		place++;
	blocks[place].address = address;
	blocks[place].bytes = bytes;
	blocks[place].number = ++numbers;
	pthread_mutex_unlock(&lock);
	write_block(place);
	return place;
}

static void *allocate_some(void *nothing)
{
	static const size_t sizes[] = {MIB, 3 * MIB + 8, 64, 9 * MIB, 200 * 1024, 2 * MIB};

	for (unsigned int i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		void *address, *passing;

		must(cudaMalloc(&passing, 5 * MIB), "cudaMalloc");
		must(i % 2 ? cudaMalloc(&address, sizes[i]) : cuMemAlloc_v2((uint64_t *)&address, sizes[i]), "cudaMalloc");
		keep(address, sizes[i]);
		must(i % 2 ? cudaFree(passing) : cuMemFree_v2((uint64_t)passing), "cudaFree");
	}
	return nothing;
}

static void grow(int threads)
{
	pthread_t thread[16];

	for (int i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, allocate_some, NULL);
	for (int i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
}

static void check(void)
{
	int differ = 0, count = 0;

	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].address) {
			differ += block_differs(i);
			count++;
		}
	printf(differ ? "%d of %d differ\n" : "same\n", differ, count);
}

static void shrink(void)
{
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].address && ((uint64_t)blocks[i].address < range ||
					  (uint64_t)blocks[i].address >= range + SEGMENTS * SEGMENT_BYTES)) {
			must(i % 3 ? cudaFree(blocks[i].address) : cuMemFree_v2((uint64_t)blocks[i].address), "cudaFree");
			blocks[i].address = NULL;
		}
}

static void list(void)
{
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].address)
			printf("%lu:%zu:%lu ", (uint64_t)blocks[i].address, blocks[i].bytes, blocks[i].number);
	printf("\n");
}

static void find(const char *name, void *into)
{
	must(cudaGetDriverEntryPointByVersion(name, into, 12000, 0, NULL), name);
}

/* Grows a segment as torch does: piece by piece, then access to all the new pieces. */
static void segments(void)
{
	struct property property = {1, 0, {1, 0}, NULL, {0}};
	struct access access = {{1, 0}, 3};

	find("cuMemAddressReserve", &reserve);
	find("cuMemAddressFree", &unreserve);
	find("cuMemCreate", &create);
	find("cuMemRelease", &release);
	find("cuMemMap", &map);
	find("cuMemUnmap", &unmap);
	find("cuMemSetAccess", &set_access);
	find("cuMemRetainAllocationHandle", &retain);
	must(reserve(&range, SEGMENTS * SEGMENT_BYTES, 0, 0, 0), "reserve");
	for (uint64_t i = 0; i < SEGMENTS; i++) {
		must(create(&handles[i], SEGMENT_BYTES, &property, 0), "create");
		must(map(range + i * SEGMENT_BYTES, SEGMENT_BYTES, 0, handles[i], 0), "map");
	}
	must(set_access(range, SEGMENTS * SEGMENT_BYTES, &access, 1), "set_access");
	for (uint64_t i = 0; i < SEGMENTS; i++)
		keep((void *)(range + i * SEGMENT_BYTES), SEGMENT_BYTES);
}

static void segments_lose(int from, int to)
{
	for (uint64_t i = (uint64_t)from; i < (uint64_t)to; i++) {
		must(unmap(range + i * SEGMENT_BYTES, SEGMENT_BYTES), "unmap");
		must(release(handles[i]), "release");
		for (int j = 0; j < BLOCKS; j++)
			if ((uint64_t)blocks[j].address == range + i * SEGMENT_BYTES)
				blocks[j].address = NULL;
	}
	if (to == SEGMENTS)
		must(unreserve(range, SEGMENTS * SEGMENT_BYTES), "unreserve");
}

/* Prints CUDA's results for invalid calls. */
static void errors(void)
{
	char *address = NULL, *again;
	void *large = NULL;
	int status;

	status = cudaFree(NULL);
	printf("%d %d ", status, cudaGetLastError());
	status = cudaMalloc(&large, (size_t)1 << 40);
	printf("%d %d ", status, cudaGetLastError());
	status = cudaMalloc(NULL, 4 * MIB);
	printf("%d %d ", status, cudaGetLastError());
	must(cudaMalloc((void **)&address, 4 * MIB), "cudaMalloc");
	status = cudaFree(address + 64);
	printf("%d %d ", status, cudaGetLastError());
	again = address;
	must(cudaFree(address), "cudaFree");
	status = cudaFree(again);
	printf("%d %d %d\n", status, cudaGetLastError(), cuMemFree_v2((uint64_t)again));
}

/* Whether repeated calls leave the loader's last error unchanged. */
static void loader(void)
{
	void *address;

	for (int i = 0; i < 2; i++) {
		dlerror();
		if (i && dlopen("/nowhere/at-all.so", RTLD_NOW))
			printf("there is ");
		must(cudaMalloc(&address, 4 * MIB), "cudaMalloc");
		must(cudaFree(address), "cudaFree");
		must(cuMemAlloc_v2((uint64_t *)&address, 64), "cuMemAlloc");
		must(cuMemFree_v2((uint64_t)address), "cuMemFree");
	}
	printf(dlerror() ? "kept\n" : "lost\n");
}

static void peers(void)
{
	void *before, *after;
	unsigned long long flags[4];

	find("cuMemGetAccess", &get_access);
	must(cudaSetDevice(1), "cudaSetDevice");
	must(cudaMalloc(&before, 4 * MIB), "cudaMalloc");
	must(cudaSetDevice(0), "cudaSetDevice");
	must(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
	must(cudaSetDevice(1), "cudaSetDevice");
	must(cudaMalloc(&after, 4 * MIB), "cudaMalloc");
	keep(before, 4 * MIB);
	keep(after, 4 * MIB);
	must(cudaSetDevice(0), "cudaSetDevice");
	for (int i = 0; i < 4; i++)
		must(get_access(&flags[i], (int[]){1, i % 2}, (uint64_t)(i < 2 ? before : after)), "cuMemGetAccess");
	printf("%llu %llu %llu %llu\n", flags[0], flags[1], flags[2], flags[3]);
}

static void access_to(const void *address)
{
	find("cuMemGetAccess", &get_access);
	for (int device = 0; device < 2; device++) {
		unsigned long long flags;

		if (get_access(&flags, (int[]){1, device}, (uint64_t)address))
			printf("- "); /* CUDA's own */
		else
			printf("%llu ", flags);
	}
}

static void access_now(void)
{
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].address)
			access_to(blocks[i].address);
	printf("\n");
}

static _Atomic int stopping;

static void *come_and_go(void *nothing)
{
	while (!stopping) {
		void *address[4];

		for (int i = 0; i < 4; i++)
			must(cudaMalloc(&address[i], (size_t)(i + 1) * MIB), "cudaMalloc");
		for (int i = 0; i < 4; i++)
			must(cudaFree(address[i]), "cudaFree");
	}
	return nothing;
}

static int (*make_event)(void **, unsigned int), (*record)(void *, void *);

/* Like a thread that launches work: it enters and leaves the driver continuously, and waits there only for the driver's
 * lock. */
static void *call_on(void *event)
{
	while (!stopping)
		must(record(event, NULL), "cuEventRecord");
	return NULL;
}

static int (*ask_flags)(unsigned int *, void *);

static void *ask_on(void *nothing)
{
	unsigned int flags;

	for (; !stopping; usleep(1000))
		ask_flags(&flags, &flags);
	return nothing;
}

static void *allocate_later(void *nothing)
{
	void *address;

	must(cudaMalloc(&address, 4 * MIB), "cudaMalloc");
	keep(address, 4 * MIB);
	return nothing;
}

static void *sleep_on(void *nothing)
{
	for (;;)
		pause();
	return nothing;
}

/* Prints the handle, or the error. */
static void print_handle(int status, struct shared handle)
{
	if (status)
		printf("error-%d ", status);
	for (size_t i = 0; !status && i < sizeof(handle.bytes); i++)
		printf("%02x", handle.bytes[i]);
	printf(" ");
}

static void share(int place)
{
	struct shared handle;

	print_handle(cudaIpcGetMemHandle(&handle, blocks[place].address), handle);
}

static void *opened, *event;

static struct shared read_handle(const char *text)
{
	struct shared handle;

	for (size_t i = 0; i < sizeof(handle.bytes); i++)
		must(sscanf(text + 2 * i, "%2hhx", &handle.bytes[i]) != 1, "a handle");
	return handle;
}

static void share_event(void)
{
	struct shared handle;

	print_handle(cudaIpcGetEventHandle(&handle, event), handle);
}

/* Keeps the GPU busy for so many milliseconds, and records the event behind that. */
static void record_behind(int ms)
{
	uint64_t ns = (uint64_t)ms * 1000000;
	void *module, *spin, *arguments[] = {&ns};

	must(cuModuleLoadData(&module, "spin"), "cuModuleLoadData");
	must(cuModuleGetFunction(&spin, module, "spin"), "cuModuleGetFunction");
	must(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL), "cuLaunchKernel");
	must(cudaEventRecord(event, NULL), "cudaEventRecord");
}

static void open_shared(const char *text)
{
	int status = cudaIpcOpenMemHandle(&opened, read_handle(text), 1);

	if (status)
		printf("error-%d ", status);
	else
		printf("%p ", opened);
}

/* Prints the first word of the opened memory. */
static void peek(void)
{
	uint64_t word;

	must(cudaMemcpy(&word, opened, sizeof(word), TO_HOST), "cudaMemcpy");
	printf("%llu ", (unsigned long long)word);
}

static void poke(uint64_t word)
{
	must(cudaMemcpy(opened, &word, sizeof(word), TO_DEVICE), "cudaMemcpy");
}

static void *shut_elsewhere(void *status)
{
	*(int *)status = cudaIpcCloseMemHandle(opened);
	return NULL;
}

/* Repeatedly exports memory and frees it at once. */
static void *trade(void *nothing)
{
	while (!stopping) {
		struct shared handle;
		void *address;

		must(cudaMalloc(&address, 2 * MIB), "cudaMalloc");
		must(cudaIpcGetMemHandle(&handle, address), "cudaIpcGetMemHandle");
		must(cudaFree(address), "cudaFree");
	}
	return nothing;
}

int main(void)
{
	pthread_t idle, thread[4];
	char line[512];

	setvbuf(stdout, NULL, _IOLBF, 0);
	pthread_create(&idle, NULL, sleep_on, NULL); /* starts the control thread too */
	while (fgets(line, sizeof(line), stdin)) {
		char *word = strtok(line, " \n"), *more = strtok(NULL, "\n");
		int number = more ? atoi(more) : 0;
		size_t room, total;
		void *address;

		if (strcmp(word, "grow") == 0)
			grow(number);
		else if (strcmp(word, "replace") == 0) { /* a descriptor by a file */
			int file = open(strchr(more, ' ') + 1, O_RDWR);

			must(file < 0 || dup2(file, number) != number || close(file), "replace");
		} else if (strcmp(word, "asking") == 0) {
			find("cuMemHostGetFlags", &ask_flags);
			pthread_create(&thread[0], NULL, ask_on, NULL);
		} else if (strcmp(word, "shrink") == 0)
			shrink();
		else if (strcmp(word, "capture") == 0)
			must(cudaStreamBeginCapture(NULL, 0), "cudaStreamBeginCapture");
		else if (strcmp(word, "driver-capture") == 0)
			must(cuStreamBeginCapture_v2(NULL, 0), "cuStreamBeginCapture");
		else if (strcmp(word, "driver-captured") == 0)
			must(cuStreamEndCapture(NULL, &address), "cuStreamEndCapture");
		else if (strcmp(word, "register") == 0)
			must(cuMemGetHandleForAddressRange(&number, (uint64_t)blocks[0].address, 4096, 1, 0),
			     "cuMemGetHandleForAddressRange");
		else if (strcmp(word, "captured") == 0)
			must(cudaStreamEndCapture(NULL, &address), "cudaStreamEndCapture");
		else if (strcmp(word, "segments") == 0)
			segments();
		else if (strcmp(word, "lose") == 0)
			segments_lose(number, number ? SEGMENTS : SEGMENTS / 2);
		else if (strcmp(word, "release") == 0)
			for (int i = 0; i < number; i++)
				must(release(handles[i]), "release");
		else if (strcmp(word, "retain") == 0)
			must(retain(&(uint64_t){0}, range), "retain");
		else if (strcmp(word, "fill") == 0) {
			must(cudaMalloc(&address, (size_t)number * MIB), "cudaMalloc");
			keep(address, (size_t)number * MIB);
		} else if (strcmp(word, "library") == 0) {
			void *library = dlopen(more, RTLD_NOW);
			int (*take)(void **, size_t) = library ? (int (*)(void **, size_t))dlsym(library, "take") : NULL;

			must(take ? take(&address, 4 * MIB) : -1, "take");
			keep(address, 4 * MIB);
		} else if (strcmp(word, "device") == 0)
			must(cudaSetDevice(number), "cudaSetDevice");
		else if (strcmp(word, "later") == 0)
			pthread_create(&thread[0], NULL, allocate_later, NULL);
		else if (strcmp(word, "wait") == 0)
			pthread_join(thread[0], NULL);
		else if (strcmp(word, "come") == 0)
			for (int i = 0; i < 4; i++)
				pthread_create(&thread[i], NULL, come_and_go, NULL);
		else if (strcmp(word, "calling") == 0) {
			find("cuEventCreate", &make_event);
			find("cuEventRecord", &record);
			for (int i = 0; i < 4; i++) {
				must(cudaSetDevice(0) || make_event(&address, 0), "cuEventCreate");
				pthread_create(&thread[i], NULL, call_on, address);
			}
		} else if (strcmp(word, "stop") == 0) {
			stopping = 1;
			for (int i = 0; i < 4; i++)
				pthread_join(thread[i], NULL);
		} else if (strcmp(word, "reset") == 0) {
			must(cudaDeviceReset(), "cudaDeviceReset");
			memset(blocks, 0, sizeof(blocks));
		} else if (strcmp(word, "alone") == 0)
			must(cudaDeviceDisablePeerAccess(1), "cudaDeviceDisablePeerAccess");
		else if (strcmp(word, "share") == 0)
			share(number);
		else if (strcmp(word, "open") == 0)
			open_shared(more);
		else if (strcmp(word, "peek") == 0)
			peek();
		else if (strcmp(word, "poke") == 0)
			poke((uint64_t)number);
		else if (strcmp(word, "shut") == 0)
			printf("%d ", cudaIpcCloseMemHandle(opened));
		else if (strcmp(word, "event") == 0)
			must(cudaEventCreateWithFlags(&event, (unsigned int)number), "cudaEventCreateWithFlags");
		else if (strcmp(word, "record-behind") == 0)
			record_behind(number);
		else if (strcmp(word, "share-event") == 0)
			share_event();
		else if (strcmp(word, "open-event") == 0)
			printf("%d ", cudaIpcOpenEventHandle(&event, read_handle(more)));
		else if (strcmp(word, "event-done") == 0)
			printf("%d ", cudaEventQuery(event));
		else if (strcmp(word, "no-event") == 0)
			must(cudaEventDestroy(event), "cudaEventDestroy");
		else if (strcmp(word, "opened") == 0)
			access_to(opened);
		else if (strcmp(word, "shut-elsewhere") == 0) {
			pthread_create(&thread[0], NULL, shut_elsewhere, &number);
			pthread_join(thread[0], NULL);
			printf("%d ", number);
		} else if (strcmp(word, "trade") == 0)
			for (int i = 0; i < 4; i++)
				pthread_create(&thread[i], NULL, trade, NULL);
		else if (strcmp(word, "fork") == 0) {
			pid_t child = fork();

			if (child == 0) {
				pthread_create(&idle, NULL, sleep_on, NULL);
				pause();
			}
			printf("%d ", child);
		}

		if (strcmp(word, "leave") == 0) {
			printf("done\n");
			pthread_cancel(idle);
			pthread_exit(NULL);
		}
		if (strcmp(word, "check") == 0)
			check();
		else if (strcmp(word, "loader") == 0)
			loader();
		else if (strcmp(word, "free") == 0)
			printf("%d\n", cudaFree(more ? (void *)strtoul(more, NULL, 10) : NULL));
		else if (strcmp(word, "list") == 0)
			list();
		else if (strcmp(word, "errors") == 0)
			errors();
		else if (strcmp(word, "peers") == 0)
			peers();
		else if (strcmp(word, "access") == 0)
			access_now();
		else if (strcmp(word, "room") == 0) {
			must(cudaMemGetInfo(&room, &total), "cudaMemGetInfo");
			printf("%zu\n", room);
		} else
			printf("done\n");
	}
	return 0;
}
