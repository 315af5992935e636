/* Ragged attention over a paged pool: any number of queries per request, any mask.
 *
 * The softmax takes two passes over a buffer of scores instead of running maxima: a masked key then adds an
 * exact zero to chains in key order, so that a node of a tree gets the bits that plain decoding would give. */
#ifndef ADA_ATTENTION_H
#define ADA_ATTENTION_H

#include "gemm.h"

#define QUERY_ROWS 24   /* rows (queries x heads of a group) that share one pass over the keys */
#define KEY_BLOCK 64    /* values gathered at a time */
#define MAX_HEAD_GROUP 256 /* bound of a stack buffer: native.py checks it */

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
    const int32_t *item_start; /* [requests + 1], items are (query block, kv head) */
    const int32_t *block_queries; /* [requests], queries per block */
} attention;

typedef struct {
    float *q;       /* [rows][padded_dim] */
    float *scores;  /* [rows][score_stride] */
    float *out;     /* [rows][padded_dim] */
    float *keys;    /* [4][padded_dim] */
    float *values;  /* [KEY_BLOCK][padded_dim] */
    size_t score_stride;
} attention_scratch;

/* The sums of four vectors' lanes, in one fixed tree. */
static ALWAYS_INLINE void four_lane_sums(const vf *v, float *out) {
#if VL == 8 && defined(__AVX__)
    __m256 low = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), high = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 sums = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#elif VL == 16 && defined(__AVX512F__)
    for (int i = 0; i < 4; i++) out[i] = _mm512_reduce_add_ps((__m512)v[i]);
#else
    for (int i = 0; i < 4; i++) {
        float lanes[VL];
        store(lanes, v[i]);
        UNROLL for (int width = VL / 2; width; width /= 2)
            UNROLL for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
        out[i] = lanes[0];
    }
#endif
}

/* Four keys against up to three queries: as many sums as the registers of AVX2 hold. */
static ALWAYS_INLINE void score_four(const int type, const int rows, const float *q, int dim, const char *keys,
                                     const size_t *at, float *scores, size_t stride) {
    vf acc[3][4] = {{{0}}};
    for (int d = 0; d < dim; d += VL) {
        vf x[3];
        UNROLL for (int r = 0; r < rows; r++) x[r] = load(q + r * dim + d);
        UNROLL for (int j = 0; j < 4; j++) {
            vf key = load_as_float(type, keys, at[j] + d);
            IN_REGISTER(key);
            UNROLL for (int r = 0; r < rows; r++) acc[r][j] += x[r] * key;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) four_lane_sums(acc[r], scores + r * stride);
}

static ALWAYS_INLINE void score_keys(const int type, const char *keys, const size_t *at, int dim,
                                     attention_scratch *s, int rows, int key0) {
    float *scores = s->scores + key0;
    const float *q = s->q;
    for (int left = rows; left > 0;) {
        int count = left == 4 ? 2 : imin(left, 3); /* two and two rather than three and one */
        if (count == 3) score_four(type, 3, q, dim, keys, at, scores, s->score_stride);
        else if (count == 2) score_four(type, 2, q, dim, keys, at, scores, s->score_stride);
        else score_four(type, 1, q, dim, keys, at, scores, s->score_stride);
        left -= count;
        q += count * dim;
        scores += count * s->score_stride;
    }
}

/* Scores of all rows against all keys. A score is one sum over the head in a fixed order, wherever the key is. */
static void score_all(const attention *a, attention_scratch *s, const int32_t *slots, int keys, int head, int rows) {
    const int dim = a->padded_dim;
    for (int key0 = 0; key0 < keys; key0 += 4) {
        size_t at[4];
        for (int j = 0; j < 4; j++)
            at[j] = (size_t)slots[imin(key0 + j, keys - 1)] * a->slot_stride + (size_t)head * a->head_dim;
        if (dim != a->head_dim) { /* odd sizes: zero columns make up whole vectors */
            for (int j = 0; j < 4; j++) {
                widen(a->type, a->keys, at[j], s->keys + j * dim, a->head_dim);
                at[j] = (size_t)j * dim;
            }
            score_keys(FP32, (const char *)s->keys, at, dim, s, rows, key0);
        } else if (a->type == FP32) score_keys(FP32, a->keys, at, dim, s, rows, key0);
        else if (a->type == FP16) score_keys(FP16, a->keys, at, dim, s, rows, key0);
        else score_keys(BF16, a->keys, at, dim, s, rows, key0);
    }
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

/* Where a block's values can be read as rows of a matrix: in the pool itself if the slots follow each other. */
static const float *value_rows(const attention *a, attention_scratch *s, const int32_t *slots, int count, int head,
                               size_t *ld) {
    const size_t offset = (size_t)head * a->head_dim;
    if (a->type == FP32 && a->padded_dim == a->head_dim && slots[count - 1] - slots[0] == count - 1) {
        int j = 1;
        while (j < count && slots[j] == slots[j - 1] + 1) j++;
        *ld = a->slot_stride;
        if (j == count) return (const float *)a->values + (size_t)slots[0] * a->slot_stride + offset;
    }
    for (int j = 0; j < count; j++)
        widen(a->type, a->values, (size_t)slots[j] * a->slot_stride + offset, s->values + j * a->padded_dim, a->head_dim);
    *ld = a->padded_dim;
    return s->values;
}

static void weigh_values(const attention *a, attention_scratch *s, const int32_t *slots, int keys, int head, int rows) {
    memset(s->out, 0, sizeof(float) * rows * a->padded_dim);
    for (int key0 = 0; key0 < keys; key0 += KEY_BLOCK) {
        int count = imin(KEY_BLOCK, keys - key0);
        tile_args t = {.x = s->scores + key0, .ldx = s->score_stride, .panel_stride = PANEL, .depth = count,
                       .c = s->out, .ldc = a->padded_dim};
        t.w = value_rows(a, s, slots + key0, count, head, &t.ldw);
        small_gemm(t, TILE_CHAIN, rows, a->padded_dim / PANEL, PANEL);
    }
}

/* Queries [q0, q0 + queries) of a request against one kv head, into the scratch. */
static void attend(const attention *a, attention_scratch *s, int request, int head, int q0, int queries) {
    const int group = a->heads / a->kv_heads, rows = queries * group, dim = a->head_dim;
    const int first = a->qo_indptr[request], total = a->qo_indptr[request + 1] - first;
    const int32_t *slots = a->kv_indices + a->kv_indptr[request];
    const int kv = a->kv_indptr[request + 1] - a->kv_indptr[request];
    const int keys = a->mask ? kv : imax(0, kv - total + q0 + queries);
    const int padded = ceil_div(keys, PANEL) * PANEL;
    float sums[MAX_HEAD_GROUP];

    for (int r = 0; r < rows; r++)
        memcpy(s->q + r * a->padded_dim,
               a->q + (first + q0 + r / group) * a->q_stride + (size_t)(head * group + r % group) * dim, sizeof(float) * dim);
    score_all(a, s, slots, keys, head, rows);
    for (int r = 0; r < rows; r++) {
        int query = q0 + r / group;
        const uint8_t *mask = a->mask ? a->mask + a->mask_start[request] + (int64_t)query * kv : NULL;
        exponentiate(s->scores + r * s->score_stride, a->mask ? kv : kv - total + query + 1, padded, mask);
    }
    row_sums(s->scores, s->score_stride, rows, keys, sums);
    weigh_values(a, s, slots, keys, head, rows);
    for (int r = 0; r < rows; r++) {
        const float scale = sums[r] > 0 ? 1.0f / sums[r] : 0.0f;
        for (int d = 0; d < dim; d++) s->out[r * a->padded_dim + d] *= scale;
    }
}

typedef struct {
    int request, head, q0, queries;
} attention_item;

static attention_item find_item(const attention *a, int item) {
    int request = 0, beyond = a->requests;
    while (beyond - request > 1) {
        const int middle = (request + beyond) / 2;
        if (item < a->item_start[middle]) beyond = middle;
        else request = middle;
    }
    const int local = item - a->item_start[request], size = a->block_queries[request];
    const int queries = a->qo_indptr[request + 1] - a->qo_indptr[request], q0 = local / a->kv_heads * size;
    return (attention_item){request, local % a->kv_heads, q0, imin(size, queries - q0)};
}

typedef struct {
    const attention *a;
    attention_scratch *scratch;
} attention_job;

static void attention_compute(void *data, int item, const uint8_t *taken) {
    const attention_job *job = data;
    const attention_item i = find_item(job->a, item);
    (void)taken;
    attend(job->a, job->scratch, i.request, i.head, i.q0, i.queries);
}

static void attention_store(void *data, int item) {
    const attention_job *job = data;
    const attention *a = job->a;
    const attention_item i = find_item(a, item);
    const int group = a->heads / a->kv_heads, dim = a->head_dim, first = a->qo_indptr[i.request];
    for (int r = 0; r < i.queries * group; r++) {
        const size_t row = first + i.q0 + r / group, head = i.head * group + r % group;
        memcpy(a->out + (row * a->heads + head) * dim, job->scratch->out + (size_t)r * a->padded_dim, sizeof(float) * dim);
    }
}

static void attend_all(team *t, const attention *a, attention_scratch *s) {
    attention_job job = {a, s};
    team_phase(t, a->item_start[a->requests], (phase_work){attention_compute, attention_store, &job});
}

#endif
