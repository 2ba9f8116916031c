/* Kernels one after another: a stretch of a program in which nothing moves. */
#include <string.h>

#include "conv.h"

typedef struct {
    void (*kernel)(const void *sizes, const Buffers *buffers);
    const void *sizes;
    const Buffers *buffers;
} Step;

void tapestry_run(const Step *step, int64_t steps) {
    for (int64_t i = 0; i < steps; i++) step[i].kernel(step[i].sizes, step[i].buffers);
}

typedef struct {
    int64_t outer, bytes, from, to, cell; /* `outer` pieces of so many bytes; bytes between pieces, and between cells */
} Move;

typedef struct {
    const char *from;
    char *to;
    const int64_t *at; /* which cell it goes to; null: the first */
} Ends;

void tapestry_move(const Move *m, const Ends *e) {
    char *to = e->to + (e->at ? *e->at * m->cell : 0);
    for (int64_t i = 0; i < m->outer; i++) memcpy(to + i * m->to, e->from + i * m->from, (size_t)m->bytes);
}
