/* Ragged attention over a paged pool: any number of queries per request, any mask.
 *
 * The softmax takes two passes over a buffer of scores instead of running maxima: a masked key then adds an
 * exact zero to chains in key order, so that a node of a tree gets the bits that plain decoding would give. */
#ifndef ADA_ATTENTION_H
#define ADA_ATTENTION_H

#include "gemm.h"

#define QUERY_ROWS 24   /* rows (queries x heads of a group) that share one pass over a head's keys and values */
#define KEY_BLOCK 64    /* keys that all rows of an item take at a time, while the next so many are prefetched */

typedef struct {
    int heads, kv_heads, head_dim, padded_dim, type;
    const float *q;          /* row t: q_stride floats, head after head, scaled already */
    size_t q_stride;
    float *out;              /* row t: heads * head_dim */
    const char *keys, *values;
    size_t slot_stride;      /* elements between slots */
    int requests;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices;
    int masked;              /* the first requests, which have a mask; the others are causal */
    const uint8_t *mask;     /* of these, per request row-major */
    const int64_t *mask_start;
    int item_heads;          /* kv heads of an item: one or all */
    const int32_t *item_start; /* [requests + 1], items are (query block, block of kv heads) */
    const int32_t *block_queries; /* [requests], queries per block */
} attention;

/* Rows of an item are kv head > query > head of the group. */
typedef struct {
    float *q;       /* [rows][padded_dim] */
    float *out;     /* [rows][padded_dim] */
    float *maxima;  /* [rows][VL], over every VL-th key */
    float *sums;    /* [rows] */
    float *keys;    /* [4][padded_dim] */
    float *values;  /* [KEY_BLOCK][padded_dim] */
    float *scores;  /* [rows][score_stride] */
    size_t score_stride;
} attention_scratch;

typedef struct {
    int request, head0, heads, q0, queries;
    int rows;             /* of one kv head */
    int first, past;      /* the request's first token, and its keys before the first query */
    int keys;             /* that any of the queries may see */
    const int32_t *slots; /* of the keys */
} attention_item;

static attention_item find_item(const attention *a, int item) {
    int request = 0, beyond = a->requests;
    while (beyond - request > 1) {
        const int middle = (request + beyond) / 2;
        if (item < a->item_start[middle]) beyond = middle;
        else request = middle;
    }
    const int pieces = a->kv_heads / a->item_heads, local = item - a->item_start[request];
    const int first = a->qo_indptr[request], total = a->qo_indptr[request + 1] - first;
    const int kv = a->kv_indptr[request + 1] - a->kv_indptr[request];
    attention_item i = {.request = request, .first = first, .past = kv - total};
    i.head0 = local % pieces * a->item_heads;
    i.heads = a->item_heads;
    i.q0 = local / pieces * a->block_queries[request];
    i.queries = imin(a->block_queries[request], total - i.q0);
    i.rows = i.queries * (a->heads / a->kv_heads);
    i.keys = request < a->masked ? kv : imax(0, i.past + i.q0 + i.queries);
    i.slots = a->kv_indices + a->kv_indptr[request];
    return i;
}

/* The sums of four vectors' lanes, in one fixed tree. */
static ALWAYS_INLINE void four_lane_sums(const vf *v, float *out) {
#if VL == 8 && defined(__AVX__)
    __m256 low = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), high = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    __m256 sums = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#elif VL == 16 && defined(__AVX512F__)
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    const __m512 sums = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
    const __m256 half = _mm512_castps512_ps256(sums) + _mm512_extractf32x8_ps(sums, 1);
    _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
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

/* Elements from the pool's start to key `key` of the request, or to its last one. */
static ALWAYS_INLINE size_t key_at(const attention *a, const attention_item *i, int head, int key) {
    return (size_t)i->slots[imin(key, i->keys - 1)] * a->slot_stride + (size_t)head * a->head_dim;
}

/* Into L2: into L1 it would push out what is in use. */
static ALWAYS_INLINE void fetch_head(const attention *a, const char *pool, size_t at) {
    const size_t bytes = type_bytes[a->type];
    for (size_t line = 0; line < a->head_dim * bytes; line += 64) __builtin_prefetch(pool + at * bytes + line, 0, 2);
}

/* Rows that four keys are scored against at a time, by registers. */
#if VL == 16
#define SCORE_ROWS 6
#else
#define SCORE_ROWS 3
#endif

static ALWAYS_INLINE void score_four(const int type, const int rows, const float *q, int dim, const char *keys,
                                     const size_t *at, float *scores, size_t stride) {
    vf acc[SCORE_ROWS][4] = {{{0}}};
    for (int d = 0; d < dim; d += VL) {
        vf x[SCORE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) x[r] = load(q + r * dim + d);
        UNROLL for (int j = 0; j < 4; j++) {
            vf key = load_as_float(type, keys, at[j] + d);
            IN_REGISTER(key);
            UNROLL for (int r = 0; r < rows; r++) acc[r][j] += x[r] * key;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) four_lane_sums(acc[r], scores + r * stride);
}

static ALWAYS_INLINE void score_rows(const int type, const float *q, int dim, const char *keys, const size_t *at,
                                     float *scores, size_t stride, int rows) {
    const int row_tiles = ceil_div(rows, SCORE_ROWS);
    for (int i = 0; i < row_tiles; i++) {
        const int row = rows * i / row_tiles, count = rows * (i + 1) / row_tiles - row;
        const float *x = q + row * dim;
        float *out = scores + row * stride;
        switch (count) {
#if SCORE_ROWS > 3
        case 6: score_four(type, 6, x, dim, keys, at, out, stride); break;
        case 5: score_four(type, 5, x, dim, keys, at, out, stride); break;
        case 4: score_four(type, 4, x, dim, keys, at, out, stride); break;
#endif
        case 3: score_four(type, 3, x, dim, keys, at, out, stride); break;
        case 2: score_four(type, 2, x, dim, keys, at, out, stride); break;
        default: score_four(type, 1, x, dim, keys, at, out, stride);
        }
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

/* Hidden and padding keys' scores become minus infinity; the row's maxima follow. */
static void hide_keys(float *scores, int begin, int end, int visible, const uint8_t *mask, float *maxima) {
    vf max = load(maxima);
    for (int j = begin; j < end; j += VL) {
        const vf x = blend(seen_keys(j, visible, mask), load(scores + j), splat(-INFINITY));
        store(scores + j, x);
        max = vmax(max, x);
    }
    store(maxima, max);
}

/* A block of keys against all rows of the item's kv head `h`. A score is one sum over the head in a fixed order,
 * wherever the key is. */
static void score_block(const attention *a, attention_scratch *s, const attention_item *i, int h, int key0) {
    const int dim = a->padded_dim, row0 = h * i->rows, end = imin(key0 + KEY_BLOCK, i->keys);
    const float *q = s->q + (size_t)row0 * dim;
    float *scores = s->scores + row0 * s->score_stride;
    for (int key = key0; key < end; key += 4) {
        size_t at[4];
        for (int j = 0; j < 4; j++) {
            at[j] = key_at(a, i, i->head0 + h, key + j);
            fetch_head(a, a->keys, key_at(a, i, i->head0 + h, key + j + KEY_BLOCK));
        }
        if (dim != a->head_dim) { /* odd sizes: zero columns make up whole vectors */
            for (int j = 0; j < 4; j++) {
                widen(a->type, a->keys, at[j], s->keys + j * dim, a->head_dim);
                at[j] = (size_t)j * dim;
            }
            score_rows(FP32, q, dim, (const char *)s->keys, at, scores + key, s->score_stride, i->rows);
        } else if (a->type == FP32) score_rows(FP32, q, dim, a->keys, at, scores + key, s->score_stride, i->rows);
        else if (a->type == FP16) score_rows(FP16, q, dim, a->keys, at, scores + key, s->score_stride, i->rows);
        else score_rows(BF16, q, dim, a->keys, at, scores + key, s->score_stride, i->rows);
    }
    const int group = a->heads / a->kv_heads, padded = ceil_div(end, PANEL) * PANEL;
    const int64_t kv = a->kv_indptr[i->request + 1] - a->kv_indptr[i->request];
    const int masked = i->request < a->masked;
    for (int r = 0; r < i->rows; r++) {
        const int query = i->q0 + r / group;
        const uint8_t *mask = masked ? a->mask + a->mask_start[i->request] + query * kv : NULL;
        hide_keys(scores + r * s->score_stride, key0, padded, masked ? (int)kv : i->past + query + 1, mask,
                  s->maxima + (row0 + r) * VL);
    }
}

/* Rows of c += x W over fp32 rows of at least `panels` panels; the first tile of a panel prefetches. */
static void small_gemm(tile_args a, int rows, int panels) {
    const int row_tiles = ceil_div(rows, MAX_ROWS), largest = ceil_div(rows, row_tiles);
    const tile_args all = a;
    for (int p = 0; p < panels;) {
        const int at_once = largest <= PAIR_ROWS && p + 1 < panels ? 2 : 1;
        a.w = (const float *)all.w + p * PANEL;
        for (int i = 0; i < row_tiles; i++) {
            const int row = rows * i / row_tiles, count = rows * (i + 1) / row_tiles - row;
            a.x = all.x + row * a.ldx;
            a.c = all.c + row * a.ldc + p * PANEL;
            a.ahead = i ? (const char *)a.w : all.ahead + p * PANEL * sizeof(float);
            a.ahead_step = i ? 0 : all.ahead_step;
            tiles[at_once - 1][FP32][TILE_CHAIN][count - 1](&a);
        }
        p += at_once;
    }
}

/* Sums of four rows at a time, each in key order, on top of what `sums` holds. */
static void add_row_sums(const float *scores, size_t stride, int rows, int keys, float *sums) {
    for (int r = 0; r < rows; r += 4) {
        const int last = rows - r - 1, at[4] = {0, imin(1, last), imin(2, last), imin(3, last)};
        const float *p0 = scores + r * stride, *p1 = p0 + at[1] * stride, *p2 = p0 + at[2] * stride, *p3 = p0 + at[3] * stride;
        float s0 = sums[r], s1 = sums[r + at[1]], s2 = sums[r + at[2]], s3 = sums[r + at[3]];
        for (int j = 0; j < keys; j++) s0 += p0[j], s1 += p1[j], s2 += p2[j], s3 += p3[j];
        const float four[4] = {s0, s1, s2, s3};
        memcpy(sums + r, four, sizeof(float) * imin(4, rows - r));
    }
}

/* Infinity and NaN become zero. fp16 overflows, and a slot that is hidden may hold what did, of another request:
 * weighed with zero it would still be NaN. */
static inline void drop_overflow(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = x[i] - x[i] == 0 ? x[i] : 0;
}

/* Sets where a block's values can be read as rows of a matrix: in the pool itself if the slots follow each other. */
static void find_values(const attention *a, attention_scratch *s, const attention_item *i, int head, int key0, int count,
                        tile_args *t) {
    const int32_t *slots = i->slots + key0;
    int j = 1;
    while (j < count && slots[j] == slots[j - 1] + 1) j++;
    if (j == count && a->type == FP32 && a->padded_dim == a->head_dim) {
        t->w = (const float *)a->values + key_at(a, i, head, key0);
        t->ldw = a->slot_stride;
        t->ahead_step = a->slot_stride * sizeof(float);
        t->ahead = (const char *)t->w + KEY_BLOCK * t->ahead_step; /* most slots follow each other */
        return;
    }
    for (j = 0; j < count; j++) {
        fetch_head(a, a->values, key_at(a, i, head, key0 + j + KEY_BLOCK));
        float *row = s->values + j * a->padded_dim;
        widen(a->type, a->values, key_at(a, i, head, key0 + j), row, a->head_dim);
        if (a->type == FP16 && i->request < a->masked) drop_overflow(row, a->head_dim);
    }
    t->w = s->values;
    t->ldw = a->padded_dim;
    t->ahead = (const char *)t->w;
}

/* A block of values into all rows of the item's kv head `h`: the block's scores become unnormalised probabilities
 * in place, exact zeros where keys are hidden, which add to the sums and weigh the values. */
static void weigh_block(const attention *a, attention_scratch *s, const attention_item *i, int h, int key0) {
    const int row0 = h * i->rows, count = imin(KEY_BLOCK, i->keys - key0);
    float *scores = s->scores + row0 * s->score_stride + key0;
    for (int r = 0; r < i->rows; r++) {
        float *p = scores + r * s->score_stride;
        const vf top = splat(s->maxima[(row0 + r) * VL]);
        for (int j = 0; j < count; j += VL) store(p + j, vexp(load(p + j) - top));
    }
    add_row_sums(scores, s->score_stride, i->rows, count, s->sums + row0);
    tile_args t = {.x = scores, .ldx = s->score_stride, .panel_stride = PANEL, .depth = count,
                   .c = s->out + (size_t)row0 * a->padded_dim, .ldc = a->padded_dim};
    find_values(a, s, i, i->head0 + h, key0, count, &t);
    small_gemm(t, i->rows, a->padded_dim / PANEL);
}

static void start_item(const attention *a, attention_scratch *s, const attention_item *i) {
    const int group = a->heads / a->kv_heads, rows = i->heads * i->rows;
    for (int r = 0; r < rows; r++) {
        const int query = i->first + i->q0 + r % i->rows / group, head = (i->head0 + r / i->rows) * group + r % group;
        memcpy(s->q + (size_t)r * a->padded_dim, a->q + query * a->q_stride + (size_t)head * a->head_dim,
               sizeof(float) * a->head_dim);
        store(s->maxima + r * VL, splat(-INFINITY));
        s->sums[r] = 0;
    }
    memset(s->out, 0, sizeof(float) * rows * a->padded_dim);
}

/* Into the scratch; early at its end once somebody else has stored the item. The heads take turns at every block,
 * since a slot holds all of them: whole slots are what memory streams best. */
static void attend(const attention *a, attention_scratch *s, const attention_item *i, const uint8_t *taken) {
    const int rows = i->heads * i->rows;
    start_item(a, s, i);
    for (int key0 = 0; key0 < i->keys && !is_taken(taken); key0 += KEY_BLOCK)
        for (int h = 0; h < i->heads; h++) score_block(a, s, i, h, key0);
    for (int r = 0; r < rows; r++) {
        const float top = lane_max(load(s->maxima + r * VL));
        s->maxima[r * VL] = top == -INFINITY ? 0 : top; /* a query that sees nothing: all zeros */
    }
    for (int key0 = 0; key0 < i->keys && !is_taken(taken); key0 += KEY_BLOCK)
        for (int h = 0; h < i->heads; h++) weigh_block(a, s, i, h, key0);
    for (int r = 0; r < rows; r++) {
        const float scale = s->sums[r] > 0 ? 1.0f / s->sums[r] : 0.0f;
        for (int d = 0; d < a->head_dim; d++) s->out[r * a->padded_dim + d] *= scale;
    }
}

typedef struct {
    const attention *a;
    attention_scratch *scratch;
} attention_job;

static void attention_compute(void *data, int item, const uint8_t *taken) {
    const attention_job *job = data;
    const attention_item i = find_item(job->a, item);
    attend(job->a, job->scratch, &i, taken);
}

static void attention_store(void *data, int item) {
    const attention_job *job = data;
    const attention *a = job->a;
    const attention_item i = find_item(a, item);
    const int group = a->heads / a->kv_heads, dim = a->head_dim;
    for (int r = 0; r < i.heads * i.rows; r++) {
        const size_t query = i.first + i.q0 + r % i.rows / group, head = (i.head0 + r / i.rows) * group + r % group;
        memcpy(a->out + (query * a->heads + head) * dim, job->scratch->out + (size_t)r * a->padded_dim, sizeof(float) * dim);
    }
}

static void attend_all(team *t, const attention *a, attention_scratch *s) {
    attention_job job = {a, s};
    team_phase(t, a->item_start[a->requests], (phase_work){attention_compute, attention_store, &job});
}

#endif
