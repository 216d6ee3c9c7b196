// Loops over rows of any length by vectors, and over blocks of rows by threads.
#pragma once
#include <algorithm>
#include <memory>
#include <new>
#include "simd.h"

// All lanes of a vector; a plain int means the first so many.
struct All {};

INLINE vf load(const float* p, All) { return load(p); }
INLINE void store(float* p, vf x, All) { store(p, x); }

// Lanes beyond `count` are zero.
INLINE vf load(const float* p, int count) {
  float lanes[VL] = {};
  std::memcpy(lanes, p, 4 * count);
  return load(lanes);
}

INLINE void store(float* p, vf x, int count) {
  float lanes[VL];
  store(lanes, x);
  std::memcpy(p, lanes, 4 * count);
}

// The sigmoid of a SiLU: 0 where vsigmoid's smallest value, 1e-38, would still weigh against a very
// negative x. Hence -0 far below zero and NaN at -inf, as in torch.
INLINE vf silu_sigmoid(vf x) { return select(x < -88.f, vf{}, vsigmoid(x)); }

// body(i, lanes) for every vector of a row of n numbers.
template <class Body>
INLINE void each(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) body(i, All{});
  if (i < n) body(i, int(n - i));
}

// A partition of rows that depends on their number alone, not on the threads: sums over blocks
// come out the same, whoever computes them.
struct Blocks {
  static constexpr int64_t MOST = 128;
  int64_t rows, size, count;
  Blocks(int64_t rows, int64_t least_size)
      : rows(rows),
        size(std::max(least_size, (rows + MOST - 1) / MOST)),
        count((rows + size - 1) / size) {}
  int64_t from(int64_t block) const { return block * size; }
  int64_t to(int64_t block) const { return std::min(rows, (block + 1) * size); }
};

// Room for one row of sums per block, zeros at first.
struct Partial {
  int64_t blocks, n;
  std::unique_ptr<float[]> data;
  Partial(int64_t blocks, int64_t n) : blocks(blocks), n(n), data(new float[blocks * n]()) {}
  float* row(int64_t block) { return data.get() + block * n; }

  // The sum over the blocks in their order.
  float total(int64_t i) const {
    double sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += data[b * n + i];
    return float(sum);
  }
};
