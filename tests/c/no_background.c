/* The background thread, for programs whose schedules are explored: there is none, as
   it would come in at any time. What it does, allocations and trims do as well. */
#include "core/background.h"

void
nrm__background_watched_init(struct nrm__watched *watched, nrm_resource *mr,
                             uint64_t (*look)(nrm_resource *mr, uint64_t now_ns,
                                              bool is_first))
{
    nrm__list_init(&watched->link);
    watched->mr = mr;
    watched->look = look;
}

void
nrm__background_watch(struct nrm__watched *watched)
{
    (void)watched;
}

void
nrm__background_forget(struct nrm__watched *watched)
{
    (void)watched;
}

void
nrm__background_drop_orphan(void)
{
}

void
nrm__background_wake(void)
{
}

bool
nrm__background_is_here(void)
{
    return false;
}

void
nrm__background_settle(uint64_t limit_ns)
{
    (void)limit_ns;
}

bool
nrm__background_is_running(void)
{
    return false;
}

uint64_t
nrm__background_n_turns(void)
{
    return 0;
}
