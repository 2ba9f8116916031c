/* Several products of the same rows, and a function of each cell of all of them, by blocks of rows that stay in cache. */
#include "conv.h"

enum { MOST_SUMS = 4, CELLS = 1 << 18 };

typedef struct {
    Conv sum; /* each of them: rows are the pixels of one line */
    int64_t sums;
    Cells *then;
} Several;

typedef struct {
    const float *x, *w[MOST_SUMS], *bias[MOST_SUMS];
    float *y;
} Products;

void tapestry_several(const Several *s, const Products *b, int64_t part, int64_t parts) {
    Range of = share(s->sum.in_w, part, parts);
    int64_t rows = of.end - of.begin, features = s->sum.features, high = CELLS / (s->sums * features) / 48 * 48 + 48;
    if (high > rows) high = rows;
    float *scratch = tapestry_scratch(s->sums * high * features);
    for (int64_t m = of.begin; m < of.end; m += high) {
        Conv c = s->sum;
        c.in_w = c.out_w = of.end - m < high ? of.end - m : high;
        int64_t cells = c.in_w * features;
        void *arrays[MOST_SUMS + 1];
        for (int64_t k = 0; k < s->sums; k++) {
            arrays[k] = scratch + k * high * features;
            tapestry_conv(&c, &(Buffers){.x = b->x + m * c.x_pixel, .w = b->w[k], .bias = b->bias[k], .y = arrays[k]}, 0, 1);
        }
        arrays[s->sums] = b->y + m * features;
        s->then(&cells, arrays, 0, 1);
    }
}
