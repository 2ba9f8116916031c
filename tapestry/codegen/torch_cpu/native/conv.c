/* Convolutions of f32 images whose channels are adjacent, on packed weights, with what follows them: bias, residual, clamp. */
#include "conv.h"

typedef struct { int64_t n, y, x; } Place; /* an output pixel */

/* Of the reduced dimension: channels under one tap; `joined` so many pieces from here on are one, where no padding is read. */
typedef struct { int64_t ty, tx, channel, length, joined; } Piece;

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

INLINE void next(const Conv *c, Place *p) {
    if (++p->x == c->out_w) {
        p->x = 0;
        if (++p->y == c->out_h) p->y = 0, p->n++;
    }
}

#define LOAD(p) (v == nv - 1 ? load_some(p, some) : load(p))

INLINE void tile(const int rows, const int nv, const Conv *c, const Buffers *b, const Piece *piece, int64_t pieces,
                 Place *place, int64_t f0, const float *w, int first, int last) {
    vec acc[MOST_ROWS][WIDEST];
    float *y[MOST_ROWS];
    const float *x[MOST_ROWS];
    const float *residual[MOST_ROWS] = {0};
    int64_t row[MOST_ROWS], column[MOST_ROWS], reach = (c->kernel_w - 1) * c->dilation_w;
    int within = 1;
    lanes some = first_lanes(c->features - f0 - (nv - 1) * VL); /* of the last vector */
    UNROLL for (int r = 0; r < rows; r++) {
        y[r] = b->y + place->n * c->y_image + place->y * c->y_row + place->x * c->y_pixel + f0;
        if (last && b->residual) {
            residual[r] = b->residual + place->n * c->r_image + place->y * c->r_row + place->x * c->r_pixel + f0;
            UNROLL for (int v = 0; v < nv; v++) __builtin_prefetch(residual[r] + v * VL);
        }
        row[r] = place->y * c->stride_h - c->pad_h;
        column[r] = place->x * c->stride_w - c->pad_w;
        within &= column[r] >= 0 && column[r] + reach < c->in_w;
        x[r] = b->x + place->n * c->x_image + row[r] * c->x_row + column[r] * c->x_pixel;
        next(c, place);
    }
    UNROLL for (int v = 0; v < nv; v++) {
        vec start = {};
        if (first && b->bias) start = LOAD(b->bias + f0 + v * VL);
        UNROLL for (int r = 0; r < rows; r++) acc[r][v] = first ? start : LOAD(y[r] + v * VL);
    }
    for (int64_t i = 0, n; i < pieces; i += n) {
        const float *at[MOST_ROWS];
        int64_t down = piece[i].ty * c->dilation_h, right = piece[i].tx * c->dilation_w;
        int64_t step = down * c->x_row + right * c->x_pixel + piece[i].channel;
        int any = 0;
        n = within ? piece[i].joined : 1;
        UNROLL for (int r = 0; r < rows; r++) {
            int inside = (uint64_t)(row[r] + down) < (uint64_t)c->in_h && (uint64_t)(column[r] + right) < (uint64_t)c->in_w;
            at[r] = inside ? x[r] + step : b->zeros;
            any |= inside;
        }
        if (any) multiply(rows, nv, at, w, n * piece[i].length, acc);
        w += n * piece[i].length * nv * VL;
    }
    vec low = all(c->low), high = all(c->high);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) {
            vec out = acc[r][v];
            if (last && b->residual) out += LOAD(residual[r] + v * VL);
            if (last && c->clamped) out = clamp(out, low, high);
            if (v == nv - 1) store_some(y[r] + v * VL, out, some);
            else store(y[r] + v * VL, out);
        }
}

typedef void (*Tile)(const Conv *, const Buffers *, const Piece *, int64_t, Place *, int64_t, const float *, int, int);

#define DEFINE(ROWS, NV)                                                                                                  \
    static __attribute__((noinline)) void tile_##ROWS##_##NV(const Conv *c, const Buffers *b, const Piece *p, int64_t n,   \
                                                             Place *place, int64_t f0, const float *w, int first, int last) { \
        tile(ROWS, NV, c, b, p, n, place, f0, w, first, last);                                                             \
    }
SHAPES(DEFINE)

#define ENTRY(ROWS, NV) [NV][ROWS] = tile_##ROWS##_##NV,
static const Tile TILES[WIDEST + 1][MOST_ROWS + 1] = {SHAPES(ENTRY)};

/* Rows [m0, m1) of one panel over some pieces; meanwhile the weights of the next are fetched. */
static void strip(const Conv *c, const Buffers *b, const Piece *piece, int64_t pieces, int64_t m0, int64_t m1, int64_t f0,
                  int nv, const float *w, int first, int last, const float *ahead, int64_t length) {
    int64_t pixels = c->out_h * c->out_w;
    Place place = {m0 / pixels, m0 % pixels / c->out_w, m0 % c->out_w};
    int64_t lines = length / 16, done = 0, m = m0;
    while (m < m1) {
        int64_t left = m1 - m, tiles = (left + TALLEST[nv] - 1) / TALLEST[nv];
        int rows = (int)((left + tiles - 1) / tiles);
        while (!TILES[nv][rows]) rows--;
        TILES[nv][rows](c, b, piece, pieces, &place, f0, w, first, last);
        m += rows;
        for (int64_t until = lines * (m - m0) / (m1 - m0); done < until; done++) __builtin_prefetch(ahead + done * 16, 0, 2);
    }
}

/* The pieces in order; those of one row of the kernel are joined where their channels follow each other in memory. */
static int64_t cut(const Conv *c, Piece *piece) {
    int64_t n = 0, joined = c->x_pixel == c->channels && c->dilation_w == 1 && c->kernel_w * c->channels <= DEPTH;
    for (int64_t ty = 0; ty < c->kernel_h; ty++)
        for (int64_t tx = 0; tx < c->kernel_w; tx++)
            for (int64_t channel = 0; channel < c->channels; channel += DEPTH) {
                int64_t rest = c->channels - channel;
                piece[n++] = (Piece){ty, tx, channel, rest < DEPTH ? rest : DEPTH, joined ? c->kernel_w - tx : 1};
            }
    return n;
}

typedef struct { int64_t first, pieces, start, length; } Span; /* pieces, and the steps of the reduced dimension that they are */

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

/* Blocks of rows, so that what is read of x stays in cache; in each, panels by blocks of the reduced dimension. */
void tapestry_conv(const Conv *c, const Buffers *b) {
    int64_t rows = c->images * c->out_h * c->out_w, vectors = (c->features + VL - 1) / VL, sides = panels(vectors);
    int64_t taps = c->kernel_h * c->kernel_w, depth = taps * c->channels, deep = c->channels > DEPTH && rows * c->channels > 131072, wide = deep ? DEPTH : c->channels;
    Piece piece[taps * ((c->channels + DEPTH - 1) / DEPTH)];
    Span span[taps * ((c->channels + DEPTH - 1) / DEPTH)];
    int64_t pieces = cut(c, piece), spans = blocks(piece, pieces, span);
    int64_t high = (depth * vectors * VL < 65536 ? 8192 : 131072) / wide / 48 * 48 + 48;
    for (int64_t m = 0; m < rows; m += high)
        for (int64_t t = 0; t < sides * spans; t++) {
            int64_t p = deep ? t % sides : t / spans, v0 = panel_start(vectors, p), nv = panel_start(vectors, p + 1) - v0;
            const Span *s = span + (deep ? t / sides : t % spans);
            const float *w = b->w + (v0 * depth + s->start * nv) * VL;
            int first = s == span, last = s == span + spans - 1;
            int64_t length = t + 1 < sides * spans ? s->length * nv * VL : 0;
            const float *ahead = deep && p + 1 < sides ? b->w + (v0 + nv) * depth * VL + s->start * nv * VL : w + length;
            strip(c, b, piece + s->first, s->pieces, m, m + high < rows ? m + high : rows, v0 * VL, (int)nv, w, first, last, ahead, length);
        }
}
