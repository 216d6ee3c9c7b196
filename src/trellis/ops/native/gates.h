// y = silu(gate) up, number by number.
#pragma once
#include "lanes.h"

constexpr int64_t GATE_BLOCK = 4096;

static void silu_product(
    const float* gate, const float* up, float* y, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t from = 0; from < n; from += GATE_BLOCK)
    each(std::min(GATE_BLOCK, n - from), [&](int64_t j, auto lanes) {
      const int64_t i = from + j;
      const vf z = load(gate + i, lanes);
      store(y + i, z * silu_sigmoid(z) * load(up + i, lanes), lanes);
    });
}

static void silu_product_backward(
    const float* dy, const float* gate, const float* up, float* dgate, float* dup, int64_t n,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t from = 0; from < n; from += GATE_BLOCK)
    each(std::min(GATE_BLOCK, n - from), [&](int64_t j, auto lanes) {
      const int64_t i = from + j;
      const vf z = load(gate + i, lanes), s = silu_sigmoid(z), value = z * s, d = load(dy + i, lanes);
      store(dgate + i, d * load(up + i, lanes) * (s + value * (1.f - s)), lanes);
      store(dup + i, d * value, lanes);
    });
}
