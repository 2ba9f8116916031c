/* Channel by channel over windows: depthwise convolutions and maximum pooling of f32 images whose channels are adjacent. */
#include "conv.h"

enum { WIDE = 4, DEEP = 2, MOST_TAPS = 3 }; /* pixels by vectors of channels that are computed together */

#define LOAD(d, p) ((d) == deep - 1 ? load_some(p, some) : load(p))

typedef struct { int64_t image, oy, ox, channel, ty0, ty1, tx0, tx1; } Spot; /* where, and the taps that read the image there */

/* One row of taps of pixels at places of a row: of any width, or (then each place is loaded once) of `width` with `stride`. */
INLINE void taps(const int wide, const int deep, const int width, const int stride, const float *x, const float *w, int64_t pixel,
                 int64_t across, int64_t step, int64_t channels, int64_t tx0, int64_t tx1, lanes some, vec acc[][DEEP]) {
    if (width) {
        UNROLL for (int d = 0; d < deep; d++) {
            vec weight[MOST_TAPS];
            UNROLL for (int t = 0; t < width; t++) weight[t] = LOAD(d, w + t * channels + d * VL);
            UNROLL for (int i = 0; i < (wide - 1) * stride + width; i++) {
                vec v = LOAD(d, x + i * pixel + d * VL);
                UNROLL for (int j = 0; j < wide; j++)
                    if (i >= j * stride && i < j * stride + width) acc[j][d] += weight[i - j * stride] * v;
            }
        }
        return;
    }
    x += tx0 * step, w += tx0 * channels;
    for (int64_t t = tx0; t < tx1; t++, x += step, w += channels)
        UNROLL for (int d = 0; d < deep; d++) {
            vec weight = LOAD(d, w + d * VL);
            UNROLL for (int j = 0; j < wide; j++) acc[j][d] += weight * LOAD(d, x + j * across + d * VL);
        }
}

/* `wide` pixels from a spot on, all of which its taps reach. */
INLINE void depthwise(const int wide, const int deep, const int width, const int stride, const Conv *c, const Buffers *b, const Spot s) {
    vec acc[WIDE][DEEP], low = all(c->low), high = all(c->high);
    int64_t channels = c->channels, down = c->dilation_h * c->x_row, across = c->stride_w * c->x_pixel, step = c->dilation_w * c->x_pixel;
    int64_t pixel = c->x_pixel, along = c->kernel_w * channels;
    lanes some = first_lanes(channels - s.channel - (deep - 1) * VL);
    const float *w = b->w + s.ty0 * along + s.channel;
    const float *x = b->x + s.image * c->x_image + (s.oy * c->stride_h - c->pad_h) * c->x_row + s.ty0 * down +
                     (s.ox * c->stride_w - c->pad_w) * pixel + s.channel;
    UNROLL for (int d = 0; d < deep; d++) {
        vec bias = {};
        if (b->bias) bias = LOAD(d, b->bias + s.channel + d * VL);
        UNROLL for (int j = 0; j < wide; j++) acc[j][d] = bias;
    }
    for (int64_t ty = s.ty0; ty < s.ty1; ty++, x += down, w += along)
        taps(wide, deep, width, stride, x, w, pixel, across, step, channels, s.tx0, s.tx1, some, acc);
    UNROLL for (int j = 0; j < wide; j++) {
        float *y = b->y + s.image * c->y_image + s.oy * c->y_row + (s.ox + j) * c->y_pixel + s.channel;
        const float *r = b->residual + s.image * c->r_image + s.oy * c->r_row + (s.ox + j) * c->r_pixel + s.channel;
        UNROLL for (int d = 0; d < deep; d++) {
            vec out = acc[j][d];
            if (b->residual) out += LOAD(d, r + d * VL);
            if (c->clamped) out = clamp(out, low, high);
            if (d == deep - 1) store_some(y + d * VL, out, some);
            else store(y + d * VL, out);
        }
    }
}

/* A row of the output: WIDE pixels at a time from `left` to `right`, where no tap reads padding. */
INLINE void depthwise_row(const int width, const int stride, const Conv *c, const Buffers *b, int64_t image, int64_t oy,
                          int64_t left, int64_t right) {
    int64_t ty0, ty1, tx0, tx1, ox = 0, channels = c->channels, k;
    valid(oy, c->stride_h, c->pad_h, c->dilation_h, c->kernel_h, c->in_h, &ty0, &ty1);
    while (ox < c->out_w) {
        if (ox >= left && ox + WIDE <= right) {
            for (k = 0; channels - k > VL; k += DEEP * VL)
                depthwise(WIDE, DEEP, width, stride, c, b, (Spot){image, oy, ox, k, ty0, ty1, 0, c->kernel_w});
            if (k < channels) depthwise(WIDE, 1, width, stride, c, b, (Spot){image, oy, ox, k, ty0, ty1, 0, c->kernel_w});
            ox += WIDE;
            continue;
        }
        valid(ox, c->stride_w, c->pad_w, c->dilation_w, c->kernel_w, c->in_w, &tx0, &tx1);
        for (k = 0; channels - k > VL; k += DEEP * VL) depthwise(1, DEEP, 0, 0, c, b, (Spot){image, oy, ox, k, ty0, ty1, tx0, tx1});
        if (k < channels) depthwise(1, 1, 0, 0, c, b, (Spot){image, oy, ox, k, ty0, ty1, tx0, tx1});
        ox++;
    }
}

#define ROW(WIDTH, STRIDE)                                                                                                    \
    static void row_##WIDTH##_##STRIDE(const Conv *c, const Buffers *b, int64_t image, int64_t oy, int64_t left, int64_t right) { \
        depthwise_row(WIDTH, STRIDE, c, b, image, oy, left, right);                                                           \
    }
ROW(3, 1)
ROW(3, 2)
ROW(0, 0)

/* w: taps x channels; every output channel reads the input channel of its number. */
void tapestry_depthwise(const Conv *c, const Buffers *b) {
    int near = c->kernel_w == 3 && c->dilation_w == 1;
    void (*row)(const Conv *, const Buffers *, int64_t, int64_t, int64_t, int64_t) =
        near && c->stride_w == 1 ? row_3_1 : near && c->stride_w == 2 ? row_3_2 : row_0_0;
    int64_t left = (c->pad_w + c->stride_w - 1) / c->stride_w, reach = (c->kernel_w - 1) * c->dilation_w;
    int64_t right = c->in_w + c->pad_w > reach ? (c->in_w + c->pad_w - reach - 1) / c->stride_w + 1 : 0;
    if (right > c->out_w) right = c->out_w;
    for (int64_t image = 0; image < c->images; image++)
        for (int64_t oy = 0; oy < c->out_h; oy++) row(c, b, image, oy, left, right);
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
void tapestry_max_pool(const Conv *c, const Buffers *b) {
    for (int64_t image = 0; image < c->images; image++)
        for (int64_t oy = 0; oy < c->out_h; oy++)
            for (int64_t ox = 0; ox < c->out_w; ox++) {
                int64_t ty0, ty1, tx0, tx1;
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

/* Sums over whole images, divided by `high`. */
void tapestry_mean(const Conv *c, const Buffers *b) {
    vec count = all(c->high);
    for (int64_t image = 0; image < c->images; image++)
        for (int64_t k = 0; k < c->channels; k += VL) {
            lanes some = first_lanes(c->channels - k);
            vec total = {};
            for (int64_t y = 0; y < c->in_h; y++)
                for (int64_t x = 0; x < c->in_w; x++)
                    total += load_some(b->x + image * c->x_image + y * c->x_row + x * c->x_pixel + k, some);
            store_some(b->y + image * c->channels + k, total / count, some);
        }
}

/* Planes side by side to pixels: channels of a plane each become adjacent. Few channels, each at its own constant step. */
#define PIXELS(N)                                                                                     \
    case N:                                                                                           \
        for (int64_t i = 0; i < pixels; i++)                                                          \
            for (int k = 0; k < N; k++) y[i * N + k] = x[k * pixels + i];                             \
        break;

void tapestry_pixels(const float *restrict x, float *restrict y, int64_t images, int64_t channels, int64_t pixels) {
    for (int64_t image = 0; image < images; image++, x += channels * pixels, y += channels * pixels) switch (channels) {
            PIXELS(2)
            PIXELS(3)
            PIXELS(4)
        }
}
