/* Beam search of candidate trees (AdaServe, Algorithm 2, line 8): all draft steps in one call.
 *
 * Node order within a row is step-major: node step * width + beam. */
#ifndef ADA_BEAM_H
#define ADA_BEAM_H

#include "forward.h"
#include "sampling.h"

#define MAX_WIDTH 16

/* Mirrored by a ctypes structure in native.py. */
typedef struct {
    int32_t rows, width, depth, window; /* window = 1 + width * depth columns: the root's and the nodes' */
    const int64_t *base;                /* [rows]: cached tokens, the root's position */
    const int32_t *kv_indptr, *kv_indices; /* per row the prefix, then the window */
    const int32_t *columns;             /* [width * depth]: window column of each node */
    const float *scale, *spread;        /* [rows]: of the rows' transforms */
    const uint64_t *keys;               /* [rows] */
    int64_t *tokens, *parents;          /* out: [rows, width * depth]; parents within the row, -1 is the root */
    double *logprobs;                   /* out: of paths */
    uint8_t *visible;                   /* out, zeros at first: [rows, width * depth, window] */
    int (*keep)(int steps);             /* whether to go on after so many steps; NULL: always */
    int64_t held;                       /* how many kv_indices there are */
} beam;

typedef struct {
    float *hidden, *before, *scale, *spread, *logprobs;
    int64_t *ids, *positions, *slots, *best;
    uint64_t *keys;
    int32_t *qo_indptr;
    uint8_t *mask;
} beam_buffers;

static int beam_reserve(model *m, const beam *s, beam_buffers *b) {
    const size_t nodes = (size_t)s->rows * s->width, keys = s->kv_indptr[s->rows];
    const size_t longs = sizeof(int64_t) * nodes * (4 + s->width);
    const size_t floats = sizeof(float) * nodes * (2 * m->shape.hidden + 2 + s->width);
    const size_t bytes = longs + floats + sizeof(int32_t) * (s->rows + 1) + keys * s->width;
    char *data = reserve(&m->beam, bytes);
    if (!data) return 0;
    b->ids = (int64_t *)data;
    b->positions = b->ids + nodes;
    b->slots = b->positions + nodes;
    b->best = b->slots + nodes; /* [nodes, width] */
    b->keys = (uint64_t *)(b->best + nodes * s->width);
    b->hidden = (float *)(b->keys + nodes);
    b->before = b->hidden + nodes * m->shape.hidden;
    b->scale = b->before + nodes * m->shape.hidden;
    b->spread = b->scale + nodes;
    b->logprobs = b->spread + nodes; /* [nodes, width] */
    b->qo_indptr = (int32_t *)(b->logprobs + nodes * s->width);
    b->mask = (uint8_t *)(b->qo_indptr + s->rows + 1);
    return 1;
}

static void see(const beam *s, int row, int node, int parent) {
    uint8_t *own = s->visible + ((size_t)row * s->width * s->depth + node) * s->window;
    if (parent < 0) own[0] = 1;
    else memcpy(own, s->visible + ((size_t)row * s->width * s->depth + parent) * s->window, s->window);
    own[s->columns[node]] = 1;
}

/* The root's best children. */
static void first_level(const beam *s, const beam_buffers *b) {
    const int nodes = s->width * s->depth;
    for (int row = 0; row < s->rows; row++)
        for (int i = 0; i < s->width; i++) {
            const size_t at = (size_t)row * nodes + i;
            s->tokens[at] = b->best[row * s->width + i];
            s->logprobs[at] = b->logprobs[row * s->width + i];
            s->parents[at] = -1;
            see(s, row, i, -1);
        }
}

/* The `width` likeliest of all children of the level before `step` (0-based), earlier ones first among equals. */
static void next_level(const beam *s, const beam_buffers *b, int step) {
    const int w = s->width, nodes = w * s->depth, before = (step - 1) * w;
    for (int row = 0; row < s->rows; row++) {
        const size_t base = (size_t)row * nodes;
        double path[MAX_WIDTH];
        int child[MAX_WIDTH], held = 0;
        for (int c = 0; c < w * w; c++) {
            const double value = s->logprobs[base + before + c / w] + b->logprobs[row * w * w + c];
            if (held == w && !(value > path[w - 1])) continue;
            int at = held < w ? held++ : w - 1;
            for (; at > 0 && value > path[at - 1]; at--) path[at] = path[at - 1], child[at] = child[at - 1];
            path[at] = value;
            child[at] = c;
        }
        for (int i = 0; i < w; i++) {
            const int node = step * w + i, parent = before + child[i] / w;
            s->tokens[base + node] = b->best[row * w * w + child[i]];
            s->logprobs[base + node] = path[i];
            s->parents[base + node] = parent;
            see(s, row, node, parent);
        }
    }
}

/* Tokens, places and mask of the forward over the level before `step`. */
static void level_inputs(const beam *s, const beam_buffers *b, int step) {
    const int w = s->width, nodes = w * s->depth, before = (step - 1) * w;
    uint8_t *mask = b->mask;
    for (int row = 0; row < s->rows; row++) {
        const int keys = s->kv_indptr[row + 1] - s->kv_indptr[row], prefix = keys - s->window;
        const int32_t *slots = s->kv_indices + s->kv_indptr[row] + prefix;
        for (int i = 0; i < w; i++, mask += keys) {
            const int at = row * w + i;
            b->ids[at] = s->tokens[(size_t)row * nodes + before + i];
            b->positions[at] = s->base[row] + step;
            b->slots[at] = slots[s->columns[before + i]];
            memcpy(mask + prefix, s->visible + ((size_t)row * nodes + before + i) * s->window, s->window);
        }
    }
}

/* A head's state behind each parent of the level before `step`: its forward over that level takes them in. */
static void parents_states(const model *m, const beam *s, const beam_buffers *b, int step) {
    const int w = s->width, before = (step - 1) * w;
    const size_t n = m->shape.hidden;
    for (int row = 0; row < s->rows; row++)
        for (int i = 0; i < w; i++) {
            const int64_t parent = s->parents[(size_t)row * w * s->depth + before + i];
            const size_t at = parent < 0 ? row : row * w + parent - (before - w); /* before the first level: roots */
            memcpy(b->before + (row * w + i) * n, b->hidden + at * n, sizeof(float) * n);
        }
}

static int check_beam(const batch *first, const beam *s) {
    if (s->rows < 0 || s->width < 1 || s->width > MAX_WIDTH || s->depth < 1) return BAD_BEAM;
    if (s->window != 1 + s->width * s->depth || bad_spans(s->kv_indptr, s->rows, s->held)) return BAD_BEAM;
    for (int row = 0; row < s->rows; row++)
        if (s->kv_indptr[row + 1] - s->kv_indptr[row] < s->window) return BAD_BEAM;
    if (outside32(s->columns, s->width * s->depth, s->window) || first->requests != s->rows) return BAD_BEAM;
    for (int row = 0; row < s->rows; row++)
        if (first->qo_indptr[row + 1] <= first->qo_indptr[row]) return BAD_BEAM; /* there is no root */
    return 0;
}

/* In `first` each row's last token is its root; the states of `first` go nowhere. Returns the steps run, or below 0
 * what is wrong (check.h). */
EXPORT int ada_beam_search(model *m, const batch *first, const beam *s, int threads) {
    const int w = s->width;
    beam_buffers b;
    int wrong = check_beam(first, s);
    if (wrong) return wrong;
    if (!beam_reserve(m, s, &b)) return NO_MEMORY;
    batch level = *first;
    level.hidden = b.hidden; /* of the roots, then of each level */
    if ((wrong = run_forward(m, &level, 1, threads))) return wrong;
    memset(b.mask, 1, (size_t)s->kv_indptr[s->rows] * w);
    for (int row = 0; row <= s->rows; row++) b.qo_indptr[row] = row * w;
    for (int i = 0; i < s->rows * w; i++) {
        b.scale[i] = s->scale[i / w];
        b.spread[i] = s->spread[i / w];
        b.keys[i] = s->keys[i / w];
    }
    const transform roots = {s->scale, s->spread, s->keys, s->base};
    const transform beams = {b.scale, b.spread, b.keys, b.positions};
    if (top_logprobs(m, b.hidden, s->rows, 1, &roots, w, b.logprobs, b.best, threads)) return NO_MEMORY;
    first_level(s, &b);
    level.tokens = s->rows * w;
    level.requests = s->rows;
    level.ids = b.ids;
    level.positions = b.positions;
    level.slots = b.slots;
    level.qo_indptr = b.qo_indptr;
    level.kv_indptr = s->kv_indptr;
    level.kv_indices = s->kv_indices;
    level.masked = s->rows;
    level.mask = b.mask;
    level.before = is_head(m) ? b.before : NULL;
    level.before_rows = NULL;
    level.before_type = FP32;
    level.befores = level.tokens;
    level.keys = s->held;
    level.mask_cells = (int64_t)s->kv_indptr[s->rows] * w;
    for (int step = 1; step < s->depth; step++) {
        if (s->keep && !s->keep(step)) return step;
        level_inputs(s, &b, step);
        if (is_head(m)) parents_states(m, s, &b, step);
        if ((wrong = run_forward(m, &level, 0, threads))) return wrong;
        if (top_logprobs(m, b.hidden, s->rows * w, w, &beams, w, b.logprobs, b.best, threads)) return NO_MEMORY;
        next_level(s, &b, step);
    }
    return s->depth;
}

#endif
