/* Rows divided by the root of the mean of their squares. */
#include <math.h>

#include "norm.h"

/* y = scale * (x * (1 / sqrt(sum(x * x) / count + epsilon))) */
void tapestry_rms_norm(const Rows *r, const RowBuffers *b, int64_t part, int64_t parts) {
    Range rows = share(r->rows, part, parts);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        const float *x = b->x + i * r->width;
        vec total = {};
        for (int64_t k = 0; k < r->width; k += VL) {
            vec v = load_some(x + k, first_lanes(r->width - k));
            total += v * v;
        }
        float sum = 0;
        for (int j = 0; j < VL; j++) sum += total[j];
        vec inverse = all(1.0f / sqrtf(sum / r->count + r->epsilon));
        for (int64_t k = 0; k < r->width; k += VL) {
            lanes some = first_lanes(r->width - k);
            store_some(b->y + i * r->width + k, load_some(b->scale + k, some) * (load_some(x + k, some) * inverse), some);
        }
    }
}
