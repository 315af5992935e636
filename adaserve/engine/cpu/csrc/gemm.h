/* y = x W^T with W packed once into the order in which the threads stream it.
 *
 * Packed order: group of `group_panels` panels > block of DEPTH k > panel > k > 16 columns. Each group is one
 * contiguous read; its sums stay in a thread's scratch until the epilogue. For few rows the products are bound
 * by that read, so tiles prefetch (tile.h): a single one ahead of itself, several that share a panel the next one. */
#ifndef ADA_GEMM_H
#define ADA_GEMM_H

#include <stdlib.h>
#include <sys/mman.h>

#include "int8.h"
#include "team.h"

#define ROW_BLOCK 120   /* rows that share one pass over the weights */
#define MAX_GROUP 8     /* panels per group */
#define HELD_BLOCKS 4   /* of activations in 8 bits */

typedef struct {
    int columns, depth, type; /* W is [columns, depth] */
    int panels, group_panels, groups;
    int gated;                /* panels alternate between gate and up columns */
    char *data;
    size_t bytes;
    float *bias;              /* [panels * PANEL] or NULL */
} matrix;

/* Rows of activations, by blocks of DEPTH columns: element (row, k) at
 * data[k / DEPTH * block + row * ld + k % DEPTH]. Row-major is block = DEPTH, ld = columns. */
typedef struct {
    const float *data;
    size_t ld, block;
} operand;

enum { EPILOGUE_STORE, EPILOGUE_ADD, EPILOGUE_SILU };

typedef struct {
    int kind;
    float *y;     /* STORE, ADD: row-major, `ld` apart. SILU: an operand's data */
    size_t ld, block;
} epilogue;

/* Rows of one block of DEPTH k in 8 bits. */
typedef struct {
    int block, row0; /* block: -1 where there are none */
    float scale[ROW_BLOCK];
    uint8_t bytes[ROW_BLOCK * DEPTH];
} quantised;

typedef struct {
    float sums[ROW_BLOCK * MAX_GROUP * PANEL];
    quantised held[HELD_BLOCKS];
} gemm_scratch;

/* ---- packing ---- */

static char *huge_alloc(size_t bytes) {
    const size_t page = (size_t)2 << 20;
    char *data = aligned_alloc(page, (bytes + page - 1) / page * page + page);
#ifdef MADV_HUGEPAGE
    if (data) madvise(data, (bytes + page - 1) / page * page, MADV_HUGEPAGE);
#endif
    return data;
}

/* Source row of a packed column, or -1 for padding. */
static int source_row(const matrix *m, int column) {
    int half = m->columns / 2, panel = column / PANEL, lane = column % PANEL;
    if (!m->gated) return column < m->columns ? column : -1;
    int i = panel / 2 * PANEL + lane;
    return i < half ? i + panel % 2 * half : -1;
}

/* Of a packed panel of kc k. */
static inline size_t panel_bytes(int type, int kc) {
    if (type == INT8) return (size_t)quads_of(kc) * PANEL * QUAD + sizeof(panel_ends);
    return (size_t)kc * PANEL * type_bytes[type];
}

static size_t group_bytes(const matrix *m) {
    size_t total = 0;
    for (int k0 = 0; k0 < m->depth; k0 += DEPTH) total += panel_bytes(m->type, imin(DEPTH, m->depth - k0));
    return total * m->group_panels;
}

/* `source` holds fp32 where the panel is to be of 8 bits, else what the panel holds. */
static void pack_panel(const matrix *m, const char *source, int panel, int k0, int kc, char *target) {
    if (m->type == INT8) {
        for (int lane = 0; lane < PANEL; lane++) {
            const int row = source_row(m, panel * PANEL + lane);
            pack_column(row < 0 ? NULL : (const float *)source + (size_t)row * m->depth + k0, kc, lane, target);
        }
        return;
    }
    const size_t bytes = type_bytes[m->type];
    for (int lane = 0; lane < PANEL; lane++) {
        int row = source_row(m, panel * PANEL + lane);
        const char *from = source + ((size_t)row * m->depth + k0) * bytes;
        char *to = target + packed_lane(m->type, lane) * bytes;
        for (int k = 0; k < kc; k++, to += PANEL * bytes) {
            if (row < 0) memset(to, 0, bytes);
            else memcpy(to, from + k * bytes, bytes);
        }
    }
}

static void pack_matrix(matrix *m, const char *source) {
    char *target = m->data;
    for (int group = 0; group < m->groups; group++)
        for (int k0 = 0; k0 < m->depth; k0 += DEPTH) {
            int kc = imin(DEPTH, m->depth - k0);
            for (int p = 0; p < m->group_panels; p++) {
                pack_panel(m, source, group * m->group_panels + p, k0, kc, target);
                target += panel_bytes(m->type, kc);
            }
        }
}

/* Wide groups read x less often; the threads need enough groups to share. */
static int choose_group(int panels, int threads) {
    for (int size = MAX_GROUP; size > 2; size /= 2) {
        int groups = ceil_div(panels, size);
        if (groups >= 8 * threads || (panels % size == 0 && groups % threads == 0)) return size;
    }
    return 2;
}

static int matrix_init(matrix *m, const void *source, const float *bias, int columns, int depth, int type,
                       int gated, int threads) {
    int panels = gated ? 2 * ceil_div(columns / 2, PANEL) : ceil_div(columns, PANEL);
    int size = choose_group(panels, threads);
    *m = (matrix){.columns = columns, .depth = depth, .type = type, .group_panels = size, .gated = gated};
    m->groups = ceil_div(panels, size);
    m->panels = m->groups * size;
    m->bytes = m->groups * group_bytes(m);
    m->data = huge_alloc(m->bytes);
    if (!m->data) return 0;
    pack_matrix(m, source);
    if (bias) {
        m->bias = calloc((size_t)m->panels * PANEL, sizeof(float));
        if (!m->bias) return 0;
        memcpy(m->bias, bias, sizeof(float) * columns);
    }
    return 1;
}

static void matrix_free(matrix *m) {
    free(m->data);
    free(m->bias);
}

/* ---- products ---- */

/* One panel (or two neighbours) of one k block against all rows, in evenly sized row tiles, while the next
 * `bytes` of packed weights are fetched. */
static void multiply(tile_args a, const tile_fn *table, int rows, int row_tiles, const char *next, size_t bytes) {
    const float *x = a.x;
    float *c = a.c;
    for (int i = 0; i < row_tiles; i++) {
        int row = rows * i / row_tiles, count = rows * (i + 1) / row_tiles - row;
        a.x = x + row * a.ldx;
        a.c = c + row * a.ldc;
        a.ahead = next + bytes * i / row_tiles;
        table[count - 1](&a);
    }
}

static void multiply_block(const matrix *m, const char *w, int kc, const float *x, size_t ldx, int rows,
                           int mode, gemm_scratch *s) {
    const int row_tiles = imax(ceil_div(rows, MAX_ROWS), rows > 2 ? MIN_TILES : 1);
    const int at_once = ceil_div(rows, row_tiles) <= PAIR_ROWS ? 2 : 1;
    const size_t bytes = (size_t)at_once * kc * PANEL * type_bytes[m->type];
    const tile_fn *table = tiles[at_once - 1][m->type][mode];
    tile_args a = {.x = x, .ldx = ldx, .ldw = PANEL, .panel_stride = (size_t)kc * PANEL, .depth = kc,
                   .ldc = (size_t)m->group_panels * PANEL};
    const int prefetch = rows >= PREFETCH_ROWS;
    if (prefetch) a.ahead_step = bytes / (kc * row_tiles);
    for (int p = 0; p < m->group_panels; p += at_once, w += bytes) {
        a.w = w;
        a.c = s->sums + p * PANEL;
        const char *next = row_tiles == 1 && LEAD ? w + LEAD : w + bytes;
        multiply(a, table, rows, row_tiles, prefetch ? next : w, prefetch ? bytes : 0);
    }
}

static void finish_silu(const matrix *m, const epilogue *e, const float *sums, size_t ld, int row0, int rows,
                        int column0) {
    for (int p = 0; p < m->group_panels; p += 2) {
        int column = (column0 + p * PANEL) / 2;
        if (column >= m->columns / 2) return;
        float *out = e->y + (size_t)(column / DEPTH) * e->block + column % DEPTH;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL; j += VL) {
                const float *pair = sums + r * ld + p * PANEL + j;
                vf gate = load(pair), up = load(pair + PANEL);
                store(out + (row0 + r) * e->ld + j, gate * up / (1.0f + vexp_bounded(-gate)));
            }
    }
}

static void finish_rows(const matrix *m, const epilogue *e, const float *sums, size_t ld, int row0, int rows,
                        int column0) {
    int count = imin(m->group_panels * PANEL, m->columns - column0);
    const float *bias = m->bias ? m->bias + column0 : NULL;
    for (int r = 0; r < rows; r++) {
        const float *from = sums + r * ld;
        float *to = e->y + (row0 + r) * e->ld + column0;
        for (int j = 0; j < count; j++) {
            float value = bias ? from[j] + bias[j] : from[j];
            to[j] = e->kind == EPILOGUE_ADD ? to[j] + value : value;
        }
    }
}

static const quantised *in_8_bits(operand x, int block, int kc, int row0, int rows, gemm_scratch *s) {
    quantised *q = &s->held[block % HELD_BLOCKS];
    if (q->block == block && q->row0 == row0) return q;
    const float *from = x.data + block * x.block + row0 * x.ld;
    for (int i = 0; i < rows; i++) q->scale[i] = quantise(from + i * x.ld, kc, q->bytes + i * DEPTH);
    q->block = block;
    q->row0 = row0;
    return q;
}

/* As `multiply_block`, in 8 bits. */
static void multiply_int8(const matrix *m, const char *w, int kc, const quantised *x, int rows, int mode,
                          gemm_scratch *s) {
    const int row_tiles = ceil_div(rows, PAIR_ROWS);
    int8_args a = {.panel_bytes = panel_bytes(INT8, kc), .quads = quads_of(kc), .ldc = (size_t)m->group_panels * PANEL};
    for (int p = 0; p < m->group_panels; p += 2, w += 2 * a.panel_bytes) {
        a.w = w;
        for (int i = 0; i < row_tiles; i++) {
            const int row = rows * i / row_tiles, count = rows * (i + 1) / row_tiles - row;
            a.x = x->bytes + row * DEPTH;
            a.scale = x->scale + row;
            a.c = s->sums + p * PANEL + row * a.ldc;
            a.ahead = i ? w : w + 2 * a.panel_bytes;
            int8_tiles[mode][count - 1](&a);
        }
    }
}

/* Into the scratch; early at its end once somebody else has stored the product. */
static void multiply_group(const matrix *m, int group, operand x, int row0, int rows, gemm_scratch *s,
                           const uint8_t *taken) {
    const char *w = m->data + group * (m->bytes / m->groups);
    for (int k0 = 0; k0 < m->depth && !is_taken(taken); k0 += DEPTH) {
        const int kc = imin(DEPTH, m->depth - k0), mode = k0 ? TILE_ADD : TILE_SET;
        const float *block = x.data + k0 / DEPTH * x.block + row0 * x.ld;
        if (m->type == INT8) multiply_int8(m, w, kc, in_8_bits(x, k0 / DEPTH, kc, row0, rows, s), rows, mode, s);
        else multiply_block(m, w, kc, block, x.ld, rows, mode, s);
        w += m->group_panels * panel_bytes(m->type, kc);
    }
}

typedef struct {
    const matrix *m;
    operand x;
    int rows, blocks;
    epilogue e;
    gemm_scratch *scratch;
} gemm_job;

static void gemm_rows(const gemm_job *g, int item, int *row0, int *rows) {
    *row0 = (int)((int64_t)g->rows * (item % g->blocks) / g->blocks);
    *rows = (int)((int64_t)g->rows * (item % g->blocks + 1) / g->blocks) - *row0;
}

static void gemm_compute(void *data, int item, const uint8_t *taken) {
    const gemm_job *g = data;
    int row0, rows;
    gemm_rows(g, item, &row0, &rows);
    multiply_group(g->m, item / g->blocks, g->x, row0, rows, g->scratch, taken);
}

static void gemm_store(void *data, int item) {
    const gemm_job *g = data;
    const matrix *m = g->m;
    const size_t ld = (size_t)m->group_panels * PANEL;
    const int column0 = item / g->blocks * m->group_panels * PANEL;
    int row0, rows;
    gemm_rows(g, item, &row0, &rows);
    if (g->e.kind == EPILOGUE_SILU) finish_silu(m, &g->e, g->scratch->sums, ld, row0, rows, column0);
    else finish_rows(m, &g->e, g->scratch->sums, ld, row0, rows, column0);
}

static int gemm_items(const matrix *m, int rows) { return m->groups * ceil_div(rows, ROW_BLOCK); }

/* y = epilogue(x W^T), a phase. */
static void gemm(team *t, const matrix *m, operand x, int rows, epilogue e, gemm_scratch *s) {
    gemm_job g = {m, x, rows, ceil_div(rows, ROW_BLOCK), e, s};
    for (int i = 0; i < HELD_BLOCKS; i++) s->held[i].block = -1;
    team_phase(t, gemm_items(m, rows), (phase_work){gemm_compute, gemm_store, &g});
}

#endif
