/* What the kernels of convolutions compute, by definition. The proof reads this text; its trials compile it beside the kernels.
 *
 * A weight is as the model has it, before it is packed.
 */
#include "../conv.h"

typedef struct { int64_t feature, channel, row, column; } Taps; /* strides of a weight, in floats */

INLINE float smaller(float a, float b) { return a != a || a < b ? a : b; }
INLINE float larger(float a, float b) { return a != a || a > b ? a : b; }

/* The image at a place, rows `x_row` and columns `pixel` apart; `other` around it. */
static float input(const Conv *c, const Buffers *b, int64_t start, int64_t row, int64_t column, int64_t pixel, float other) {
    int64_t at = start + row * c->x_row + column * pixel;
    return row >= 0 && row < c->in_h && column >= 0 && column < c->in_w ? b->x[at] : other;
}

static void put(const Conv *c, const Buffers *b, int64_t n, int64_t y, int64_t x, int64_t f, float sum) {
    float bias = b->bias ? b->bias[f] : 0.0f;
    float more = b->residual ? b->residual[n * c->r_image + y * c->r_row + x * c->r_pixel + f] : 0.0f;
    float out = sum + bias + more;
    b->y[n * c->y_image + y * c->y_row + x * c->y_pixel + f] = c->clamped ? smaller(larger(out, c->low), c->high) : out;
}

/* `pixel` and `channel`: strides of the image. */
static void contracted(const Conv *c, const Taps *t, const Buffers *b, int64_t pixel, int64_t channel) {
    for (int64_t n = 0; n < c->images; n++)
        for (int64_t y = 0; y < c->out_h; y++)
            for (int64_t x = 0; x < c->out_w; x++)
                for (int64_t f = 0; f < c->features; f++) {
                    float sum = 0.0f;
                    for (int64_t i = 0; i < c->kernel_h; i++)
                        for (int64_t j = 0; j < c->kernel_w; j++)
                            for (int64_t k = 0; k < c->channels; k++) {
                                int64_t row = y * c->stride_h - c->pad_h + i * c->dilation_h;
                                int64_t column = x * c->stride_w - c->pad_w + j * c->dilation_w;
                                float v = input(c, b, n * c->x_image + k * channel, row, column, pixel, 0.0f);
                                sum += v * b->w[f * t->feature + k * t->channel + i * t->row + j * t->column];
                            }
                    put(c, b, n, y, x, f, sum);
                }
}

void contract_conv(const Conv *c, const Taps *t, const Buffers *b) { contracted(c, t, b, c->x_pixel, 1); }

/* Channels are planes. */
void contract_planes(const Conv *c, const Taps *t, const Buffers *b) { contracted(c, t, b, 1, c->x_pixel); }

/* Every feature of the channel of its number. */
void contract_depthwise(const Conv *c, const Taps *t, const Buffers *b) {
    for (int64_t n = 0; n < c->images; n++)
        for (int64_t y = 0; y < c->out_h; y++)
            for (int64_t x = 0; x < c->out_w; x++)
                for (int64_t f = 0; f < c->features; f++) {
                    float sum = 0.0f;
                    for (int64_t i = 0; i < c->kernel_h; i++)
                        for (int64_t j = 0; j < c->kernel_w; j++) {
                            int64_t row = y * c->stride_h - c->pad_h + i * c->dilation_h;
                            int64_t column = x * c->stride_w - c->pad_w + j * c->dilation_w;
                            float v = input(c, b, n * c->x_image + f, row, column, c->x_pixel, 0.0f);
                            sum += v * b->w[f * t->feature + i * t->row + j * t->column];
                        }
                    put(c, b, n, y, x, f, sum);
                }
}

void contract_max_pool(const Conv *c, const Buffers *b) {
    for (int64_t n = 0; n < c->images; n++)
        for (int64_t y = 0; y < c->out_h; y++)
            for (int64_t x = 0; x < c->out_w; x++)
                for (int64_t f = 0; f < c->channels; f++) {
                    float best = -__builtin_inff();
                    for (int64_t i = 0; i < c->kernel_h; i++)
                        for (int64_t j = 0; j < c->kernel_w; j++) {
                            int64_t row = y * c->stride_h - c->pad_h + i * c->dilation_h;
                            int64_t column = x * c->stride_w - c->pad_w + j * c->dilation_w;
                            best = larger(best, input(c, b, n * c->x_image + f, row, column, c->x_pixel, -__builtin_inff()));
                        }
                    b->y[n * c->y_image + y * c->y_row + x * c->y_pixel + f] = best;
                }
}

/* Sums over whole images, divided by `high`. */
void contract_mean(const Conv *c, const Buffers *b) {
    for (int64_t n = 0; n < c->images; n++)
        for (int64_t f = 0; f < c->channels; f++) {
            float sum = 0.0f;
            for (int64_t y = 0; y < c->in_h; y++)
                for (int64_t x = 0; x < c->in_w; x++) sum += b->x[n * c->x_image + y * c->x_row + x * c->x_pixel + f];
            b->y[n * c->channels + f] = sum / c->high;
        }
}
