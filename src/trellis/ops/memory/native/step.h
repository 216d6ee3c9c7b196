// One token of each sequence, straight on the states as Python holds them, [m][d]: for decoding.
#pragma once
#include "call.h"

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

// memory -> next, both [m][d]; z is taken at `at`, the memory or its anchor, times the token's decay
// if `after`. z, u: [WIDEST].
static inline void step_write(
    const float* memory, const float* at, float* next, const float* x, const float* target,
    float log_decay, float step_size, int phi, bool after, Width w, int d, float* z, float* u) {
  const float decay = std::exp(log_decay), kept = after ? decay : 1.f;
  std::memset(z, 0, 4 * w.np);
  for (int i = 0; i < w.n; i++) z[i] = kept * dot_any(at + i * d, x, d);
  gradient(phi, z, target, u, w);
  for (int i = 0; i < w.n; i++) {
    const float *row = memory + i * d, write = step_size * u[i];
    float* out = next + i * d;
    each(d, [&](int j) { store(out + j, load(row + j) * decay - load(x + j) * write); },
         [&](int j) { out[j] = row[j] * decay - x[j] * write; });
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

// One token for each sequence, none of it saved: a step of decoding, straight on the states.
struct Step {
  const Problem& p;
  Mask mask1, mask2, mask_y;
  explicit Step(const Problem& p) : p(p), mask1(p.m[0]), mask2(p.m[1]), mask_y(p.y_dim()) {}

  static bool fits(const Problem& p) {
    if (p.saved.given()) return false;
    for (int64_t n = 0; n < p.sequences(); n++)
      if (p.sequence[n].length != 1) return false;
    return true;
  }

  static float* row_of(const Tensor& x, const Sequence& s, int64_t h, float* out, int n) {
    std::memset(out, 0, 4 * WIDEST);
    read_row(x, x.at(s.batch, s.token, h), out, n);
    return out;
  }

  void head(int64_t n, int64_t h) const {
    const Sequence& s = p.sequence[n];
    alignas(64) float q[WIDEST], x[WIDEST], target[WIDEST], z[WIDEST], u[WIDEST], y[WIDEST];
    float log_decay, step_size;
    auto of = [&](float* state, int64_t size) { return state + (n * p.heads + h) * size; };
    auto gate = [&](const Tensor& t, float& value) {
      read_row(t, t.at(s.batch, s.token, h), &value, 1);
    };
    // One pass: reads the token's x, target and gates, and gives the memory after the token.
    auto write = [&](int i, const float* mask) {
      const int m = p.m[i], d = p.d[i];
      const int64_t size = int64_t(m) * d;
      row_of(p.in.x[i], s, h, x, d), row_of(p.in.target[i], s, h, target, m);
      gate(p.in.log_decay[i], log_decay), gate(p.in.step_size[i], step_size);
      const float* memory = of(p.start.memory[i], size);
      const float* at = s.offset == 0 ? memory : of(p.start.anchor[i], size);
      float* next = of(p.final.memory[i], size);
      step_write(memory, at, next, x, target, log_decay, step_size, p.phi[i], p.after,
                 {m, padded(m), mask}, d, z, u);
      if (p.minibatch > 1)
        std::memcpy(of(p.final.anchor[i], size), s.offset + 1 == p.minibatch ? next : at, 4 * size);
      return next;
    };
    const float* first = write(0, mask1.on);
    row_of(p.in.q, s, h, q, p.d[0]);
    std::memset(y, 0, sizeof y);
    step_read(first, q, y, p.m[0], p.d[0]);
    activate(p.f, y, q, {p.m[0], padded(p.m[0]), mask1.on});

    const float* second = write(1, mask2.on);
    std::memset(y, 0, sizeof y);
    (p.transposed ? step_read_transposed : step_read)(second, q, y, p.m[1], p.d[1]);
    activate(p.psi, y, y, {p.y_dim(), padded(p.y_dim()), mask_y.on});
    write_row(p.y, p.y.at(s.batch, s.token, h), y, p.y_dim());
  }

  int run() const {
    const int64_t tasks = p.sequences() * p.heads;
#pragma omp parallel for num_threads(p.threads) schedule(static)
    for (int64_t i = 0; i < tasks; i++) head(i / p.heads, i % p.heads);
    return 0;
  }
};
