/* One forward: every member of the team walks through the phases of all layers. */
#ifndef ADA_FORWARD_H
#define ADA_FORWARD_H

#include "check.h"

typedef struct {
    model *m;
    const batch *b;
    attention attention;
    float *residual, *normed, *joined, *qkv, *attended, *mlp;
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
        memcpy(residual, p->b->before + i * n, sizeof(float) * n);
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

static void layer_phases(team *t, const pass *p, int index) {
    const model_source *s = &p->m->shape;
    const layer *l = &p->m->layers[index];
    const int tokens = p->b->tokens;
    const size_t hidden = s->hidden, q_size = s->heads * s->head_dim, qkv_size = l->qkv.columns;
    gemm_scratch *scratch = &p->m->members[t->rank].gemm;
    row_job job = {.p = p, .index = index};

    operand x = {p->joined, 2 * hidden, DEPTH};
    if (!l->hidden_norm) x = (operand){normed_rows(t, p, l->input_norm), hidden, DEPTH};
    gemm(t, &l->qkv, x, tokens, (epilogue){EPILOGUE_STORE, p->qkv, qkv_size, 0}, scratch);
    team_phase(t, row_blocks(tokens), (phase_work){NULL, position_block, &job});
    attention_phase(t, p, index);
    operand attended = {p->attended, q_size, DEPTH};
    gemm(t, &l->o, attended, tokens, (epilogue){EPILOGUE_ADD, p->residual, hidden, 0}, scratch);
    mlp_phases(t, p, l, normed_rows(t, p, l->post_norm), scratch);
}

static void forward_phases(team *t, void *data) {
    const pass *p = data;
    model *m = p->m;
    row_job job = {.p = p, .weight = m->shape.final_norm, .out = p->b->hidden, .stride = m->shape.hidden};
    const int blocks = row_blocks(p->b->tokens);
    team_phase(t, blocks, (phase_work){NULL, is_head(m) ? join_block : embed_block, &job});
    if (is_mtp(m)) {
        operand x = {p->joined, 2 * job.stride, DEPTH};
        gemm(t, &m->project, x, p->b->tokens, (epilogue){EPILOGUE_STORE, p->residual, job.stride, 0},
             &m->members[t->rank].gemm);
    }
    for (int i = 0; i < m->shape.layers; i++) {
        capture_phases(t, p, i);
        layer_phases(t, p, i);
    }
    team_phase(t, blocks, (phase_work){NULL, is_eagle(m) ? copy_block : norm_block, &job});
}

/* Bytes of the counters of all phases above. */
static size_t forward_phase_bytes(const pass *p, int threads) {
    const model_source *s = &p->m->shape;
    const int tokens = p->b->tokens, items = p->attention.item_start[p->b->requests];
    const size_t rows = phase_bytes(threads, row_blocks(tokens)), norms = norms_itself(p) ? 0 : 2 * rows;
    size_t total = (2 + p->b->captures) * rows;
    if (is_mtp(p->m)) total += phase_bytes(threads, gemm_items(&p->m->project, tokens));
    for (int i = 0; i < s->layers; i++) {
        const layer *l = &p->m->layers[i];
        total += norms + rows + phase_bytes(threads, items) + phase_bytes(threads, gemm_items(&l->qkv, tokens)) +
                 phase_bytes(threads, gemm_items(&l->o, tokens));
        /* A row block of the MLP is one of a product. */
        total += ceil_div(tokens, ROW_BLOCK) * (phase_bytes(threads, l->gate_up.groups) + phase_bytes(threads, l->down.groups));
    }
    return total;
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

static int plan_attention(pass *p, int threads) {
    model *m = p->m;
    const batch *b = p->b;
    const model_source *s = &m->shape;
    const int n = b->requests;
    int64_t *mask_start = reserve(&m->plan, sizeof(int64_t) * (n + 1) + sizeof(int32_t) * (2 * n + 1));
    if (!mask_start) return 0;
    int32_t *item_start = (int32_t *)(mask_start + n + 1), *block = item_start + n + 1;
    p->attention = (attention){
        .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = s->head_dim,
        .padded_dim = ceil_div(s->head_dim, PANEL) * PANEL, .type = b->kv_type, .q = p->qkv,
        .q_stride = (size_t)(s->heads + 2 * s->kv_heads) * s->head_dim, .out = p->attended,
        .slot_stride = b->slot_stride, .requests = n, .qo_indptr = b->qo_indptr, .kv_indptr = b->kv_indptr,
        .kv_indices = b->kv_indices, .mask = b->mask, .mask_start = mask_start, .item_start = item_start,
        .block_queries = block};
    plan_items(&p->attention, item_start, block, threads);
    int queries = 1, longest = 0;
    mask_start[0] = 0;
    for (int i = 0; i < n; i++) {
        const int keys = b->kv_indptr[i + 1] - b->kv_indptr[i];
        mask_start[i + 1] = mask_start[i] + (int64_t)(b->qo_indptr[i + 1] - b->qo_indptr[i]) * keys;
        queries = imax(queries, block[i]);
        longest = imax(longest, keys);
    }
    const size_t rows = (size_t)p->attention.item_heads * queries * (s->heads / s->kv_heads);
    /* The extra panel keeps rows of a power-of-two length out of each other's cache sets. */
    const size_t stride = (size_t)(ceil_div(longest, PANEL) + 1) * PANEL;
    for (int i = 0; i < threads; i++)
        if (!reserve_scratch(&m->members[i], &p->attention, rows, stride)) return 0;
    return 1;
}

#endif
