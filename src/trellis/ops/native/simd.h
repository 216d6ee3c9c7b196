// Vectors of floats by the compiler's vector types: AVX-512, AVX2 and plain SSE or NEON alike.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
INLINE vf splat(float x) { return x - vf{}; }  // x - 0 is x; x + 0 would lose -0
INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }

// Numbers of half precision, as their bits, to floats and back, rounded to nearest even. NaN stays
// NaN.
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

INLINE vu bits_at(const uint16_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const vh*>(p), vu);
}
INLINE void store_bits(uint16_t* p, vu x) {
  *reinterpret_cast<vh*>(p) = __builtin_convertvector(x, vh);
}
INLINE vu pick(vi mask, vu yes, vu no) { return mask ? yes : no; }

INLINE vf from_bfloat(vu h) { return (vf)(h << 16); }

INLINE vu to_bfloat(vf x) {
  const vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return pick(x == x, rounded, bits >> 16 | 0x40);
}

INLINE vf from_half(vu h) {
  const vu sign = (h & 0x8000) << 16, rest = h & 0x7fff;
  // A half's exponent and fraction, read as a float, are off by a power of two; also subnormal.
  const vu finite = (vu)((vf)(rest << 13) * 5.192296858534828e33f);  // 2^112
  return (vf)(sign | pick((vi)(rest >= 0x7c00), 0x7f800000 | (rest & 0x3ff) << 13, finite));
}

INLINE vu to_half(vf x) {
  const vu sign = (vu)x >> 16 & 0x8000, rest = (vu)x & 0x7fffffff;
  const vu subnormal = (vu)((vf)rest + 0.5f) - 0x3f000000;  // the addition rounds
  const vu normal = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  const vu finite = pick((vi)(rest < 0x38800000), subnormal, normal);
  const vu large = pick((vi)(rest >= 0x477ff000), vu{} + 0x7c00, finite);  // rounds to infinity
  return sign | pick((vi)(rest > 0x7f800000), vu{} + 0x7e00, large);
}

// The sum of all lanes, by halves.
INLINE float sum(vf x) {
#if defined(__AVX512F__)
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif defined(__AVX__)
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
#else
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1);
#endif
  return x[0] + x[1];
}

// exp to about 1e-7 relative; arguments outside of [-87, 88] are clamped, NaN stays NaN.
INLINE vf vexp(vf x) {
  x = select(x > 88.f, splat(88.f), select(x < -87.f, splat(-87.f), x));
  const vf shifted = x * 1.44269504f + 12582912.f;  // rounds to whole numbers of ln 2
  const vf n = shifted - 12582912.f;
  const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  const vi exponent = ((vi)shifted - 0x4b400000 + 127) << 23;
  return p * (vf)exponent;
}

INLINE vf vsigmoid(vf x) { return 1.f / (1.f + vexp(-x)); }

INLINE vf vtanh(vf x) {
  const vf large = 1.f - 2.f / (1.f + vexp(2.f * x));
  const vf s = x * x;
  vf p = s * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * s - 5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  return select(vabs(x) < 0.625f, x + x * s * p, large);
}

// The normal distribution function, to about 1e-7, and its density. Near zero by the odd polynomial
// of erf in Cephes, which rounds like the sum that it is part of; beyond by Abramowitz and Stegun
// 7.1.26, whose error of 1e-7 would show in the small values of a GELU near zero.
INLINE vf vnormal(vf x, vf& density) {
  const vf e = vexp(-0.5f * x * x);
  density = e * 0.39894228040f;
  const vf t = 1.f / (1.f + 0.3275911f * 0.70710678f * vabs(x));
  vf p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const vf upper = 0.5f * p * t * e;
  const vf far = select(x > 0.f, 1.f - upper, upper);
  const vf w = x * 0.70710678f, s = w * w;
  vf q = s * 7.853861353e-5f - 8.010193625e-4f;
  q = q * s + 5.188327686e-3f;
  q = q * s - 2.685381194e-2f;
  q = q * s + 1.128358515e-1f;
  q = q * s - 3.761262582e-1f;
  q = q * s + 1.128379166f;
  return select(vabs(w) < 1.f, 0.5f + 0.5f * w * q, far);
}

#if defined(__AVX__)
// Exchanges lanes between the rows i and i + STEP, for all i in which the bit STEP is not set.
template <int STEP, int... LANE>
INLINE void swap_lanes(const vf (&in)[VL], vf (&out)[VL]) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++)
    if (!(i & STEP)) {
      out[i] = __builtin_shufflevector(in[i], in[i + STEP], LANE...);
      out[i + STEP] = __builtin_shufflevector(in[i], in[i + STEP], (LANE + STEP)...);
    }
}

// out[i][j] = in[j][i] for a block of VL x VL: swaps the off-diagonal quarters of ever smaller
// blocks, down to 1 x 1.
INLINE void transpose_square(const float* in, long in_stride, float* out, long out_stride) {
  vf a[VL], b[VL];
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) a[i] = load(in + i * in_stride);
#if defined(__AVX512F__)
  swap_lanes<8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b);
  swap_lanes<4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(b, a);
  swap_lanes<2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
  swap_lanes<1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(b, a);
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) store(out + i * out_stride, a[i]);
#else
  swap_lanes<4, 0, 1, 2, 3, 8, 9, 10, 11>(a, b);
  swap_lanes<2, 0, 1, 8, 9, 4, 5, 12, 13>(b, a);
  swap_lanes<1, 0, 8, 2, 10, 4, 12, 6, 14>(a, b);
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) store(out + i * out_stride, b[i]);
#endif
}
#endif

// out[i][j] = in[j][i] for a 16 x 16 block; `in` and `out` must not overlap.
INLINE void transpose_block(const float* in, long in_stride, float* out, long out_stride) {
#if defined(__AVX__)
  for (int i = 0; i < 16; i += VL)
    for (int j = 0; j < 16; j += VL)
      transpose_square(in + j * in_stride + i, in_stride, out + i * out_stride + j, out_stride);
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) out[i * out_stride + j] = in[j * in_stride + i];
#endif
}

// in [16][n] with stride n -> out [n][16]
INLINE void to_lanes(const float* in, float* out, int n) {
  for (int j = 0; j < n; j += 16) transpose_block(in + j, n, out + j * 16, 16);
}

// in [n][16] -> out [16][n] with stride n
INLINE void to_rows(const float* in, float* out, int n) {
  for (int j = 0; j < n; j += 16) transpose_block(in + j * 16, 16, out + j, n);
}
