/* What a draft or a draw of the target needs of a row of logits. */
#ifndef ADA_SAMPLING_H
#define ADA_SAMPLING_H

#include "gemm.h"

/* How rows of logits are read: scale * logits + spread * noise, the noise Gumbel, a function of (key, position,
 * token) alone. Mirrored by a ctypes structure in noise.py. */
typedef struct {
    const float *scale, *spread;
    const uint64_t *keys;
    const int64_t *positions;
} transform;

static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static ALWAYS_INLINE vu mix32(vu x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Gumbel noise from 32 random bits. Of 1 - u only the distance u from 1 is kept, whose precision is relative, so
 * that the largest values, which decide draws, are fine-grained. */
static ALWAYS_INLINE vf gumbel(vu bits) {
    const vf u = (__builtin_convertvector((vi)(bits >> 1), vf) + 0.5f) * 0x1p-31f;
    const vf rest = 1.0f - u, lost = 1.0f - rest;
    /* -log(1 - u), corrected for what 1 - u lost by rounding. */
    const vf e = -vlog(vmax(rest, splat(0x1p-32f))) * u / vmax(lost, splat(0x1p-25f));
    return -vlog(blend((vi)(lost > 0.0f), e, u));
}

/* Where a row's noise begins: lanes of token numbers, to be mixed with `high`. */
typedef struct {
    vu token;
    uint32_t high;
} noise;

static ALWAYS_INLINE noise row_noise(const transform *r, int i) {
    const uint64_t seed = mix64(r->keys[i] ^ mix64((uint64_t)r->positions[i] + 0x9e3779b97f4a7c15u));
    noise own = {.token = {0}, .high = (uint32_t)(seed >> 32)};
    for (int j = 0; j < VL; j++) own.token[j] = (uint32_t)seed + j;
    return own;
}

static ALWAYS_INLINE vf noise_of(vu token, uint32_t high) { return gumbel(mix32(mix32(token) ^ high)); }

static ALWAYS_INLINE vf next_noise(noise *own) {
    const vf values = noise_of(own->token, own->high);
    own->token += VL;
    return values;
}

/* Token numbers of the logits from `at` on, less than VL of them at the end; `ids`: NULL where they are all. */
static ALWAYS_INLINE vu tokens_at(const int64_t *ids, int at, int n) {
    vu tokens = {0};
    if (ids && at + VL <= n) return __builtin_convertvector(*(const vl *)(ids + at), vu);
    for (int j = 0; j < VL; j++) tokens[j] = ids ? (uint32_t)ids[imin(at + j, n - 1)] : (uint32_t)(at + j);
    return tokens;
}

/* logits <- scale * logits + spread * noise, of the `rows` rows from `i` on, whose keys and positions are those of
 * the first: so is their noise. `ids`: the logits' tokens, NULL where they are all. */
static void transform_rows(float *logits, int rows, int n, const int64_t *ids, const transform *r, int i) {
    const noise start = row_noise(r, i);
    for (int at = 0; at < n; at += VL) {
        const vf shift = noise_of(start.token[0] + tokens_at(ids, at, n), start.high);
        for (int row = 0; row < rows; row++) {
            float *to = logits + (size_t)row * n + at;
            const float scale = r->scale[i + row];
            const vf own = shift * r->spread[i + row];
            if (at + VL <= n) store(to, load(to) * scale + own);
            else for (int j = 0; at + j < n; j++) to[j] = to[j] * scale + own[j];
        }
    }
}

/* The same without noise, of one row. */
static void scale_row(float *logits, int n, float scale) {
    int at = 0;
    for (; at + VL <= n; at += VL) store(logits + at, load(logits + at) * scale);
    for (; at < n; at++) logits[at] *= scale;
}

static float row_max(const float *logits, int n) {
    vf best = splat(-INFINITY);
    int i = 0;
    for (; i + VL <= n; i += VL) best = vmax(load(logits + i), best);
    float top = lane_max(best);
    for (; i < n; i++) top = logits[i] > top ? logits[i] : top;
    return top;
}

/* The first of the largest, as torch.argmax gives it. */
static int row_argmax(const float *logits, int n) {
    const float top = row_max(logits, n);
    for (int i = 0; i < n; i++)
        if (logits[i] == top) return i;
    return 0;
}

/* The first of the largest of row `i` as read; `logits` stay as they are. */
static int row_draw(const float *logits, int n, const transform *r, int i) {
    const float scale = r->scale[i], spread = r->spread[i];
    if (spread == 0.0f) return row_argmax(logits, n);
    noise own = row_noise(r, i);
    vf best = splat(-INFINITY);
    vi place = {0}, at_lane;
    for (int j = 0; j < VL; j++) at_lane[j] = j;
    for (int at = 0; at < n; at += VL, at_lane += VL) {
        const vf shift = next_noise(&own) * spread;
        vf value = splat(-INFINITY);
        if (at + VL <= n) value = load(logits + at) * scale + shift;
        else for (int j = 0; at + j < n; j++) value[j] = logits[at + j] * scale + shift[j];
        const vi above = (vi)(value > best);
        best = blend(above, value, best);
        place = (above & at_lane) | (~above & place);
    }
    int found = 0;
    for (int j = 1; j < VL; j++)
        if (best[j] > best[found] || (best[j] == best[found] && place[j] < place[found])) found = j;
    return place[found];
}

static float row_exp_sum(const float *logits, int n, float top) {
    vf sum = splat(0.0f);
    int i = 0;
    for (; i + VL <= n; i += VL) sum += vexp(load(logits + i) - top);
    vf last = splat(-INFINITY);
    for (int j = 0; i + j < n; j++) last[j] = logits[i + j] - top;
    return lane_sum(sum + vexp(last));
}

/* The `width` largest logits in descending order, earlier tokens first among equals. */
static void row_top(const float *logits, int n, int width, float *values, int64_t *tokens) {
    int held = 0;
    for (int i = 0; i < n;) {
        /* Once the list is full nearly every vector is passed over with one comparison. */
        if (held == width && i + VL <= n) {
            vi above = load(logits + i) > values[width - 1];
            int any = 0;
            for (int j = 0; j < VL; j++) any |= above[j];
            if (!any) {
                i += VL;
                continue;
            }
        }
        for (int end = imin(i + VL, n); i < end; i++) {
            if (held == width && !(logits[i] > values[width - 1])) continue;
            int at = held < width ? held++ : width - 1;
            for (; at > 0 && logits[i] > values[at - 1]; at--) {
                values[at] = values[at - 1];
                tokens[at] = tokens[at - 1];
            }
            values[at] = logits[i];
            tokens[at] = i;
        }
    }
}

/* log softmax of the `width` likeliest tokens. */
static void row_top_logprobs(const float *logits, int n, int width, float *logprobs, int64_t *tokens) {
    row_top(logits, n, width, logprobs, tokens);
    float top = logprobs[0], log_sum = logf(row_exp_sum(logits, n, top));
    for (int i = 0; i < width; i++) logprobs[i] = logprobs[i] - top - log_sum;
}

#endif
