/* Checks, under AddressSanitizer, that the wrapper in hygiene.c returns what libc would, and ENOSYS for io_uring. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "abi.h"
#include "checks/expect.h"

int main(void)
{
	char params[256];
	int ends[2];
	char byte = 0;
	void *page;

	EXPECT(snapshim_abi_version == SNAPSHIM_ABI_VERSION);

	memset(params, 0, sizeof(params));
	errno = 0;
	EXPECT(syscall(425L, 8L, params) == -1 && errno == ENOSYS);

#ifdef SYS_arch_prctl
	errno = 0;
	EXPECT(syscall(SYS_arch_prctl, 0x1023L, 18L) == -1 && errno == EOPNOTSUPP);
#endif

	EXPECT(syscall(SYS_getpid) == (long)getpid());

	errno = 0;
	EXPECT(syscall(SYS_close, -1L) == -1 && errno == EBADF);
	errno = 77; /* a call that succeeds leaves errno alone */
	EXPECT(syscall(SYS_getppid) == (long)getppid() && errno == 77);

	EXPECT(pipe(ends) == 0);
	EXPECT(syscall(SYS_write, (long)ends[1], "x", 1L) == 1);
	EXPECT(syscall(SYS_read, (long)ends[0], &byte, 1L) == 1 && byte == 'x');

	/* six arguments, and a result that is an address */
	page = (void *)syscall(SYS_mmap, 0L, 4096L, (long)(PROT_READ | PROT_WRITE), (long)(MAP_PRIVATE | MAP_ANONYMOUS), -1L,
			       0L);
	EXPECT(page != MAP_FAILED);
	memset(page, 1, 4096);
	EXPECT(munmap(page, 4096) == 0);
	return 0;
}
