/* Channel by channel over windows: depthwise convolutions and maximum pooling of f32 images whose channels are adjacent. */
#include "conv.h"

enum { WIDE = 4, WIDER = 8 }; /* pixels that are computed together: of 3 x 3 windows, at most of any other */

/* A row of the output: the taps [ty0, ty1) read rows of the image, the first of which is `first`. */
typedef struct { int64_t oy, ty0, ty1, first; } Row;

INLINE const float *input(const Conv *c, const Buffers *b, const Row *r, int64_t ty) {
    return b->x + (r->first + (ty - r->ty0) * c->dilation_h) * c->x_row;
}

INLINE void put(const Conv *c, const Buffers *b, const Row *r, int64_t ox, int64_t k, vec out, lanes some) {
    if (b->residual) out += load_some(b->residual + r->oy * c->r_row + ox * c->r_pixel + k, some);
    if (c->clamped) out = clamp(out, all(c->low), all(c->high));
    store_some(b->y + r->oy * c->y_row + ox * c->y_pixel + k, out, some);
}

/* `n` pixels from `ox` on, any window; `inner`: these reach no padding to their sides. */
INLINE void pixels(const int n, const int inner, const Conv *c, const Buffers *b, const Row *r, int64_t ox, int64_t k, lanes some) {
    int64_t step = c->dilation_w * c->x_pixel, apart = c->stride_w * c->x_pixel;
    vec acc[WIDER], bias = {};
    if (b->bias) bias = load_some(b->bias + k, some);
    UNROLL for (int j = 0; j < n; j++) acc[j] = bias;
    for (int64_t ty = r->ty0; ty < r->ty1; ty++) {
        int64_t at = ox * c->stride_w - c->pad_w;
        const float *x = input(c, b, r, ty) + at * c->x_pixel + k, *w = b->w + ty * c->kernel_w * c->channels + k;
        for (int64_t t = 0; t < c->kernel_w; t++, x += step, w += c->channels, at += c->dilation_w) {
            vec weight = load_some(w, some);
            UNROLL for (int j = 0; j < n; j++)
                if (inner || (uint64_t)(at + j * c->stride_w) < (uint64_t)c->in_w)
                    acc[j] = fma_of(weight, load_some(x + j * apart, some), acc[j]);
        }
    }
    UNROLL for (int j = 0; j < n; j++) put(c, b, r, ox + j, k, acc[j], some);
}

/* A row of any windows, of which pixels [left, right) reach no padding to their sides. */
static void any_row(const Conv *c, const Buffers *b, const Row *r, int64_t left, int64_t right, int64_t k, lanes some) {
#define PIXELS(N)                                                                  \
    for (; ox + N <= c->out_w; ox += N) {                                          \
        if (ox >= left && ox + N <= right) pixels(N, 1, c, b, r, ox, k, some);     \
        else pixels(N, 0, c, b, r, ox, k, some);                                   \
    }
    int64_t ox = 0;
    PIXELS(8)
    PIXELS(4)
    PIXELS(2)
    PIXELS(1)
}

/* A row of `tall` rows of 3 neighbouring taps, weights in registers: on pixels [left, right) WIDE at a time, since these reach no
 * padding (the last may be some that are done, which are then made once more), else one by one. */
INLINE void near(const int tall, const int stride, const Conv *c, const Buffers *b, const Row *r, int64_t left, int64_t right,
                 int64_t k, lanes some) {
    vec weight[3][3], bias = {}, low = all(c->low), high = all(c->high);
    int64_t pixel = c->x_pixel, apart = c->y_pixel, further = c->r_pixel;
    int clamped = c->clamped != 0;
    const float *x[3], *residual = b->residual ? b->residual + r->oy * c->r_row + k : 0;
    float *y = b->y + r->oy * c->y_row + k;
    if (b->bias) bias = load_some(b->bias + k, some);
    UNROLL for (int i = 0; i < tall; i++) {
        x[i] = input(c, b, r, r->ty0 + i) - c->pad_w * c->x_pixel + k;
        UNROLL for (int t = 0; t < 3; t++) weight[i][t] = load_some(b->w + ((r->ty0 + i) * 3 + t) * c->channels + k, some);
    }
    int64_t ended = right - left < WIDE ? 0 : right;
    for (int64_t ox = 0; ox < c->out_w; ox++) {
        if (ended && ox == left) ox = right;
        if (ox == c->out_w) break;
        int64_t at = ox * stride - c->pad_w;
        vec acc = bias;
        UNROLL for (int i = 0; i < tall; i++)
            UNROLL for (int t = 0; t < 3; t++)
                if ((uint64_t)(at + t) < (uint64_t)c->in_w)
                    acc = fma_of(weight[i][t], load_some(x[i] + (ox * stride + t) * pixel, some), acc);
        put(c, b, r, ox, k, acc, some);
    }
    for (int64_t at = left; at < ended; at += WIDE) {
        int64_t ox = at + WIDE <= right ? at : right - WIDE;
        vec acc[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) acc[j] = bias;
        UNROLL for (int i = 0; i < tall; i++) {
            const float *from = x[i] + ox * stride * pixel;
            UNROLL for (int p = 0; p < (WIDE - 1) * stride + 3; p++) {
                vec v = load_some(from + p * pixel, some);
                UNROLL for (int j = 0; j < WIDE; j++)
                    if (p >= j * stride && p < j * stride + 3) acc[j] = fma_of(weight[i][p - j * stride], v, acc[j]);
            }
        }
        UNROLL for (int j = 0; j < WIDE; j++) {
            if (residual) acc[j] += load_some(residual + (ox + j) * further, some);
            if (clamped) acc[j] = clamp(acc[j], low, high);
            store_some(y + (ox + j) * apart, acc[j], some);
        }
    }
}

typedef void (*Near)(const Conv *, const Buffers *, const Row *, int64_t, int64_t, int64_t, lanes);

#define NEAR(TALL, STRIDE)                                                                                                      \
    static void near_##TALL##_##STRIDE(const Conv *c, const Buffers *b, const Row *r, int64_t left, int64_t right, int64_t k, \
                                       lanes some) {                                                                           \
        near(TALL, STRIDE, c, b, r, left, right, k, some);                                                                     \
    }
NEAR(1, 1) NEAR(2, 1) NEAR(3, 1) NEAR(1, 2) NEAR(2, 2) NEAR(3, 2)
static const Near NEARS[4][3] = {{0}, {0, near_1_1, near_1_2}, {0, near_2_1, near_2_2}, {0, near_3_1, near_3_2}};

/* Rows [row, end) of one image. */
static void depthwise_rows(const Conv *c, const Buffers *buffers, int64_t image, int64_t row, int64_t end) {
    Buffers at = *buffers, *b = &at;
    int64_t left = (c->pad_w + c->stride_w - 1) / c->stride_w, reach = (c->kernel_w - 1) * c->dilation_w;
    int64_t right = c->in_w + c->pad_w > reach ? (c->in_w + c->pad_w - reach - 1) / c->stride_w + 1 : 0;
    int usual = c->kernel_w == 3 && c->kernel_h <= 3 && c->dilation_w == 1 && c->stride_w <= 2;
    if (right > c->out_w) right = c->out_w;
    at.x += image * c->x_image, at.y += image * c->y_image;
    if (at.residual) at.residual += image * c->r_image;
    for (; row < end; row++) {
        Row r = {.oy = row};
        valid(row, c->stride_h, c->pad_h, c->dilation_h, c->kernel_h, c->in_h, &r.ty0, &r.ty1);
        if (r.ty0 < r.ty1) r.first = row * c->stride_h - c->pad_h + r.ty0 * c->dilation_h;
        Near run = usual && r.ty0 < r.ty1 ? NEARS[r.ty1 - r.ty0][c->stride_w] : 0;
        for (int64_t k = 0; k < c->channels; k += VL) {
            lanes some = first_lanes(c->channels - k);
            (run ? run : any_row)(c, b, &r, left, right, k, some);
        }
    }
}

/* w: taps x channels; every output channel reads the input channel of its number. */
void tapestry_depthwise(const Conv *c, const Buffers *b, int64_t part, int64_t parts) {
    Range rows = share(c->images * c->out_h, part, parts);
    for (int64_t row = rows.begin, end; row < rows.end; row = end) {
        int64_t first = row / c->out_h * c->out_h;
        end = first + c->out_h < rows.end ? first + c->out_h : rows.end;
        depthwise_rows(c, b, row / c->out_h, row - first, end - first);
    }
}

/* The larger number; a NaN, of either, wins. */
INLINE vec larger(vec best, vec v) {
#if defined(__AVX512F__)
    return (vec)_mm512_mask_mov_ps((__m512)best, _mm512_cmp_ps_mask((__m512)v, (__m512)best, _CMP_NLE_UQ) & _mm512_cmp_ps_mask((__m512)best, (__m512)best, _CMP_ORD_Q), (__m512)v);
#else
    mask m = ~(v <= best) & (best == best);
    return (vec)(((mask)v & m) | ((mask)best & ~m));
#endif
}

/* Padding is never the maximum. */
void tapestry_max_pool(const Conv *c, const Buffers *b, int64_t part, int64_t parts) {
    Range rows = share(c->images * c->out_h, part, parts);
    for (int64_t row = rows.begin; row < rows.end; row++)
            for (int64_t ox = 0; ox < c->out_w; ox++) {
                int64_t ty0, ty1, tx0, tx1, image = row / c->out_h, oy = row % c->out_h;
                valid(oy, c->stride_h, c->pad_h, c->dilation_h, c->kernel_h, c->in_h, &ty0, &ty1);
                valid(ox, c->stride_w, c->pad_w, c->dilation_w, c->kernel_w, c->in_w, &tx0, &tx1);
                const float *x = b->x + image * c->x_image + (oy * c->stride_h - c->pad_h) * c->x_row +
                                 (ox * c->stride_w - c->pad_w) * c->x_pixel;
                float *y = b->y + image * c->y_image + oy * c->y_row + ox * c->y_pixel;
                for (int64_t k = 0; k < c->channels; k += VL) {
                    lanes some = first_lanes(c->channels - k);
                    vec best = all(-__builtin_inff());
                    for (int64_t ty = ty0; ty < ty1; ty++)
                        for (int64_t tx = tx0; tx < tx1; tx++) {
                            const float *at = x + ty * c->dilation_h * c->x_row + tx * c->dilation_w * c->x_pixel + k;
                            best = larger(best, load_some(at, some));
                        }
                    store_some(y + k, best, some);
                }
            }
}
