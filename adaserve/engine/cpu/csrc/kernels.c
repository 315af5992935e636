/* Forward of Llama-family models over a paged KV pool: what Python calls. See the headers for the parts. */
#include "filter.h"
#include "forward.h"

#define WORK_PER_THREAD 2000000 /* half bytes of weights x (rows + 8) */

/* Members that pay for the work: fewer for little of it, where barriers would cost more than they gain. */
static int useful_threads(int64_t weights, int64_t rows, int threads) {
    const int64_t work = weights * (rows + 8) / WORK_PER_THREAD + 1;
    return work < threads ? (int)work : threads;
}

static int64_t layer_weights(const model *m) {
    const layer *l = m->layers;
    return m->shape.layers ? (int64_t)(l->qkv.bytes + l->o.bytes + l->gate_up.bytes + l->down.bytes) / 2 : 0;
}

/* `ends_only`: states of each request's last token alone are wanted; each has one. 0, or below 0 what is wrong
 * (check.h). */
static int run_forward(model *m, const batch *b, int ends_only, int threads) {
    const model_source *s = &m->shape;
    const int wrong = check_batch(b, m);
    if (wrong) return wrong;
    const size_t rows = b->tokens, q_size = (size_t)s->heads * s->head_dim;
    const size_t mlp = (size_t)ceil_div(s->intermediate, DEPTH) * DEPTH * imin(b->tokens, ROW_BLOCK);
    threads = useful_threads(layer_weights(m) * s->layers, b->tokens, threads);
    pass p = {.m = m, .b = b};
    p.residual = reserve(&m->residual, sizeof(float) * rows * s->hidden);
    p.normed = reserve(&m->normed, sizeof(float) * rows * s->hidden);
    p.joined = is_head(m) ? reserve(&m->joined, sizeof(float) * rows * 2 * s->hidden) : NULL;
    p.qkv = reserve(&m->qkv, sizeof(float) * rows * (q_size + 2 * (size_t)s->kv_heads * s->head_dim));
    p.attended = reserve(&m->attended, sizeof(float) * rows * q_size);
    p.mlp = reserve(&m->mlp, sizeof(float) * mlp);
    if (is_head(m) && !p.joined) return NO_MEMORY;
    if (!p.residual || !p.normed || !p.qkv || !p.attended || !p.mlp) return NO_MEMORY;
    if (!reserve_members(m, threads) || !plan_attention(&p, b, &m->plan, threads)) return NO_MEMORY;
    if (!reserve_members_scratch(&p, threads)) return NO_MEMORY;
    pass ends;
    batch last_tokens;
    if (ends_only && b->tokens > b->requests) {
        if (!plan_ends(&ends, &last_tokens, &p, threads)) return NO_MEMORY;
        p.ends = &ends;
    }
    char *phases = reserve_phases(&m->phases, forward_phase_bytes(&p, threads));
    if (!phases) return NO_MEMORY;
    team_run(forward_phases, &p, threads, phases);
    return 0;
}

EXPORT int ada_forward(model *m, const batch *b, int threads) { return run_forward(m, b, 0, threads); }

typedef struct {
    model *m;
    const float *hidden;
    int rows, width; /* width 0: logits only, -1: argmax */
    int alike;       /* neighbours with one key and position, whose noise is the same; divides `rows` */
    float *normed;   /* room for them where the model hands out `raw_states`; NULL otherwise */
    float *logits, *logprobs;
    const transform *how;
    int64_t *tokens;
} head_pass;

static void norm_state(void *data, int i) {
    const head_pass *p = data;
    const model_source *s = &p->m->shape;
    rms_norm(p->hidden + (size_t)i * s->hidden, s->final_norm, p->normed + (size_t)i * s->hidden, s->hidden, s->norm_eps);
}

/* Rows of the head become tokens. */
static void name_tokens(const model *m, int64_t *tokens, int count) {
    const int64_t *ids = m->shape.token_ids;
    for (int i = 0; ids && i < count; i++) tokens[i] = ids[tokens[i]];
}

static void best_logits(void *data, int i) {
    const head_pass *p = data;
    const int vocab = p->m->lm_head.columns;
    p->tokens[i] = row_argmax(p->logits + (size_t)i * vocab, vocab);
    name_tokens(p->m, p->tokens + i, 1);
}

static void read_logits(void *data, int item) {
    const head_pass *p = data;
    const int vocab = p->m->lm_head.columns, begin = item * p->alike;
    float *logits = p->logits + (size_t)begin * vocab;
    if (p->how->spread[begin] != 0.0f) transform_rows(logits, p->alike, vocab, p->m->shape.token_ids, p->how, begin);
    else for (int i = 0; i < p->alike; i++) scale_row(logits + (size_t)i * vocab, vocab, p->how->scale[begin + i]);
    for (int i = begin; i < begin + p->alike; i++, logits += vocab) {
        int64_t *tokens = p->tokens + (size_t)i * p->width;
        row_top_logprobs(logits, vocab, p->width, p->logprobs + (size_t)i * p->width, tokens);
        name_tokens(p->m, tokens, p->width);
    }
}

static void head_phases(team *t, void *data) {
    const head_pass *p = data;
    if (p->normed) team_phase(t, p->rows, (phase_work){NULL, norm_state, data});
    operand x = {p->normed ? p->normed : p->hidden, p->m->shape.hidden, DEPTH};
    epilogue e = {EPILOGUE_STORE, p->logits, p->m->lm_head.columns, 0};
    gemm(t, &p->m->lm_head, x, p->rows, e, &p->m->members[t->rank].gemm);
    if (p->width < 0) team_phase(t, p->rows, (phase_work){NULL, best_logits, data});
    if (p->width > 0) team_phase(t, p->rows / p->alike, (phase_work){NULL, read_logits, data});
}

static int run_head(head_pass p, int threads) {
    const size_t hidden = p.m->shape.hidden, vocab = p.m->lm_head.columns;
    threads = useful_threads((int64_t)p.m->lm_head.bytes / 2, p.rows, threads);
    if (raw_states(p.m) && !(p.normed = reserve(&p.m->normed, sizeof(float) * p.rows * hidden))) return NO_MEMORY;
    if (!p.logits) p.logits = reserve(&p.m->logits, sizeof(float) * p.rows * vocab);
    if (!p.logits || !reserve_members(p.m, threads)) return NO_MEMORY;
    const size_t bytes = phase_bytes(threads, gemm_items(&p.m->lm_head, p.rows)) + 2 * phase_bytes(threads, p.rows);
    char *phases = reserve_phases(&p.m->phases, bytes);
    if (!phases) return NO_MEMORY;
    team_run(head_phases, &p, threads, phases);
    return 0;
}

EXPORT int ada_logits(model *m, const float *hidden, int rows, float *logits, int threads) {
    return run_head((head_pass){.m = m, .hidden = hidden, .rows = rows, .logits = logits}, threads);
}

EXPORT int ada_argmax(model *m, const float *hidden, int rows, int64_t *tokens, int threads) {
    return run_head((head_pass){.m = m, .hidden = hidden, .rows = rows, .width = -1, .tokens = tokens}, threads);
}

static int top_logprobs(model *m, const float *hidden, int rows, int alike, const transform *how, int width,
                        float *logprobs, int64_t *tokens, int threads) {
    return run_head((head_pass){.m = m, .hidden = hidden, .rows = rows, .width = width, .alike = alike, .how = how,
                                .logprobs = logprobs, .tokens = tokens}, threads);
}

EXPORT int ada_top_logprobs(model *m, const float *hidden, int rows, const transform *how, int width, float *logprobs,
                            int64_t *tokens, int threads) {
    return top_logprobs(m, hidden, rows, 1, how, width, logprobs, tokens, threads);
}

typedef struct {
    int rows;
    void (*one)(void *data, int i);
    void *data;
} rows_pass;

static void rows_phase(team *t, void *data) {
    const rows_pass *p = data;
    team_phase(t, p->rows, (phase_work){NULL, p->one, p->data});
}

/* Something short with each row of some logits. */
static void each_row(int rows, int vocab, void (*one)(void *data, int i), void *data, int threads) {
    rows_pass p = {rows, one, data};
    threads = (int64_t)rows * vocab < 16384 ? 1 : threads;
    char *phases = threads > 1 ? aligned_alloc(LINE, phase_bytes(threads, rows)) : NULL;
    if (phases) memset(phases, 0, phase_bytes(threads, rows));
    team_run(rows_phase, &p, phases ? threads : 1, phases);
    free(phases);
}

typedef struct {
    const float *logits;
    int vocab;
    const transform *how;
    int64_t *tokens;
} draw_pass;

static void draw_one(void *data, int i) {
    const draw_pass *p = data;
    p->tokens[i] = row_draw(p->logits + (size_t)i * p->vocab, p->vocab, p->how, i);
}

/* The best token of every row as `how` says: a draw of softmax(scale * logits) where spread is 1. */
EXPORT void ada_draw(const float *logits, int rows, int vocab, const transform *how, int64_t *tokens, int threads) {
    draw_pass p = {logits, vocab, how, tokens};
    each_row(rows, vocab, draw_one, &p, threads);
}

typedef struct {
    float *logits;
    int vocab;
    const int64_t *at;
    const filters *asked;
} filter_pass;

static void filter_one(void *data, int i) {
    const filter_pass *p = data;
    row_filter(p->logits + (size_t)p->at[i] * p->vocab, p->vocab, p->asked, i);
}

/* In the rows `at`, -inf for what is not kept. */
EXPORT void ada_filter(float *logits, int vocab, const int64_t *at, int rows, const filters *asked, int threads) {
    filter_pass p = {logits, vocab, at, asked};
    each_row(rows, vocab, filter_one, &p, threads);
}

#include "beam.h"

/* Whether products in 8 bits are faster than others. */
EXPORT int ada_fast_int8(void) { return FAST_INT8; }

/* Lanes of the vectors this library was compiled for. */
EXPORT int ada_vector_lanes(void) { return VL; }
