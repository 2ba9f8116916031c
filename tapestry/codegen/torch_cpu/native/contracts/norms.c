/* What the kernels of norms compute, by definition. */
#include <math.h>

#include "../norm.h"

void contract_rms_norm(const Rows *r, const RowBuffers *b) {
    for (int64_t i = 0; i < r->rows; i++)
        for (int64_t k = 0; k < r->width; k++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < r->width; j++) sum += b->x[i * r->width + j] * b->x[i * r->width + j];
            b->y[i * r->width + k] = b->scale[k] * (b->x[i * r->width + k] * (1.0f / sqrtf(sum / r->count + r->epsilon)));
        }
}
