// Fused pointwise kernels in fp32 with their backwards: norms, the gate of SwiGLU, the causal
// convolution, the cross-entropy. The equations stand in ops/norms.py, gates.py, convolution.py and
// cross_entropy.py.
//
// Functions named trellis_* are called from Python (pointwise.py). Their arguments are first the
// inputs, then the outputs, then sizes and other numbers, last the number of threads. All tensors are
// contiguous. The functions return 0, or 1 if there is no memory for their buffers.
#include <omp.h>
#include <algorithm>
#include <memory>
#include <new>
#include <vector>
#include "simd.h"

// ---- Loops over rows of any length by vectors, and over blocks of rows by threads ----

// All lanes of a vector. Where a function takes `lanes`, an int instead means the first so many.
struct All {};

INLINE vf load(const float* p, All) { return load(p); }
INLINE void store(float* p, vf x, All) { store(p, x); }
INLINE vf only(vf x, All) { return x; }

// Lanes from `count` on are zero.
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

// x with zeros in the lanes from `count` on.
INLINE vf only(vf x, int count) {
  for (int j = count; j < VL; j++) x[j] = 0;
  return x;
}

// Calls body(i, lanes) for every vector of a row of n numbers; the last may be partly filled.
template <class Body>
INLINE void each(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) body(i, All{});
  if (i < n) body(i, int(n - i));
}

// The sigmoid of a SiLU: 0 where vsigmoid's smallest value, 1e-38, would still weigh against a very
// negative x. Hence -0 far below zero and NaN at -inf, as in torch.
INLINE vf silu_sigmoid(vf x) { return select(x < -88.f, vf{}, vsigmoid(x)); }

// Rows cut into blocks by their number alone, not by the number of threads: sums over blocks come
// out the same whichever thread computes them.
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

// One row of n sums for each block, zeros at first.
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

template <class Body>
static int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// ---- Norms: y = x scale weight gelu(gate), row by row, scale = 1 / sqrt(share |x|^2 + eps) ----

// share is 1 / n for RMSNorm and 1 for unit length. weight and gate may be missing (null).
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

// x, y [rows][n]; weight [n] and gate [rows][n] may be null.
extern "C" int trellis_norm(
    const float* x, const float* weight, const float* gate, float* y, int64_t rows, int64_t n,
    double share, double eps, int64_t threads) {
  const Norm norm = {x, weight, gate, n, float(share), float(eps)};
  const auto run = weight ? (gate ? norm_forward<true, true> : norm_forward<true, false>)
                          : (gate ? norm_forward<false, true> : norm_forward<false, false>);
  return guarded([&] { run(norm, y, rows, threads); });
}

extern "C" int trellis_norm_backward(
    const float* dy, const float* x, const float* weight, const float* gate, float* dx,
    float* dweight, float* dgate, int64_t rows, int64_t n, double share, double eps,
    int64_t threads) {
  const Norm norm = {x, weight, gate, n, float(share), float(eps)};
  const auto run = weight ? (gate ? norm_backward<true, true> : norm_backward<true, false>)
                          : (gate ? norm_backward<false, true> : norm_backward<false, false>);
  return guarded([&] { run(norm, dy, dx, dweight, dgate, rows, threads); });
}

// ---- The gate of SwiGLU: y = silu(gate) up, number by number ----

constexpr int64_t GATE_BLOCK = 4096;

extern "C" int trellis_silu_product(
    const float* gate, const float* up, float* y, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t from = 0; from < n; from += GATE_BLOCK)
    each(std::min(GATE_BLOCK, n - from), [&](int64_t j, auto lanes) {
      const int64_t i = from + j;
      const vf z = load(gate + i, lanes);
      store(y + i, z * silu_sigmoid(z) * load(up + i, lanes), lanes);
    });
  return 0;
}

extern "C" int trellis_silu_product_backward(
    const float* dy, const float* gate, const float* up, float* dgate, float* dup, int64_t n,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t from = 0; from < n; from += GATE_BLOCK)
    each(std::min(GATE_BLOCK, n - from), [&](int64_t j, auto lanes) {
      const int64_t i = from + j;
      const vf z = load(gate + i, lanes), s = silu_sigmoid(z), value = z * s;
      const vf d = load(dy + i, lanes);
      store(dgate + i, d * load(up + i, lanes) * (s + value * (1.f - s)), lanes);
      store(dup + i, d * value, lanes);
    });
  return 0;
}

// ---- Convolution: y_t = act(bias + sum over j of weight[j] x_{t-W+1+j}), channel by channel ----

constexpr int64_t WIDEST_WINDOW = 16;  // WIDEST in convolution.py

// act is the identity or SiLU. The sequences are stored one after the other; before its first token
// each has a tail of W-1 inputs.
struct Convolution {
  const float *x, *weight, *bias, *tail;  // [rows][D], [W][D], [D] or null, [N][W-1][D]
  const int64_t* bounds;                  // [N+1], the first row of every sequence
  int64_t sequences, channels, width;
  bool silu;

  // Tokens from .. to - 1 of a sequence, computed on their own.
  struct Part {
    int64_t sequence, from, to;
  };
  static constexpr int64_t PART = 64;

  int64_t length(int64_t n) const { return bounds[n + 1] - bounds[n]; }
  int64_t reach() const { return width - 1; }

  // An empty sequence has one empty part, so that the gradient of its tail is written.
  std::vector<Part> parts() const {
    std::vector<Part> found;
    for (int64_t n = 0; n < sequences; n++)
      for (int64_t from = 0; from == 0 || from < length(n); from += PART)
        found.push_back({n, from, std::min(from + PART, length(n))});
    return found;
  }

  // The input at token t of a sequence, t >= -(W-1).
  const float* input(int64_t n, int64_t t) const {
    return t >= 0 ? x + (bounds[n] + t) * channels : tail + (n * reach() + reach() + t) * channels;
  }

  // The window of token t: W rows, oldest first.
  void window(int64_t n, int64_t t, const float** rows) const {
    for (int64_t j = 0; j < width; j++) rows[j] = input(n, t - reach() + j);
  }

  template <class Lanes>
  INLINE vf at(const Convolution& c, const float* const* rows, int64_t i, Lanes lanes) {
    vf z = c.bias ? load(c.bias + i, lanes) : vf{};
    for (int64_t j = 0; j < c.width; j++)
      z += load(c.weight + j * c.channels + i, lanes) * load(rows[j] + i, lanes);
    return z;
  }

  void forward(const Part& part, float* y) const {
    const float* rows[WIDEST_WINDOW];
    for (int64_t t = part.from; t < part.to; t++) {
      window(part.sequence, t, rows);
      float* out = y + (bounds[part.sequence] + t) * channels;
      each(channels, [&](int64_t i, auto lanes) {
        const vf z = at(*this, rows, i, lanes);
        store(out + i, silu ? z * silu_sigmoid(z) : z, lanes);
      });
    }
  }

  // The last W-1 inputs of a sequence.
  void final_tail(int64_t n, float* final) const {
    for (int64_t j = 0; j < reach(); j++)
      std::memcpy(
          final + (n * reach() + j) * channels, input(n, length(n) - reach() + j), 4 * channels);
  }

  // dz has room for PART + W-1 rows. The gradients of the weight are added to dweight [W][D], those
  // of the bias, if there is one, to the D numbers behind it.
  void backward(
      const Part& part, const float* dy, const float* dfinal, float* dx, float* dtail,
      float* dweight, float* dz) const {
    const float* rows[WIDEST_WINDOW];
    const int64_t n = part.sequence, end = std::min(part.to + reach(), length(n));
    for (int64_t t = part.from; t < end; t++) {
      window(n, t, rows);
      const float* d = dy + (bounds[n] + t) * channels;
      float* out = dz + (t - part.from) * channels;
      const bool own = t < part.to;  // the next part adds what later tokens give to dweight
      each(channels, [&](int64_t i, auto lanes) {
        vf g = load(d + i, lanes);
        if (silu) {
          const vf z = at(*this, rows, i, lanes), s = silu_sigmoid(z);
          g *= s + z * s * (1.f - s);
        }
        store(out + i, g, lanes);
        if (!own) return;
        for (int64_t j = 0; j < width; j++) {
          float* w = dweight + j * channels + i;
          store(w, load(w, lanes) + g * load(rows[j] + i, lanes), lanes);
        }
        if (bias) {
          float* b = dweight + width * channels + i;
          store(b, load(b, lanes) + g, lanes);
        }
      });
    }
    // The gradient of the input at token t: from the outputs that saw it and from the final tail.
    auto gather = [&](int64_t t, float* out) {
      const int64_t first = std::max<int64_t>(t, 0), last = std::min(t + width, end);
      const int64_t kept = t - (length(n) - reach());
      each(channels, [&](int64_t i, auto lanes) {
        vf g = kept >= 0 ? load(dfinal + (n * reach() + kept) * channels + i, lanes) : vf{};
        for (int64_t s = first; s < last; s++)
          g += load(weight + (reach() - (s - t)) * channels + i, lanes) *
               load(dz + (s - part.from) * channels + i, lanes);
        store(out + i, g, lanes);
      });
    };
    for (int64_t t = part.from; t < part.to; t++) gather(t, dx + (bounds[n] + t) * channels);
    if (part.from == 0)
      for (int64_t j = 0; j < reach(); j++)
        gather(j - reach(), dtail + (n * reach() + j) * channels);
  }
};

static void convolution_forward(const Convolution& c, float* y, float* final, int64_t threads) {
  const std::vector<Convolution::Part> parts = c.parts();
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < int64_t(parts.size()); i++) c.forward(parts[i], y);
  for (int64_t n = 0; n < c.sequences; n++) c.final_tail(n, final);
}

static void convolution_backward(
    const Convolution& c, const float* dy, const float* dfinal, float* dx, float* dtail,
    float* dweight, float* dbias, int64_t threads) {
  const std::vector<Convolution::Part> parts = c.parts();
  const Blocks blocks(parts.size(), 1);
  Partial partial(blocks.count, (c.width + (c.bias != nullptr)) * c.channels);
  const int64_t room = (Convolution::PART + c.reach()) * c.channels;
  std::vector<float> dz(threads * room);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks.count; b++)
    for (int64_t i = blocks.from(b); i < blocks.to(b); i++)
      c.backward(
          parts[i], dy, dfinal, dx, dtail, partial.row(b), dz.data() + omp_get_thread_num() * room);
  for (int64_t d = 0; d < c.channels; d++) {
    for (int64_t j = 0; j < c.width; j++)
      dweight[d * c.width + j] = partial.total(j * c.channels + d);
    if (c.bias) dbias[d] = partial.total(c.width * c.channels + d);
  }
}

// x, y [rows][D]; weight [W][D]; bias [D] or null; tail, final [N][W-1][D]; bounds [N+1].
extern "C" int trellis_convolution(
    const float* x, const float* weight, const float* bias, const float* tail,
    const int64_t* bounds, float* y, float* final, int64_t sequences, int64_t channels,
    int64_t width, int64_t silu, int64_t threads) {
  const Convolution c = {x, weight, bias, tail, bounds, sequences, channels, width, silu != 0};
  return guarded([&] { convolution_forward(c, y, final, threads); });
}

// dweight is [D][W], unlike weight.
extern "C" int trellis_convolution_backward(
    const float* dy, const float* dfinal, const float* x, const float* weight, const float* bias,
    const float* tail, const int64_t* bounds, float* dx, float* dweight, float* dbias,
    float* dtail, int64_t sequences, int64_t channels, int64_t width, int64_t silu,
    int64_t threads) {
  const Convolution c = {x, weight, bias, tail, bounds, sequences, channels, width, silu != 0};
  return guarded(
      [&] { convolution_backward(c, dy, dfinal, dx, dtail, dweight, dbias, threads); });
}

// ---- Cross-entropy: -log softmax(z)[target] of a row z of logits, and its gradient in z ----

template <bool GRADIENT>
static float cross_entropy_row(float* z, int64_t target, int64_t n) {
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
  const float at_target = z[target];
  vf sums{};
  each(n, [&](int64_t i, auto lanes) {
    const vf v = load(z + i, lanes) - top;
    vf e = select(v < -87.f, vf{}, vexp(v));
    if (GRADIENT) store(z + i, e, lanes);
    sums += only(e, lanes);
  });
  const float total = sum(sums);
  if (GRADIENT) {
    const float scale = 1.f / total;
    each(n, [&](int64_t i, auto lanes) { store(z + i, load(z + i, lanes) * scale, lanes); });
    z[target] -= 1.f;
  }
  // The difference first: a large `top` would swallow the logarithm.
  return std::log(total) + (top - at_target);
}

template <bool GRADIENT>
static void cross_entropy(
    const int64_t* target, float* logits, float* loss, int64_t rows, int64_t n, int64_t ignored,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    float* z = logits + r * n;
    if (target[r] != ignored) {
      loss[r] = cross_entropy_row<GRADIENT>(z, target[r], n);
    } else {
      loss[r] = 0;
      if (GRADIENT) std::memset(z, 0, 4 * n);
    }
  }
}

// target, loss [rows]; logits [rows][n] become their gradient if `gradient` is not 0. Rows whose
// target is `ignored` have loss and gradient 0.
extern "C" int trellis_cross_entropy(
    const int64_t* target, float* logits, float* loss, int64_t rows, int64_t n, int64_t ignored,
    int64_t gradient, int64_t threads) {
  const auto run = gradient ? cross_entropy<true> : cross_entropy<false>;
  run(target, logits, loss, rows, n, ignored, threads);
  return 0;
}
