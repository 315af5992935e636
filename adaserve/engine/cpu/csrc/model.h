/* A model's packed weights and the buffers that its forwards reuse. */
#ifndef ADA_MODEL_H
#define ADA_MODEL_H

#include "attention.h"

/* Mirrored by ctypes structures of the same names in native.py. */
typedef struct {
    const void *weight; /* [columns, depth], contiguous; read once */
    const float *bias;  /* [columns] or NULL */
    int32_t columns, depth, type;
} matrix_source;

typedef struct {
    matrix_source qkv, o, gate_up, down;
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    const float *hidden_norm;     /* [hidden] in the layer of a head that takes hidden states in, otherwise NULL */
} layer_source;

typedef struct {
    int32_t hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, vocab, layers;
    int32_t threads;    /* the weights are laid out for so many; others work */
    int32_t embed_type;
    int32_t positions;  /* rows of cos_sin */
    float norm_eps, qk_norm_eps;
    const void *embed;  /* [vocab, hidden]; this and the next two stay the caller's and must live on */
    const float *cos_sin, *final_norm;
    const int64_t *token_ids; /* [rows of lm_head]: the token of each; NULL: its number */
    const layer_source *layer;
    matrix_source lm_head;
    /* What an MTP layer does first: [hidden, 2 * hidden], and the norms of what it reads. weight: NULL elsewhere. */
    matrix_source project;
    const float *token_norm, *hidden_norm;
    int32_t norm_output; /* whether an EAGLE-3 head hands on what its final norm gives */
} model_source;

/* Mirrored by a ctypes structure in native.py. */
typedef struct {
    int32_t tokens, requests, masked, kv_type; /* masked: so many have a mask, the others are causal */
    const int64_t *ids, *positions, *slots;
    const int32_t *qo_indptr, *kv_indptr, *kv_indices;
    const uint8_t *mask;
    void *const *k_pools, *const *v_pools; /* per layer [slots, kv_heads, head_dim] */
    int64_t slot_stride;                   /* elements between slots */
    float *hidden;                         /* out: [tokens, hidden], or [requests, hidden] of their last tokens */
    const void *before;                    /* [befores, hidden]: what a head takes in beside the tokens; else NULL */
    const int64_t *before_rows;            /* [tokens]: their rows of `before`; NULL: row i goes with token i */
    int64_t befores, before_type;
    float *captured;                       /* out: [tokens, captures, hidden], the residuals before some layers */
    const int32_t *capture;                /* [captures]: these layers */
    int64_t captures;
    int64_t keys, mask_cells, pool_slots;  /* how many kv_indices, cells of the mask and slots of a pool there are */
} batch;

typedef struct {
    matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm, *hidden_norm;
} layer;

typedef struct {
    void *data;
    size_t bytes;
} buffer;

#define OWN_NORM_FLOATS 16384 /* up to here each member norms all rows for itself */

typedef struct {
    _Alignas(LINE) gemm_scratch gemm; /* no vector crosses a line, and no two members share one */
    float normed[OWN_NORM_FLOATS];
    buffer attention;
    attention_scratch parts;
} member;

_Static_assert(sizeof(member) % LINE == 0, "aligned_alloc may refuse other sizes, as macOS and sanitizers do");

typedef struct {
    model_source shape;
    layer *layers;
    matrix lm_head, project;
    buffer residual, normed, joined, qkv, attended, mlp, logits, plan, ends, plan_of_ends, phases, beam;
    member *members;
    int num_members;
} model;

/* An EAGLE-3 head: its first layer reads a token's embedding beside the hidden state that came before it. */
static inline int is_eagle(const model *m) { return m->shape.layers > 0 && m->layers[0].hidden_norm != NULL; }

/* What most EAGLE-3 heads give are hidden states before their final norm, since their next step takes them in. */
static inline int raw_states(const model *m) { return is_eagle(m) && !m->shape.norm_output; }

/* An MTP layer: it projects both before its first layer, and its next step takes in what the final norm gives. */
static inline int is_mtp(const model *m) { return m->shape.project.weight != NULL; }

static inline int is_head(const model *m) { return is_eagle(m) || is_mtp(m); }

static void *reserve(buffer *b, size_t bytes) {
    if (b->bytes < bytes) {
        free(b->data);
        b->bytes = bytes + bytes / 4 + 64;
        b->data = aligned_alloc(64, (b->bytes + 63) / 64 * 64);
        if (!b->data) b->bytes = 0;
    }
    return b->data;
}

/* Counters of a run's phases; NULL when memory is short. */
static char *reserve_phases(buffer *b, size_t bytes) {
    char *data = reserve(b, bytes + 1);
    if (data) memset(data, 0, bytes);
    return data;
}

static int reserve_members(model *m, int count) {
    if (count <= m->num_members) return 1;
    member *members = aligned_alloc(LINE, sizeof(member) * count);
    if (!members) return 0;
    memset(members, 0, sizeof(member) * count);
    for (int i = 0; i < m->num_members; i++) members[i].attention = m->members[i].attention;
    free(m->members);
    m->members = members;
    m->num_members = count;
    return 1;
}

static int matrix_load(matrix *m, const matrix_source *s, int gated, int threads) {
    return matrix_init(m, s->weight, s->bias, s->columns, s->depth, s->type, gated, threads);
}

static int layer_load(layer *l, const layer_source *s, int threads) {
    l->input_norm = s->input_norm;
    l->post_norm = s->post_norm;
    l->q_norm = s->q_norm;
    l->k_norm = s->k_norm;
    l->hidden_norm = s->hidden_norm;
    return matrix_load(&l->qkv, &s->qkv, 0, threads) && matrix_load(&l->o, &s->o, 0, threads) &&
           matrix_load(&l->gate_up, &s->gate_up, 1, threads) && matrix_load(&l->down, &s->down, 0, threads);
}

EXPORT void ada_model_free(model *m) {
    if (!m) return;
    for (int i = 0; m->layers && i < m->shape.layers; i++) {
        matrix *all[] = {&m->layers[i].qkv, &m->layers[i].o, &m->layers[i].gate_up, &m->layers[i].down};
        for (int j = 0; j < 4; j++) matrix_free(all[j]);
    }
    matrix_free(&m->lm_head);
    matrix_free(&m->project);
    buffer *buffers[] = {&m->residual, &m->normed, &m->joined, &m->qkv, &m->attended, &m->mlp, &m->logits, &m->plan,
                         &m->ends, &m->plan_of_ends, &m->phases, &m->beam};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]->data);
    for (int i = 0; i < m->num_members; i++) free(m->members[i].attention.data);
    free(m->members);
    free(m->layers);
    free(m);
}

/* NULL when memory is short. */
EXPORT model *ada_model_create(const model_source *source) {
    model *m = calloc(1, sizeof(model));
    if (!m) return NULL;
    m->shape = *source;
    m->layers = calloc(source->layers, sizeof(layer));
    int ok = m->layers != NULL && matrix_load(&m->lm_head, &source->lm_head, 0, source->threads);
    if (ok && is_mtp(m)) ok = matrix_load(&m->project, &source->project, 0, source->threads);
    for (int i = 0; ok && i < source->layers; i++) ok = layer_load(&m->layers[i], &source->layer[i], source->threads);
    if (ok) return m;
    ada_model_free(m);
    return NULL;
}

#endif
