/* Makes torch release its unused device memory and end its idle compilers, in the interpreter's main thread between two
 * bytecodes.
 *
 * A checkpoint would copy the caching allocator's free blocks for nothing, and the processes that torch.compile keeps for the
 * next compilation. Only the job's main thread may call torch, so the call is queued in the interpreter
 * (Py_AddPendingCall), which makes it when that thread is not inside C code.
 * Invariant: at most one such call is queued; one that runs after its deadline does nothing; the job's exceptions,
 * references and output are not affected.
 *
 * Python's functions are looked up on demand, because most processes with this library have no interpreter.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

typedef struct object object; /* PyObject */

/* From Python's headers, 3.8 and later. */
static struct {
	int (*Py_IsInitialized)(void);
	int (*Py_AddPendingCall)(int (*)(void *), void *);
	void (*Py_DecRef)(object *);
	object *(*PyImport_GetModuleDict)(void); /* borrowed */
	object *(*PyDict_GetItemString)(object *, const char *); /* borrowed */
	object *(*PyObject_GetAttrString)(object *, const char *);
	object *(*PyObject_CallObject)(object *, object *);
	object *(*PyObject_CallFunction)(object *, const char *, ...);
	object *(*PyObject_Str)(object *);
	int (*PyObject_IsTrue)(object *);
	object *(*PySequence_Tuple)(object *);
	object *(*PyTuple_GetItem)(object *, ptrdiff_t); /* borrowed */
	ptrdiff_t (*PyTuple_Size)(object *);
	long long (*PyLong_AsLongLong)(object *);
	const char *(*PyUnicode_AsUTF8)(object *);
	object *(*PyErr_Occurred)(void); /* borrowed */
	int (*PyErr_ExceptionMatches)(object *);
	void (*PyErr_Fetch)(object **, object **, object **);
	void (*PyErr_Clear)(void);
	int (*PyGILState_Ensure)(void);
	void (*PyGILState_Release)(int);
	object **PyExc_Exception;
} python;

static const struct {
	const char *name;
	void *place;
} symbols[] = {
#define SYMBOL(name) {#name, &python.name}
	SYMBOL(Py_IsInitialized),
	SYMBOL(Py_AddPendingCall),
	SYMBOL(Py_DecRef),
	SYMBOL(PyImport_GetModuleDict),
	SYMBOL(PyDict_GetItemString),
	SYMBOL(PyObject_GetAttrString),
	SYMBOL(PyObject_CallObject),
	SYMBOL(PyObject_CallFunction),
	SYMBOL(PyObject_Str),
	SYMBOL(PyObject_IsTrue),
	SYMBOL(PySequence_Tuple),
	SYMBOL(PyTuple_GetItem),
	SYMBOL(PyTuple_Size),
	SYMBOL(PyLong_AsLongLong),
	SYMBOL(PyUnicode_AsUTF8),
	SYMBOL(PyErr_Occurred),
	SYMBOL(PyErr_ExceptionMatches),
	SYMBOL(PyErr_Fetch),
	SYMBOL(PyErr_Clear),
	SYMBOL(PyGILState_Ensure),
	SYMBOL(PyGILState_Release),
	SYMBOL(PyExc_Exception),
};

#define KNOCK_AFTER_NS 20000000

enum { IDLE, WANTED, RUNNING, DONE };
static uint32_t state;
static uint32_t knocking;    /* 1: a thread of ours waits for the interpreter's lock */
static uint32_t handed_over; /* 1: the interpreter has our call on its list */

/* Written by the main thread before DONE, read by the control thread after it. */
static int outcome;
static long long given_back_bytes;
static uint64_t pools_told;
static char reason[256];

static int give_up(int status, const char *why)
{
	size_t bytes = strlen(why) < sizeof(reason) ? strlen(why) : sizeof(reason) - 1;

	memcpy(reason, why, bytes);
	reason[bytes] = 0;
	return status;
}

/* Calls owner.name(), or owner.name(index) where index is not negative. NULL: an exception is set. */
static object *call(object *owner, const char *name, int index)
{
	object *function = python.PyObject_GetAttrString(owner, name);
	object *value = NULL;

	if (function) {
		value = index < 0 ? python.PyObject_CallObject(function, NULL) :
				    python.PyObject_CallFunction(function, "i", index);
		python.Py_DecRef(function);
	}
	return value;
}

static long long call_number(object *owner, const char *name, int index)
{
	object *value = call(owner, name, index);
	long long number = -1;

	if (value) {
		number = python.PyLong_AsLongLong(value);
		python.Py_DecRef(value);
	}
	return number;
}

static int call_truth(object *owner, const char *name)
{
	object *value = call(owner, name, -1);
	int truth = -1;

	if (value) {
		truth = python.PyObject_IsTrue(value);
		python.Py_DecRef(value);
	}
	return truth;
}

/* -1: an exception is set. */
static long long reserved_bytes(object *cuda)
{
	long long devices = call_number(cuda, "device_count", -1);
	long long total = devices < 0 ? -1 : 0;

	for (int device = 0; device < devices && total >= 0; device++) {
		long long bytes = call_number(cuda, "memory_reserved", device);

		total = bytes < 0 ? -1 : total + bytes;
	}
	return total;
}

static int empty(object *cuda)
{
	int truth = call_truth(cuda, "is_initialized");
	long long before, after;
	object *nothing;

	if (truth == 0)
		return give_up(ENODATA, "torch has not used a GPU in this process");
	if (truth > 0) {
		truth = call_truth(cuda, "is_current_stream_capturing");
		if (truth > 0)
			return give_up(EBUSY, "a CUDA graph is being captured");
	}
	if (truth < 0)
		return EIO;
	before = reserved_bytes(cuda);
	nothing = before < 0 ? NULL : call(cuda, "empty_cache", -1);
	if (!nothing)
		return EIO;
	python.Py_DecRef(nothing);
	after = reserved_bytes(cuda);
	given_back_bytes = after >= 0 && after < before ? before - after : 0;
	return after < 0 ? EIO : 0;
}

/* Clears an exception. True: it is no Exception, but KeyboardInterrupt or the like, and stays set. */
static bool interrupted(void)
{
	if (python.PyErr_Occurred() && python.PyErr_ExceptionMatches(*python.PyExc_Exception))
		python.PyErr_Clear();
	return python.PyErr_Occurred() != NULL;
}

/* -1: an exception is set. */
static int attribute_truth(object *owner, const char *name)
{
	object *value = python.PyObject_GetAttrString(owner, name);
	int truth = value ? python.PyObject_IsTrue(value) : -1;

	if (value)
		python.Py_DecRef(value);
	return truth;
}

/* Whether torch would make this call by itself, given time: the user may have switched that off, and then there is no timer.
 * Not while something is being compiled: the pool's former workers would go on beside new ones. And quiesce() takes the lock,
 * which the main thread may have at this moment. */
static bool is_idle(object *pool)
{
	object *lock;
	int locked;

	if (attribute_truth(pool, "timer") != 1 || attribute_truth(pool, "pending_futures") != 0)
		return false;
	lock = python.PyObject_GetAttrString(pool, "write_lock");
	locked = lock ? call_truth(lock, "locked") : -1;
	if (lock)
		python.Py_DecRef(lock);
	return locked == 0;
}

/* Has the pools of torch.compile that are idle end their workers, as torch itself does when it has compiled nothing for a minute.
 * It starts new ones when it needs them. A pool that has no such function, or does not answer as expected, is left as it is.
 * Afterwards no exception is set, or one that is not an Exception. */
static void end_idle_compilers(void)
{
	object *compiling = python.PyDict_GetItemString(python.PyImport_GetModuleDict(), "torch._inductor.async_compile");
	object *listed = compiling ? python.PyObject_GetAttrString(compiling, "_pool_set") : NULL;
	object *pools = listed ? python.PySequence_Tuple(listed) : NULL;

	for (ptrdiff_t i = 0; pools && i < python.PyTuple_Size(pools) && !interrupted(); i++) {
		object *pool = python.PyTuple_GetItem(pools, i);
		object *nothing = is_idle(pool) ? call(pool, "quiesce", -1) : NULL;

		if (nothing) {
			python.Py_DecRef(nothing);
			pools_told++;
		}
	}
	if (pools)
		python.Py_DecRef(pools);
	if (listed)
		python.Py_DecRef(listed);
	interrupted();
}

/* Reports and clears the exception that is set if it is an Exception; KeyboardInterrupt and the like stay set. */
static void swallow_exception(void)
{
	object *parts[3] = {NULL, NULL, NULL};
	object *text;
	const char *utf8;

	if (!python.PyErr_Occurred() || !python.PyErr_ExceptionMatches(*python.PyExc_Exception))
		return;
	python.PyErr_Fetch(&parts[0], &parts[1], &parts[2]);
	text = python.PyObject_Str(parts[1] ? parts[1] : parts[0]);
	utf8 = text ? python.PyUnicode_AsUTF8(text) : NULL;
	give_up(EIO, utf8 ? utf8 : "torch raised an exception that cannot be printed");
	if (text)
		python.Py_DecRef(text);
	interrupted();
	for (int i = 0; i < 3; i++)
		if (parts[i])
			python.Py_DecRef(parts[i]);
}

/* Runs in the main thread with the interpreter's lock. -1: an exception is set, which propagates into the job's code. */
static int at_the_safe_point(void *argument)
{
	uint32_t wanted = WANTED;
	object *torch, *cuda;

	(void)argument;
	STORE(&handed_over, 0);
	if (!SWAP_IF(&state, &wanted, RUNNING))
		return 0;
	given_back_bytes = 0;
	pools_told = 0;
	reason[0] = 0;
	end_idle_compilers();
	torch = python.PyDict_GetItemString(python.PyImport_GetModuleDict(), "torch");
	if (interrupted()) {
		outcome = EINTR;
	} else if (torch) {
		cuda = python.PyObject_GetAttrString(torch, "cuda");
		outcome = cuda ? empty(cuda) : EIO;
		if (cuda)
			python.Py_DecRef(cuda);
	} else {
		outcome = give_up(ENOENT, "torch is not imported in this process");
	}
	swallow_exception();
	if (python.PyErr_Occurred())
		outcome = give_up(EINTR, "the job was interrupted just then (KeyboardInterrupt or SystemExit)");
	STORE(&state, DONE);
	wake_word(&state);
	return outcome == EINTR ? -1 : 0;
}

static bool look_up(void)
{
	for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
		void *found = dlsym(RTLD_DEFAULT, symbols[i].name);

		if (!found)
			return false;
		memcpy(symbols[i].place, &found, sizeof(found));
	}
	return python.Py_IsInitialized();
}

static void *take_the_lock_once(void *argument)
{
	python.PyGILState_Release(python.PyGILState_Ensure());
	STORE(&knocking, 0);
	return argument;
}

/* Before 3.13 the interpreter notices a pending call from another thread only when it is interrupted for another reason,
 * such as another thread that requests its lock. torch causes that often, a loop of pure Python never does. A separate
 * thread requests the lock, because that may take long and the control thread must answer meanwhile. */
static void knock(void)
{
	uint32_t none = 0;
	pthread_attr_t attributes;
	pthread_t thread;

	if (!SWAP_IF(&knocking, &none, 1))
		return;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	if (create_exempt_thread(&thread, &attributes, take_the_lock_once, NULL) != 0)
		STORE(&knocking, 0);
	pthread_attr_destroy(&attributes);
}

static int report(void)
{
	add_text(reason);
	snapshim_mailbox.result[0] = outcome == 0 ? (uint64_t)given_back_bytes : 0;
	snapshim_mailbox.result[1] = pools_told;
	return outcome;
}

/* Called by the control thread. */
int empty_cache(int64_t timeout_ns)
{
	int64_t deadline = now_ns() + timeout_ns;
	uint32_t seen = WANTED;

	if (LOAD(&snapshim_mailbox.parked)) {
		add_text("the job is parked");
		return EBUSY;
	}
	if (LOAD(&state) == RUNNING) {
		add_text("torch is still giving memory back since the last time");
		return EBUSY;
	}
	if (!look_up()) {
		add_text("there is no Python interpreter in this process");
		return ENOSYS;
	}
	STORE(&state, WANTED);
	if (!LOAD(&handed_over)) {
		STORE(&handed_over, 1);
		if (python.Py_AddPendingCall(at_the_safe_point, NULL) != 0) {
			STORE(&handed_over, 0);
			STORE(&state, IDLE);
			add_text("the interpreter's list of pending calls is full");
			return EAGAIN;
		}
	}
	for (bool knocked = false;;) {
		int64_t left = deadline - now_ns();

		seen = LOAD(&state);
		if (seen == DONE)
			return report();
		if (left <= 0)
			break;
		wait_word(&state, seen, left < KNOCK_AFTER_NS || knocked ? left : KNOCK_AFTER_NS);
		if (!knocked && LOAD(&state) == WANTED)
			knock();
		knocked = true;
	}
	seen = WANTED;
	if (SWAP_IF(&state, &seen, IDLE)) {
		add_text("the interpreter's main thread stayed in C code and reached no safe point in time");
		return ETIMEDOUT;
	}
	if (seen == DONE)
		return report();
	add_text("torch has begun to give memory back and is not done yet");
	return ETIMEDOUT;
}

/* A forked child may inherit the interpreter's queue with our call in it. The call then does nothing. */
void safepoint_forget(void)
{
	state = IDLE;
	handed_over = 0;
	knocking = 0;
}
