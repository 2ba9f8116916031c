/* Attention, head by head and by blocks of queries: scores, their softmax's states and the weighted values while they are in cache.
 *
 * For every row the states are the maximum, the sum of exp(score - maximum) and the values weighted by it, as `softsum` has them
 * (a score that is the maximum weighs 1, infinite or not), or the quotient of the last two.
 */
#include <stdlib.h>

#include "attention.h"

enum { ROWS = 48 }; /* queries at once */

/* exp for x <= 0: 2^n p(r) with the polynomial of Cephes' expf (Moshier 1992); 0 below the least normal number. */
INLINE vec exponential(vec x) {
    const vec magic = all(12582912.0f), least = all(-87.33654f);
    vec kept = (vec)((mask)x & ~(x < least)) + (vec)((mask)least & (x < least));
    vec shifted = kept * all(1.44269504f) + magic, n = shifted - magic;
    vec r = kept - n * all(0.693359375f);
    r -= n * all(-2.12194440e-4f);
    vec p = all(1.9875691500e-4f) * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f), p = p * r + all(4.1665795894e-2f), p = p * r + all(1.6666665459e-1f), p = p * r + all(0.5f);
    p = p * r * r + r + all(1.0f);
    mask exponent = (mask)shifted << 23;
    vec scale = (vec)(exponent + ((mask)all(1.0f)));
    return (vec)((mask)(p * scale) & ~(x < least));
}

/* The larger; a NaN wins. */
INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }

/* One row of scores to weights; padding keys weigh nothing. */
static void weigh(const Attention *a, float *s, const float *m, int64_t padded, float *top, float *sum) {
    vec scale = all(a->scale), lowest = all(-__builtin_inff()), high = lowest, total = {};
    int64_t whole = a->keys / VL * VL;
    mask nan = {};
    for (int64_t k = 0; k < a->keys; k += VL) {
        lanes some = first_lanes(a->keys - k);
        vec t = load(s + k) * scale;
        if (m) t += a->mask[3] ? load_some(m + k, some) : all(*m);
        if (k >= whole) {
            vec kept = lowest;
            for (int64_t i = 0; i < a->keys - k; i++) kept[i] = t[i];
            t = kept;
        }
        store(s + k, t);
        nan |= t != t;
        mask more = t > high;
        high = (vec)(((mask)t & more) | ((mask)high & ~more));
    }
    float best = high[0];
    int64_t any = 0;
    for (int i = 0; i < VL; i++) best = larger(best, high[i]), any |= nan[i];
    if (any) best = __builtin_nanf("");
    vec peak = all(best);
    for (int64_t k = 0; k < padded; k += VL) {
        vec t = load(s + k), e = exponential(t - peak);
        mask equal = t == peak;
        e = (vec)(((mask)all(1.0f) & equal) | ((mask)e & ~equal));
        if (k >= whole)
            for (int64_t i = a->keys - k < 0 ? 0 : a->keys - k; i < VL; i++) e[i] = 0;
        store(s + k, e);
        total += e;
    }
    *top = best, *sum = sum_of(total);
}

/* Rows by features, `stride` between rows, as panels for tile.h: features are columns (`turned`: they are rows). */
static void panel(const float *from, float *to, int64_t features, int64_t depth, int64_t stride, int turned) {
    int64_t vectors = (features + VL - 1) / VL;
    for (int64_t p = 0; p < panels(vectors); p++) {
        int64_t f0 = panel_start(vectors, p) * VL, f1 = panel_start(vectors, p + 1) * VL, width = f1 - f0;
        for (int64_t f = f0; turned && f < f1; f++)
            for (int64_t d = 0; d < depth; d++) to[d * width + f - f0] = f < features ? from[f * stride + d] : 0.0f;
        for (int64_t d = 0; !turned && d < depth; d++)
            for (int64_t f = f0; f < f1; f++) to[d * width + f - f0] = f < features ? from[d * stride + f] : 0.0f;
        to += depth * width;
    }
}

INLINE int64_t columns(const Attention *a) { return a->columns ? a->columns : a->depth; }

static void head(const Attention *a, const Heads *h, int64_t i, int64_t j, const float *keys, const float *values, float *score) {
    int64_t padded = (a->keys + VL - 1) / VL * VL;
    const float *q = h->q + i * a->q[0] + j * a->q[1];
    float *out = h->out + i * a->out[0] + j * a->out[1];
    const float *other = h->other ? h->other + i * a->other[0] + j * a->other[1] : 0;
    for (int64_t r = 0; r < a->rows; r += ROWS) {
        int64_t rows = a->rows - r < ROWS ? a->rows - r : ROWS;
        float top[ROWS], sum[ROWS];
        Conv scores = product(rows, a->depth, padded, a->q[2], padded), weighted = product(rows, a->keys, columns(a), padded, a->out[2]);
        if (h->q) tapestry_conv(&scores, &(Buffers){.x = q + r * a->q[2], .w = keys, .y = score}, 0, 1);
        if (h->score) {
            void *reads[h->count + 1];
            for (int64_t k = 0; k < h->count; k++) reads[k] = h->reads[k];
            reads[h->count] = score;
            h->score((int64_t[]){i, j, r, rows, padded}, reads, 0, 1);
        }
        for (int64_t k = 0; k < rows; k++) {
            const float *m = h->mask ? h->mask + i * a->mask[0] + j * a->mask[1] + (r + k) * a->mask[2] : 0;
            weigh(a, score + k * padded, m, padded, top + k, sum + k);
        }
        tapestry_conv(&weighted, &(Buffers){.x = score, .w = values, .y = out + r * a->out[2]}, 0, 1);
        for (int64_t k = 0; k < rows; k++) {
            float none = top[k] - top[k], *row = out + (r + k) * a->out[2];
            int plain = a->normal == 1 || none == 0;
            if (a->normal == 2) none = 0;
            for (int64_t d = 0; d < columns(a); d++) row[d] = plain ? row[d] / sum[k] : other ? other[d * a->other[2]] : none;
        }
    }
}

/* q: outer x inner x rows x depth; k, v: outer x inner x keys x depth; the last dimension of each is adjacent. */
void tapestry_attention(const Attention *a, const Heads *h, int64_t part, int64_t parts) {
    int64_t padded = (a->keys + VL - 1) / VL * VL, wide = (columns(a) + VL - 1) / VL * VL;
    float *keys = aligned_alloc(64, (size_t)((padded * a->depth + a->keys * wide + ROWS * padded) * 4 + 63) / 64 * 64);
    if (!keys) abort();
    float *values = keys + padded * a->depth, *score = values + a->keys * wide;
    Range heads = share(a->outer * a->inner, part, parts);
    for (int64_t n = heads.begin; n < heads.end; n++) {
            int64_t i = n / a->inner, j = n % a->inner;
            if (j % a->group == 0 || n == heads.begin) {
                if (h->k) panel(h->k + i * a->k[0] + j / a->group * a->k[1], keys, a->keys, a->depth, a->k[2], !a->crossed);
                panel(h->v + i * a->v[0] + j / a->group * a->v[1], values, columns(a), a->keys, a->v[2], (int)a->turned);
            }
            head(a, h, i, j, keys, values, score);
        }
    free(keys);
}

/* The same, of scores that are any function of the products; without q, of places alone. */
void tapestry_scored(const Attention *a, const Heads *h, int64_t part, int64_t parts) { tapestry_attention(a, h, part, parts); }

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec sums = {};
    for (int64_t k = 0; k < n; k += VL) {
        lanes some = first_lanes(n - k);
        sums = fma_of(load_some(a + k, some), load_some(b + k, some), sums);
    }
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)sums);
#else
    return sum_of(sums);
#endif
}

/* out = the sum of rows of v, each times its weight. */
static void weighted(const float *w, const float *v, int64_t stride, int64_t rows, int64_t depth, float *out) {
    enum { WIDE = 4 };
    for (int64_t d = 0; d < depth; d += WIDE * VL) {
        vec sums[WIDE] = {};
        lanes some[WIDE];
        UNROLL for (int i = 0; i < WIDE; i++) some[i] = first_lanes(depth - d - i * VL < 0 ? 0 : depth - d - i * VL);
        for (int64_t n = 0; n < rows; n++) {
            const float *row = v + n * stride + d;
            UNROLL for (int i = 0; i < WIDE; i++) sums[i] = fma_of(all(w[n]), load_some(row + i * VL, some[i]), sums[i]);
        }
        UNROLL for (int i = 0; i < WIDE; i++) store_some(out + d + i * VL, sums[i], some[i]);
    }
}

/* The quotient for few rows: keys and values are read where they lie. */
void tapestry_attend(const Attention *a, const Heads *h, int64_t part, int64_t parts) {
    int64_t padded = (a->keys + VL - 1) / VL * VL, most = a->group * a->rows;
    float *score = tapestry_scratch(most * padded);
    int64_t groups = (a->inner + a->group - 1) / a->group; /* a part of a group may come last */
    Range of = share(a->outer * groups, part, parts);
    for (int64_t g = of.begin; g < of.end; g++) {
            int64_t i = g / groups, j = g % groups * a->group;
            int64_t alike = (a->inner - j < a->group ? a->inner - j : a->group) * a->rows;
            const float *k = h->k + i * a->k[0] + j / a->group * a->k[1], *v = h->v + i * a->v[0] + j / a->group * a->v[1];
            const float *q = h->q + i * a->q[0] + j * a->q[1];
            for (int64_t n = 0; n < a->keys; n++)
                for (int64_t r = 0; r < alike; r++)
                    score[r * padded + n] = dot(q + r / a->rows * a->q[1] + r % a->rows * a->q[2], k + n * a->k[2], a->depth);
            for (int64_t r = 0; r < alike; r++) {
                int64_t one = j + r / a->rows, row = r % a->rows;
                const float *m = h->mask ? h->mask + i * a->mask[0] + one * a->mask[1] + row * a->mask[2] : 0;
                float top, sum, *s = score + r * padded, *out = h->out + i * a->out[0] + one * a->out[1] + row * a->out[2];
                weigh(a, s, m, padded, &top, &sum);
                weighted(s, v, a->v[2], a->keys, a->depth, out);
                const float *other = h->other ? h->other + i * a->other[0] + one * a->other[1] : 0;
                float none = top - top;
                int plain = a->normal == 1 || none == 0;
                if (a->normal == 2) none = 0;
                for (int64_t d = 0; d < a->depth; d++) out[d] = plain ? out[d] / sum : other ? other[d * a->other[2]] : none;
            }
        }
}
