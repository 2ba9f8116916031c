/* What the kernel of attention computes, by definition, where quotients are wanted. */
#include <math.h>

#include "../attention.h"

INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }

/* Of head (i, j): the score of row r and key k. */
static float score(const Attention *a, const Heads *h, int64_t i, int64_t j, int64_t r, int64_t k) {
    float sum = 0.0f;
    for (int64_t d = 0; d < a->depth; d++)
        sum += h->q[i * a->q[0] + j * a->q[1] + r * a->q[2] + d] * h->k[i * a->k[0] + j / a->group * a->k[1] + k * a->k[2] + d];
    float bias = h->mask ? h->mask[i * a->mask[0] + j * a->mask[1] + r * a->mask[2] + k * a->mask[3]] : 0.0f;
    return sum * a->scale + bias;
}

void contract_attention(const Attention *a, const Heads *h) {
    for (int64_t i = 0; i < a->outer; i++)
        for (int64_t j = 0; j < a->inner; j++)
            for (int64_t r = 0; r < a->rows; r++)
                for (int64_t d = 0; d < a->depth; d++) {
                    float best = -__builtin_inff();
                    for (int64_t k = 0; k < a->keys; k++) best = larger(score(a, h, i, j, r, k), best);
                    float sum = 0.0f, weighted = 0.0f;
                    for (int64_t k = 0; k < a->keys; k++) {
                        float s = score(a, h, i, j, r, k);
                        float weight = s == best ? 1.0f : expf(s - best);
                        sum += weight;
                        weighted += weight * h->v[i * a->v[0] + j / a->group * a->v[1] + k * a->v[2] + d];
                    }
                    float none = best - best, rest = a->normal == 2 ? 0.0f : none;
                    float other = h->other ? h->other[i * a->other[0] + j * a->other[1] + d * a->other[2]] : rest;
                    h->out[i * a->out[0] + j * a->out[1] + r * a->out[2] + d] = a->normal == 1 || none == 0.0f ? weighted / sum : other;
                }
}
