/* On the declaration of a variable that functions in other files read all the time: it
   is in the same shared object, so its address needs no table. */
#ifndef NRM_BASE_HIDDEN_H
#define NRM_BASE_HIDDEN_H

#define NRM__HIDDEN __attribute__((visibility("hidden")))

#endif
