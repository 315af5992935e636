/* One forward: every member of the team walks through the phases of all layers. */
#ifndef ADA_FORWARD_H
#define ADA_FORWARD_H

#include "check.h"

typedef struct pass {
    model *m;
    const batch *b;
    attention attention;
    float *residual, *normed, *joined, *qkv, *attended, *mlp;
    const struct pass *ends; /* of each request's last token, which goes on alone once all keys are written; or NULL */
} pass;

#define SHARED_ROWS 4 /* tokens that are embedded, normed or positioned at a time */

static void rms_norm(const float *x, const float *weight, float *y, int n, float eps) {
    vf squares = splat(0.0f);
    float sum = 0;
    int i = 0;
    for (; i + VL <= n; i += VL) squares += load(x + i) * load(x + i);
    for (; i < n; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf((lane_sum(squares) + sum) / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) y[i] = x[i] * scale * weight[i];
}

static void norm_rows(const pass *p, const float *weight, float *out, int begin, int end) {
    const size_t n = p->m->shape.hidden;
    for (int i = begin; i < end; i++) rms_norm(p->residual + i * n, weight, out + i * n, (int)n, p->m->shape.norm_eps);
}

typedef struct {
    const pass *p;
    const float *weight;
    float *out;
    size_t stride; /* of `out`, where rows are copied */
    int index;     /* of the layer */
} row_job;

static int row_blocks(int rows) { return ceil_div(rows, SHARED_ROWS); }

static void norm_block(void *data, int block) {
    const row_job *j = data;
    norm_rows(j->p, j->weight, j->out, block * SHARED_ROWS, imin((block + 1) * SHARED_ROWS, j->p->b->tokens));
}

/* Whether every member norms all rows for itself: a phase costs more than a few rows. */
static int norms_itself(const pass *p) { return (int64_t)p->b->tokens * p->m->shape.hidden <= OWN_NORM_FLOATS; }

/* The normed residual. */
static const float *normed_rows(team *t, const pass *p, const float *weight) {
    if (norms_itself(p)) {
        /* A late member may see the residual change meanwhile: then what it norms for is stored already. */
        float *own = p->m->members[t->rank].normed;
        norm_rows(p, weight, own, 0, p->b->tokens);
        return own;
    }
    row_job job = {.p = p, .weight = weight, .out = p->normed};
    team_phase(t, row_blocks(p->b->tokens), (phase_work){NULL, norm_block, &job});
    return p->normed;
}

static void embed_block(void *data, int block) {
    const pass *p = ((const row_job *)data)->p;
    const model_source *s = &p->m->shape;
    for (int i = block * SHARED_ROWS; i < imin((block + 1) * SHARED_ROWS, p->b->tokens); i++)
        widen(s->embed_type, s->embed, (size_t)p->b->ids[i] * s->hidden, p->residual + (size_t)i * s->hidden, s->hidden);
}

/* A head's input, [2 * hidden] a token: the normed embedding, then the normed hidden state that came before it. An
 * MTP layer reads the second token of a text without its embedding. */
static void join_block(void *data, int block) {
    const pass *p = ((const row_job *)data)->p;
    const model_source *s = &p->m->shape;
    const layer *l = &p->m->layers[0];
    const int mtp = is_mtp(p->m);
    const float *token_norm = mtp ? s->token_norm : l->input_norm, *hidden_norm = mtp ? s->hidden_norm : l->hidden_norm;
    const size_t n = s->hidden;
    for (int i = block * SHARED_ROWS; i < imin((block + 1) * SHARED_ROWS, p->b->tokens); i++) {
        float *residual = p->residual + i * n, *joined = p->joined + 2 * i * n;
        widen(s->embed_type, s->embed, (size_t)p->b->ids[i] * n, residual, (int)n);
        if (mtp && p->b->positions[i] <= 1) memset(residual, 0, sizeof(float) * n);
        rms_norm(residual, token_norm, joined, (int)n, s->norm_eps);
        const size_t row = p->b->before_rows ? (size_t)p->b->before_rows[i] : (size_t)i;
        widen((int)p->b->before_type, p->b->before, row * n, residual, (int)n);
        rms_norm(residual, hidden_norm, joined + n, (int)n, s->norm_eps);
    }
}

/* The residual as it is. */
static void copy_block(void *data, int block) {
    const row_job *j = data;
    const size_t n = j->p->m->shape.hidden;
    for (int i = block * SHARED_ROWS; i < imin((block + 1) * SHARED_ROWS, j->p->b->tokens); i++)
        memcpy(j->out + i * j->stride, j->p->residual + i * n, sizeof(float) * n);
}

static void capture_phases(team *t, const pass *p, int index) {
    const size_t n = p->m->shape.hidden;
    for (int i = 0; i < p->b->captures; i++) {
        row_job job = {.p = p, .out = p->b->captured + i * n, .stride = p->b->captures * n};
        if (p->b->capture[i] == index)
            team_phase(t, row_blocks(p->b->tokens), (phase_work){NULL, copy_block, &job});
    }
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    int i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

/* q: normed, rotated and scaled in place; k and v: into the pools. */
static void position_token(const pass *p, int index, int token) {
    const model_source *s = &p->m->shape;
    const layer *l = &p->m->layers[index];
    const batch *b = p->b;
    const int dim = s->head_dim, half = s->rotary_dim / 2;
    const float *cos = s->cos_sin + b->positions[token] * s->rotary_dim, *sin = cos + half;
    const float scale = 1.0f / sqrtf((float)dim);
    float *head = p->qkv + (size_t)token * (s->heads + 2 * s->kv_heads) * dim;
    for (int h = 0; h < s->heads + s->kv_heads; h++, head += dim) {
        const float *norm = h < s->heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm(head, norm, head, dim, s->qk_norm_eps);
        rotate(head, cos, sin, half);
        if (h < s->heads)
            for (int i = 0; i < dim; i++) head[i] *= scale;
    }
    const int kv_size = s->kv_heads * dim;
    const size_t at = (size_t)b->slots[token] * b->slot_stride;
    narrow(b->kv_type, head - kv_size, b->k_pools[index], at, kv_size);
    narrow(b->kv_type, head, b->v_pools[index], at, kv_size);
}

static void position_block(void *data, int block) {
    const row_job *j = data;
    const int end = imin((block + 1) * SHARED_ROWS, j->p->b->tokens);
    for (int i = block * SHARED_ROWS; i < end; i++) position_token(j->p, j->index, i);
}

static void attention_phase(team *t, const pass *p, int index) {
    attention a = p->attention;
    a.keys = p->b->k_pools[index];
    a.values = p->b->v_pools[index];
    attend_all(t, &a, &p->m->members[t->rank].parts);
}

/* In row blocks, so that the activations between the two products stay in cache. */
static void mlp_phases(team *t, const pass *p, const layer *l, const float *normed, gemm_scratch *scratch) {
    const size_t hidden = p->m->shape.hidden;
    for (int row0 = 0; row0 < p->b->tokens; row0 += ROW_BLOCK) {
        const int rows = imin(ROW_BLOCK, p->b->tokens - row0);
        const size_t block = (size_t)rows * DEPTH;
        operand x = {normed + row0 * hidden, hidden, DEPTH}, activated = {p->mlp, DEPTH, block};
        gemm(t, &l->gate_up, x, rows, (epilogue){EPILOGUE_SILU, p->mlp, DEPTH, block}, scratch);
        gemm(t, &l->down, activated, rows, (epilogue){EPILOGUE_ADD, p->residual + row0 * hidden, hidden, 0}, scratch);
    }
}

/* Queries, and keys and values of the pools. */
static void project_phases(team *t, const pass *p, int index) {
    const layer *l = &p->m->layers[index];
    const size_t hidden = p->m->shape.hidden, qkv_size = l->qkv.columns;
    row_job job = {.p = p, .index = index};
    operand x = {p->joined, 2 * hidden, DEPTH};
    if (!l->hidden_norm) x = (operand){normed_rows(t, p, l->input_norm), hidden, DEPTH};
    gemm(t, &l->qkv, x, p->b->tokens, (epilogue){EPILOGUE_STORE, p->qkv, qkv_size, 0}, &p->m->members[t->rank].gemm);
    team_phase(t, row_blocks(p->b->tokens), (phase_work){NULL, position_block, &job});
}

/* What the queries find, and the MLP. */
static void mix_phases(team *t, const pass *p, int index) {
    const model_source *s = &p->m->shape;
    const layer *l = &p->m->layers[index];
    gemm_scratch *scratch = &p->m->members[t->rank].gemm;
    attention_phase(t, p, index);
    operand attended = {p->attended, s->heads * s->head_dim, DEPTH};
    gemm(t, &l->o, attended, p->b->tokens, (epilogue){EPILOGUE_ADD, p->residual, s->hidden, 0}, scratch);
    mlp_phases(t, p, l, normed_rows(t, p, l->post_norm), scratch);
}

/* Queries and residuals of each request's last token to the front. No row is overwritten before it has moved. */
static void move_ends(void *data, int item) {
    const pass *p = ((const row_job *)data)->p;
    const size_t hidden = p->m->shape.hidden, q_size = p->attention.heads * p->attention.head_dim;
    (void)item;
    for (size_t i = 0; i < (size_t)p->b->requests; i++) {
        const size_t last = p->b->qo_indptr[i + 1] - 1;
        if (last == i) continue;
        memcpy(p->residual + i * hidden, p->residual + last * hidden, sizeof(float) * hidden);
        memcpy(p->qkv + i * p->attention.q_stride, p->qkv + last * p->attention.q_stride, sizeof(float) * q_size);
    }
}

static void forward_phases(team *t, void *data) {
    const pass *p = data;
    model *m = p->m;
    const size_t hidden = m->shape.hidden;
    row_job all = {.p = p};
    team_phase(t, row_blocks(p->b->tokens), (phase_work){NULL, is_head(m) ? join_block : embed_block, &all});
    if (is_mtp(m)) {
        operand x = {p->joined, 2 * hidden, DEPTH};
        gemm(t, &m->project, x, p->b->tokens, (epilogue){EPILOGUE_STORE, p->residual, hidden, 0},
             &m->members[t->rank].gemm);
    }
    for (int i = 0; i < m->shape.layers; i++) {
        capture_phases(t, p, i);
        project_phases(t, p, i);
        if (p->ends && i == m->shape.layers - 1) {
            team_phase(t, 1, (phase_work){NULL, move_ends, &all});
            p = p->ends;
        }
        mix_phases(t, p, i);
    }
    row_job out = {.p = p, .weight = m->shape.final_norm, .out = p->b->hidden, .stride = hidden};
    team_phase(t, row_blocks(p->b->tokens), (phase_work){NULL, raw_states(m) ? copy_block : norm_block, &out});
}

static size_t row_bytes(const pass *p, int threads) { return phase_bytes(threads, row_blocks(p->b->tokens)); }

static size_t norm_bytes(const pass *p, int threads) { return norms_itself(p) ? 0 : row_bytes(p, threads); }

/* Bytes of the counters of `mix_phases`. */
static size_t mix_bytes(const pass *p, const layer *l, int threads) {
    const int tokens = p->b->tokens, items = p->attention.item_start[p->b->requests];
    /* A row block of the MLP is one of a product. */
    const size_t mlp = phase_bytes(threads, l->gate_up.groups) + phase_bytes(threads, l->down.groups);
    return norm_bytes(p, threads) + phase_bytes(threads, items) + phase_bytes(threads, gemm_items(&l->o, tokens)) +
           ceil_div(tokens, ROW_BLOCK) * mlp;
}

/* Bytes of the counters of all phases above. */
static size_t forward_phase_bytes(const pass *p, int threads) {
    const model *m = p->m;
    const int tokens = p->b->tokens;
    size_t total = (1 + p->b->captures) * row_bytes(p, threads);
    if (is_mtp(m)) total += phase_bytes(threads, gemm_items(&m->project, tokens));
    for (int i = 0; i < m->shape.layers; i++) {
        const layer *l = &m->layers[i];
        total += norm_bytes(p, threads) + phase_bytes(threads, gemm_items(&l->qkv, tokens)) + row_bytes(p, threads);
        if (p->ends && i == m->shape.layers - 1) {
            total += phase_bytes(threads, 1);
            p = p->ends;
        }
        total += mix_bytes(p, l, threads);
    }
    return total + row_bytes(p, threads);
}

/* Queries per item and kv heads per item. Many queries share a pass over the keys, and all heads of a slot are best
 * read at once; but every thread needs an item. */
static void plan_items(attention *a, int32_t *item_start, int32_t *block_queries, int threads) {
    const int group = a->heads / a->kv_heads, shared = imax(1, QUERY_ROWS / group);
    int blocks = 0;
    for (int i = 0; i < a->requests; i++) blocks += ceil_div(a->qo_indptr[i + 1] - a->qo_indptr[i], shared);
    const int split = ceil_div(threads, imax(1, blocks * a->kv_heads)); /* of a block, where there are many threads */
    a->item_heads = threads > 1 && blocks < 2 * threads ? 1 : a->kv_heads;
    item_start[0] = 0;
    for (int i = 0; i < a->requests; i++) {
        const int queries = a->qo_indptr[i + 1] - a->qo_indptr[i];
        block_queries[i] = imax(1, ceil_div(imin(shared, queries), split));
        item_start[i + 1] = item_start[i] + ceil_div(queries, block_queries[i]) * (a->kv_heads / a->item_heads);
    }
}

static int reserve_scratch(member *m, const attention *a, size_t rows, size_t stride) {
    const size_t dim = a->padded_dim;
    const size_t scores = rows * stride;
    const size_t sizes[] = {rows * dim, rows * dim, rows * VL, rows, 4 * dim, KEY_BLOCK * dim, scores};
    enum { PARTS = sizeof sizes / sizeof *sizes };
    float *parts[PARTS];
    size_t total = 0;
    for (int i = 0; i < PARTS; i++) total += (sizes[i] + 15) / 16 * 16;
    float *data = reserve(&m->attention, sizeof(float) * total);
    if (!data) return 0;
    if (a->padded_dim != a->head_dim) memset(data, 0, sizeof(float) * (total - scores)); /* padding columns */
    for (int i = 0; i < PARTS; data += (sizes[i] + 15) / 16 * 16, i++) parts[i] = data;
    m->parts = (attention_scratch){parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], stride};
    return 1;
}

/* Members' scratch for the attention of a pass. */
static int reserve_members_scratch(const pass *p, int threads) {
    const attention *a = &p->attention;
    int queries = 1, longest = 0;
    for (int i = 0; i < a->requests; i++) {
        queries = imax(queries, a->block_queries[i]);
        longest = imax(longest, a->kv_indptr[i + 1] - a->kv_indptr[i]);
    }
    const size_t rows = (size_t)a->item_heads * queries * (a->heads / a->kv_heads);
    /* The extra panel keeps rows of a power-of-two length out of each other's cache sets. */
    const size_t stride = (size_t)(ceil_div(longest, PANEL) + 1) * PANEL;
    for (int i = 0; i < threads; i++)
        if (!reserve_scratch(&p->m->members[i], a, rows, stride)) return 0;
    return 1;
}

/* The attention of a pass over the last queries of each request of `whole`, all of them or fewer. */
static int plan_attention(pass *p, const batch *whole, buffer *plan, int threads) {
    const batch *b = p->b;
    const model_source *s = &p->m->shape;
    const int n = b->requests;
    int64_t *mask_start = reserve(plan, sizeof(int64_t) * n + sizeof(int32_t) * (2 * n + 1));
    if (!mask_start) return 0;
    int32_t *item_start = (int32_t *)(mask_start + n), *block = item_start + n + 1;
    p->attention = (attention){
        .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
        .padded_dim = ceil_div(s->head_dim, PANEL) * PANEL, .type = b->kv_type, .q = p->qkv,
        .q_stride = (size_t)(s->heads + 2 * s->kv_heads) * s->head_dim, .out = p->attended,
        .slot_stride = b->slot_stride, .requests = n, .qo_indptr = b->qo_indptr, .kv_indptr = b->kv_indptr,
        .kv_indices = b->kv_indices, .masked = b->masked, .mask = b->mask, .mask_start = mask_start,
        .item_start = item_start, .block_queries = block};
    plan_items(&p->attention, item_start, block, threads);
    int64_t cells = 0;
    for (int i = 0; i < n; i++) {
        const int64_t keys = b->kv_indptr[i + 1] - b->kv_indptr[i];
        cells += (whole->qo_indptr[i + 1] - whole->qo_indptr[i]) * keys;
        mask_start[i] = cells - (b->qo_indptr[i + 1] - b->qo_indptr[i]) * keys;
    }
    return 1;
}

/* What is left of pass `p` once only each request's last token goes on; `b` is made its batch. Their scratch is that
 * of `p`, which has at least as many queries and heads in an item. */
static int plan_ends(pass *ends, batch *b, const pass *p, int threads) {
    model *m = p->m;
    const int n = p->b->requests;
    int32_t *qo_indptr = reserve(&m->ends, sizeof(int32_t) * (n + 1));
    if (!qo_indptr) return 0;
    for (int i = 0; i <= n; i++) qo_indptr[i] = i;
    *b = *p->b;
    b->tokens = n;
    b->qo_indptr = qo_indptr;
    *ends = *p;
    ends->b = b;
    return plan_attention(ends, p->b, &m->plan_of_ends, threads);
}

#endif
