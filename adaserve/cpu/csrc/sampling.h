/* What a draft or a greedy request needs of a row of logits. */
#ifndef ADA_SAMPLING_H
#define ADA_SAMPLING_H

#include "gemm.h"

/* The first of the largest, as torch.argmax gives it. */
static int row_argmax(const float *logits, int n) {
    vf best = splat(-INFINITY);
    float top;
    int i = 0;
    for (; i + VL <= n; i += VL) best = vmax(load(logits + i), best);
    top = lane_max(best);
    for (; i < n; i++) top = logits[i] > top ? logits[i] : top;
    for (i = 0; i < n; i++)
        if (logits[i] == top) return i;
    return 0;
}

static float row_exp_sum(const float *logits, int n, float scale, float top) {
    vf sum = splat(0.0f);
    int i = 0;
    for (; i + VL <= n; i += VL) sum += vexp((load(logits + i) - top) * scale);
    vf last = splat(-INFINITY);
    for (int j = 0; i + j < n; j++) last[j] = (logits[i + j] - top) * scale;
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

/* log softmax(scale * logits) of the `width` likeliest tokens. */
static void row_top_logprobs(const float *logits, int n, float scale, int width, float *logprobs, int64_t *tokens) {
    row_top(logits, n, width, logprobs, tokens);
    float top = logprobs[0], log_sum = logf(row_exp_sum(logits, n, scale, top));
    for (int i = 0; i < width; i++) logprobs[i] = (logprobs[i] - top) * scale - log_sum;
}

#endif
