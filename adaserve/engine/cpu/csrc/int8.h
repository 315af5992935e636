/* Products in 8 bits, for drafts: a draft may be wrong, and some processors add up four such products of each
 * lane in one instruction.
 *
 * Weights are rounded by column and block of DEPTH k, activations by row and block. A block's sum is an exact
 * integer, so a row's result depends on nothing but the row, on every host. */
#ifndef ADA_INT8_H
#define ADA_INT8_H

#include "tile.h"

/* Four k of a column stand side by side, to be added up by one instruction. */
#define QUAD 4
#define ZERO 128 /* activations are stored without a sign, this much above their value */

#if VL == 16 && defined(__AVX512VNNI__)
#define FAST_INT8 1
#elif VL == 8 && defined(__AVXVNNI__)
#define FAST_INT8 1
#else
#define FAST_INT8 0
#endif

/* A packed panel of one block: [quads][PANEL][QUAD] weights, then these. */
typedef struct {
    float scale[PANEL];
    int32_t offset[PANEL]; /* what ZERO adds to a sum, negated */
} panel_ends;

static inline int quads_of(int kc) { return (kc + QUAD - 1) / QUAD; }

/* x, w: four bytes a lane, w's with a sign. */
static ALWAYS_INLINE vi dot_quads(vi sum, vi x, vi w) {
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif VL == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#else
    for (int bit = 0; bit < 32; bit += 8) sum += (x >> bit & 0xff) * (w << (24 - bit) >> 24);
    return sum;
#endif
}

/* `n` numbers to bytes, up to whole quads. Returns what one of them stands for. */
static float quantise(const float *x, int n, uint8_t *bytes) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    vi largest = {0}; /* magnitudes, in the order of their bits: a NaN is the largest */
    int32_t bits = 0;
    float top;
    int i = 0;
    for (; i + VL <= n; i += VL) {
        const vi magnitude = (vi)load(x + i) & 0x7fffffff, above = magnitude > largest;
        largest = (above & magnitude) | (~above & largest);
    }
    for (; i < n; i++) {
        int32_t magnitude;
        memcpy(&magnitude, x + i, sizeof magnitude);
        bits = imax(bits, magnitude & 0x7fffffff);
    }
    for (int lane = 0; lane < VL; lane++) bits = imax(bits, largest[lane]);
    memcpy(&top, &bits, sizeof top);
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (i = 0; i + VL <= n; i += VL) {
        const vi rounded = (vi)(load(x + i) * inverse + magic) + ZERO;
        *(vb *)(bytes + i) = __builtin_convertvector(rounded & 0xff, vb);
    }
    for (; i < n; i++) {
        const float shifted = x[i] * inverse + magic[0];
        int32_t rounded;
        memcpy(&rounded, &shifted, sizeof rounded);
        bytes[i] = (uint8_t)(rounded + ZERO);
    }
    for (; i % QUAD; i++) bytes[i] = ZERO;
    return top / 127.0f;
}

/* One column's `n` weights of a block; `column`: 0 to PANEL - 1 of the panel at `target`. NULL: a column of zeros. */
static void pack_column(const float *weights, int n, int column, char *target) {
    panel_ends *ends = (panel_ends *)(target + (size_t)quads_of(n) * PANEL * QUAD);
    float top = 0;
    int32_t sum = 0;
    for (int k = 0; weights && k < n; k++) top = fmaxf(top, fabsf(weights[k]));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int k = 0; k < quads_of(n) * QUAD; k++) {
        const int8_t rounded = weights && k < n ? (int8_t)lrintf(weights[k] * inverse) : 0;
        target[(size_t)(k / QUAD * PANEL + column) * QUAD + k % QUAD] = (char)rounded;
        sum += rounded;
    }
    ends->scale[column] = top / 127.0f;
    ends->offset[column] = -ZERO * sum;
}

typedef struct {
    const uint8_t *x;   /* rows of activations, DEPTH apart */
    const float *scale; /* one a row */
    const char *w;      /* panels, `panel_bytes` apart */
    size_t panel_bytes;
    int quads;
    float *c;           /* output rows, `ldc` apart */
    size_t ldc;
    const char *ahead;  /* weights to prefetch, as many as are multiplied */
} int8_args;

static ALWAYS_INLINE void int8_body(const int rows, const int mode, const int8_args *a) {
    enum { NW = 2 * NV }; /* vectors of two panels' row */
    vi sums[MAX_ROWS][NW];
    const char *w = a->w, *ahead = a->ahead;
    const size_t panel = (size_t)a->quads * PANEL * QUAD;
    for (int j = 0; j < NW; j++) {
        const panel_ends *ends = (const panel_ends *)(w + j / NV * a->panel_bytes + panel);
        UNROLL for (int r = 0; r < rows; r++) sums[r][j] = *(const vi *)(ends->offset + j % NV * VL);
    }
    for (int k = 0; k < a->quads; k++) {
        vi b[NW];
        UNROLL for (int j = 0; j < NW; j++) {
            b[j] = *(const vi *)(w + j / NV * a->panel_bytes + ((size_t)k * PANEL + j % NV * VL) * QUAD);
            IN_REGISTER(b[j]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t quad;
            memcpy(&quad, a->x + (size_t)r * DEPTH + k * QUAD, sizeof quad);
            const vi value = quad - (vi){0};
            UNROLL for (int j = 0; j < NW; j++) sums[r][j] = dot_quads(sums[r][j], value, b[j]);
        }
        __builtin_prefetch(ahead + (size_t)k * 2 * PANEL * QUAD, 0, 2);
        __builtin_prefetch(ahead + (size_t)k * 2 * PANEL * QUAD + LINE_BYTES, 0, 2);
    }
    for (int j = 0; j < NW; j++) {
        const panel_ends *ends = (const panel_ends *)(w + j / NV * a->panel_bytes + panel);
        const vf scale = load(ends->scale + j % NV * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            float *to = a->c + r * a->ldc + j * VL;
            vf value = __builtin_convertvector(sums[r][j], vf) * (scale * a->scale[r]);
            if (mode == TILE_ADD) value += load(to);
            store(to, value);
        }
    }
}

typedef void (*int8_fn)(const int8_args *);

#define DEFINE_INT8(R, M) \
    static void int8_##R##_##M(const int8_args *a) { int8_body(R, M, a); }
#define NAME_INT8(R, M) int8_##R##_##M,
ROWS_2(DEFINE_INT8, TILE_SET)
ROWS_2(DEFINE_INT8, TILE_ADD)
/* Two panels at once, by mode and rows. */
static const int8_fn int8_tiles[2][PAIR_ROWS] = {{ROWS_2(NAME_INT8, TILE_SET)}, {ROWS_2(NAME_INT8, TILE_ADD)}};

#endif
