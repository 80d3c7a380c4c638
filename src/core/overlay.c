/*
 * See overlay.h. The last range that starts before an address either contains it, or
 * lies with it in all that does: so a look-up goes from there outwards, and how many
 * ranges lie beside each other does not matter. An outer range enters before what lies
 * in it and leaves after it, but where others unmapped memory, or gave it back too
 * early: that is looked for, which costs a range with nothing in it one step.
 */
#include "core/overlay.h"

#include "base/bits.h"

static struct nrm__entry *
entry_of(struct nrm__tree_node *node)
{
    return node != NULL ? NRM__CONTAINER(node, struct nrm__entry, node) : NULL;
}

/* What a range lies in, that is known. */
static struct nrm__entry *
around(const struct nrm__entry *entry)
{
    return entry->below != NULL ? entry->below : entry->outer;
}

static struct nrm__entry *
innermost(struct nrm__entry *entry, uintptr_t address)
{
    while (entry != NULL && address - entry->node.start >= entry->node.nbytes) {
        entry = around(entry);
    }
    return entry;
}

struct nrm__entry *
nrm__overlay_find(const struct nrm__tree *tree, uintptr_t address)
{
    return innermost(entry_of(nrm__tree_floor(tree, address)), address);
}

/* What starts in `entry` and lay in `from` lies in `to` now. */
static void
move_inner(const struct nrm__tree *tree, const struct nrm__entry *entry,
           const struct nrm__entry *from, struct nrm__entry *to)
{
    uintptr_t start = entry->node.start;
    struct nrm__tree_node *node = nrm__tree_above(tree, start);
    for (; node != NULL && node->start - start < entry->node.nbytes;
         node = nrm__tree_above(tree, node->start)) {
        for (struct nrm__entry *e = entry_of(node); e != NULL; e = e->below) {
            e->outer = e->outer == from ? to : e->outer;
        }
    }
}

void
nrm__overlay_enter(const struct nrm__tree *tree, struct nrm__entry *entry,
                   struct nrm__entry *floor)
{
    entry->outer = entry->below != NULL ? entry->below->outer
                                        : innermost(floor, entry->node.start);
    move_inner(tree, entry, around(entry), entry);
}

void
nrm__overlay_leave(const struct nrm__tree *tree, const struct nrm__entry *entry)
{
    move_inner(tree, entry, entry, around(entry));
}
