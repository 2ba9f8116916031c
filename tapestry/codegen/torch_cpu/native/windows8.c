/* Windows of a padded image of bytes, channels adjacent, side by side as rows of a matrix. */
#include <stdint.h>

typedef struct {
    int64_t in_w, channels, rows, out_w, kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, own;
} Windows8;

#define COPY(N, AT) __builtin_memcpy(y + (AT), x + (AT), N)

/* n bytes, the last ones twice where that saves steps. */
static inline void copy(uint8_t *restrict y, const uint8_t *restrict x, int64_t n) {
    if (n >= 16) {
        for (int64_t i = 0; i + 16 <= n; i += 16) COPY(16, i);
        COPY(16, n - 16);
    } else if (n >= 8) COPY(8, 0), COPY(8, n - 8);
    else if (n >= 4) COPY(4, 0), COPY(4, n - 4);
    else
        for (int64_t i = 0; i < n; i++) y[i] = x[i];
}

/* x: the first channel of a group at the first of `rows` rows of places; `own` channels are the group's. */
void tapestry_windows8(const Windows8 *c, const uint8_t *x, uint8_t *y) {
    int joined = c->own == c->channels && c->dilation_w == 1;
    int64_t pieces = joined ? 1 : c->kernel_w, run = joined ? c->kernel_w * c->own : c->own;
    int64_t across = c->dilation_w * c->channels, down = c->dilation_h * c->in_w * c->channels;
    for (int64_t row = 0; row < c->rows; row++)
        for (int64_t place = 0; place < c->out_w; place++) {
            const uint8_t *from = x + (row * c->stride_h * c->in_w + place * c->stride_w) * c->channels;
            for (int64_t i = 0; i < c->kernel_h; i++)
                for (int64_t j = 0; j < pieces; j++, y += run) copy(y, from + i * down + j * across, run);
        }
}
