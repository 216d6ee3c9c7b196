// y_t = act(bias + sum over j of weight[j] x_{t-W+1+j}), by channel, act the identity or SiLU.
// Sequences lie one behind the other; before its first token each has a tail of W-1 inputs.
#pragma once
#include <omp.h>
#include <vector>
#include "lanes.h"

constexpr int64_t WIDEST_WINDOW = 16;

struct Convolution {
  const float *x, *weight, *bias, *tail;  // [rows][D], [W][D], [D] or null, [N][W-1][D]
  const int64_t* bounds;                  // [N+1], the first row of every sequence
  int64_t sequences, channels, width;
  bool silu;

  // A part of a sequence that is computed on its own: tokens from .. to - 1.
  struct Part {
    int64_t sequence, from, to;
  };
  static constexpr int64_t PART = 64;

  int64_t length(int64_t n) const { return bounds[n + 1] - bounds[n]; }
  int64_t reach() const { return width - 1; }

  // An empty sequence is one empty part: its tail passes through.
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

  // dz: room for PART + W-1 rows. dweight [W][D] is added to, and behind it dbias [D] if there is one.
  void backward(
      const Part& part, const float* dy, const float* dfinal, float* dx, float* dtail,
      float* dweight, float* dz) const {
    const float* rows[WIDEST_WINDOW];
    const int64_t n = part.sequence, end = std::min(part.to + reach(), length(n));
    for (int64_t t = part.from; t < end; t++) {
      window(n, t, rows);
      const float* d = dy + (bounds[n] + t) * channels;
      float* out = dz + (t - part.from) * channels;
      const bool own = t < part.to;  // the other tokens' share of dweight is the next part's
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
    // The gradient of the input at token t: of the outputs that saw it, and of the final tail.
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
