/* Which candidates are verified: the marginal pricing of scheduler/pricing.py, in the same order of operations.
 * In Python it is a hundred small calls, and behind a forward that has emptied the caches each costs twice. */
#ifndef ADA_PRICING_H
#define ADA_PRICING_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int32_t rows, bins, most; /* most: nodes that fit */
    double ceiling;           /* of one step's probability */
    /* Candidate trees, [nodes] and [rows + 1]; parents inside the row and before their children. */
    const double *logprob;
    const int64_t *parent, *depth, *row_start;
    const double *factor; /* [rows, bins + 1]: what a claimed probability of a bin is worth */
    const double *weight; /* [rows]: value of a token */
    const int64_t *cap;   /* [rows]: deepest node that may be kept, or NULL */
    const double *seconds; /* [most + 1]: of an iteration that verifies so many nodes */
    /* out */
    double *f, *value; /* [nodes]: probability that a node is accepted, and that times its row's weight */
    double *expected;  /* [rows]: tokens */
    int64_t *counts;   /* [rows]: kept nodes */
    uint8_t *keep;     /* [nodes] */
    double rate, price; /* value per second of what is kept; what one node more or less costs */
    int32_t *order, *spare; /* [nodes] */
} pricing;

static void node_values(const pricing *p) {
    for (int row = 0; row < p->rows; row++) {
        const int64_t start = p->row_start[row], end = p->row_start[row + 1];
        const double *factor = p->factor + (size_t)row * (p->bins + 1);
        for (int64_t i = start; i < end; i++) {
            const int64_t parent = p->parent[i];
            double step = p->logprob[i], above = 1.0;
            if (parent >= 0) step -= p->logprob[start + parent], above = p->f[start + parent];
            const double q = step < 0.0 ? exp(step) : isnan(step) ? 0.0 : 1.0;
            const double one = q * factor[(int)(q * p->bins)];
            p->f[i] = above * (one < p->ceiling ? one : p->ceiling);
        }
        if (p->cap)
            for (int64_t i = start; i < end; i++)
                if (p->depth[i] > p->cap[row]) p->f[i] = 0.0;
        for (int64_t i = start; i < end; i++) p->value[i] = p->weight[row] * p->f[i];
    }
}

/* Nodes by falling value, of equals the first: a merge sort from the bottom. */
static const int32_t *falling(const pricing *p, int nodes) {
    int32_t *from = p->order, *to = p->spare;
    for (int i = 0; i < nodes; i++) from[i] = i;
    for (int run = 1; run < nodes; run *= 2) {
        for (int begin = 0; begin < nodes; begin += 2 * run) {
            const int middle = begin + run < nodes ? begin + run : nodes;
            const int end = middle + run < nodes ? middle + run : nodes;
            for (int a = begin, b = middle, out = begin; out < end; out++) {
                const int first = b >= end || (a < middle && p->value[from[a]] >= p->value[from[b]]);
                to[out] = first ? from[a++] : from[b++];
            }
        }
        int32_t *swap = from;
        from = to, to = swap;
    }
    return from;
}

static void count_kept(pricing *p, const int32_t *order, int best, int nodes) {
    memset(p->keep, 0, nodes);
    for (int i = 0; i < best; i++) p->keep[order[i]] = 1;
    for (int row = 0; row < p->rows; row++) {
        double expected = 0.0;
        int64_t count = 0;
        for (int64_t i = p->row_start[row]; i < p->row_start[row + 1]; i++)
            if (p->keep[i]) expected += p->f[i], count++;
        p->counts[row] = count;
        p->expected[row] = 1.0 + expected;
    }
}

static void price_nodes(pricing *p) {
    const int nodes = (int)p->row_start[p->rows];
    node_values(p);
    const int32_t *order = falling(p, nodes);
    double worth = 0.0;
    for (int row = 0; row < p->rows; row++) worth += p->weight[row];
    int best = 0;
    p->rate = worth / p->seconds[0];
    for (int count = 1; count <= p->most; count++) {
        const double value = p->value[order[count - 1]];
        if (!(value > 0.0)) break;
        worth += value;
        const double rate = worth / p->seconds[count];
        if (rate > p->rate) p->rate = rate, best = count;
    }
    const int low = best > p->rows ? best - p->rows : 0;
    const int high = best + p->rows < p->most ? best + p->rows : p->most;
    p->price = p->rate * ((p->seconds[high] - p->seconds[low]) / (high - low > 1 ? high - low : 1));
    if (best == p->most && best > 0 && best < nodes) { /* a place costs what the last one in is worth */
        const double last = p->value[order[best - 1]];
        if (last > p->price) p->price = last;
    }
    count_kept(p, order, best, nodes);
}

#endif
