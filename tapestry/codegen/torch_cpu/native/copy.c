/* A copy of cells from some strides to others; along an axis the places to read may be listed instead. */
#include <string.h>

#include "conv.h"

enum { MOST_AXES = 6, TILE = 16 };

/* Strides and places in cells; the last axis but one is that of rows. */
typedef struct {
    int64_t rank, bytes, extent[MOST_AXES], from[MOST_AXES], to[MOST_AXES];
} Copy;

typedef struct {
    const char *x;
    char *y;
    const int64_t *places[MOST_AXES];
} Copied;

/* Eight columns of x, cells of 32 bits from step to step, as rows of y. */
typedef int32_t eight __attribute__((vector_size(32)));
typedef eight eight_loose __attribute__((aligned(4), may_alias));
#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (eight){__VA_ARGS__})
#endif
#define LOW(a, b) MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) MIX(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_PAIRS(a, b) MIX(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
static void turned(const int32_t *x, int64_t from, int32_t *y, int64_t to) {
    eight r[8], t[8], u[8];
    for (int i = 0; i < 8; i++) r[i] = *(const eight_loose *)(x + i * from);
    for (int i = 0; i < 8; i += 2) t[i] = LOW(r[i], r[i + 1]), t[i + 1] = HIGH(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++)
            u[i + 2 * k] = LOW_PAIRS(t[i + k], t[i + k + 2]), u[i + 2 * k + 1] = HIGH_PAIRS(t[i + k], t[i + k + 2]);
    for (int i = 0; i < 4; i++) {
        *(eight_loose *)(y + i * to) = MIX(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(eight_loose *)(y + (i + 4) * to) = MIX(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Whole tiles of rows that are adjacent in x as rows that are adjacent in y, lines of memory at a time; how many cells are done. */
static int64_t tiles(const int32_t *x, int64_t from, int32_t *y, int64_t to, int64_t rows, int64_t cells) {
    const int64_t whole = rows == TILE ? cells / TILE * TILE : 0;
    for (int64_t j = 0; j < whole; j += TILE)
        for (int64_t k = 0; k < TILE; k += 8)
            for (int64_t h = 0; h < TILE; h += 8) turned(x + k + (j + h) * from, from, y + k * to + j + h, to);
    return whole;
}

/* Rows of cells. Where neighbours of a column are neighbours in memory, a tile of rows is read by columns. */
#define ROWS(T)                                                                                                   \
    static void rows_##T(const Copy *c, const Copied *b, const T *restrict x, T *restrict y, Range rows) {        \
        const int64_t r = c->rank - 2, n = c->extent[r + 1], *row = b->places[r], *cell = b->places[r + 1];       \
        const int64_t fr = c->from[r], fc = c->from[r + 1], tr = c->to[r], tc = c->to[r + 1];                     \
        if (!row && !cell && fr == 1 && fc != 1) {                                                                \
            for (int64_t i = rows.begin; i < rows.end; i += TILE) {                                               \
                const int64_t end = i + TILE < rows.end ? i + TILE : rows.end;                                    \
                const int64_t done = sizeof(T) == 4 && tc == 1                                                    \
                    ? tiles((const int32_t *)(x + i), fc, (int32_t *)(y + i * tr), tr, end - i, n) : 0;           \
                for (int64_t j = done; j < n; j++)                                                                \
                    for (int64_t k = i; k < end; k++) y[k * tr + j * tc] = x[k + j * fc];                         \
            }                                                                                                     \
            return;                                                                                               \
        }                                                                                                         \
        for (int64_t i = rows.begin; i < rows.end; i++) {                                                         \
            const T *from = x + (row ? row[i] : i * fr);                                                          \
            T *to = y + i * tr;                                                                                   \
            if (cell)                                                                                             \
                for (int64_t j = 0; j < n; j++) to[j * tc] = from[cell[j]];                                       \
            else if (fc == 1 && tc == 1)                                                                          \
                memcpy(to, from, (size_t)n * sizeof(T));                                                          \
            else                                                                                                  \
                for (int64_t j = 0; j < n; j++) to[j * tc] = from[j * fc];                                        \
        }                                                                                                         \
    }
ROWS(int8_t)
ROWS(int16_t)
ROWS(int32_t)
ROWS(int64_t)

void tapestry_copy(const Copy *c, const Copied *b, int64_t part, int64_t parts) {
    const int64_t r = c->rank - 2, many = c->extent[r];
    if (parts > 1 && c->rank == 2 && many == 1 && !b->places[0] && !b->places[1]) { /* one row, of which threads take pieces */
        const Range cells = share(c->extent[1], part, parts);
        Copy piece = *c;
        piece.extent[1] = cells.end - cells.begin;
        tapestry_copy(&piece, &(Copied){b->x + cells.begin * c->from[1] * c->bytes, b->y + cells.begin * c->to[1] * c->bytes, {0}}, 0, 1);
        return;
    }
    int64_t total = many;
    for (int64_t i = 0; i < r; i++) total *= c->extent[i];
    const Range mine = share(total, part, parts);
    for (int64_t at = mine.begin; at < mine.end;) {
        const int64_t first = at % many, left = mine.end - at;
        const Range rows = {first, first + left < many ? first + left : many};
        int64_t from = 0, to = 0;
        for (int64_t i = r - 1, rest = at / many; i >= 0; rest /= c->extent[i], i--) {
            const int64_t k = rest % c->extent[i];
            from += b->places[i] ? b->places[i][k] : k * c->from[i];
            to += k * c->to[i];
        }
        const char *x = b->x + from * c->bytes;
        char *y = b->y + to * c->bytes;
        switch (c->bytes) {
            case 1: rows_int8_t(c, b, (const int8_t *)x, (int8_t *)y, rows); break;
            case 2: rows_int16_t(c, b, (const int16_t *)x, (int16_t *)y, rows); break;
            case 4: rows_int32_t(c, b, (const int32_t *)x, (int32_t *)y, rows); break;
            default: rows_int64_t(c, b, (const int64_t *)x, (int64_t *)y, rows);
        }
        at += rows.end - rows.begin;
    }
}
