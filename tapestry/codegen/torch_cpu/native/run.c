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
    void (*python)(void);
    int64_t under_way; /* until the kernel says that it has ended well */
} Called;

void tapestry_called(Called *c, const void *unused) {
    (void)unused;
    c->under_way = 1;
    c->python();
}

typedef struct {
    int64_t outer, bytes, from, to, cell; /* `outer` pieces of so many bytes; bytes between pieces, and between cells */
    int64_t each;                         /* pieces of a row */
} Move;

typedef struct {
    const char *from;
    char *to;
    const int64_t *at; /* which cell each row goes to; null: the first */
} Ends;

void tapestry_move(const Move *m, const Ends *e) {
    for (int64_t i = 0; i < m->outer; i++) {
        char *to = e->to + i * m->to + (e->at ? e->at[i / m->each] * m->cell : 0);
        memmove(to, e->from + i * m->from, (size_t)m->bytes); /* a cache's last places may reach into what is behind them */
    }
}
