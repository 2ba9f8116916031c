/* Depthwise convolutions of 8-bit integers with adjacent channels by values of 16 bits, summed in i32; padding is in the image. */
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef struct {
    int64_t images, in_h, in_w, channels, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, is_unsigned;
} Depthwise8;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#if defined(__AVX512F__)
enum { WIDE = 16, PLACES = 4 };
#else
enum { WIDE = 8, PLACES = 4 };
#endif

typedef int32_t sums __attribute__((vector_size(WIDE * 4)));
typedef int16_t values __attribute__((vector_size(WIDE * 2), aligned(1), may_alias));
typedef int32_t stored __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));

INLINE sums widened(const void *x, const int is_unsigned) {
#if defined(__AVX512F__)
    __m128i eight = _mm_loadu_si128(x);
    return (sums)(is_unsigned ? _mm512_cvtepu8_epi32(eight) : _mm512_cvtepi8_epi32(eight));
#elif defined(__AVX2__)
    __m128i eight = _mm_loadl_epi64(x);
    return (sums)(is_unsigned ? _mm256_cvtepu8_epi32(eight) : _mm256_cvtepi8_epi32(eight));
#else
    sums out;
    UNROLL for (int i = 0; i < WIDE; i++) out[i] = is_unsigned ? ((const uint8_t *)x)[i] : ((const int8_t *)x)[i];
    return out;
#endif
}

/* Some neighbouring places of a row, all channels. */
INLINE void places(const Depthwise8 *c, const int n, const int is_unsigned, const uint8_t *x, const int16_t *w, int32_t *y) {
    int64_t channels = c->channels, across = c->stride_w * channels, k = 0;
    for (; k + WIDE <= channels; k += WIDE) {
        sums acc[PLACES] = {};
        const int16_t *tap = w + k;
        for (int64_t i = 0; i < c->kernel_h; i++)
            for (int64_t j = 0; j < c->kernel_w; j++, tap += channels) {
                const uint8_t *at = x + (i * c->dilation_h * c->in_w + j * c->dilation_w) * channels + k;
                sums by = __builtin_convertvector(*(const values *)tap, sums);
                UNROLL for (int r = 0; r < n; r++) acc[r] += widened(at + r * across, is_unsigned) * by;
            }
        UNROLL for (int r = 0; r < n; r++) *(stored *)(y + r * channels + k) = acc[r];
    }
    for (; k < channels; k++)
        for (int r = 0; r < n; r++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < c->kernel_h; i++)
                for (int64_t j = 0; j < c->kernel_w; j++) {
                    const uint8_t *at = x + (i * c->dilation_h * c->in_w + j * c->dilation_w) * channels + r * across + k;
                    sum += (is_unsigned ? *at : (int8_t)*at) * w[(i * c->kernel_w + j) * channels + k];
                }
            y[r * channels + k] = sum;
        }
}

INLINE void rows(const Depthwise8 *c, const int is_unsigned, const uint8_t *x, const int16_t *w, int32_t *y) {
    for (int64_t image = 0; image < c->images; image++)
        for (int64_t row = 0; row < c->out_h; row++) {
            const uint8_t *from = x + (image * c->in_h + row * c->stride_h) * c->in_w * c->channels;
            int64_t at = 0, step = c->stride_w * c->channels;
            for (; at + PLACES <= c->out_w; at += PLACES, y += PLACES * c->channels) places(c, PLACES, is_unsigned, from + at * step, w, y);
            for (; at < c->out_w; at++, y += c->channels) places(c, 1, is_unsigned, from + at * step, w, y);
        }
}

/* x: images, height, width, channels. w: taps, channels. y: images, places, channels. None has gaps. */
void tapestry_depthwise8(const Depthwise8 *c, const void *x, const int16_t *w, int32_t *y) {
    if (c->is_unsigned) rows(c, 1, x, w, y);
    else rows(c, 0, x, w, y);
}
