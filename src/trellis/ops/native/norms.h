// y = x scale weight gelu(gate), row by row, with scale = 1 / sqrt(share |x|^2 + eps).
// share is 1 / n for RMSNorm and 1 for unit length. weight and gate may be missing (null).
#pragma once
#include "lanes.h"

struct Norm {
  const float *x, *weight, *gate;
  int64_t n;
  float share, eps;

  float scale(const float* row) const {
    vf squares{};
    each(n, [&](int64_t i, auto lanes) {
      const vf v = load(row + i, lanes);
      squares += v * v;
    });
    return 1.f / std::sqrt(sum(squares) * share + eps);
  }

  template <bool WEIGHT, bool GATE>
  void forward(int64_t r, float* y) const {
    const float* row = x + r * n;
    const float s = scale(row);
    each(n, [&](int64_t i, auto lanes) {
      vf out = load(row + i, lanes) * s;
      if (WEIGHT) out *= load(weight + i, lanes);
      if (GATE) {
        vf density;
        const vf z = load(gate + r * n + i, lanes);
        out *= z * vnormal(z, density);
      }
      store(y + r * n + i, out, lanes);
    });
  }

  // With h = dy weight gelu(gate), the gradient of the normalised row:
  // dx = scale (h - normal share (normal . h)).
  template <bool WEIGHT, bool GATE>
  void backward(int64_t r, const float* dy, float* dx, float* dweight, float* dgate) const {
    const float* row = x + r * n;
    const float s = scale(row);
    dx += r * n;
    vf along{};
    each(n, [&](int64_t i, auto lanes) {
      const vf normal = load(row + i, lanes) * s;
      vf h = load(dy + r * n + i, lanes);
      if (GATE) {
        vf density;
        const vf z = load(gate + r * n + i, lanes), below = vnormal(z, density);
        vf dz = h * normal * (below + z * density);
        if (WEIGHT) dz *= load(weight + i, lanes);
        store(dgate + r * n + i, dz, lanes);
        h *= z * below;
      }
      if (WEIGHT) {
        store(dweight + i, load(dweight + i, lanes) + h * normal, lanes);
        h *= load(weight + i, lanes);
      }
      along += h * normal;
      store(dx + i, h, lanes);
    });
    const float pull = sum(along) * share * s;
    each(n, [&](int64_t i, auto lanes) {
      store(dx + i, (load(dx + i, lanes) - load(row + i, lanes) * pull) * s, lanes);
    });
  }
};

template <bool WEIGHT, bool GATE>
static void norm_forward(const Norm& norm, float* y, int64_t rows, int64_t threads) {
  const Blocks blocks(rows, 16);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks.count; b++)
    for (int64_t r = blocks.from(b); r < blocks.to(b); r++) norm.forward<WEIGHT, GATE>(r, y);
}

template <bool WEIGHT, bool GATE>
static void norm_backward(
    const Norm& norm, const float* dy, float* dx, float* dweight, float* dgate, int64_t rows,
    int64_t threads) {
  const Blocks blocks(rows, 16);
  Partial partial(WEIGHT ? blocks.count : 0, norm.n);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks.count; b++)
    for (int64_t r = blocks.from(b); r < blocks.to(b); r++)
      norm.backward<WEIGHT, GATE>(r, dy, dx, WEIGHT ? partial.row(b) : nullptr, dgate);
  if (WEIGHT)
    for (int64_t i = 0; i < norm.n; i++) dweight[i] = partial.total(i);
}
