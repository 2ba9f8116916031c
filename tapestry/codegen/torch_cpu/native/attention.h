/* What attention works on. */
#ifndef TAPESTRY_ATTENTION_H
#define TAPESTRY_ATTENTION_H

#include "conv.h"

typedef struct {
    int64_t outer, inner, group, rows, keys, depth; /* heads are two dimensions; `group` inner ones share keys and values */
    int64_t q[3], k[3], v[3], mask[4], out[3], other[3]; /* strides: outer, inner, row (and key); of `other`: outer, inner, depth */
    int64_t normal; /* 1: the quotient; 2, 3: which is 0 (or `other`), or NaN, in rows whose maximum is not finite */
    float scale;
    int64_t crossed; /* keys are adjacent, and k[2] is from one place along the depth to the next */
    int64_t columns, turned; /* of values, 0 where they are as many as the depth; keys of values are adjacent, v[2] is from column to column */
} Attention;

typedef struct {
    const float *q, *k, *v, *mask;
    float *out;
    const float *other;
    void (*score)(const int64_t *at, void *const *reads, int64_t part, int64_t parts); /* for `tapestry_scored`: makes scores of products, in place */
    void *const *reads; /* `count` arrays that it reads; it is given the scores behind them */
    int64_t count;
} Heads;

#endif
