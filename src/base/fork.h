/*
 * The locks of this folder over a fork. Nothing here may include os/fork.h, so
 * os/fork.c calls these itself: prepare after every other hook, parent or child before
 * them.
 */
#ifndef NRM_BASE_FORK_H
#define NRM_BASE_FORK_H

void nrm__thread_states_fork_prepare(void);
void nrm__thread_states_fork_parent(void);
void nrm__thread_states_fork_child(void);

void nrm__options_fork_prepare(void);
void nrm__options_fork_parent(void);
void nrm__options_fork_child(void);

#endif
