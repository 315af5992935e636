/* The inner product kernel: a few rows of x against 16 or 32 columns of packed weights.
 *
 * Every output is one chain of fused multiply-adds over k, in order. Hence a row's result does not depend on
 * how many rows or columns share its tile, which makes a forward reproducible across batch shapes. */
#ifndef ADA_TILE_H
#define ADA_TILE_H

#include "simd.h"

static inline int imin(int a, int b) { return a < b ? a : b; }
static inline int imax(int a, int b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

#define PANEL 16            /* columns of a packed panel */
#define DEPTH 256           /* k of a packed block */
#define LINE_BYTES 64       /* of a cache line */
#define NV (PANEL / VL)     /* vectors of a panel's row */

/* Rows per tile, by registers: 2 panels x 12 rows in 32 zmm, 1 x 6 in 16 ymm or 32 NEON registers. Few rows
 * leave too few independent chains to hide the latency of an FMA: they take two panels at once. */
#if VL == 16
#define MAX_ROWS 12
#define PAIR_ROWS 12
#else
#define MAX_ROWS 6
#define PAIR_ROWS 2
#endif

/* What products prefetch, by vectors, since these set the time that a panel leaves for it: from how many rows on,
 * how many bytes a single tile looks ahead (0: to the panel after its own), and at least how many tiles three or
 * more rows are cut into. The first tile takes a panel from L2 to L1, where the others find it. */
#if VL == 16
#define PREFETCH_ROWS 1
#define LEAD 0
#define MIN_TILES 2
#else
#define PREFETCH_ROWS 3
#define LEAD 1536
#define MIN_TILES 1
#endif

/* Keeps a vector out of the memory operands of its several uses, each of which would load it again. */
#if defined(__x86_64__) && VL <= HOST_VL
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v) (void)(v)
#endif

typedef struct {
    const float *x;  /* rows of activations, `ldx` apart */
    size_t ldx;
    const void *w;   /* row k of panel p starts at element p * panel_stride + k * ldw */
    size_t ldw, panel_stride;
    int depth;       /* number of k */
    float *c;        /* output rows, `ldc` apart */
    size_t ldc;
    const char *ahead; /* weights to prefetch while this tile computes */
    size_t ahead_step; /* bytes per k */
} tile_args;

/* What becomes of c: overwritten, increased by the sum, or taken as the start of the chain. */
enum { TILE_SET = 0, TILE_ADD = 1, TILE_CHAIN = 2, NUM_TILE_MODES = 3 };

/* Where a packed row keeps a column. bf16 rows pair columns i and i + 8 in one 32-bit word, from which a shift and
 * a mask make two whole vectors; wider vectors than half a row do better with a plain conversion. */
static ALWAYS_INLINE int packed_lane(int type, int column) {
    if (type != BF16 || VL == 16) return column;
    return column % 8 * 2 + column / 8;
}

/* Vector `j` of a packed row. */
static ALWAYS_INLINE vf packed_vector(int type, const char *row, int j) {
    if (type != BF16 || VL == 16) return load_as_float(type, row, j * VL);
    vi words = *(const vi *)(row + j * VL % 8 * 4);
    return j * VL < 8 ? (vf)(words << 16) : (vf)(words & (int32_t)0xffff0000);
}

static ALWAYS_INLINE void tile_body(const int rows, const int panels, const int type, const int mode,
                                    const tile_args *a) {
    vf acc[MAX_ROWS][2 * NV];
    const int nv = panels * NV;
    const float *x = a->x;
    const size_t ldx = a->ldx, ldw = a->ldw, ldc = a->ldc, ahead_step = a->ahead_step;
    const size_t bytes = type == FP32 ? 4 : 2, panel_bytes = a->panel_stride * bytes;
    const char *w = a->w, *ahead = a->ahead;
    float *c = a->c;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < nv; j++)
            if (mode == TILE_CHAIN) acc[r][j] = load(c + r * ldc + j * VL);
            else acc[r][j] = splat(0.0f);
    for (int k = 0; k < a->depth; k++) {
        vf b[2 * NV];
        UNROLL for (int j = 0; j < nv; j++) {
            b[j] = packed_vector(type, w + (j / NV) * panel_bytes, j % NV);
            IN_REGISTER(b[j]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf value = splat(x[r * ldx + k]);
            UNROLL for (int j = 0; j < nv; j++) acc[r][j] += value * b[j];
        }
        /* Into L2: into L1 it would push out what this panel still needs. */
        __builtin_prefetch(ahead, 0, 2);
        if (panels * PANEL * bytes > 64) __builtin_prefetch(ahead + 64, 0, 2);
        ahead += ahead_step;
        w += ldw * bytes;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < nv; j++) {
            if (mode == TILE_ADD) acc[r][j] += load(c + r * ldc + j * VL);
            store(c + r * ldc + j * VL, acc[r][j]);
        }
}

typedef void (*tile_fn)(const tile_args *);

#define DEFINE_TILE(R, P, T, M) \
    static void tile_##R##_##P##_##T##_##M(const tile_args *a) { tile_body(R, P, T, M, a); }

/* Rows of tiles that take one panel, and of those that take two. */
#define ROWS_TO_2(F, ...) F(1, __VA_ARGS__) F(2, __VA_ARGS__)
#define ROWS_TO_6(F, ...) \
    ROWS_TO_2(F, __VA_ARGS__) F(3, __VA_ARGS__) F(4, __VA_ARGS__) F(5, __VA_ARGS__) F(6, __VA_ARGS__)
#if VL == 16
#define ROWS_TO_12(F, ...) \
    ROWS_TO_6(F, __VA_ARGS__) F(7, __VA_ARGS__) F(8, __VA_ARGS__) F(9, __VA_ARGS__) \
    F(10, __VA_ARGS__) F(11, __VA_ARGS__) F(12, __VA_ARGS__)
#define ROWS_1 ROWS_TO_12
#define ROWS_2 ROWS_TO_12
#else
#define ROWS_1 ROWS_TO_6
#define ROWS_2 ROWS_TO_2
#endif

/* Products set or add, from every storage; attention also chains, over fp32 scratch. */
#define FOR_KINDS(F) \
    F(1, FP32, TILE_SET) F(1, FP32, TILE_ADD) F(1, FP32, TILE_CHAIN) F(1, FP16, TILE_SET) F(1, FP16, TILE_ADD) \
    F(1, BF16, TILE_SET) F(1, BF16, TILE_ADD) F(2, FP32, TILE_SET) F(2, FP32, TILE_ADD) F(2, FP32, TILE_CHAIN) \
    F(2, FP16, TILE_SET) F(2, FP16, TILE_ADD) F(2, BF16, TILE_SET) F(2, BF16, TILE_ADD)

#define DEFINE_KIND(P, T, M) ROWS_##P(DEFINE_TILE, P, T, M)
FOR_KINDS(DEFINE_KIND)

#define NAME_TILE(R, P, T, M) tile_##R##_##P##_##T##_##M,
#define FILL_KIND(P, T, M) [P - 1][T][M] = {ROWS_##P(NAME_TILE, P, T, M)},
static const tile_fn tiles[2][NUM_TYPES][NUM_TILE_MODES][MAX_ROWS] = {FOR_KINDS(FILL_KIND)};

#endif
