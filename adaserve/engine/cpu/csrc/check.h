/* One pass over the numbers that a forward uses as addresses: nothing outside its arrays is read or written.
 *
 * A few comparisons per token and cached key, against thousands of multiplications. */
#ifndef ADA_CHECK_H
#define ADA_CHECK_H

#include "model.h"

/* Results of a forward below 0; native.py says them in words. */
enum { NO_MEMORY = -1, BAD_TOKEN = -2, BAD_POSITION = -3, BAD_SLOT = -4, BAD_KEY = -5, BAD_SPAN = -6, BAD_BEAM = -7, BAD_STATES = -8 };

/* Whether a value is below 0 or `limit` or more. No early exit, so that it runs in vectors. */
static int outside64(const int64_t *values, int64_t count, int64_t limit) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= (uint64_t)values[i] >= (uint64_t)limit;
    return bad;
}

static int outside32(const int32_t *values, int64_t count, int64_t limit) {
    const uint32_t most = limit < INT32_MAX ? (uint32_t)limit : (uint32_t)INT32_MAX;
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= (uint32_t)values[i] >= most;
    return bad;
}

/* Whether spans start at 0, none is of negative length, and the last ends at `end` or before it. */
static int bad_spans(const int32_t *indptr, int spans, int64_t end) {
    int bad = indptr[0] != 0 || indptr[spans] > end;
    for (int i = 0; i < spans; i++) bad |= indptr[i + 1] < indptr[i];
    return bad;
}

/* 0, or what is wrong with the batch of a forward. */
static int check_batch(const batch *b, const model *m) {
    const model_source *s = &m->shape;
    if (bad_spans(b->qo_indptr, b->requests, b->tokens) || b->qo_indptr[b->requests] != b->tokens) return BAD_SPAN;
    if (bad_spans(b->kv_indptr, b->requests, b->keys)) return BAD_SPAN;
    int64_t cells = 0;
    for (int i = 0; i < b->requests; i++) {
        const int64_t queries = b->qo_indptr[i + 1] - b->qo_indptr[i], keys = b->kv_indptr[i + 1] - b->kv_indptr[i];
        if (i < b->masked) cells += queries * keys;
        else if (queries > keys) return BAD_SPAN; /* causal: the queries are the last keys */
    }
    if (cells > b->mask_cells) return BAD_SPAN;
    if (is_head(m) != (b->before != NULL)) return BAD_STATES;
    if (b->before && (b->before_rows ? outside64(b->before_rows, b->tokens, b->befores) : b->tokens > b->befores))
        return BAD_STATES;
    if (b->captures && (!b->captured || outside32(b->capture, b->captures, s->layers))) return BAD_STATES;
    if (outside64(b->ids, b->tokens, s->vocab)) return BAD_TOKEN;
    if (outside64(b->positions, b->tokens, s->positions)) return BAD_POSITION;
    if (outside64(b->slots, b->tokens, b->pool_slots)) return BAD_SLOT;
    if (outside32(b->kv_indices, b->kv_indptr[b->requests], b->pool_slots)) return BAD_KEY;
    return 0;
}

#endif
