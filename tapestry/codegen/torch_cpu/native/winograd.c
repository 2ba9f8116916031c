/* 3 x 3 convolutions in 2 x 2 tiles of the output, F(2x2, 3x3) of Lavin and Gray (2015): 16 products where 36 would be.
 *
 * An output is made of the inputs of its own window alone, so that a NaN stays where it belongs; an infinity would become one.
 * Where anything is not finite all of a part is computed again, plainly.
 */
#include <stdlib.h>

#include "conv.h"

enum { POINTS = 16, FEW_TILES = 512 }; /* tiles of all images that are not shared out: features are */

/* How many tiles are transformed at once, of all that there are: what they take should stay in the second level of cache. */
static int64_t at_once(const Conv *c, int64_t tiles) {
    int64_t most = 12288 / (c->channels + c->features), parts;
    most = most < 64 ? 64 : most > 128 ? 128 : most;
    parts = (tiles + most - 1) / most;
    return (tiles + parts - 1) / parts;
}

INLINE void one_way(const vec d0, const vec d1, const vec d2, const vec d3, vec *t, int step) {
    t[0] = d0 - d2, t[step] = d1 + d2, t[2 * step] = d2 - d1, t[3 * step] = d1 - d3;
}

/* Image n, tile (ty, tx): B'dB of its 4 x 4 inputs, to 16 places `apart`. */
static void forward(const Conv *c, const Buffers *b, int64_t n, int64_t ty, int64_t tx, float *to, int64_t apart) {
    const float *from[POINTS];
    for (int i = 0; i < POINTS; i++) {
        int64_t y = 2 * ty - c->pad_h + i / 4, x = 2 * tx - c->pad_w + i % 4;
        int inside = (uint64_t)y < (uint64_t)c->in_h && (uint64_t)x < (uint64_t)c->in_w;
        from[i] = inside ? b->x + n * c->x_image + y * c->x_row + x * c->x_pixel : b->zeros;
    }
    for (int64_t k = 0; k < c->channels; k += VL) {
        vec t[POINTS], v[POINTS];
        UNROLL for (int j = 0; j < 4; j++)
            one_way(load(from[j] + k), load(from[4 + j] + k), load(from[8 + j] + k), load(from[12 + j] + k), t + j, 4);
        UNROLL for (int i = 0; i < 4; i++) one_way(t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3], v + 4 * i, 1);
        UNROLL for (int i = 0; i < POINTS; i++) store(to + i * apart + k, v[i]);
    }
}

/* A'mA of 16 places `apart`, to the up to 2 x 2 outputs of some features of a tile; a NaN in what is returned if any is not finite. */
static vec backward(const Conv *c, const Buffers *b, int64_t n, int64_t ty, int64_t tx, const float *from, int64_t apart, Range features) {
    vec finite = {}, low = all(c->low), high = all(c->high);
    int64_t down = c->out_h - 2 * ty < 2 ? 0 : 1, right = c->out_w - 2 * tx < 2 ? 0 : 1;
    float *y = b->y + n * c->y_image + 2 * ty * c->y_row + 2 * tx * c->y_pixel;
    const float *r = b->residual ? b->residual + n * c->r_image + 2 * ty * c->r_row + 2 * tx * c->r_pixel : 0;
    for (int64_t k = features.begin; k < features.end; k += VL) {
        vec t[8], out[4], bias = b->bias ? load(b->bias + k) : (vec){};
        UNROLL for (int j = 0; j < 4; j++) {
            const float *m = from + j * apart + k;
            vec m1 = load(m + 4 * apart), m2 = load(m + 8 * apart);
            t[j] = load(m) + m1 + m2, t[4 + j] = m1 - m2 - load(m + 12 * apart);
        }
        UNROLL for (int i = 0; i < 2; i++)
            out[2 * i] = t[4 * i] + t[4 * i + 1] + t[4 * i + 2], out[2 * i + 1] = t[4 * i + 1] - t[4 * i + 2] - t[4 * i + 3];
        UNROLL for (int i = 0; i < 4; i++) {
            if (i / 2 > down || i % 2 > right) continue;
            vec v = out[i] + bias;
            finite += v - v;
            if (r) v += load(r + i / 2 * c->r_row + i % 2 * c->r_pixel + k);
            if (c->clamped) v = clamp(v, low, high);
            store(y + i / 2 * c->y_row + i % 2 * c->y_pixel + k, v);
        }
    }
    return finite;
}

/* The convolution by its definition, with weights as they were before they were transformed: U = GgG' of columns of [1 0 0],
 * [1 1 1] / 2, [1 -1 1] / 2, [0 0 1]. */
static void plainly(const Conv *c, const Buffers *b, Range lines, Range sides) {
    int64_t size = (c->features + VL - 1) / VL * VL * c->channels;
    static const float back[3][4] = {{1, 0, 0, 0}, {0, 1, -1, 0}, {0, 0, 0, 1}};
    float *taps = malloc(9 * size * sizeof(float));
    if (!taps) abort();
    int64_t vectors = c->features / VL, steps = c->channels;
    for (int64_t p = 0; p < panels(vectors); p++) {
        int64_t v0 = panel_start(vectors, p), width = (panel_start(vectors, p + 1) - v0) * VL;
        for (int tap = 0; tap < 9; tap++)
            for (int64_t k = 0; k < steps * width; k++) {
                float w = 0;
                for (int e = 0; e < POINTS; e++) w += back[tap / 3][e / 4] * back[tap % 3][e % 4] * b->w[e * size + v0 * VL * steps + k];
                taps[9 * v0 * VL * steps + tap * steps * width + k] = w;
            }
    }
    int64_t down = (c->out_h + 1) / 2;
    for (int64_t line = lines.begin, end; line < lines.end; line = end) { /* image by image */
        int64_t image = line / down, row = 2 * (line % down), rows;
        end = (image + 1) * down < lines.end ? (image + 1) * down : lines.end;
        rows = 2 * (end - line) < c->out_h - row ? 2 * (end - line) : c->out_h - row;
        Conv part = *c;
        part.images = 1, part.out_h = rows, part.pad_h -= row;
        Buffers at = *b;
        at.w = taps, at.x += image * c->x_image, at.y += image * c->y_image + row * c->y_row;
        if (at.residual) at.residual += image * c->r_image + row * c->r_row;
        tapestry_conv_range(&part, &at, (Range){0, rows * c->out_w}, sides);
    }
    free(taps);
}

/* What follows, on lines of tiles that are whole. */
static void follow_lines(const Conv *c, float *y, Range lines, Range features) {
    const int64_t down = (c->out_h + 1) / 2;
    for (int64_t line = lines.begin; line < lines.end; line++) {
        const int64_t row = 2 * (line % down), rows = row + 2 <= c->out_h ? 2 : 1;
        follow(c, y, (line / down * c->out_h + row) * c->out_w, rows * c->out_w, features);
    }
}

/* w: 16 matrices features x channels, packed one after another; where they would not be finite, a NaN at the end, and the weight
 * itself at the beginning, packed for tapestry_conv. Channels and features are multiples of VL. */
void tapestry_winograd(const Conv *c, const Buffers *b, int64_t part, int64_t parts) {
    int64_t across = (c->out_w + 1) / 2, down = (c->out_h + 1) / 2;
    int64_t vectors = c->features / VL;
    Range lines = {0, c->images * down}, sides = {0, panels(vectors)};
    if (lines.end * across < FEW_TILES) sides = share(sides.end, part, parts); /* each weight is read by one thread */
    else lines = share(lines.end, part, parts);
    Range features = {panel_start(vectors, sides.begin) * VL, panel_start(vectors, sides.end) * VL};
    int64_t from = lines.begin * across, tiles = lines.end * across, most = at_once(c, tiles - from);
    int64_t size = c->features * c->channels, wide = most * c->channels, out = most * c->features;
    if (b->w[POINTS * size - 1] != b->w[POINTS * size - 1]) {
        tapestry_conv(c, b, part, parts);
        return;
    }
    float *v = tapestry_scratch(POINTS * (wide + out)), *m = v + POINTS * wide;
    vec finite = {};
    int64_t done = lines.begin;
    for (int64_t t0 = from; t0 < tiles; t0 += most) {
        int64_t count = most < tiles - t0 ? most : tiles - t0;
        Conv each = product(count, c->channels, c->features, c->channels, c->features);
        for (int64_t i = 0, t = t0; i < count; i++, t++)
            forward(c, b, t / (across * down), t / across % down, t % across, v + i * c->channels, wide);
        for (int e = 0; e < POINTS; e++)
            tapestry_conv_range(&each, &(Buffers){.x = v + e * wide, .w = b->w + e * size, .y = m + e * out}, (Range){0, count}, sides);
        for (int64_t i = 0, t = t0; i < count; i++, t++)
            finite += backward(c, b, t / (across * down), t / across % down, t % across, m + i * c->features, out, features);
        const int64_t whole = (t0 + count) / across;
        if (c->then) follow_lines(c, b->y, (Range){done, whole}, features);
        done = whole;
    }
    for (int i = 0; i < VL; i++)
        if (finite[i] != finite[i]) {
            plainly(c, b, lines, sides);
            return;
        }
}
