// -log softmax(logits)[target] of every row, and its gradient in place of the logits.
#pragma once
#include "lanes.h"

// Rows whose target is `ignored` have loss and gradient 0.
struct CrossEntropy {
  float* logits;
  const int64_t* target;
  float* loss;
  int64_t n, ignored;

  template <bool GRADIENT>
  void row(int64_t r) const {
    float* z = logits + r * n;
    if (target[r] == ignored) {
      loss[r] = 0;
      if (GRADIENT) std::memset(z, 0, 4 * n);
      return;
    }
    float top = z[0];
    if (n >= VL) {
      vf tops = load(z);
      // The last vector overlaps the one before it: a maximum may see a number twice.
      for (int64_t i = 0; i < n; i += VL) {
        const vf v = load(z + std::min(i, n - VL));
        tops = select(v > tops, v, tops);
      }
      for (int j = 0; j < VL; j++) top = tops[j] > top ? tops[j] : top;
    } else {
      for (int64_t i = 0; i < n; i++) top = z[i] > top ? z[i] : top;
    }
    const float at_target = z[target[r]];
    vf sums{};
    each(n, [&](int64_t i, auto lanes) {
      const vf v = load(z + i, lanes) - top;
      vf e = select(v < -87.f, vf{}, vexp(v));
      if (GRADIENT) store(z + i, e, lanes);
      sums += only(e, lanes);
    });
    const float total = sum(sums);
    // The difference first: a large `top` would swallow the logarithm.
    loss[r] = std::log(total) + (top - at_target);
    if (!GRADIENT) return;
    const float scale = 1.f / total;
    each(n, [&](int64_t i, auto lanes) { store(z + i, load(z + i, lanes) * scale, lanes); });
    z[target[r]] -= 1.f;
  }

  static vf only(vf x, All) { return x; }
  static vf only(vf x, int count) {
    for (int j = count; j < VL; j++) x[j] = 0;
    return x;
  }
};

template <bool GRADIENT>
static void cross_entropy(const CrossEntropy& problem, int64_t rows, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; r++) problem.row<GRADIENT>(r);
}
