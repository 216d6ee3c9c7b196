// One token of one pass on a state as Python holds it, [m][d]: for decoding.
#pragma once
#include "activations.h"

// Full vectors, then what is left over.
template <class Vector, class Scalar>
INLINE void each(int n, Vector vector, Scalar scalar) {
  int i = 0;
  for (; i + VL <= n; i += VL) vector(i);
  for (; i < n; i++) scalar(i);
}

INLINE float dot_any(const float* a, const float* b, int n) {
  vf total{};
  float rest = 0;
  each(n, [&](int i) { total += load(a + i) * load(b + i); }, [&](int i) { rest += a[i] * b[i]; });
  return sum(total) + rest;
}

// memory -> next, both [m][d]; z is taken at `at`, the memory or its anchor. z and u are [WIDEST].
static inline void step_write(
    const float* memory, const float* at, float* next, const float* x, const float* target,
    float log_beta, float gamma, int phi, Width w, int d, float* z, float* u) {
  const float beta = std::exp(log_beta);
  std::memset(z, 0, 4 * w.np);
  for (int i = 0; i < w.n; i++) z[i] = dot_any(at + i * d, x, d);
  gradient(phi, z, target, u, w);
  for (int i = 0; i < w.n; i++) {
    const float *row = memory + i * d, write = gamma * u[i];
    float* out = next + i * d;
    each(d, [&](int j) { store(out + j, load(row + j) * beta - load(x + j) * write); },
         [&](int j) { out[j] = row[j] * beta - x[j] * write; });
  }
}

// y [m] = M query
static inline void step_read(const float* memory, const float* query, float* y, int m, int d) {
  for (int i = 0; i < m; i++) y[i] = dot_any(memory + i * d, query, d);
}

// y [d] = M^T query
static inline void step_read_transposed(
    const float* memory, const float* query, float* y, int m, int d) {
  std::memset(y, 0, 4 * d);
  for (int i = 0; i < m; i++) {
    const float* row = memory + i * d;
    each(d, [&](int j) { store(y + j, load(y + j) + load(row + j) * query[i]); },
         [&](int j) { y[j] += row[j] * query[i]; });
  }
}
