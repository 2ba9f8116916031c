/* Convolutions of f32 images whose channels are adjacent, on packed weights, with what follows them: bias, residual, clamp. */
#include <stdlib.h>

#include "conv.h"

typedef struct { int64_t n, z, y, x; } Place; /* an output pixel */

/* Of the reduced dimension: channels under one tap; `joined` so many pieces from here on are one, where no padding is read. */
typedef struct { int64_t tz, ty, tx, channel, length, joined; } Piece;

int64_t tapestry_lanes(void) { return VL; }

int64_t tapestry_packed_size(int64_t features, int64_t depth) { return (features + VL - 1) / VL * VL * depth; }

/* w: features x depth, row-major, the reduced dimension in the order of the taps and then channels. */
void tapestry_pack(const float *w, float *packed, int64_t features, int64_t depth) {
    int64_t vectors = (features + VL - 1) / VL;
    for (int64_t p = 0; p < panels(vectors); p++) {
        int64_t f0 = panel_start(vectors, p) * VL, f1 = panel_start(vectors, p + 1) * VL;
        for (int64_t k = 0; k < depth; k++)
            for (int64_t f = f0; f < f1; f++) *packed++ = f < features ? w[f * depth + k] : 0.0f;
    }
}

/* Memory of this thread's own, for as long as it lives; the next caller takes the same. */
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

typedef struct { int64_t first, pieces, start, length; } Span; /* pieces, and the steps of the reduced dimension that they are */

INLINE void next(const Conv *c, Place *p) {
    if (++p->x == c->out_w) {
        p->x = 0;
        if (++p->y == c->out_h) {
            p->y = 0;
            if (++p->z == c->out_d) p->z = 0, p->n++;
        }
    }
}

#define LOAD(p) (v == nv - 1 ? load_some(p, some) : load(p))

/* Accumulators: the bias, or what has been summed before at y. */
INLINE void begin(const int rows, const int nv, float *const *y, const float *bias, vec acc[][WIDEST], lanes some) {
    UNROLL for (int v = 0; v < nv; v++) {
        vec start = {};
        if (!y && bias) start = LOAD(bias + v * VL);
        UNROLL for (int r = 0; r < rows; r++) acc[r][v] = y ? LOAD(y[r] + v * VL) : start;
    }
}

INLINE void finish(const int rows, const int nv, const Conv *c, float *const *y, const float *const *residual, vec acc[][WIDEST],
                   int clamped, lanes some) {
    vec low = all(c->low), high = all(c->high);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) {
            vec out = acc[r][v];
            if (residual) out += LOAD(residual[r] + v * VL);
            if (clamped) out = clamp(out, low, high);
            if (v == nv - 1) store_some(y[r] + v * VL, out, some);
            else store(y[r] + v * VL, out);
        }
}

/* Pixels that follow each other at one step, each a row of a matrix: what a kernel of one row reads, `length` cells of it. */
INLINE void plain(const int rows, const int nv, const Conv *c, const Buffers *b, const Span *s, int64_t m, int64_t f0,
                  const float *w, int first, int last) {
    vec acc[MOST_ROWS][WIDEST];
    float *y[MOST_ROWS];
    const float *x[MOST_ROWS], *residual[MOST_ROWS] = {0};
    lanes some = first_lanes(c->features - f0 - (nv - 1) * VL);
    UNROLL for (int r = 0; r < rows; r++) {
        y[r] = b->y + (m + r) * c->y_pixel + f0, x[r] = b->x + (m + r) * c->stride_w * c->x_pixel + s->start;
        if (last && b->residual) residual[r] = b->residual + (m + r) * c->r_pixel + f0;
    }
    begin(rows, nv, first ? 0 : y, b->bias ? b->bias + f0 : 0, acc, some);
    multiply(rows, nv, x, w, s->length, acc);
    finish(rows, nv, c, y, last && b->residual ? residual : 0, acc, last && c->clamped, some);
}

INLINE int in(int64_t at, int64_t size) { return (uint64_t)at < (uint64_t)size; }

INLINE void tile(const int rows, const int nv, const Conv *c, const Buffers *b, const Piece *piece, int64_t pieces,
                 Place *place, int64_t f0, const float *w, int first, int last) {
    vec acc[MOST_ROWS][WIDEST];
    float *y[MOST_ROWS];
    const float *x[MOST_ROWS];
    const float *residual[MOST_ROWS] = {0};
    int64_t frame[MOST_ROWS], row[MOST_ROWS], column[MOST_ROWS], reach = (c->kernel_w - 1) * c->dilation_w;
    int64_t through = (c->kernel_d - 1) * c->dilation_d, tall = (c->kernel_h - 1) * c->dilation_h;
    int within = 1, inner = 1;
    lanes some = first_lanes(c->features - f0 - (nv - 1) * VL); /* of the last vector */
    int64_t across = place->x + rows <= c->out_w ? c->stride_w : 0; /* all in one row: the first one's place says it all */
    UNROLL for (int r = 0; r < rows; r++) {
        if (across && r) {
            y[r] = y[r - 1] + c->y_pixel, x[r] = x[r - 1] + across * c->x_pixel;
            frame[r] = frame[r - 1], row[r] = row[r - 1], column[r] = column[r - 1] + across;
            if (last && b->residual) residual[r] = residual[r - 1] + c->r_pixel;
        } else {
            const Place p = *place;
            y[r] = b->y + p.n * c->y_image + p.z * c->y_frame + p.y * c->y_row + p.x * c->y_pixel + f0;
            if (last && b->residual) residual[r] = b->residual + p.n * c->r_image + p.z * c->r_frame + p.y * c->r_row + p.x * c->r_pixel + f0;
            frame[r] = p.z * c->stride_d - c->pad_d, row[r] = p.y * c->stride_h - c->pad_h, column[r] = p.x * c->stride_w - c->pad_w;
            x[r] = b->x + p.n * c->x_image + frame[r] * c->x_frame + row[r] * c->x_row + column[r] * c->x_pixel;
        }
        within &= column[r] >= 0 && column[r] + reach < c->in_w;
        inner &= frame[r] >= 0 && frame[r] + through < c->in_d && row[r] >= 0 && row[r] + tall < c->in_h;
        if (!across) next(c, place);
    }
    if (across) place->x += rows - 1, next(c, place);
    inner &= within;
    begin(rows, nv, first ? 0 : y, b->bias ? b->bias + f0 : 0, acc, some);
    for (int64_t i = 0, n; i < pieces; i += n) {
        const float *at[MOST_ROWS];
        int64_t on = piece[i].tz * c->dilation_d, down = piece[i].ty * c->dilation_h, right = piece[i].tx * c->dilation_w;
        int64_t step = on * c->x_frame + down * c->x_row + right * c->x_pixel + piece[i].channel;
        const float *taps = w;
        n = within ? piece[i].joined : 1;
        w += n * piece[i].length * nv * VL;
        UNROLL for (int r = 0; r < rows; r++) at[r] = x[r] + step;
        if (!inner && across && !(in(frame[0] + on, c->in_d) && in(row[0] + down, c->in_h))) continue;
        if (!inner && !(across && within)) {
            int any = 0;
            UNROLL for (int r = 0; r < rows; r++) {
                int inside = in(column[r] + right, c->in_w) & in(row[r] + down, c->in_h) & in(frame[r] + on, c->in_d);
                at[r] = inside ? at[r] : b->zeros;
                any |= inside;
            }
            if (!any) continue;
        }
        multiply(rows, nv, at, taps, n * piece[i].length, acc);
    }
    finish(rows, nv, c, y, last && b->residual ? residual : 0, acc, last && c->clamped, some);
}

typedef void (*Tile)(const Conv *, const Buffers *, const Piece *, int64_t, Place *, int64_t, const float *, int, int);
typedef void (*Plain)(const Conv *, const Buffers *, const Span *, int64_t, int64_t, const float *, int, int);

#define DEFINE(ROWS, NV)                                                                                                  \
    static __attribute__((noinline)) void tile_##ROWS##_##NV(const Conv *c, const Buffers *b, const Piece *p, int64_t n,   \
                                                             Place *place, int64_t f0, const float *w, int first, int last) { \
        tile(ROWS, NV, c, b, p, n, place, f0, w, first, last);                                                             \
    }                                                                                                                     \
    static __attribute__((noinline)) void plain_##ROWS##_##NV(const Conv *c, const Buffers *b, const Span *s, int64_t m,   \
                                                              int64_t f0, const float *w, int first, int last) {           \
        plain(ROWS, NV, c, b, s, m, f0, w, first, last);                                                                   \
    }
SHAPES(DEFINE)

#define ENTRY(ROWS, NV) [NV][ROWS] = tile_##ROWS##_##NV,
static const Tile TILES[WIDEST + 1][MOST_ROWS + 1] = {SHAPES(ENTRY)};
#define PLAIN(ROWS, NV) [NV][ROWS] = plain_##ROWS##_##NV,
static const Plain PLAINS[WIDEST + 1][MOST_ROWS + 1] = {SHAPES(PLAIN)};

/* Rows [m0, m1) of one panel over some pieces; meanwhile the weights of the next are fetched, but for few rows (`multiply`). */
static void strip(const Conv *c, const Buffers *b, const Piece *piece, const Span *s, int matrix, int64_t m0, int64_t m1,
                  int64_t f0, int nv, const float *w, int first, int last, const float *ahead, int64_t length) {
    int64_t lines_of = m0 / c->out_w, frames = lines_of / c->out_h;
    Place place = {frames / c->out_d, frames % c->out_d, lines_of % c->out_h, m0 % c->out_w};
    int64_t lines = m1 - m0 <= MOST_ROWS ? 0 : length / 16, done = 0, m = m0;
    while (m < m1) {
        int64_t left = m1 - m, tiles = (left + TALLEST[nv] - 1) / TALLEST[nv];
        int rows = (int)((left + tiles - 1) / tiles);
        while (!TILES[nv][rows]) rows--;
        if (matrix) PLAINS[nv][rows](c, b, s, m, f0, w, first, last);
        else TILES[nv][rows](c, b, piece + s->first, s->pieces, &place, f0, w, first, last);
        m += rows;
        for (int64_t until = lines * (m - m0) / (m1 - m0); done < until; done++) __builtin_prefetch(ahead + done * 16, 0, 2);
    }
}

/* The pieces in order; those of one row of the kernel are joined where their channels follow each other in memory. */
static int64_t cut(const Conv *c, Piece *piece) {
    int64_t n = 0, joined = c->x_pixel == c->channels && c->dilation_w == 1 && c->kernel_w * c->channels <= DEPTH;
    for (int64_t t = 0; t < c->kernel_d * c->kernel_h; t++)
        for (int64_t tx = 0; tx < c->kernel_w; tx++)
            for (int64_t channel = 0; channel < c->channels; channel += DEPTH) {
                int64_t rest = c->channels - channel;
                piece[n++] = (Piece){t / c->kernel_h, t % c->kernel_h, tx, channel, rest < DEPTH ? rest : DEPTH, joined ? c->kernel_w - tx : 1};
            }
    return n;
}

/* Blocks of at most DEPTH steps; what is joined stays together. */
static int64_t blocks(const Piece *piece, int64_t pieces, Span *out) {
    int64_t n = 0, step = 0;
    for (int64_t i = 0; i < pieces; n++) {
        Span s = {i, 0, step, 0};
        do {
            s.length += piece[i].joined * piece[i].length;
            i += piece[i].joined;
        } while (i < pieces && s.length + piece[i].joined * piece[i].length <= DEPTH);
        s.pieces = i - s.first;
        step += s.length;
        out[n] = s;
    }
    return n;
}

/* Whether pixels are rows of matrices, of the image as of the result. */
static int is_matrix(const Conv *c, const Buffers *b) {
    int near_taps = c->kernel_w == 1 || (c->x_pixel == c->channels && c->dilation_w == 1);
    int inside = !c->pad_h && !c->pad_w && (c->out_w - 1) * c->stride_w + c->kernel_w <= c->in_w;
    if (c->kernel_d > 1 || c->kernel_h > 1 || c->out_d > 1 || c->pad_d || !near_taps || !inside) return 0;
    if (c->images * c->out_h == 1) return 1;
    if (c->kernel_w > 1 || c->stride_h > 1 || c->stride_w > 1 || c->in_w != c->out_w) return 0;
    int near = c->x_row == c->in_w * c->x_pixel && c->y_row == c->out_w * c->y_pixel;
    int added = !b->residual || (c->r_row == c->out_w * c->r_pixel && (c->images == 1 || c->r_image == c->out_h * c->r_row));
    int alone = c->images == 1 || (c->x_image == c->in_h * c->x_row && c->y_image == c->out_h * c->y_row && c->in_h == c->out_h);
    return near && added && alone;
}

enum { NARROW = 2, SHORT = 2 * VL }; /* features that leave most lanes empty; steps from which on lanes go along them instead */

/* Rows of matrices times few features: sums along what is read, a lane for each of its neighbours. */
static void narrow(const Conv *c, const Buffers *b, Range m_of, int64_t depth) {
    float taps[depth];
    lanes some = first_lanes(depth % VL);
    for (int64_t f = 0; f < c->features; f++) {
        for (int64_t k = 0; k < depth; k++) taps[k] = b->w[k * VL + f];
        for (int64_t m = m_of.begin; m < m_of.end; m++) {
            const float *x = b->x + m * c->stride_w * c->x_pixel;
            float *y = b->y + m * c->y_pixel + f;
            vec even = {}, odd = {};
            int64_t k = 0;
            for (; k + 2 * VL <= depth; k += 2 * VL) {
                even = fma_of(load(x + k), load(taps + k), even);
                odd = fma_of(load(x + k + VL), load(taps + k + VL), odd);
            }
            if (k + VL <= depth) even = fma_of(load(x + k), load(taps + k), even), k += VL;
            if (k < depth) odd = fma_of(load_some(x + k, some), load_some(taps + k, some), odd);
            float sum = sum_of(even + odd) + (b->bias ? b->bias[f] : 0);
            if (b->residual) sum += b->residual[m * c->r_pixel + f];
            *y = c->clamped ? clamp(all(sum), all(c->low), all(c->high))[0] : sum;
        }
    }
}

INLINE int64_t pixels(const Conv *c) { return c->images * c->out_d * c->out_h * c->out_w; }

enum { SMALL = 1 << 14 }; /* cells of a result that are followed up while they are in cache */

/* Blocks of rows, so that what is read of x stays in cache; in each, panels by blocks of the reduced dimension. */
void tapestry_conv_range(const Conv *c, const Buffers *b, Range m_of, Range p_of) {
    int64_t rows = pixels(c), vectors = (c->features + VL - 1) / VL;
    int64_t taps = c->kernel_d * c->kernel_h * c->kernel_w, depth = taps * c->channels, deep = c->channels > DEPTH && rows * c->channels > 131072, wide = deep ? DEPTH : c->channels;
    Piece piece[taps * ((c->channels + DEPTH - 1) / DEPTH)];
    Span span[taps * ((c->channels + DEPTH - 1) / DEPTH)];
    int64_t pieces = cut(c, piece), spans = blocks(piece, pieces, span);
    int matrix = is_matrix(c, b);
    if (matrix && c->features <= NARROW && depth >= SHORT) {
        narrow(c, b, m_of, depth);
        if (c->then) follow(c, b->y, m_of.begin, m_of.end - m_of.begin, (Range){0, c->features});
        return;
    }
    int64_t high = (depth * vectors * VL < 65536 ? 8192 : 131072 / c->kernel_d) / wide / 48 * 48 + 48;
    int64_t ours = p_of.end - p_of.begin, few = SMALL / c->features / 48 * 48 + 48;
    if (c->then && few < high) high = few;
    for (int64_t m = m_of.begin; m < m_of.end; m += high) {
        const int64_t end = m + high < m_of.end ? m + high : m_of.end;
        for (int64_t t = 0; t < ours * spans; t++) {
            int64_t p = p_of.begin + (deep ? t % ours : t / spans), v0 = panel_start(vectors, p), nv = panel_start(vectors, p + 1) - v0;
            const Span *s = span + (deep ? t / ours : t % spans);
            const float *w = b->w + (v0 * depth + s->start * nv) * VL;
            int first = s == span, last = s == span + spans - 1;
            int64_t length = t + 1 < ours * spans ? s->length * nv * VL : 0;
            const float *ahead = deep && p + 1 < p_of.end ? b->w + (v0 + nv) * depth * VL + s->start * nv * VL : w + length;
            strip(c, b, piece, s, matrix, m, end, v0 * VL, (int)nv, w, first, last, ahead, length);
        }
        if (c->then) {
            const int64_t f0 = panel_start(vectors, p_of.begin) * VL, f1 = panel_start(vectors, p_of.end) * VL;
            follow(c, b->y, m, end - m, (Range){f0, f1 < c->features ? f1 : c->features});
        }
    }
}

/* Of groups, rows and panels those are shared out that leave less to read again: the weight for each part of the rows, the image
 * for each of the others. */
void tapestry_conv(const Conv *c, const Buffers *b, int64_t part, int64_t parts) {
    Range groups = {0, c->groups}, rows = {0, pixels(c)}, sides = {0, panels((c->features + VL - 1) / VL)};
    int64_t depth = c->kernel_d * c->kernel_h * c->kernel_w * c->channels;
    int64_t weight = depth * c->features, image = c->images * c->in_d * c->in_h * c->in_w * c->channels;
    if (groups.end > 1 && groups.end >= parts) groups = share(groups.end, part, parts);
    else if (sides.end >= parts && weight > image) sides = share(sides.end, part, parts);
    else rows = share(rows.end, part, parts);
    for (int64_t g = groups.begin; g < groups.end; g++) {
        Buffers at = *b;
        at.x += g * c->channels, at.y += g * c->features, at.w += g * tapestry_packed_size(c->features, depth);
        if (at.bias) at.bias += g * c->features;
        if (at.residual) at.residual += g * c->features;
        tapestry_conv_range(c, &at, rows, sides);
    }
}
