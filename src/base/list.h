/* An intrusive doubly linked circular list; the head is a link too. The caller
   locks. */
#ifndef NRM_BASE_LIST_H
#define NRM_BASE_LIST_H

#include <stdbool.h>

struct nrm__link {
    struct nrm__link *next, *previous;
};

static inline void
nrm__list_init(struct nrm__link *head)
{
    head->next = head->previous = head;
}

static inline bool
nrm__list_is_empty(const struct nrm__link *head)
{
    return head->next == head;
}

static inline void
nrm__list_insert_after(struct nrm__link *position, struct nrm__link *link)
{
    link->next = position->next;
    link->previous = position;
    position->next->previous = link;
    position->next = link;
}

static inline void
nrm__list_append(struct nrm__link *head, struct nrm__link *link)
{
    nrm__list_insert_after(head->previous, link);
}

/* `link` is in a list; afterwards it is a list of its own. */
static inline void
nrm__list_remove(struct nrm__link *link)
{
    link->previous->next = link->next;
    link->next->previous = link->previous;
    nrm__list_init(link);
}

#endif
