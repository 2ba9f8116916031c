/* Convolutions of images of few channels, a plane each: their rows are made pixels in memory of our own, a band at a time. */
#include <stdlib.h>

#include "conv.h"

enum { BAND = 1 << 14 }; /* floats of the band that is made pixels at once, unless the weight, read for each, is large too */

float *tapestry_scratch(int64_t floats) {
    static _Thread_local float *memory;
    static _Thread_local int64_t size;
    if (size < floats) {
        free(memory);
        memory = aligned_alloc(64, (size_t)(floats * (int64_t)sizeof(float) + 63) / 64 * 64);
        if (!memory) abort();
        size = floats;
    }
    return memory;
}

/* Planes `apart` to pixels whose channels are adjacent. Few channels, each at its own constant step. */
#define PIXELS(N)                                                                                     \
    case N:                                                                                           \
        for (int64_t i = 0; i < pixels; i++)                                                          \
            for (int k = 0; k < N; k++) y[i * N + k] = x[k * apart + i];                              \
        break;

static void to_pixels(const float *restrict x, float *restrict y, int64_t channels, int64_t apart, int64_t pixels) {
    switch (channels) {
        PIXELS(2)
        PIXELS(3)
        PIXELS(4)
    }
}

static int64_t reach(const Conv *c, int64_t rows) { return (rows - 1) * c->stride_h + (c->kernel_h - 1) * c->dilation_h + 1; }

/* Rows [row, end) of one image. */
static void planes_rows(const Conv *c, const Buffers *b, int64_t image, int64_t row, int64_t end) {
    int64_t width = c->in_w * c->channels, most = end - row;
    if (c->kernel_h * c->kernel_w * c->channels * c->features < BAND)
        while (most > 1 && reach(c, most) * width > BAND) most = (most + 1) / 2;
    float *pixels = tapestry_scratch(reach(c, most) * width);
    for (int64_t n; row < end; row += n) {
        n = end - row < most ? end - row : most;
        int64_t first = row * c->stride_h - c->pad_h, last = first + reach(c, n), from = first < 0 ? 0 : first;
        if (last > c->in_h) last = c->in_h;
        if (last < from) last = from;
        to_pixels(b->x + image * c->x_image + from * c->x_row, pixels, c->channels, c->x_pixel, (last - from) * c->in_w);
        Conv part = *c;
        part.images = 1, part.in_h = last - from, part.out_h = n, part.pad_h = from - first;
        part.x_row = width, part.x_pixel = c->channels;
        Buffers at = *b;
        at.x = pixels, at.y += image * c->y_image + row * c->y_row;
        if (at.residual) at.residual += image * c->r_image + row * c->r_row;
        tapestry_conv(&part, &at, 0, 1);
    }
}

/* x: planes row by row without gaps, `x_pixel` apart (of one image `x_image` may be anything); all else as in tapestry_conv. */
void tapestry_planes(const Conv *c, const Buffers *b, int64_t part, int64_t parts) {
    Range rows = share(c->images * c->out_h, part, parts);
    for (int64_t row = rows.begin, end; row < rows.end; row = end) {
        int64_t first = row / c->out_h * c->out_h;
        end = first + c->out_h < rows.end ? first + c->out_h : rows.end;
        planes_rows(c, b, row / c->out_h, row - first, end - first);
    }
}
