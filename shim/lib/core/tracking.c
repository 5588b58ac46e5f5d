/* Makes a userfaultfd of this process for the daemon, which finds with it the pages that the job writes while its memory is
 * sent to another node (snapshotd/precopy/). The kernel binds a userfaultfd to the memory of the process that makes it.
 *
 * Invariant: this library registers no memory with it, and keeps it only until the daemon has taken a copy. So the daemon
 * alone decides how long pages are tracked, and the kernel undoes everything when the daemon or its child ends. A descriptor
 * that the daemon did not have closed, because it died, is closed by the control thread after KEPT_NS. A forked child closes
 * its copy.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define KEPT_NS 5000000000
#define NOTHING (-1)
/* Of newer headers than some that this is built with. */
#define USER_MODE_ONLY 1
#define WP_UNPOPULATED ((uint64_t)1 << 13)
#define WP_ASYNC ((uint64_t)1 << 15)

static int tracking = NOTHING;
static bool opening; /* the kernel may have made a descriptor whose number is not known yet */
static int64_t close_at_ns;

static void tracking_close(void)
{
	if (tracking >= 0)
		KERNEL(SYS_close, tracking);
	tracking = NOTHING;
}

/* Only faults of user mode: other ones need a privilege, and the asynchronous mode handles all of them without it. */
static int tracking_open(void)
{
	struct uffdio_api api = {.api = UFFD_API, .features = WP_ASYNC | WP_UNPOPULATED};
	int status;

	tracking_close();
	STORE(&opening, true);
	tracking = (int)KERNEL(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | USER_MODE_ONLY);
	STORE(&opening, false);
	if (tracking < 0) {
		status = -tracking;
		tracking = NOTHING;
		add_text("the kernel, or a filter of system calls, allows no userfaultfd");
		return status;
	}
	status = (int)-KERNEL(SYS_ioctl, tracking, UFFDIO_API, &api);
	if (status) {
		tracking_close();
		add_text("this kernel cannot tell which pages are written (userfaultfd, WP_ASYNC: Linux 6.7)");
		return status;
	}
	close_at_ns = now_ns() + KEPT_NS;
	snapshim_mailbox.result[0] = (uint64_t)tracking;
	return 0;
}

int tracking_dispatch(uint32_t command)
{
	if (command == SNAPSHIM_TRACK_OPEN)
		return tracking_open();
	tracking_close();
	return 0;
}

/* How long the control thread may wait for its next command; FOREVER: nothing has to be closed. */
int64_t tracking_wait_ns(void)
{
	int64_t left_ns;

	if (tracking < 0)
		return FOREVER;
	left_ns = close_at_ns - now_ns();
	if (left_ns > 0)
		return left_ns;
	tracking_close();
	return FOREVER;
}

/* In a forked child. Returns whether it may have inherited a descriptor whose number is not known. */
bool tracking_forget(void)
{
	bool unknown = LOAD(&opening) && tracking < 0;

	tracking_close();
	opening = false;
	return unknown;
}
