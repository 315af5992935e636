/* Ragged attention over a paged pool: any number of queries per request, any mask.
 *
 * The softmax takes two passes over a buffer of scores instead of running maxima: a masked key then adds an
 * exact zero to chains in key order, so that a node of a tree gets the bits that plain decoding would give. */
#ifndef ADA_ATTENTION_H
#define ADA_ATTENTION_H

#include "gemm.h"

#define QUERY_ROWS 24   /* rows (queries x heads of a group) that share one pass over the keys */
#define KEY_BLOCK 64    /* values gathered at a time */
#define MAX_HEAD_DIM 512 /* bounds of stack buffers: native.py checks them */
#define MAX_HEAD_GROUP 256

typedef struct {
    int heads, kv_heads, head_dim, padded_dim, type;
    const float *q;          /* row t: q_stride floats, head after head, scaled already */
    size_t q_stride;
    float *out;              /* row t: heads * head_dim */
    const char *keys, *values;
    size_t slot_stride;      /* elements between slots */
    int requests;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices;
    const uint8_t *mask;     /* per request row-major, or NULL: causal */
    const int64_t *mask_start;
    int *next_item;          /* shared counter: items are claimed as members come free */
    const int32_t *item_start; /* [requests + 1], items are (query block, kv head) */
    const int32_t *block_queries; /* [requests], queries per block */
} attention;

typedef struct {
    float *q;       /* [rows][head_dim] */
    float *scores;  /* [rows][score_stride] */
    float *out;     /* [rows][padded_dim] */
    float *keys;    /* [head_dim][PANEL], a transposed block */
    float *values;  /* [KEY_BLOCK][padded_dim] */
    size_t score_stride;
} attention_scratch;

#ifdef __AVX__
/* Eight rows of eight floats, transposed into columns 0..7 of panel rows. */
static ALWAYS_INLINE void transpose8(const float *const *rows, int d, float *panel) {
    __m256 r[8], t[8];
    UNROLL for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + d);
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(panel + (d + i) * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(panel + (d + i + 4) * PANEL, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#endif

static void transpose_keys(const float *const *rows, int head_dim, float *panel) {
    int d = 0;
#ifdef __AVX__
    for (; d + 8 <= head_dim; d += 8) {
        transpose8(rows, d, panel);
        transpose8(rows + 8, d, panel + 8);
    }
#endif
    for (; d < head_dim; d++)
        for (int j = 0; j < PANEL; j++) panel[d * PANEL + j] = rows[j][d];
}

/* Rows [row0, row0 + count) of c (+)= x W over fp32 scratch panels. */
static void small_gemm(tile_args a, int mode, int rows, int panels, size_t panel_step) {
    const int row_tiles = ceil_div(rows, MAX_ROWS), largest = ceil_div(rows, row_tiles);
    const float *x = a.x;
    float *c = a.c;
    a.ahead = (const char *)a.w; /* already in cache: the prefetch has nothing to do */
    for (int p = 0; p < panels;) {
        int at_once = largest <= PAIR_ROWS && p + 1 < panels ? 2 : 1;
        for (int i = 0; i < row_tiles; i++) {
            int row = rows * i / row_tiles, count = rows * (i + 1) / row_tiles - row;
            a.x = x + row * a.ldx;
            a.c = c + row * a.ldc + p * PANEL;
            tiles[at_once - 1][FP32][mode][count - 1](&a);
        }
        p += at_once;
        a.w = (const float *)a.w + at_once * panel_step;
    }
}

static void score_block(const attention *a, attention_scratch *s, const int32_t *slots, int count, int head,
                        int rows, int key0) {
    static const float zeros[MAX_HEAD_DIM];
    float wide[PANEL * MAX_HEAD_DIM];
    const float *key_rows[PANEL];
    for (int j = 0; j < PANEL; j++) {
        size_t at = j < count ? (size_t)slots[j] * a->slot_stride + (size_t)head * a->head_dim : 0;
        if (j >= count) key_rows[j] = zeros;
        else if (a->type == FP32) key_rows[j] = (const float *)a->keys + at;
        else {
            widen(a->type, a->keys, at, wide + j * a->head_dim, a->head_dim);
            key_rows[j] = wide + j * a->head_dim;
        }
    }
    transpose_keys(key_rows, a->head_dim, s->keys);
    tile_args t = {.x = s->q, .ldx = a->head_dim, .w = s->keys, .ldw = PANEL, .depth = a->head_dim,
                   .c = s->scores + key0, .ldc = s->score_stride};
    small_gemm(t, TILE_SET, rows, 1, 0);
}

/* Lanes of keys [j, j + VL) that the query sees: all bits or none. */
static ALWAYS_INLINE vi seen_keys(int j, int visible, const uint8_t *mask) {
    vi seen = {0};
    if (j + VL <= visible && !mask) return ~seen;
    if (j + VL <= visible) return (vi)(__builtin_convertvector(*(const vb *)(mask + j), vi) != 0);
    for (int i = 0; i < VL; i++) seen[i] = j + i < visible && (!mask || mask[j + i]) ? -1 : 0;
    return seen;
}

/* Scores to unnormalised probabilities in place; hidden and padding keys become exact zeros. */
static void exponentiate(float *scores, int visible, int padded, const uint8_t *mask) {
    vf max = splat(-INFINITY);
    for (int j = 0; j < padded; j += VL) {
        vf x = blend(seen_keys(j, visible, mask), load(scores + j), splat(-INFINITY));
        store(scores + j, x);
        max = vmax(max, x);
    }
    float top = lane_max(max);
    if (top == -INFINITY) top = 0; /* the query sees nothing: all zeros */
    for (int j = 0; j < padded; j += VL) store(scores + j, vexp(load(scores + j) - top));
}

/* Sums of four rows at a time, each in key order. */
static void row_sums(const float *scores, size_t stride, int rows, int keys, float *sums) {
    for (int r = 0; r < rows; r += 4) {
        const float *p0 = scores + r * stride, *p1 = r + 1 < rows ? p0 + stride : p0;
        const float *p2 = r + 2 < rows ? p1 + stride : p0, *p3 = r + 3 < rows ? p2 + stride : p0;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (int j = 0; j < keys; j++) s0 += p0[j], s1 += p1[j], s2 += p2[j], s3 += p3[j];
        const float four[4] = {s0, s1, s2, s3};
        memcpy(sums + r, four, sizeof(float) * imin(4, rows - r));
    }
}

static void weigh_values(const attention *a, attention_scratch *s, const int32_t *slots, int keys, int head,
                         int rows) {
    memset(s->out, 0, sizeof(float) * rows * a->padded_dim);
    for (int key0 = 0; key0 < keys; key0 += KEY_BLOCK) {
        int count = imin(KEY_BLOCK, keys - key0);
        for (int j = 0; j < count; j++) {
            size_t at = (size_t)slots[key0 + j] * a->slot_stride + (size_t)head * a->head_dim;
            widen(a->type, a->values, at, s->values + j * a->padded_dim, a->head_dim);
        }
        tile_args t = {.x = s->scores + key0, .ldx = s->score_stride, .w = s->values, .ldw = a->padded_dim,
                       .panel_stride = PANEL, .depth = count, .c = s->out, .ldc = a->padded_dim};
        small_gemm(t, TILE_CHAIN, rows, a->padded_dim / PANEL, PANEL);
    }
}

/* Queries [q0, q0 + queries) of a request against one kv head. */
static void attend(const attention *a, attention_scratch *s, int request, int head, int q0, int queries) {
    const int group = a->heads / a->kv_heads, rows = queries * group, dim = a->head_dim;
    const int first = a->qo_indptr[request], total = a->qo_indptr[request + 1] - first;
    const int32_t *slots = a->kv_indices + a->kv_indptr[request];
    const int kv = a->kv_indptr[request + 1] - a->kv_indptr[request];
    const int keys = a->mask ? kv : imax(0, kv - total + q0 + queries);
    const int padded = ceil_div(keys, PANEL) * PANEL;
    float sums[MAX_HEAD_GROUP];

    for (int i = 0; i < queries; i++)
        memcpy(s->q + i * group * dim, a->q + (first + q0 + i) * a->q_stride + (size_t)head * group * dim,
               sizeof(float) * group * dim);
    for (int key0 = 0; key0 < keys; key0 += PANEL)
        score_block(a, s, slots + key0, imin(PANEL, keys - key0), head, rows, key0);
    for (int r = 0; r < rows; r++) {
        int query = q0 + r / group;
        const uint8_t *mask = a->mask ? a->mask + a->mask_start[request] + (int64_t)query * kv : NULL;
        exponentiate(s->scores + r * s->score_stride, a->mask ? kv : kv - total + query + 1, padded, mask);
    }
    row_sums(s->scores, s->score_stride, rows, keys, sums);
    weigh_values(a, s, slots, keys, head, rows);
    for (int r = 0; r < rows; r++) {
        float scale = sums[r] > 0 ? 1.0f / sums[r] : 0.0f;
        float *out = a->out + (size_t)(first + q0 + r / group) * a->heads * dim + (size_t)(head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) out[d] = s->out[r * a->padded_dim + d] * scale;
    }
}

static void attention_share(const attention *a, attention_scratch *s) {
    int total = a->item_start[a->requests], request = 0;
    for (;;) {
        int item = __atomic_fetch_add(a->next_item, 1, __ATOMIC_RELAXED);
        if (item >= total) return;
        while (item >= a->item_start[request + 1]) request++;
        int local = item - a->item_start[request], size = a->block_queries[request];
        int queries = a->qo_indptr[request + 1] - a->qo_indptr[request];
        int q0 = local / a->kv_heads * size;
        attend(a, s, request, local % a->kv_heads, q0, imin(size, queries - q0));
    }
}

#endif
