/* Checks that a command which comes late, because its thread had no time, does not undo a later one. */
#include <errno.h>
#include <stdlib.h>

#include "checks/expect.h"
#include "nccl/gate.h"

static bool is_open(void)
{
	return atomic_load(&gate_word) == GATE_OPEN;
}

int main(void)
{
	uint64_t missing;

	EXPECT(gate_close(1) && !is_open());
	EXPECT(gate_open(3, false, &missing) == 0 && is_open());
	EXPECT(!gate_close(2) && is_open());
	EXPECT(!gate_set_targets(2, calloc(1, sizeof(struct gate_target)), 1, NULL, 0));
	EXPECT(gate_close(4) && !is_open());
	EXPECT(gate_open(3, false, &missing) == ECANCELED && !is_open());
	EXPECT(gate_set_targets(5, calloc(1, sizeof(struct gate_target)), 1, NULL, 0));
	EXPECT(gate_open(6, false, &missing) == 0 && is_open());
	return 0;
}
