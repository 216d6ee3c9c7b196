// One token of up to 16 sequences through a whole language model, on the states of its cache in
// place. Python (models/decoder.py) packs the weights, and hands them over once for a model.
//
// A block is five steps, and threads meet behind each: the maps that read the normed residual
// stream; the heads of the mixer; the output map; the two maps of the SwiGLU; its last map. Norms are
// computed by every thread for itself, which costs less than to wait for one another.
#include <omp.h>
#include <atomic>
#include <memory>
#include <mutex>
#include "../../ops/memory/native/step.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace {

// ---- Threads ----

// All threads wait for each other: awake for some ten microseconds, then asleep, so that a thread
// whose core is taken by another program does not cost the core of those that wait for it.
class Barrier {
  static constexpr int SPINS = 1000;
  std::atomic<int> arrived{0}, round{0}, asleep{0};

 public:
  void wait(int count) {
    if (count == 1) return;
    const int now = round.load();
    if (arrived.fetch_add(1) + 1 == count) {
      arrived.store(0);
      round.store(now + 1);
      if (asleep.load()) wake();
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (round.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    asleep.fetch_add(1);
    while (round.load() == now) sleep(now);
    asleep.fetch_sub(1);
  }

 private:
#if defined(__linux__)
  void sleep(int now) { syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0); }
#else
  void sleep(int) { std::this_thread::yield(); }
  void wake() {}
#endif
};

struct Thread {
  int64_t index, count;
  float* own;  // room for one normed row of every sequence
  int64_t first(int64_t items) const { return items * index / count; }
  int64_t last(int64_t items) const { return items * (index + 1) / count; }
};

// ---- Products with packed matrices ----

// Outputs whose weights lie side by side: a matrix is [panels][inputs][PANEL].
constexpr int PANEL = 32, VECTORS = PANEL / VL;
// Sequences that share one reading of a panel, and sums that run beside each other: 16 registers.
constexpr int GROUP = VL == 16 ? 8 : VL == 8 ? 2 : 1;

struct Matrix {
  const void* panels;
  bool half;  // bf16
  int64_t count, inputs, outputs;
  Matrix(const Call& call, const std::string& name) {
    const Tensor t = call.tensor(name);
    panels = t.data, half = t.type == BFLOAT16, count = t.size[0], inputs = t.size[1];
    outputs = call.number(name);
  }
};

INLINE vf widened(const float* p) { return load(p); }
INLINE vf widened(const uint16_t* p) { return from_bfloat(bits_at(p)); }

// out [G][PANEL]: the products of one panel with G rows x, `stride` apart.
template <int G, class W>
INLINE void panel(const W* w, int64_t inputs, const float* x, int64_t stride, float* out) {
  constexpr int SUMS = std::max(1, GROUP / 2 / G);
  vf acc[SUMS][G][VECTORS] = {};
  auto add = [&](int64_t i, int s) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      const vf weight = widened(w + i * PANEL + v * VL);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) acc[s][g][v] += weight * x[g * stride + i];
    }
  };
  int64_t i = 0;
  for (; i + SUMS <= inputs; i += SUMS) {
    __builtin_prefetch(w + i * PANEL + 16 * 1024 / sizeof(W));
#pragma GCC unroll 8
    for (int s = 0; s < SUMS; s++) add(i + s, s);
  }
  for (; i < inputs; i++) add(i, 0);
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      vf total = acc[0][g][v];
      for (int s = 1; s < SUMS; s++) total += acc[s][g][v];
      store(out + g * PANEL + v * VL, total);
    }
}

// use(p, n, out) for every panel p of this thread's share and every row n of x [rows][stride].
template <class W, class Use>
INLINE void product_of(
    const Matrix& m, const W* weights, const float* x, int64_t stride, int rows, const Thread& t,
    Use use) {
  alignas(64) float out[GROUP * PANEL];
  for (int64_t p = t.first(m.count); p < t.last(m.count); p++) {
    const W* w = weights + p * m.inputs * PANEL;
    int n = 0;
    auto group = [&](auto size) {
      constexpr int G = decltype(size)::value;
      for (; n + G <= rows; n += G) {
        panel<G>(w, m.inputs, x + n * stride, stride, out);
        for (int g = 0; g < G; g++) use(p, n + g, out + g * PANEL);
      }
    };
    group(std::integral_constant<int, GROUP>{});
    if constexpr (GROUP > 2) group(std::integral_constant<int, 2>{});
    group(std::integral_constant<int, 1>{});
  }
}

template <class Use>
void product(const Matrix& m, const float* x, int64_t stride, int rows, const Thread& t, Use use) {
  if (m.half)
    product_of(m, static_cast<const uint16_t*>(m.panels), x, stride, rows, t, use);
  else
    product_of(m, static_cast<const float*>(m.panels), x, stride, rows, t, use);
}

// ---- Small parts ----

// How a loop reads and writes: whole vectors, or single numbers where fewer are left.
struct Vectors {
  typedef vf Number;
  INLINE vf get(const float* p) { return load(p); }
  INLINE void put(float* p, vf x) { store(p, x); }
};

struct Singles {
  typedef float Number;
  INLINE float get(const float* p) { return *p; }
  INLINE void put(float* p, float x) { *p = x; }
};

// body(i, Vectors or Singles) for all of n numbers.
template <class Body>
INLINE void all(int n, Body body) {
  each(n, [&](int i) { body(i, Vectors{}); }, [&](int i) { body(i, Singles{}); });
}

INLINE vf silu(vf x) { return x * select(x < -88.f, vf{}, vsigmoid(x)); }
float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// x / sqrt(|x|^2 share + eps) * weight, for n numbers; weight may be null.
void norm(const float* x, const float* weight, float share, float eps, float* out, int n) {
  const float scale = 1 / std::sqrt(dot_any(x, x, n) * share + eps);
  each(n, [&](int i) { store(out + i, load(x + i) * scale * (weight ? load(weight + i) : splat(1))); },
       [&](int i) { out[i] = x[i] * scale * (weight ? weight[i] : 1); });
}

void rms_norm(const float* x, const float* weight, float eps, float* out, int n) {
  norm(x, weight, 1.f / n, eps, out, n);
}

float real(const Call& call, const std::string& name) {
  return std::stof(std::string(call.option(name)));
}

// Numbers and pointers of a layer's state, as Python lays them out: see `slots` of each mixer.
typedef const int64_t* Slots;
float* floats(Slots slots, int i) { return reinterpret_cast<float*>(slots[i]); }
int64_t* integers(Slots slots, int i) { return reinterpret_cast<int64_t*>(slots[i]); }

// q, k, v or alpha: its place in the row of projections, and what follows the projection.
struct Stream {
  int64_t at, size, channels;       // size of one head, of all heads
  const float *weight, *bias;       // of the convolution, [width][channels]; null: none
  int64_t width;
  bool silu_alone, unit;            // SiLU without a convolution; scaled to unit length

  Stream(const Call& call, const std::string& name, int64_t heads, bool silu_alone)
      : at(call.number(name + "_at")), size(call.number(name + "_size")), channels(heads * size),
        weight(call.tensor(name + "_conv").floats()), bias(call.tensor(name + "_bias").floats()),
        width(call.tensor(name + "_conv").size[0]), silu_alone(silu_alone),
        unit(call.number(name + "_unit")) {}

  // The numbers of one head, with zeros up to a multiple of 16; the tail moves on by a token.
  void take(const float* row, int64_t n, int64_t h, float* tail, float* out) const {
    const float* x = row + at + h * size;
    std::memcpy(out, x, 4 * size);
    std::memset(out + size, 0, 4 * (padded(size) - size));
    if (weight) {
      float* past = tail + n * (width - 1) * channels + h * size;
      const float *w = weight + h * size, *b = bias ? bias + h * size : nullptr;
      all(size, [&](int i, auto by) {
        auto y = b ? by.get(b + i) : decltype(by.get(x)){};
        for (int64_t j = 0; j < width - 1; j++)
          y += by.get(w + j * channels + i) * by.get(past + j * channels + i);
        y += by.get(w + (width - 1) * channels + i) * by.get(x + i);
        for (int64_t j = 0; j + 2 < width; j++)
          by.put(past + j * channels + i, by.get(past + (j + 1) * channels + i));
        if (width > 1) by.put(past + (width - 2) * channels + i, by.get(x + i));
        by.put(out + i, y);
      });
    }
    if (weight || silu_alone)
      for (int i = 0; i < size; i += VL) store(out + i, silu(load(out + i)));
    if (unit) norm(out, nullptr, 1, 1e-6f, out, size);
  }
};

// ---- Mixers ----

struct Mixer {
  int64_t heads;
  explicit Mixer(const Call& call) : heads(call.number("heads")) {}
  virtual ~Mixer() = default;
  // What the heads of sequence n share.
  virtual void prepare(int64_t, Slots) {}
  // From the row of projections to what the output map reads of head h.
  virtual void head(const float* row, int64_t n, int64_t h, Slots slots, float* out) const = 0;
  // The token has been read.
  virtual void advance(int64_t, int64_t*) const {}
};

struct Trellis : Mixer {
  static constexpr const char* slots =
      "memory.keys memory.values memory.key_anchor memory.value_anchor memory.offset "
      "q_tail k_tail v_tail alpha_tail";
  Stream q, k, v, alpha;
  int64_t gate_at, step_at, decay_at, passes, minibatch;
  int phi, f, psi;
  bool decode, after, lms, alpha_norm;
  std::string step, decay, stale_step;
  float step_max[2], temperature, eps;
  const float *step_bias, *decay_bias, *rate, *skip, *out_norm;
  Mask code, value;

  explicit Trellis(const Call& call)
      : Mixer(call), q(call, "q", heads, false), k(call, "k", heads, false),
        v(call, "v", heads, false), alpha(call, "alpha", heads, false),
        gate_at(call.number("gate_at")), step_at(call.number("step_at")),
        decay_at(call.number("decay_at")), passes(call.number("passes")),
        minibatch(call.number("minibatch")), phi(activation(call.option("phi"))),
        f(activation(call.option("f"))), psi(activation(call.option("psi"))),
        decode(call.either("value_pass", "encode", "decode")),
        after(call.either("error_at", "before", "after")), lms(call.number("lms")),
        alpha_norm(call.number("alpha_norm")),
        step(call.option("step")), decay(call.option("decay")),
        stale_step(call.option("stale_step")),
        step_max{real(call, "step_max1"), real(call, "step_max2")},
        temperature(real(call, "temperature")), eps(real(call, "eps")),
        step_bias(call.tensor("step_bias").floats()),
        decay_bias(call.tensor("decay_bias").floats()), rate(call.tensor("rate").floats()),
        skip(call.tensor("skip").floats()),
        out_norm(call.tensor("out_norm").floats()), code(alpha.size), value(v.size) {}

  float step_size(const float* row, int64_t h, int pass) const {
    if (step == "constant") return step_max[pass];
    const int64_t i = passes == 2 ? pass * heads + h : h;
    const float gate = row[step_at + i] + step_bias[i];
    return step == "softplus" ? softplus(gate) : sigmoid(gate) * step_max[pass];
  }

  float log_decay(const float* row, int64_t h, int pass) const {
    if (decay == "none") return 0;
    const int64_t i = passes == 2 ? pass * heads + h : h;
    const float gate = row[decay_at + i] + decay_bias[i];
    return decay == "softplus" ? -rate[i] * softplus(gate) : -softplus(-gate) / temperature;
  }

  void head(const float* row, int64_t n, int64_t h, Slots s, float* out) const override {
    alignas(64) float query[WIDEST], keys[WIDEST], values[WIDEST], target[WIDEST], unit[WIDEST];
    alignas(64) float z[WIDEST], u[WIDEST], y[WIDEST] = {};
    q.take(row, n, h, floats(s, 5), query);
    k.take(row, n, h, floats(s, 6), keys);
    v.take(row, n, h, floats(s, 7), values);
    alpha.take(row, n, h, floats(s, 8), target);
    const int m = alpha.size, dk = k.size, d = v.size;
    const Width slots = {m, padded(m), code.on}, width = {d, padded(d), value.on};
    if (alpha_norm) rms_norm(target, nullptr, eps, target, m);
    const int64_t offset = minibatch > 1 ? integers(s, 4)[n] : 0;
    // One pass: the memory, in place, after the token.
    auto write = [&](int pass, const float* x, const float* goal, int act, Width w, int dx) {
      const int64_t size = int64_t(w.n) * dx;
      float* memory = floats(s, pass) + (n * heads + h) * size;
      float* anchor = minibatch > 1 ? floats(s, 2 + pass) + (n * heads + h) * size : memory;
      if (minibatch > 1 && offset == 0) std::memcpy(anchor, memory, 4 * size);
      float gamma = step_size(row, h, pass);
      if (lms && (pass == 0 || !decode)) gamma /= dot_any(x, x, dx) + 1e-6f;
      if (minibatch > 1)
        gamma *= stale_step == "minibatch" ? 1.f / minibatch
                 : stale_step == "position" ? 1.f / (offset + 1) : 1.f;
      step_write(memory, anchor, memory, x, goal, log_decay(row, h, pass), gamma, act, after, w, dx,
                 z, u);
      if (minibatch > 1 && offset + 1 == minibatch) std::memcpy(anchor, memory, 4 * size);
      return memory;
    };
    step_read(write(0, keys, target, phi, slots, dk), query, y, m, dk);
    activate(f, y, query, slots);
    std::memset(y, 0, sizeof y);
    if (decode) {
      std::memset(unit, 0, sizeof unit);
      norm(target, nullptr, 1, 1e-6f, unit, m);
      step_read(write(1, unit, values, IDENTITY, width, m), query, y, d, m);
    } else {
      step_read_transposed(write(1, values, target, phi, slots, d), query, y, m, d);
    }
    activate(psi, y, y, width);
    if (skip)
      for (int i = 0; i < d; i += VL) store(y + i, load(y + i) + load(values + i) * skip[h]);
    rms_norm(y, out_norm, eps, y, d);
    const float* gate = row + gate_at + h * d;
    vf density;
    for (int i = 0; i < d; i += VL) {
      const vf g = load(gate + i);
      store(y + i, load(y + i) * (g * vnormal(g, density)));
    }
    std::memcpy(out + h * d, y, 4 * d);
  }

  void advance(int64_t rows, int64_t* s) const override {
    if (minibatch > 1)
      for (int64_t n = 0; n < rows; n++) integers(s, 4)[n] = (integers(s, 4)[n] + 1) % minibatch;
  }
};

// The largest head of Gated DeltaNet and of attention.
constexpr int LARGEST = 1024;

struct DeltaNet : Mixer {
  static constexpr const char* slots = "memory q_tail k_tail v_tail";
  Stream q, k, v;
  int64_t gate_at, step_at, decay_at;
  bool gated, decays;
  float most, eps;
  const float *decay_bias, *rate, *out_norm;

  explicit DeltaNet(const Call& call)
      : Mixer(call), q(call, "q", heads, true), k(call, "k", heads, true),
        v(call, "v", heads, true), gate_at(call.number("gate_at")),
        step_at(call.number("step_at")), decay_at(call.number("decay_at")),
        gated(call.number("gated")), decays(call.number("decays")), most(real(call, "most")),
        eps(real(call, "eps")), decay_bias(call.tensor("decay_bias").floats()),
        rate(call.tensor("rate").floats()), out_norm(call.tensor("out_norm").floats()) {}

  // COUNT numbers of all rows of the memory from column j on: decayed, corrected, read.
  template <class By, int COUNT>
  INLINE void columns(
      float* memory, int64_t j, float decay, const float* query, const float* keys,
      const float* write, const float* values, float* y, int rows, int64_t width) {
    typedef typename By::Number Number;
    constexpr int step = sizeof(Number) / 4;
    Number error[COUNT], answer[COUNT];
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++) error[c] = answer[c] = Number{};
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) error[c] += By::get(memory + i * width + j + c * step) * keys[i];
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++) error[c] = By::get(values + j + c * step) - error[c] * decay;
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
      for (int c = 0; c < COUNT; c++) {
        float* at = memory + i * width + j + c * step;
        const Number next = By::get(at) * decay + error[c] * write[i];
        By::put(at, next);
        answer[c] += next * query[i];
      }
#pragma GCC unroll 4
    for (int c = 0; c < COUNT; c++) By::put(y + j + c * step, answer[c]);
  }

  void head(const float* row, int64_t n, int64_t h, Slots s, float* out) const override {
    alignas(64) float query[LARGEST], keys[LARGEST], values[LARGEST], write[LARGEST], y[LARGEST];
    q.take(row, n, h, floats(s, 1), query);
    k.take(row, n, h, floats(s, 2), keys);
    v.take(row, n, h, floats(s, 3), values);
    const int rows = k.size;
    const int64_t width = v.size;
    const float beta = most * sigmoid(row[step_at + h]), scale = 1 / std::sqrt(float(rows));
    const float decay =
        decays ? std::exp(-rate[h] * softplus(row[decay_at + h] + decay_bias[h])) : 1.f;
    for (int i = 0; i < rows; i++) write[i] = keys[i] * beta, query[i] *= scale;
    float* memory = floats(s, 0) + (n * heads + h) * rows * width;
    int64_t j = 0;
    for (; j + 4 * VL <= width; j += 4 * VL)
      columns<Vectors, 4>(memory, j, decay, query, keys, write, values, y, rows, width);
    for (; j + VL <= width; j += VL)
      columns<Vectors, 1>(memory, j, decay, query, keys, write, values, y, rows, width);
    for (; j < width; j++)
      columns<Singles, 1>(memory, j, decay, query, keys, write, values, y, rows, width);
    rms_norm(y, out_norm, eps, y, width);
    if (gated) {
      const float* gate = row + gate_at + h * width;
      for (int64_t i = 0; i < width; i += VL) store(y + i, load(y + i) * silu(load(gate + i)));
    }
    std::memcpy(out + h * width, y, 4 * width);
  }
};

struct Attention : Mixer {
  // The last three are numbers: of the columns that there is room for, the first and the last + 1
  // that are filled.
  static constexpr const char* slots = "keys values length room begin end";
  int64_t size, group, window;  // group: queries that read one head of keys and values
  double theta;
  std::vector<float> turns;  // [sequences][size]: cosines, then sines

  explicit Attention(const Call& call)
      : Mixer(call), size(call.number("size")), group(call.number("group")),
        window(call.number("window")), theta(std::stod(std::string(call.option("theta")))), turns(16 * size) {}

  void prepare(int64_t n, Slots s) override {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
      const double angle = integers(s, 2)[n] * std::pow(theta, -2.0 * i / size);
      turns[n * size + i] = std::cos(angle), turns[n * size + half + i] = std::sin(angle);
    }
  }

  // Pairs of channels i and i + size / 2, turned by the angles of the token's place.
  void turn(const float* x, int64_t n, float scale, float* out) const {
    const int64_t half = size / 2;
    const float *cosine = turns.data() + n * size, *sine = cosine + half;
    for (int64_t i = 0; i < half; i++) {
      const float a = x[i], b = x[half + i];
      out[i] = (a * cosine[i] - b * sine[i]) * scale;
      out[half + i] = (b * cosine[i] + a * sine[i]) * scale;
    }
  }

  void head(const float* row, int64_t n, int64_t h, Slots s, float* out) const override {
    const int64_t width = heads * size, end = s[5];
    float* keys = floats(s, 0) + (n * heads + h) * s[3] * size;
    float* values = floats(s, 1) + (n * heads + h) * s[3] * size;
    turn(row + group * width + h * size, n, 1, keys + end * size);
    std::memcpy(values + end * size, row + (group + 1) * width + h * size, 4 * size);
    for (int64_t i = h * group; i < (h + 1) * group; i++)
      attend(row + i * size, n, s, keys, values, out + i * size);
  }

  void attend(
      const float* x, int64_t n, Slots s, const float* keys, const float* values,
      float* out) const {
    constexpr int BLOCK = 128;
    alignas(64) float query[LARGEST], sums[LARGEST] = {}, weights[BLOCK];
    const int64_t end = s[5];
    turn(x, n, 1 / std::sqrt(float(size)), query);
    const int64_t first = end - std::min(integers(s, 2)[n], end - s[4]);
    float top = -INFINITY, total = 0;
    for (int64_t from = first; from <= end; from += BLOCK) {
      const int count = std::min<int64_t>(BLOCK, end + 1 - from);
      float high = top;
      for (int j = 0; j < count; j++) {
        weights[j] = dot_any(query, keys + (from + j) * size, size);
        high = std::max(high, weights[j]);
      }
      for (int j = count; j < padded(count); j++) weights[j] = -INFINITY;
      const float shrink = std::exp(top - high);
      total *= shrink, top = high;
      for (int j = 0; j < count; j += VL) {
        const vf x = load(weights + j);
        store(weights + j, select(x < high - 87.f, vf{}, vexp(x - high)));
      }
      for (int j = 0; j < count; j++) total += weights[j];
      const float* at = values + from * size;
      all(size, [&](int d, auto by) {
        auto y = by.get(sums + d) * shrink;
        for (int j = 0; j < count; j++) y += by.get(at + j * size + d) * weights[j];
        by.put(sums + d, y);
      });
    }
    for (int64_t d = 0; d < size; d++) out[d] = sums[d] / total;
  }

  void advance(int64_t rows, int64_t* s) const override {
    for (int64_t n = 0; n < rows; n++) integers(s, 2)[n]++;
    s[5]++;
    if (window) s[4] = std::max(s[4], s[5] - (window - 1));
  }
};

// ---- The model ----

constexpr int SLOTS = 16;  // of every layer's state

struct Block {
  const float *mixer_norm, *mlp_norm;
  float eps;
  Matrix in, out, up, down;
  std::unique_ptr<Mixer> mixer;

  explicit Block(const Call& call)
      : mixer_norm(call.tensor("mixer_norm").floats()), mlp_norm(call.tensor("mlp_norm").floats()),
        eps(real(call, "block_eps")), in(call, "in"), out(call, "out"), up(call, "up"),
        down(call, "down") {
    const std::string_view kind = call.option("kind");
    if (kind == "trellis") mixer.reset(new Trellis(call));
    else if (kind == "delta_net") mixer.reset(new DeltaNet(call));
    else if (kind == "attention") mixer.reset(new Attention(call));
    else throw std::invalid_argument("an unknown mixer");
  }
};

// Rows are as long as the longest, in whole panels, with a panel to spare behind.
int64_t row_size(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL + PANEL; }

struct Model {
  const float *embedding, *norm;
  float eps;
  int64_t dim;
  Matrix head;
  std::vector<std::unique_ptr<Block>> blocks;
  Barrier barrier;
  std::mutex busy;  // one call at a time: calls share the barrier and the space
  std::vector<float> space;
  int64_t longest = 0;

  explicit Model(const Call& call)
      : embedding(call.tensor("embedding").floats()), norm(call.tensor("norm").floats()),
        eps(real(call, "eps")), dim(call.tensor("norm").size[0]), head(call, "head") {}

  void add(const Call& call) {
    blocks.emplace_back(new Block(call));
    const Block& b = *blocks.back();
    for (const Matrix* m : {&b.in, &b.out, &b.up, &b.down})
      longest = std::max({longest, row_size(m->inputs), row_size(m->count * PANEL)});
  }

  // x [rows][longest] is the residual stream, wide and y [rows][longest] what lies between.
  void step(
      const int64_t* ids, int rows, int64_t* states, float* logits, int64_t threads) {
    const std::lock_guard<std::mutex> alone(busy);
    const int64_t size = rows * longest;
    space.resize((3 + threads) * size + 16);
    float* x = space.data() + (16 - reinterpret_cast<uintptr_t>(space.data()) / 4 % 16);
    float *wide = x + size, *y = wide + size;
    for (int n = 0; n < rows; n++) std::memcpy(x + n * longest, embedding + ids[n] * dim, 4 * dim);
#pragma omp parallel num_threads(threads)
    {
      const int64_t index = omp_get_thread_num();
      const Thread t = {index, omp_get_num_threads(), y + (1 + index) * size};
      for (size_t i = 0; i < blocks.size(); i++) block(*blocks[i], states + i * SLOTS, x, wide, y, rows, t);
      if (logits) {
        normed(x, norm, eps, rows, t);
        product(head, t.own, longest, rows, t, [&](int64_t p, int n, const float* out) {
          const int64_t count = std::min<int64_t>(PANEL, head.outputs - p * PANEL);
          std::memcpy(logits + n * head.outputs + p * PANEL, out, 4 * count);
        });
      }
    }
    for (size_t i = 0; i < blocks.size(); i++) blocks[i]->mixer->advance(rows, states + i * SLOTS);
  }

  void normed(const float* x, const float* weight, float eps, int rows, const Thread& t) const {
    for (int n = 0; n < rows; n++) rms_norm(x + n * longest, weight, eps, t.own + n * longest, dim);
  }

  void block(
      const Block& b, Slots slots, float* x, float* wide, float* y, int rows, const Thread& t) {
    auto row = [&](int64_t p, int n) { return n * longest + p * PANEL; };
    // A panel of what a block adds to the residual stream. The padding of outputs is zero.
    auto add = [&](int64_t p, int n, const float* out) {
      float* at = x + row(p, n);
      for (int i = 0; i < PANEL; i += VL) store(at + i, load(at + i) + load(out + i));
    };
    for (int n = t.index; n < rows; n += t.count) b.mixer->prepare(n, slots);
    normed(x, b.mixer_norm, b.eps, rows, t);
    product(b.in, t.own, longest, rows, t, [&](int64_t p, int n, const float* out) {
      std::memcpy(wide + row(p, n), out, 4 * PANEL);
    });
    barrier.wait(t.count);
    const int64_t tasks = rows * b.mixer->heads;
    for (int64_t i = t.first(tasks); i < t.last(tasks); i++) {
      const int64_t n = i / b.mixer->heads;
      b.mixer->head(wide + n * longest, n, i % b.mixer->heads, slots, y + n * longest);
    }
    barrier.wait(t.count);
    product(b.out, y, longest, rows, t, add);
    barrier.wait(t.count);
    normed(x, b.mlp_norm, b.eps, rows, t);
    // The first half of a panel are rows of the gate, the second those that it multiplies.
    product(b.up, t.own, longest, rows, t, [&](int64_t p, int n, const float* out) {
      float* at = wide + n * longest + p * (PANEL / 2);
      for (int i = 0; i < PANEL / 2; i += VL)
        store(at + i, silu(load(out + i)) * load(out + PANEL / 2 + i));
    });
    barrier.wait(t.count);
    product(b.down, wide, longest, rows, t, add);
    barrier.wait(t.count);
  }
};

// 0: done; 1: out of memory; 2: an option is missing or has an unknown value.
template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::logic_error&) {
    return 2;
  }
}

}  // namespace

extern "C" {

int trellis_model(const char* options, const char* names, const Tensor* tensors, void** made) {
  return guarded([&] { *made = new Model({options, names, tensors}); });
}

int trellis_block(const char* options, const char* names, const Tensor* tensors, void* model) {
  return guarded([&] { static_cast<Model*>(model)->add({options, names, tensors}); });
}

void trellis_free(void* model) { delete static_cast<Model*>(model); }

// The names of the slots that a kind of mixer has in its state, in order.
const char* trellis_slots(const char* kind) {
  const std::string_view name = kind;
  return name == "trellis" ? Trellis::slots : name == "delta_net" ? DeltaNet::slots : Attention::slots;
}

int64_t trellis_slot_count() { return SLOTS; }
int64_t trellis_panel() { return PANEL; }
int64_t trellis_largest(const char* kind) {
  return std::string_view(kind) == "trellis" ? WIDEST : LARGEST;
}

int trellis_step(
    void* model, const int64_t* ids, int64_t rows, int64_t* states, float* logits,
    int64_t threads) {
  return guarded([&] { static_cast<Model*>(model)->step(ids, rows, states, logits, threads); });
}
}
