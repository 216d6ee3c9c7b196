// Fused pointwise kernels in fp32, with their backwards. Every function returns 0, or 1 where there
// is no memory for its buffers. Tensors are contiguous; `threads` comes last.
#include "convolution.h"
#include "cross_entropy.h"
#include "gates.h"
#include "norms.h"

namespace {

template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

// x, y [rows][n]; weight [n] and gate [rows][n] may be null.
int trellis_norm(
    const float* x, const float* weight, const float* gate, float* y, int64_t rows, int64_t n,
    double share, double eps, int64_t threads) {
  const Norm norm = {x, weight, gate, n, float(share), float(eps)};
  const auto run = weight ? (gate ? norm_forward<true, true> : norm_forward<true, false>)
                          : (gate ? norm_forward<false, true> : norm_forward<false, false>);
  return guarded([&] { run(norm, y, rows, threads); });
}

int trellis_norm_backward(
    const float* dy, const float* x, const float* weight, const float* gate, float* dx,
    float* dweight, float* dgate, int64_t rows, int64_t n, double share, double eps,
    int64_t threads) {
  const Norm norm = {x, weight, gate, n, float(share), float(eps)};
  const auto run = weight ? (gate ? norm_backward<true, true> : norm_backward<true, false>)
                          : (gate ? norm_backward<false, true> : norm_backward<false, false>);
  return guarded([&] { run(norm, dy, dx, dweight, dgate, rows, threads); });
}

int trellis_silu_product(
    const float* gate, const float* up, float* y, int64_t n, int64_t threads) {
  silu_product(gate, up, y, n, threads);
  return 0;
}

int trellis_silu_product_backward(
    const float* dy, const float* gate, const float* up, float* dgate, float* dup, int64_t n,
    int64_t threads) {
  silu_product_backward(dy, gate, up, dgate, dup, n, threads);
  return 0;
}

// x, y [rows][D]; weight [W][D]; bias [D] or null; tail, final [N][W-1][D]; bounds [N+1].
int trellis_convolution(
    const float* x, const float* weight, const float* bias, const float* tail,
    const int64_t* bounds, float* y, float* final, int64_t sequences, int64_t channels,
    int64_t width, int64_t silu, int64_t threads) {
  const Convolution c = {x, weight, bias, tail, bounds, sequences, channels, width, silu != 0};
  return guarded([&] { convolution_forward(c, y, final, threads); });
}

// dweight [D][W], unlike weight.
int trellis_convolution_backward(
    const float* dy, const float* dfinal, const float* x, const float* weight, const float* bias,
    const float* tail, const int64_t* bounds, float* dx, float* dweight, float* dbias,
    float* dtail, int64_t sequences, int64_t channels, int64_t width, int64_t silu,
    int64_t threads) {
  const Convolution c = {x, weight, bias, tail, bounds, sequences, channels, width, silu != 0};
  return guarded(
      [&] { convolution_backward(c, dy, dfinal, dx, dtail, dweight, dbias, threads); });
}

// logits [rows][n] become their gradient if `gradient` is not 0; target, loss [rows].
int trellis_cross_entropy(
    float* logits, const int64_t* target, float* loss, int64_t rows, int64_t n, int64_t ignored,
    int64_t gradient, int64_t threads) {
  const CrossEntropy problem = {logits, target, loss, n, ignored};
  gradient ? cross_entropy<true>(problem, rows, threads)
           : cross_entropy<false>(problem, rows, threads);
  return 0;
}
}
