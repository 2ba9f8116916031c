/* A tile of a product: ROWS rows of x by NV vectors of packed weights, all of it in registers.
 *
 * Vectors are GCC's and Clang's own, so that one source does for AVX-512, AVX2, NEON and SSE.
 */
#ifndef TAPESTRY_TILE_H
#define TAPESTRY_TILE_H

#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
enum { VL = 16, WIDEST = 4 };
#define SHAPES(F) F(8, 1) F(7, 1) F(6, 1) F(5, 1) F(3, 1) F(2, 1) F(1, 1) \
                  F(8, 2) F(7, 2) F(6, 2) F(5, 2) F(3, 2) F(2, 2) F(1, 2) \
                  F(8, 3) F(7, 3) F(6, 3) F(5, 3) F(3, 3) F(2, 3) F(1, 3) F(6, 4) F(5, 4) F(4, 4) F(3, 4) F(2, 4) F(1, 4)
static const int TALLEST[5] = {0, 8, 8, 8, 6};
#else
#if defined(__AVX__)
enum { VL = 8, WIDEST = 2 };
#else
enum { VL = 4, WIDEST = 2 };
#endif
#define SHAPES(F) F(8, 1) F(7, 1) F(6, 1) F(5, 1) F(4, 1) F(3, 1) F(2, 1) F(1, 1) \
                  F(6, 2) F(5, 2) F(4, 2) F(3, 2) F(2, 2) F(1, 2)
static const int TALLEST[3] = {0, 8, 6};
#endif

enum { MOST_ROWS = 8, DEPTH = 512, AHEAD = 24 }; /* rows of the tallest tile; steps of a block of the reduced dimension, and of fetching */

typedef float vec __attribute__((vector_size(VL * sizeof(float))));
typedef int32_t mask __attribute__((vector_size(VL * sizeof(float))));
typedef vec loose __attribute__((aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec all(float v) { return v - (vec){}; }
INLINE float sum_of(vec v) {
    float s = 0;
    for (int i = 0; i < VL; i++) s += v[i];
    return s;
}

/* A vector of which only the first lanes count: all of them unless it is the last of a row. */
#if defined(__AVX512F__)
typedef __mmask16 lanes;
INLINE lanes first_lanes(int64_t n) { return n >= VL ? 0xffff : (lanes)((1u << n) - 1); }
INLINE vec load_some(const float *p, lanes m) { return (vec)_mm512_maskz_loadu_ps(m, p); }
INLINE void store_some(float *p, vec v, lanes m) { _mm512_mask_storeu_ps(p, m, (__m512)v); }
#else
typedef int64_t lanes;
INLINE lanes first_lanes(int64_t n) { return n < VL ? n : VL; }
#if defined(__AVX2__)
static const int32_t FIRST[2 * VL] = {-1, -1, -1, -1, -1, -1, -1, -1};
INLINE __m256i first_of(lanes n) { return _mm256_loadu_si256((const __m256i *)(FIRST + VL - n)); }
#endif
INLINE vec load_some(const float *p, lanes n) {
    if (n == VL) return load(p);
#if defined(__AVX2__)
    return (vec)_mm256_maskload_ps(p, first_of(n));
#endif
    vec v = {};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}
INLINE void store_some(float *p, vec v, lanes n) {
    if (n == VL) store(p, v);
    else for (int i = 0; i < n; i++) p[i] = v[i];
}
#endif

/* Numbers outside are moved to the bound; a NaN stays one (of two operands, x86 gives the second if one is a NaN). */
#if defined(__AVX512F__)
INLINE vec clamp(vec v, vec lo, vec hi) { return (vec)_mm512_min_ps((__m512)hi, _mm512_max_ps((__m512)lo, (__m512)v)); }
#elif defined(__AVX__)
INLINE vec clamp(vec v, vec lo, vec hi) { return (vec)_mm256_min_ps((__m256)hi, _mm256_max_ps((__m256)lo, (__m256)v)); }
#else
INLINE vec pick(mask m, vec yes, vec no) { return (vec)(((mask)yes & m) | ((mask)no & ~m)); }
INLINE vec clamp(vec v, vec lo, vec hi) {
    v = pick(v < lo, lo, v);
    return pick(v > hi, hi, v);
}
#endif

/* a * b + c, rounded once wherever the machine can, so that every kernel of a convolution gives the same bits. */
#if defined(__AVX512F__)
INLINE vec fma_of(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX__) && defined(__FMA__)
INLINE vec fma_of(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
INLINE vec fma_of(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vec fma_of(vec a, vec b, vec c) { return a * b + c; }
#endif

/* acc += rows of x times packed weights, n steps deep; few rows wait for the weights, which are fetched ahead. */
INLINE void multiply(const int rows, const int nv, const float *const *x, const float *w, int64_t n, vec acc[][WIDEST]) {
    for (int64_t k = 0; k < n; k++, w += nv * VL) {
        vec b[WIDEST];
        if (rows <= 4) UNROLL for (int v = 0; v < nv; v++) __builtin_prefetch(w + (v + AHEAD * nv) * VL, 0, 3);
        UNROLL for (int v = 0; v < nv; v++) b[v] = load(w + v * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vec a = all(x[r][k]);
            UNROLL for (int v = 0; v < nv; v++) acc[r][v] = fma_of(a, b[v], acc[r][v]);
        }
    }
}

/* The widths of the panels that `vectors` vectors of features are packed in: as even as they can be. */
INLINE int64_t panels(int64_t vectors) { return (vectors + WIDEST - 1) / WIDEST; }
INLINE int64_t panel_start(int64_t vectors, int64_t i) { return i * vectors / panels(vectors); }

#endif
