/* Functions of the device interface that take a communicator and pass or return structs by value. */
#define _GNU_SOURCE
#include "calls.h"

/* Uses the real handle between ask_begin and ask_end; passes on a handle that is not ours. */
#define ON_REAL(name, type, nothing, ...)                                             \
	struct nccl_thread *thread = thread_self();                                       \
	struct nccl_instance *instance = real_instance();                                 \
	struct nccl_comm *comm = comm_of((uintptr_t)handle);                              \
	bool mine = comm && !thread_inside(thread);                                       \
	ncclComm_t real = handle;                                                         \
	__typeof__(nothing) answer = nothing;                                             \
                                                                                      \
	if (!instance || !instance->function[SYMBOL_##name]) {                            \
		answer_missing(thread, SYMBOL_##name);                                           \
		return answer;                                                                \
	}                                                                                 \
	if (mine) {                                                                       \
		real = ask_begin(thread, comm, SYMBOL_##name);                                \
		instance = real_instance();                                                   \
	}                                                                                 \
	if (real)                                                                         \
		answer = REAL(instance, name, type)(__VA_ARGS__);                             \
	if (mine)                                                                         \
		ask_end(thread);                                                              \
	return answer

typedef ncclTeam_t (*team_of)(ncclComm_t);
typedef int (*rank_in)(ncclComm_t, ncclTeam_t, int);

PROFILED(ncclTeam_t, ncclTeamWorld, ncclComm_t handle)
{
	ON_REAL(ncclTeamWorld, team_of, (ncclTeam_t){0}, real);
}

PROFILED(ncclTeam_t, ncclTeamLsa, ncclComm_t handle)
{
	ON_REAL(ncclTeamLsa, team_of, (ncclTeam_t){0}, real);
}

PROFILED(ncclTeam_t, ncclTeamRail, ncclComm_t handle)
{
	ON_REAL(ncclTeamRail, team_of, (ncclTeam_t){0}, real);
}

PROFILED(ncclTeam_t, ncclTeamCftMultimem, ncclComm_t handle)
{
	ON_REAL(ncclTeamCftMultimem, team_of, (ncclTeam_t){0}, real);
}

PROFILED(ncclTeam_t, ncclTeamCft, ncclComm_t handle, int mode)
{
	ON_REAL(ncclTeamCft, ncclTeam_t (*)(ncclComm_t, int), (ncclTeam_t){0}, real, mode);
}

PROFILED(int, ncclTeamRankToWorld, ncclComm_t handle, ncclTeam_t team, int rank)
{
	ON_REAL(ncclTeamRankToWorld, rank_in, -1, real, team, rank);
}

PROFILED(int, ncclTeamRankToLsa, ncclComm_t handle, ncclTeam_t team, int rank)
{
	ON_REAL(ncclTeamRankToLsa, rank_in, -1, real, team, rank);
}

PROFILED(ncclResult_t, ncclGinBarrierCreateRequirement, ncclComm_t handle, ncclTeam_t team, int barriers, void *out,
	 void *requirements)
{
	ON_REAL(ncclGinBarrierCreateRequirement, ncclResult_t (*)(ncclComm_t, ncclTeam_t, int, void *, void *),
		ncclInvalidUsage, real, team, barriers, out, requirements);
}
