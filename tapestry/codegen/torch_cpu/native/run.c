/* Kernels one after another: a stretch of a program in which nothing moves. */
#include "conv.h"

typedef struct {
    void (*kernel)(const void *sizes, const Buffers *buffers);
    const void *sizes;
    const Buffers *buffers;
} Step;

void tapestry_run(const Step *step, int64_t steps) {
    for (int64_t i = 0; i < steps; i++) step[i].kernel(step[i].sizes, step[i].buffers);
}
