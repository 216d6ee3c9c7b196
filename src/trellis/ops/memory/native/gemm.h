// Small matrix products with an epilogue per vector.
#pragma once
#include "simd.h"

// acc[r][v] = sum over k of a[r * ar + k * ak] * b[k * bk + v * VL .. + VL]
template <int R, int V>
INLINE void tile(
    const float* a, long ar, long ak, const float* b, long bk, int K, vf (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) acc[r][v] = vf{};
  for (int k = 0; k < K; k++) {
    vf bv[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) bv[v] = load(b + k * bk + v * VL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const float av = a[r * ar + k * ak];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[r][v] += av * bv[v];
    }
  }
}

template <int R, int V, class Epilogue>
INLINE void tiles(
    int rows, int cols, int K, const float* a, long ar, long ak, const float* b, long bk,
    Epilogue done) {
  for (int c = 0; c < cols; c += V * VL)
    for (int r = 0; r < rows; r += R) {
      vf acc[R][V];
      tile<R, V>(a + r * ar, ar, ak, b + c, bk, K, acc);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) done(r + i, c + v * VL, acc[i][v]);
    }
}

// For every row and vector of columns of the product A B: done(row, column, value).
// A is [rows, K] with element (r, k) at a[r * ar + k * ak]; B is [K, cols] with rows of bk.
// rows and cols are multiples of 16.
template <class Epilogue>
INLINE void product(
    int rows, int cols, int K, const float* a, long ar, long ak, const float* b, long bk,
    Epilogue done) {
  if (VL == 16) {
    if (cols % 64 == 0)
      tiles<4, 4>(rows, cols, K, a, ar, ak, b, bk, done);
    else if (cols % 32 == 0)
      tiles<8, 2>(rows, cols, K, a, ar, ak, b, bk, done);
    else
      tiles<16, 1>(rows, cols, K, a, ar, ak, b, bk, done);
  } else {
    tiles<4, 2>(rows, cols, K, a, ar, ak, b, bk, done);
  }
}
