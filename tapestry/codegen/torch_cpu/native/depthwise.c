/* Channel by channel over windows: depthwise convolutions of f32 images whose channels are adjacent. */
#include "conv.h"

enum { WIDE = 8 }; /* pixels that are computed together */

/* A row of the output: the taps [ty0, ty1) read rows of the image, the first of which is `first`. */
typedef struct { int64_t oy, ty0, ty1, first; } Row;

INLINE const float *input(const Conv *c, const Buffers *b, const Row *r, int64_t ty) {
    return b->x + (r->first + (ty - r->ty0) * c->dilation_h) * c->x_row;
}

#define ALL _Pragma("GCC unroll 24")
/* Where the pixels of a block are, in memory: a copy, since what is written might be a `Conv` as far as a compiler knows. */
typedef struct {
    const float *x, *w, *bias, *residual;
    float *y;
    int64_t tall, taps, channels, line, pixel, tap, apart, r_pixel, y_pixel, skip; /* of weights after the taps of a row */
    int clamped;
    float low, high;
    int64_t left, right; /* of what the pixels read, those that the image has */
} Block;

INLINE Block block_of(const Conv *c, const Buffers *b, const Row *r, int64_t ox) {
    return (Block){
        .x = input(c, b, r, r->ty0) + (ox * c->stride_w - c->pad_w) * c->x_pixel, .w = b->w + r->ty0 * c->kernel_w * c->channels,
        .bias = b->bias, .residual = b->residual ? b->residual + r->oy * c->r_row + ox * c->r_pixel : 0,
        .y = b->y + r->oy * c->y_row + ox * c->y_pixel, .tall = r->ty1 - r->ty0, .taps = c->kernel_w, .channels = c->channels,
        .line = c->dilation_h * c->x_row, .pixel = c->x_pixel, .tap = c->dilation_w * c->x_pixel,
        .apart = c->stride_w * c->x_pixel, .r_pixel = c->r_pixel, .y_pixel = c->y_pixel, .clamped = c->clamped != 0,
        .low = c->low, .high = c->high, .left = c->pad_w - ox * c->stride_w, .right = c->in_w + c->pad_w - ox * c->stride_w};
}

/* `n` pixels and some channels; `wide`: taps of a row, 0 for any; `edge`: whether they reach padding to their sides. */
INLINE void lanes_of(const int n, const int wide, const int stride, const int edge, const Block at, int64_t k, lanes some) {
    vec acc[WIDE], bias = {};
    if (at.bias) bias = load_some(at.bias + k, some);
    UNROLL for (int j = 0; j < n; j++) acc[j] = bias;
    const float *x = at.x + k, *w = at.w + k;
    const float *next = x + (at.tall - 1) * at.line + n * at.apart; /* new to the next pixels: their lowest line alone */
    for (int j = 0; j < n * (stride ? stride : 1); j++) __builtin_prefetch(next + j * at.pixel);
    for (int64_t ty = 0; ty < at.tall; ty++, x += at.line, w += at.skip) {
        const float *from = x;
        if (wide) {
            vec weight[7];
            UNROLL for (int t = 0; t < wide; t++, w += at.channels) weight[t] = load_some(w, some);
            ALL for (int p = 0; p < (n - 1) * stride + wide; p++, from += at.pixel) {
                if (edge && (p < at.left || p >= at.right)) continue;
                vec v = load_some(from, some);
                UNROLL for (int j = 0; j < n; j++)
                    if (p >= j * stride && p < j * stride + wide) acc[j] = fma_of(weight[p - j * stride], v, acc[j]);
            }
        } else {
            for (int64_t t = 0; t < at.taps; t++, from += at.tap, w += at.channels) {
                vec weight = load_some(w, some);
                UNROLL for (int j = 0; j < n; j++) acc[j] = fma_of(weight, load_some(from + j * at.apart, some), acc[j]);
            }
        }
    }
    if (at.residual) UNROLL for (int j = 0; j < n; j++) acc[j] += load_some(at.residual + j * at.r_pixel + k, some);
    if (at.clamped) UNROLL for (int j = 0; j < n; j++) acc[j] = clamp(acc[j], all(at.low), all(at.high));
    UNROLL for (int j = 0; j < n; j++) store_some(at.y + j * at.y_pixel + k, acc[j], some);
}

typedef void (*Pixels)(const Conv *, const Buffers *, const Row *, int64_t);

/* All channels of these pixels: what is read lies in a row, which processors fetch ahead. */
#define PIXELS(N, TAPS, STRIDE, EDGE)                                                                              \
    static void pixels_##N##_##TAPS##_##STRIDE##_##EDGE(const Conv *c, const Buffers *b, const Row *r, int64_t ox) { \
        const Block at = block_of(c, b, r, ox);                                                                    \
        int64_t k = 0;                                                                                             \
        for (; k + VL <= at.channels; k += VL) lanes_of(N, TAPS, STRIDE, EDGE, at, k, first_lanes(VL));            \
        if (k == at.channels) return;                                                                              \
        if (k) lanes_of(N, TAPS, STRIDE, EDGE, at, at.channels - VL, first_lanes(VL)); /* some once more */        \
        else lanes_of(N, TAPS, STRIDE, EDGE, at, 0, first_lanes(at.channels));                                     \
    }
#define BOTH(TAPS, STRIDE, EDGE) PIXELS(8, TAPS, STRIDE, EDGE) PIXELS(4, TAPS, STRIDE, EDGE)
#define EACH(TAPS, STRIDE) BOTH(TAPS, STRIDE, 0) BOTH(TAPS, STRIDE, 1)
BOTH(0, 0, 0) EACH(3, 1) EACH(3, 2) EACH(5, 1) EACH(5, 2) EACH(7, 1) EACH(7, 2)
#define OF(TAPS, STRIDE, EDGE) {pixels_4_##TAPS##_##STRIDE##_##EDGE, pixels_8_##TAPS##_##STRIDE##_##EDGE}
#define USUAL_OF(TAPS, STRIDE) {OF(TAPS, STRIDE, 0), OF(TAPS, STRIDE, 1)}
static const Pixels ANY[2] = OF(0, 0, 0), USUAL[3][2][2][2] = {
    {USUAL_OF(3, 1), USUAL_OF(3, 2)}, {USUAL_OF(5, 1), USUAL_OF(5, 2)}, {USUAL_OF(7, 1), USUAL_OF(7, 2)}};

/* A pixel that reaches padding to its sides: the taps inside alone. */
static void alone(const Conv *c, const Buffers *b, const Row *r, int64_t ox) {
    int64_t t0, t1, k = 0;
    valid(ox, c->stride_w, c->pad_w, c->dilation_w, c->kernel_w, c->in_w, &t0, &t1);
    Block at = block_of(c, b, r, ox);
    at.x += t0 * at.tap, at.w += t0 * at.channels, at.taps = t0 < t1 ? t1 - t0 : 0, at.skip = (c->kernel_w - at.taps) * at.channels;
    for (; k + VL <= at.channels; k += VL) lanes_of(1, 0, 0, 0, at, k, first_lanes(VL));
    if (k < at.channels) lanes_of(1, 0, 0, 0, at, k, first_lanes(at.channels - k));
}

/* Rows [row, end) of one image. */
static void depthwise_rows(const Conv *c, const Buffers *buffers, int64_t image, int64_t row, int64_t end) {
    Buffers at = *buffers, *b = &at;
    int64_t left = (c->pad_w + c->stride_w - 1) / c->stride_w, reach = (c->kernel_w - 1) * c->dilation_w;
    int64_t right = c->in_w + c->pad_w > reach ? (c->in_w + c->pad_w - reach - 1) / c->stride_w + 1 : 0;
    int usual = c->kernel_w >= 3 && c->kernel_w <= 7 && c->kernel_w % 2 && c->dilation_w == 1 && c->stride_w <= 2;
    if (right > c->out_w) right = c->out_w;
    /* The last pixels may be some that are done, done again; the usual ones may reach padding. */
    const int64_t wide = usual ? c->out_w : right - left, n = wide >= 8 ? 8 : wide >= 4 ? 4 : 0;
    const int64_t first = usual ? 0 : left, end_of = usual ? c->out_w : right;
    at.x += image * c->x_image, at.y += image * c->y_image;
    if (at.residual) at.residual += image * c->r_image;
    for (; row < end; row++) {
        Row r = {.oy = row};
        valid(row, c->stride_h, c->pad_h, c->dilation_h, c->kernel_h, c->in_h, &r.ty0, &r.ty1);
        if (r.ty0 < r.ty1) r.first = row * c->stride_h - c->pad_h + r.ty0 * c->dilation_h;
        for (int64_t ox = 0; ox < c->out_w;) {
            if (!n || ox < first || ox >= end_of) {
                alone(c, b, &r, ox++);
                continue;
            }
            if (ox + n > end_of) ox = end_of - n;
            const int edge = ox < left || ox + n > right;
            (usual ? USUAL[c->kernel_w / 2 - 1][c->stride_w - 1][edge] : ANY)[n == 8](c, b, &r, ox);
            ox += n;
        }
        if (c->then) follow(c, b->y, row * c->out_w, c->out_w, (Range){0, c->channels});
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
