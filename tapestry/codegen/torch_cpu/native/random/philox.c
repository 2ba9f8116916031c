/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11): one output word for each of a run of counters (index, draw, stream).

   Everything is 32 bits wide and without branches, so that the compiler puts a counter in each lane. */

#include <stdint.h>

#define AHEAD 64 /* counters at a time: their ten rounds stay in registers and the first cache */

static inline uint32_t high(uint32_t a, uint32_t b) { return (uint32_t)(((uint64_t)a * b) >> 32); }

void tapestry_philox(uint64_t key, uint32_t stream, uint32_t draw, int64_t word, int64_t count, const int64_t *index, int64_t *out) {
    uint32_t c[4][AHEAD];
    for (int64_t first = 0; first < count; first += AHEAD) {
        int64_t n = count - first < AHEAD ? count - first : AHEAD;
        for (int64_t k = 0; k < n; k++) {
            c[0][k] = (uint32_t)index[first + k];
            c[1][k] = (uint32_t)((uint64_t)index[first + k] >> 32);
            c[2][k] = draw;
            c[3][k] = stream;
        }
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int round = 0; round < 10; round++) {
            for (int64_t k = 0; k < n; k++) {
                uint32_t h0 = high(c[0][k], 0xD2511F53u), h1 = high(c[2][k], 0xCD9E8D57u);
                uint32_t l0 = c[0][k] * 0xD2511F53u, l1 = c[2][k] * 0xCD9E8D57u;
                c[0][k] = h1 ^ c[1][k] ^ k0;
                c[1][k] = l1;
                c[2][k] = h0 ^ c[3][k] ^ k1;
                c[3][k] = l0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (int64_t k = 0; k < n; k++) out[first + k] = (int64_t)c[word & 3][k];
    }
}
