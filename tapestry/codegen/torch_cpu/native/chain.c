/* Convolutions that read each other row by row, as one: each goes on as far as the next needs, so that of what lies between them
 * only some rows exist at a time, in the cache. Every output is made as it would be alone: by the same kernel, in the same order.
 */
#include "conv.h"

enum { DENSE, PLANES, DEPTHWISE }; /* which kernel; behind another one only convolutions of single pixels, and depthwise ones */

typedef struct {
    const Conv *sizes;
    const Buffers *buffers;
    int64_t kind, held; /* rows of the output that are kept: row r at r mod `held`; all of the last one's */
} Link;

typedef struct {
    int64_t links, rows; /* rows of the last output that are made at once */
    Link link[];
} Chain;

typedef struct { int64_t image, row, end, held; } Rows; /* of an output; and how many rows of the input are kept */

/* Rows of the output that follow each other, as do the rows of the input that a dense kernel reads of a few. */
static void make(const Link *l, const Conv *c, const Buffers *b, Rows r) {
    if (l->kind == PLANES) {
        tapestry_planes_rows(c, b, r.image, r.row, r.end);
        return;
    }
    if (l->kind == DEPTHWISE) {
        tapestry_depthwise_rows(c, b, r.image, r.row, r.end, r.held);
        return;
    }
    Conv part = *c;
    Buffers at = *b;
    part.images = 1, part.out_h = r.end - r.row;
    at.x += r.image * c->x_image, at.y += r.image * c->y_image + r.row * c->y_row;
    if (at.residual) at.residual += r.image * c->r_image + r.row * c->r_row;
    if (c->kernel_h == 1 && c->stride_h == 1 && !c->pad_h) part.in_h = part.out_h, at.x += r.row % r.held * c->x_row;
    else part.pad_h -= r.row * c->stride_h;
    tapestry_conv(&part, &at, 0, 1);
}

static void advance(const Chain *a, int64_t i, int64_t *done, int64_t image, int64_t end) {
    const Link *l = a->link + i;
    const Conv *c = l->sizes;
    int64_t held = i ? a->link[i - 1].held : c->in_h;
    if (i) {
        int64_t until = (end - 1) * c->stride_h - c->pad_h + (c->kernel_h - 1) * c->dilation_h + 1;
        if (until > c->in_h) until = c->in_h;
        if (until > done[i - 1]) advance(a, i - 1, done, image, until);
    }
    Conv sizes = *c;
    if (i) sizes.x_image = 0;
    if (i + 1 < a->links) sizes.y_image = 0;
    while (done[i] < end) { /* up to where the output, or what a kernel reads straight on, begins again */
        int64_t row = done[i], stop = row - row % l->held + l->held;
        if (l->kind == DENSE && held < c->in_h && row - row % held + held < stop) stop = row - row % held + held;
        if (stop > end) stop = end;
        Buffers b = *l->buffers;
        b.y -= (row - row % l->held) * c->y_row;
        make(l, &sizes, &b, (Rows){image, row, stop, held});
        done[i] = stop;
    }
}

/* One thread's: what lies between two of them is in one place. */
void tapestry_chain(const Chain *a, const void *nothing, int64_t part, int64_t parts) {
    (void)nothing, (void)part, (void)parts;
    int64_t last = a->links - 1, done[a->links], rows = a->link[last].sizes->out_h;
    for (int64_t image = 0; image < a->link[last].sizes->images; image++) {
        for (int64_t i = 0; i < a->links; i++) done[i] = 0;
        while (done[last] < rows) advance(a, last, done, image, done[last] + a->rows < rows ? done[last] + a->rows : rows);
    }
}
