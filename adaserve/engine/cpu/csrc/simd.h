/* Vectors of the host's width, through the compiler's vector extensions: one source for x86, ARM and others. */
#ifndef ADA_SIMD_H
#define ADA_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HOST_VL 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HOST_VL 8
#else
#define HOST_VL 4
#endif
#ifndef VL /* tests compile other widths, which the compiler then emulates */
#define VL HOST_VL
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

/* aligned(4), may_alias: rows of a caller's tensor start anywhere. */
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int64_t vl __attribute__((vector_size(8 * VL), aligned(8), may_alias));
typedef uint8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));

enum { FP32 = 0, FP16 = 1, BF16 = 2, NUM_TYPES = 3, INT8 = NUM_TYPES /* of packed matrices alone */ };

static const int type_bytes[NUM_TYPES] = {4, 2, 2};

static ALWAYS_INLINE vf splat(float x) { return x - (vf){0}; }

static ALWAYS_INLINE vf load(const float *p) { return *(const vf *)p; }

static ALWAYS_INLINE void store(float *p, vf x) { *(vf *)p = x; }

static ALWAYS_INLINE vf blend(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

/* A NaN in `b` comes through. */
static ALWAYS_INLINE vf vmax(vf a, vf b) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8 && defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return blend((vi)(a > b), a, b);
#endif
}

static ALWAYS_INLINE vf vmin(vf a, vf b) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VL == 8 && defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return blend((vi)(a < b), a, b);
#endif
}

static ALWAYS_INLINE vf half_to_float(const uint16_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    typedef __fp16 native __attribute__((vector_size(2 * VL), aligned(2), may_alias));
    return __builtin_convertvector(*(const native *)p, vf);
#else
    /* Shift the fields into place and let a multiplication fix the exponent's bias (also for denormals). */
    vi bits = __builtin_convertvector(*(const vh *)p, vi);
    vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vi)magnitude | ((bits & 0x8000) << 16));
#endif
}

static ALWAYS_INLINE vf bfloat_to_float(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vh *)p, vi) << 16);
}

/* VL elements from index `i` of an array of storage `type` (a constant where speed matters). */
static ALWAYS_INLINE vf load_as_float(int type, const void *p, size_t i) {
    if (type == FP16) return half_to_float((const uint16_t *)p + i);
    if (type == BF16) return bfloat_to_float((const uint16_t *)p + i);
    return load((const float *)p + i);
}

static inline float scalar_as_float(int type, const void *p, size_t i) {
    if (type == FP32) return ((const float *)p)[i];
    uint16_t lanes[VL] = {((const uint16_t *)p)[i]};
    return (type == FP16 ? half_to_float(lanes) : bfloat_to_float(lanes))[0];
}

/* `n` elements to fp32. */
static inline void widen(int type, const void *source, size_t from, float *target, int n) {
    int i = 0;
    for (; i + VL <= n; i += VL) store(target + i, load_as_float(type, source, from + i));
    for (; i < n; i++) target[i] = scalar_as_float(type, source, from + i);
}

/* Round to nearest even, as torch does. */
static inline uint16_t float_to_bfloat(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline uint16_t float_to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00); /* infinity */
    if (bits < 0x38800000) { /* denormal: the addition rounds at the right bit */
        float magic;
        memcpy(&magic, &bits, 4);
        magic += 0.5f;
        memcpy(&bits, &magic, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

static inline void narrow(int type, const float *source, void *target, size_t to, int n) {
    if (type == FP32) {
        memcpy((float *)target + to, source, sizeof(float) * n);
        return;
    }
    uint16_t *out = (uint16_t *)target + to;
    for (int i = 0; i < n; i++) out[i] = type == FP16 ? float_to_half(source[i]) : float_to_bfloat(source[i]);
}

/* exp with about one unit in the last place, for -87 <= x <= 88; beyond, its value at the bound. */
static ALWAYS_INLINE vf vexp_bounded(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = vmin(splat(88.0f), vmax(splat(-87.0f), x));
    vf shifted = x * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return (vf)((vi)p + ((vi)shifted << 23)); /* the magic's own bits leave at the top */
}

/* exp for x <= 88, exactly 0 below -87, which includes minus infinity. */
static ALWAYS_INLINE vf vexp(vf x) { return (vf)((vi)vexp_bounded(x) & (vi)(x >= -87.0f)); }

/* log of positive normal numbers, with about one unit in the last place. */
static ALWAYS_INLINE vf vlog(vf x) {
    vi exponent = ((vi)x >> 23) - 126;
    vf m = (vf)(((vi)x & 0x007fffff) | 0x3f000000); /* 0.5 to 1 */
    const vi low = (vi)(m < 0.707106781f);
    exponent += low;
    m = m + (vf)((vi)m & low) - 1.0f;
    const vf e = __builtin_convertvector(exponent, vf), square = m * m;
    vf p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - e * 2.12194440e-4f - square * 0.5f;
    return m + p + e * 0.693359375f;
}

/* Lanes in a fixed order, so that a row's sum never depends on its company. */
static ALWAYS_INLINE float lane_sum(vf x) {
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
}

static ALWAYS_INLINE float lane_max(vf x) {
    float max = x[0];
    for (int i = 1; i < VL; i++) max = x[i] > max ? x[i] : max;
    return max;
}

#endif
