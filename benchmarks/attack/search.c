/* Try every 32-bit seed of a Mersenne Twister against the first numbers of several torch.randn tensors.
 *
 * A tensor's numbers k and k + 8 are one Box-Muller pair, made from the low 24 bits of outputs k and k + 8. The caller
 * gives the ranges in which those bits lie for PAIRS pairs of each tensor. Seeds that fit all are printed as
 * "target seed". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { LANES = 32, STEP = 397, PAIRS = 4, HEAD = 8 + PAIRS, TARGETS = 64 };

static inline uint32_t temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static inline uint32_t output(uint32_t here, uint32_t next, uint32_t far) {
    uint32_t y = (here & 0x80000000u) | (next & 0x7fffffffu);
    return temper(far ^ (y >> 1) ^ ((next & 1u) ? 0x9908b0dfu : 0u)) & 0xffffffu;
}

static inline int within(uint32_t value, const uint32_t *range) {
    return ((value - range[0]) & 0xffffffu) <= range[1]; /* angles wrap around */
}

int main(int argc, char **argv) {
    uint64_t first = strtoull(argv[1], 0, 10), last = strtoull(argv[2], 0, 10);
    int targets = (argc - 3) / (4 * PAIRS);
    uint32_t range[TARGETS][PAIRS][4]; /* start and width of output k, then of output k + 8 */
    if (targets > TARGETS) return 1;
    for (int t = 0; t < targets; t++)
        for (int k = 0; k < 4 * PAIRS; k++) range[t][k / 4][k % 4] = (uint32_t)strtoul(argv[3 + 4 * PAIRS * t + k], 0, 10);
    static uint32_t head[HEAD + 1][LANES], tail[HEAD + 1][LANES]; /* state words from 0 and from STEP on */
    for (uint64_t seed = first; seed < last; seed += LANES) {
        uint32_t x[LANES];
        for (int l = 0; l < LANES; l++) head[0][l] = x[l] = (uint32_t)(seed + l);
        for (uint32_t i = 1; i <= HEAD; i++)
            for (int l = 0; l < LANES; l++) head[i][l] = x[l] = 1812433253u * (x[l] ^ (x[l] >> 30)) + i;
        for (uint32_t i = HEAD + 1; i < STEP; i++)
            for (int l = 0; l < LANES; l++) x[l] = 1812433253u * (x[l] ^ (x[l] >> 30)) + i;
        for (uint32_t i = 0; i < HEAD; i++)
            for (int l = 0; l < LANES; l++) tail[i][l] = x[l] = 1812433253u * (x[l] ^ (x[l] >> 30)) + STEP + i;
        for (int l = 0; l < LANES; l++) {
            uint32_t radius = output(head[0][l], head[1][l], tail[0][l]);
            uint32_t turn = output(head[8][l], head[9][l], tail[8][l]);
            for (int t = 0; t < targets; t++) {
                if (!within(radius, range[t][0]) || !within(turn, range[t][0] + 2)) continue;
                int fits = 1;
                for (int k = 1; k < PAIRS && fits; k++)
                    fits = within(output(head[k][l], head[k + 1][l], tail[k][l]), range[t][k]) &&
                           within(output(head[k + 8][l], head[k + 9][l], tail[k + 8][l]), range[t][k] + 2);
                if (fits) printf("%d %llu\n", t, (unsigned long long)(seed + l));
            }
        }
    }
    return 0;
}
