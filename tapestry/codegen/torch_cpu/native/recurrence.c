/* Recurrences over a sequence (LSTM, GRU, RNN): at each step a product with the state, and functions of the gates. */
#include <string.h>

#include "conv.h"

enum { MOST_GATES = 4, MOST_PEEPHOLES = 3, ARRAYS = 2 * MOST_GATES + 3 + MOST_PEEPHOLES + 1 };

typedef struct {
    int64_t steps, ways, batch, hidden, gates;
    int64_t early;    /* gates whose product is of the state; that of the others is of `other`, which `before` works out */
    int64_t packed[2]; /* floats of a way's weights of those, and of the others' */
    int64_t reversed; /* whether the first way is from the end; the second always is */
    /* Functions of (what the input adds to each gate, what the state adds, state, cell, other, peepholes) to one more: */
    Cells *before;    /* to `other`, which in an LSTM is the cell of this step; none where there is nothing */
    Cells *after;     /* to the state */
} Recurrence;

/* Arrays of each way one after another: of the gates (steps, batch, gates, hidden), weights and biases packed. */
typedef struct {
    const float *gates, *early, *late, *bias, *peepholes, *state, *cell;
    float *shown, *last, *last_cell;
} Sequences;

static void product_of(const Recurrence *r, Range rows, int64_t gates, const float *x, const float *w, const float *bias, float *y) {
    const Conv c = product(rows.end - rows.begin, r->hidden, gates * r->hidden, r->hidden, r->gates * r->hidden);
    tapestry_conv(&c, &(Buffers){.x = x, .w = w, .bias = bias, .y = y}, 0, 1);
}

static void walk(const Recurrence *r, const Sequences *s, int64_t way, Range rows) {
    const int64_t n = r->hidden, wide = r->gates * n, many = rows.end - rows.begin, first = way * r->batch + rows.begin;
    const int64_t backwards = way ? 1 : r->reversed, late = r->gates - r->early;
    float *own = tapestry_scratch(many * (wide + 3 * n));
    float *state = own + many * wide, *cell = state + many * n, *other = cell + many * n;
    const size_t bytes = (size_t)(many * n) * sizeof(float);
    if (s->state) memcpy(state, s->state + first * n, bytes);
    else memset(state, 0, bytes);
    if (s->cell) memcpy(cell, s->cell + first * n, bytes);
    else memset(cell, 0, bytes);
    for (int64_t at = 0; at < r->steps; at++) {
        const int64_t t = backwards ? r->steps - 1 - at : at, place = ((t * r->ways + way) * r->batch + rows.begin) * n;
        const float *given = s->gates + ((way * r->steps + t) * r->batch + rows.begin) * wide;
        const float *bias = s->bias ? s->bias + way * wide : 0;
        float *shown = s->shown + place;
        for (int stage = 0; stage < 2; stage++) {
            Cells *f = stage ? r->after : r->before;
            if (!stage) product_of(r, rows, r->early, state, s->early + way * r->packed[0], bias, own);
            else if (late) product_of(r, rows, late, other, s->late + way * r->packed[1], 0, own + r->early * n);
            for (int64_t b = 0; f && b < many; b++) {
                void *arrays[ARRAYS] = {0};
                for (int64_t g = 0; g < r->gates; g++) {
                    arrays[g] = (float *)given + b * wide + g * n;
                    arrays[MOST_GATES + g] = own + b * wide + g * n;
                }
                arrays[2 * MOST_GATES] = state + b * n, arrays[2 * MOST_GATES + 1] = cell + b * n;
                arrays[2 * MOST_GATES + 2] = other + b * n;
                for (int64_t p = 0; s->peepholes && p < MOST_PEEPHOLES; p++)
                    arrays[2 * MOST_GATES + 3 + p] = (float *)s->peepholes + (way * MOST_PEEPHOLES + p) * n;
                arrays[ARRAYS - 1] = stage ? shown + b * n : other + b * n;
                if (!stage) arrays[2 * MOST_GATES + 2] = 0;
                f(&n, arrays, 0, 1);
            }
        }
        memcpy(state, shown, bytes);
        float *before = cell;
        cell = other, other = before;
    }
    if (s->last) memcpy(s->last + first * n, state, bytes);
    if (s->last_cell) memcpy(s->last_cell + first * n, cell, bytes);
}

void tapestry_recurrence(const Recurrence *r, const Sequences *s, int64_t part, int64_t parts) {
    const Range mine = share(r->ways * r->batch, part, parts);
    for (int64_t at = mine.begin; at < mine.end;) {
        const int64_t way = at / r->batch, end = (way + 1) * r->batch < mine.end ? (way + 1) * r->batch : mine.end;
        walk(r, s, way, (Range){at - way * r->batch, end - way * r->batch});
        at = end;
    }
}
