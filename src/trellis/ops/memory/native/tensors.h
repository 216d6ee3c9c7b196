// Tensors as Python hands them over, and their rows in fp32.
#pragma once
#include "simd.h"

enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// [batch, token, head, n]: strides in elements, the last dimension contiguous.
struct Tensor {
  void* data;
  int64_t batch, token, head;
  int64_t type;
};

static inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // A half's exponent and fraction, read as a float, are off by a power of two; also subnormal.
  return from_bits(sign | to_bits(from_bits(rest << 13) * from_bits(0x77800000)));
}

static inline uint16_t to_half(float x) {
  const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (rest < 0x38800000) {  // subnormal: let the addition round
    const float aligned = from_bits(rest) + 0.5f;
    return sign | (to_bits(aligned) - to_bits(0.5f));
  }
  const uint32_t rounded = rest + 0xfff + (rest >> 13 & 1) - 0x38000000;
  return sign | rounded >> 13;
}

static inline uint16_t to_bfloat(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;  // NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Rows are short: a loop beats the call of memcpy.
INLINE void copy(const float* in, float* out, int n) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(out + i, load(in + i));
  for (; i < n; i++) out[i] = in[i];
}

static inline void read_row(const Tensor& x, int64_t at, float* out, int n) {
  if (x.type == FLOAT32) return copy(static_cast<const float*>(x.data) + at, out, n);
  const uint16_t* p = static_cast<const uint16_t*>(x.data) + at;
  if (x.type == BFLOAT16)
    for (int i = 0; i < n; i++) out[i] = from_bits(uint32_t(p[i]) << 16);
  else
    for (int i = 0; i < n; i++) out[i] = from_half(p[i]);
}

static inline void write_row(const Tensor& x, int64_t at, const float* in, int n) {
  if (x.type == FLOAT32) return copy(in, static_cast<float*>(x.data) + at, n);
  uint16_t* p = static_cast<uint16_t*>(x.data) + at;
  if (x.type == BFLOAT16)
    for (int i = 0; i < n; i++) p[i] = to_bfloat(in[i]);
  else
    for (int i = 0; i < n; i++) p[i] = to_half(in[i]);
}

// `count` tokens from `token` on into the first rows of out [16][np]; zeros elsewhere.
static inline void read_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, float* out, int n,
    int np) {
  const int64_t at = batch * x.batch + token * x.token + head * x.head;
  for (int t = 0; t < 16; t++) {
    float* row = out + t * np;
    if (t < count) read_row(x, at + t * x.token, row, n);
    const int filled = t < count ? n : 0;
    if (filled < np) std::memset(row + filled, 0, 4 * (np - filled));
  }
}

// Ask for rows ahead of their use; WRITE: they will be written.
template <bool WRITE = false>
static inline void prefetch_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, int n) {
  const int size = x.type == FLOAT32 ? 4 : 2;
  const char* at = static_cast<const char*>(x.data) +
                   size * (batch * x.batch + token * x.token + head * x.head);
  for (int t = 0; t < count; t++)
    for (int i = 0; i < n * size; i += 64) __builtin_prefetch(at + size * t * x.token + i, WRITE);
}

static inline void write_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, const float* in,
    int n, int np) {
  const int64_t at = batch * x.batch + token * x.token + head * x.head;
  for (int t = 0; t < count; t++) write_row(x, at + t * x.token, in + t * np, n);
}

// A gate [batch, token, head]: `fill` behind the last token.
static inline void read_gate(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, float* out,
    float fill) {
  const int64_t at = batch * x.batch + token * x.token + head * x.head;
  for (int t = 0; t < 16; t++) {
    out[t] = fill;
    if (t < count) read_row(x, at + t * x.token, out + t, 1);
  }
}

static inline void write_gate(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, const float* in) {
  const int64_t at = batch * x.batch + token * x.token + head * x.head;
  for (int t = 0; t < count; t++) write_row(x, at + t * x.token, in + t, 1);
}

// State [m][d] (contiguous) <-> memory [D][M] with zeros in the padding.
static inline void read_state(const float* state, float* memory, int m, int d, int M, int D) {
  std::memset(memory, 0, 4 * size_t(M) * D);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < d; j++) memory[j * M + i] = state[i * d + j];
}

static inline void write_state(float* state, const float* memory, int m, int d, int M) {
  for (int i = 0; i < m; i++)
    for (int j = 0; j < d; j++) state[i * d + j] = memory[j * M + i];
}
