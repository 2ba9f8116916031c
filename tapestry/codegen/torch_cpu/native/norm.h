/* What norms of rows work on. */
#ifndef TAPESTRY_NORM_H
#define TAPESTRY_NORM_H

#include "conv.h"

typedef struct {
    int64_t rows, width;
    float count, epsilon;
} Rows;

typedef struct {
    const float *x, *scale;
    float *y;
} RowBuffers;

#endif
