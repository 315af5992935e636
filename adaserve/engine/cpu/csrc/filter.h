/* Top-k, top-p and min-p: the rule of adaserve/engine/logits/filters.py, by selection where that one sorts. */
#ifndef ADA_FILTER_H
#define ADA_FILTER_H

#include "sampling.h"

/* What rows ask for. Mirrored by a ctypes structure in filter.py. */
typedef struct {
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
} filters;

/* A number that rises with the float. Both zeros have the same. */
static inline uint64_t rising(float x) {
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? (uint32_t)~bits : bits | 0x80000000u;
}

/* How likely the logits from `at` on are beside the largest, VL of them. */
static ALWAYS_INLINE void likely_at(const float *logits, int at, int n, float top, float temperature, float *likely) {
    vf x = splat(-INFINITY);
    if (at + VL <= n) x = load(logits + at);
    else memcpy(&x, logits + at, sizeof(float) * (n - at));
    store(likely, vexp((x - top) / temperature));
}

/* Sums of whole numbers are the same in any order. */
static inline int64_t whole(float likely) { return (int64_t)((likely < 1.0f ? likely : 1.0f) * 0x1p40f); }

/* The last logits of a row's order that are kept: the first `ties` of those whose number is `last`. */
typedef struct {
    uint64_t last;
    int64_t ties;
} order_end;

/* By the numbers' digits, one after the other: of each only the logits that agree in all before are looked at. */
static order_end find_end(const float *logits, int n, float top, float temperature, int64_t top_k, float top_p) {
    static const int behind[] = {32, 21, 10, 0}; /* bits behind each digit */
    int64_t counts[2048], sums[2048], count = 0, sum = 0, most = INT64_MAX;
    uint64_t found = 0;
    float likely[VL];
    int digit = 0;
    for (int d = 0; d < 3; d++) {
        const int size = 1 << (behind[d] - behind[d + 1]);
        memset(counts, 0, sizeof counts);
        memset(sums, 0, sizeof sums);
        for (int at = 0; at < n; at += VL) {
            likely_at(logits, at, n, top, temperature, likely);
            for (int i = 0; i < VL && at + i < n; i++) {
                const uint64_t number = rising(logits[at + i]);
                if (number >> behind[d] != found) continue;
                const int own = (int)(number >> behind[d + 1]) & (size - 1);
                counts[own]++;
                sums[own] += whole(likely[i]);
            }
        }
        if (d == 0 && top_p < 1.0f) {
            int64_t total = 0;
            for (int i = 0; i < size; i++) total += sums[i];
            most = (int64_t)(top_p * (double)total);
        }
        for (digit = size - 1; digit >= 0; digit--) {
            if (counts[digit] && (count + counts[digit] >= top_k || sum + sums[digit] > most)) break;
            count += counts[digit];
            sum += sums[digit];
        }
        if (digit < 0) return (order_end){0, n}; /* nothing is left out */
        found = found * size + digit;
    }
    const int64_t each = sums[digit] / counts[digit];
    int64_t ties = 0;
    while (ties < counts[digit] && count + ties < top_k && sum + ties * each <= most) ties++;
    return (order_end){found, ties};
}

static void row_filter(float *logits, int n, const filters *asked, int i) {
    const float temperature = asked->temperature[i], min_p = asked->min_p[i], top = row_max(logits, n);
    order_end end = find_end(logits, n, top, temperature, asked->top_k[i], asked->top_p[i]);
    float likely[VL];
    for (int at = 0; at < n; at += VL) {
        likely_at(logits, at, n, top, temperature, likely);
        for (int j = 0; j < VL && at + j < n; j++) {
            const uint64_t number = rising(logits[at + j]);
            const int is_kept = number > end.last || (number == end.last && end.ties-- > 0);
            if (!is_kept || !(likely[j] >= min_p)) logits[at + j] = -INFINITY;
        }
    }
}

#endif
