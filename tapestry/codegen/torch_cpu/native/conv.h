/* A convolution over up to three axes, and what it works on. */
#ifndef TAPESTRY_CONV_H
#define TAPESTRY_CONV_H

#include "tile.h"

/* A function of each of some cells, in place. */
typedef void Cells(const int64_t *cells, void *const *arrays, int64_t part, int64_t parts);

/* Frames (d) of rows (h) of pixels (w); each group has as many channels and features as are said here. */
typedef struct {
    int64_t images, groups, channels, features;
    int64_t in_d, in_h, in_w, out_d, out_h, out_w;
    int64_t kernel_d, kernel_h, kernel_w, stride_d, stride_h, stride_w;
    int64_t pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w;
    int64_t x_image, x_frame, x_row, x_pixel; /* strides in floats */
    int64_t y_image, y_frame, y_row, y_pixel;
    int64_t r_image, r_frame, r_row, r_pixel;
    int64_t clamped;
    float low, high;
    Cells *then; /* what becomes of each result, while it is in cache; pixels of the result then follow each other */
} Conv;

typedef struct {
    const float *x, *w, *bias, *residual, *zeros;
    float *y;
} Buffers;

/* Every kernel does one of `parts` parts of its work, cut along what its results do not share (`run.c`). */
typedef struct { int64_t begin, end; } Range;
INLINE Range share(int64_t n, int64_t part, int64_t parts) { return (Range){n * part / parts, n * (part + 1) / parts}; }

void tapestry_conv(const Conv *c, const Buffers *b, int64_t part, int64_t parts);

/* Some rows (pixels of all images) and panels of features, of one group. */
void tapestry_conv_range(const Conv *c, const Buffers *b, Range rows, Range sides);

/* Do what follows on some features of pixels, `m` the first of them. */
INLINE void follow(const Conv *c, float *y, int64_t m, int64_t pixels, Range features) {
    int64_t cells = features.end - features.begin, whole = cells == c->y_pixel, all = cells * pixels;
    for (int64_t i = 0; i < (whole ? 1 : pixels); i++) {
        void *at = y + (m + i) * c->y_pixel + features.begin;
        c->then(whole ? &all : &cells, &at, 0, 1);
    }
}

/* The product of a matrix and weights as a convolution; its rows, and those of the result, are `x` and `y` floats apart. */
INLINE Conv product(int64_t rows, int64_t depth, int64_t features, int64_t x, int64_t y) {
    return (Conv){.images = 1, .groups = 1, .channels = depth, .features = features,
                  .in_d = 1, .in_h = 1, .in_w = rows, .out_d = 1, .out_h = 1, .out_w = rows,
                  .kernel_d = 1, .kernel_h = 1, .kernel_w = 1, .stride_d = 1, .stride_h = 1, .stride_w = 1,
                  .dilation_d = 1, .dilation_h = 1, .dilation_w = 1, .x_pixel = x, .y_pixel = y};
}

/* Memory of this thread's own, for as long as it lives; the next caller takes the same. */
float *tapestry_scratch(int64_t floats);

/* The taps [t0, t1) along one axis that read the image, for the output place `at`. */
INLINE void valid(int64_t at, int64_t stride, int64_t pad, int64_t dilation, int64_t kernel, int64_t size, int64_t *t0, int64_t *t1) {
    int64_t first = at * stride - pad;
    *t0 = first >= 0 ? 0 : dilation == 1 ? -first : (-first + dilation - 1) / dilation;
    *t1 = kernel;
    if (first + (kernel - 1) * dilation < size) return;
    *t1 = first >= size ? 0 : dilation == 1 ? size - first : (size - first + dilation - 1) / dilation;
}

#endif
