// A call as Python makes it: its options, its tensors, and their rows in fp32.
#pragma once
#include <algorithm>
#include <string>
#include <vector>
#include "activations.h"

// Letters that stand for the types of tensors.
enum Type : int64_t { FLOAT32 = 'f', BFLOAT16 = 'b', FLOAT16 = 'h', INT32 = 'i', INT64 = 'q' };

// [batch, token, head, n], the last dimension contiguous; n is missing from gates.
struct Tensor {
  void* data;
  int64_t type, size[4];
  int64_t batch, token, head, entry;  // strides in elements

  bool given() const { return type != 0; }
  float* floats() const { return static_cast<float*>(data); }
  // The place of the first number of a token and head.
  int64_t at(int64_t b, int64_t t, int64_t h) const { return b * batch + t * token + h * head; }
  int64_t integer(int64_t i) const {
    return type == INT64 ? static_cast<int64_t*>(data)[i] : static_cast<int32_t*>(data)[i];
  }
};

// Options in a text such as "phi1=silu minibatch=16", and tensors whose names are a text such as
// "q x1": both are found by name, in any order.
struct Call {
  std::string_view options, names;
  const Tensor* tensors;

  Tensor tensor(const std::string& name) const {
    const Tensor* found = tensors;
    for (std::string_view rest = names; !rest.empty(); found++)
      if (next(rest) == name) return *found;
    return {};
  }

  std::string_view option(std::string_view name) const {
    for (std::string_view rest = options; !rest.empty();) {
      const std::string_view word = next(rest);
      if (word.substr(0, word.find('=')) == name) return word.substr(name.size() + 1);
    }
    throw std::invalid_argument("an option is missing");
  }

  int64_t number(std::string_view name) const {
    int64_t value = 0;
    for (char digit : option(name)) value = 10 * value + (digit - '0');
    return value;
  }

  // Whether an option that has two values has the second.
  bool either(std::string_view name, std::string_view first, std::string_view second) const {
    const std::string_view value = option(name);
    if (value != first && value != second) throw std::invalid_argument("an unknown value");
    return value == second;
  }

 private:
  // Takes a word off the text.
  static std::string_view next(std::string_view& text) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    return word;
  }
};

// Rows are short: a loop beats the call of memcpy.
INLINE void copy(const float* in, float* out, int n) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(out + i, load(in + i));
  for (; i < n; i++) out[i] = in[i];
}

// n numbers of half precision to floats, or back, by vectors; the last one in a buffer of its own.
template <class Convert>
INLINE void widen(const uint16_t* in, float* out, int n, Convert convert) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(out + i, convert(bits_at(in + i)));
  if (i == n) return;
  uint16_t rest[VL] = {};
  float last[VL];
  std::memcpy(rest, in + i, 2 * (n - i));
  store(last, convert(bits_at(rest)));
  std::memcpy(out + i, last, 4 * (n - i));
}

template <class Convert>
INLINE void narrow(const float* in, uint16_t* out, int n, Convert convert) {
  int i = 0;
  for (; i + VL <= n; i += VL) store_bits(out + i, convert(load(in + i)));
  if (i == n) return;
  float rest[VL] = {};
  uint16_t last[VL];
  std::memcpy(rest, in + i, 4 * (n - i));
  store_bits(last, convert(load(rest)));
  std::memcpy(out + i, last, 2 * (n - i));
}

static inline void read_row(const Tensor& x, int64_t at, float* out, int n) {
  if (x.type == FLOAT32) return copy(static_cast<const float*>(x.data) + at, out, n);
  const uint16_t* p = static_cast<const uint16_t*>(x.data) + at;
  if (x.type == BFLOAT16)
    widen(p, out, n, [](vu h) { return from_bfloat(h); });
  else
    widen(p, out, n, [](vu h) { return from_half(h); });
}

static inline void write_row(const Tensor& x, int64_t at, const float* in, int n) {
  if (x.type == FLOAT32) return copy(in, static_cast<float*>(x.data) + at, n);
  uint16_t* p = static_cast<uint16_t*>(x.data) + at;
  if (x.type == BFLOAT16)
    narrow(in, p, n, [](vf v) { return to_bfloat(v); });
  else
    narrow(in, p, n, [](vf v) { return to_half(v); });
}

// `count` tokens from `token` on into the first rows of out [16][np]; zeros elsewhere. The rows of a
// gate [batch, token, head] have one number.
static inline void read_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, float* out, int n,
    int np) {
  const int64_t at = x.at(batch, token, head);
  for (int t = 0; t < 16; t++) {
    float* row = out + t * np;
    if (t < count) read_row(x, at + t * x.token, row, n);
    const int filled = t < count ? n : 0;
    if (filled < np) std::memset(row + filled, 0, 4 * (np - filled));
  }
}

// Ask for rows ahead of their use; WRITE: they will be written.
template <bool WRITE = false>
static inline void prefetch_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, int n) {
  const int size = x.type == FLOAT32 ? 4 : 2;
  const char* at = static_cast<const char*>(x.data) + size * x.at(batch, token, head);
  for (int t = 0; t < count; t++)
    for (int i = 0; i < n * size; i += 64) __builtin_prefetch(at + size * t * x.token + i, WRITE);
}

static inline void write_rows(
    const Tensor& x, int64_t batch, int64_t token, int64_t head, int count, const float* in,
    int n, int np) {
  for (int t = 0; t < count; t++) write_row(x, x.at(batch, token + t, head), in + t * np, n);
}

// State [m][d] (contiguous) <-> memory [D][M] with zeros in the padding.
static inline void read_state(const float* state, float* memory, int m, int d, int M, int D) {
  std::memset(memory, 0, 4 * size_t(M) * D);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < d; j++) memory[j * M + i] = state[i * d + j];
}

static inline void write_state(float* state, const float* memory, int m, int d, int M) {
  for (int i = 0; i < m; i++)
    for (int j = 0; j < d; j++) state[i * d + j] = memory[j * M + i];
}

// Tokens between two saved memories, where the mini-batch allows.
constexpr int64_t SEGMENT_TOKENS = 192;

static inline int64_t segment_tokens(int64_t minibatch) {
  return minibatch * std::max<int64_t>(1, SEGMENT_TOKENS / minibatch);
}

struct Sequence {
  int64_t batch, token, length, offset, saved;  // saved: its first place among the saved memories
};

// The memories of both passes, [N, H, m, d] each; the anchors in stale mode only.
struct State {
  float *memory[2], *anchor[2];
  State(const Call& call, const std::string& prefix) {
    for (int i = 0; i < 2; i++) {
      memory[i] = call.tensor(prefix + "memory" + "12"[i]).floats();
      anchor[i] = call.tensor(prefix + "anchor" + "12"[i]).floats();
    }
  }
};

// What both passes read of every token; with the prefix "d" their gradients.
struct Inputs {
  Tensor q, x[2], target[2], log_decay[2], step_size[2];
  Inputs(const Call& call, const std::string& prefix) : q(call.tensor(prefix + "q")) {
    for (int i = 0; i < 2; i++) {
      x[i] = call.tensor(prefix + "x" + "12"[i]);
      target[i] = call.tensor(prefix + "target" + "12"[i]);
      log_decay[i] = call.tensor(prefix + "log_decay" + "12"[i]);
      step_size[i] = call.tensor(prefix + "step_size" + "12"[i]);
    }
  }
};

struct Problem {
  Inputs in, grad;        // grad: in the backward
  Tensor y;               // dy in the backward
  State start, final;     // in the backward: gradients of the start, gradients of the final state
  State origin;           // the state that the forward started from
  Tensor saved;           // memories for the backward; if not given, nothing is saved
  int64_t heads, threads;
  int d[2], m[2];         // sizes of x and target in each pass
  int phi[2], f, psi;
  bool transposed;        // the value pass reads with the transpose
  int64_t minibatch;      // 1: exact
  bool after;             // error_at=after: z reads a memory that the token itself has decayed
  int64_t segment;        // tokens between saved memories, a multiple of the minibatch
  bool shared_target;     // both passes have the same target: its gradients are added up
  std::vector<Sequence> sequence;
  int64_t places = 0;     // of saved memories

  Problem(const Call& call, int64_t threads, bool forwards)
      : in(call, ""), grad(call, "d"), y(call.tensor(forwards ? "y" : "dy")),
        start(call, forwards ? "" : "d"), final(call, forwards ? "final_" : "dfinal_"),
        origin(call, ""), saved(call.tensor("saved")), heads(in.x[0].size[2]), threads(threads),
        phi{activation(call.option("phi1")), activation(call.option("phi2"))},
        f(activation(call.option("f"))), psi(activation(call.option("psi"))),
        transposed(call.number("transposed")), minibatch(call.number("minibatch")),
        after(call.either("error_at", "before", "after")),
        segment(segment_tokens(minibatch)), shared_target(!in.target[1].given()) {
    // What both passes share is given once.
    for (Tensor* pair : {in.target, in.log_decay, in.step_size})
      if (!pair[1].given()) pair[1] = pair[0];
    for (int i = 0; i < 2; i++) d[i] = in.x[i].size[3], m[i] = in.target[i].size[3];
    const Tensor bounds = call.tensor("cu_seqlens"), offset = call.tensor("offset");
    const int64_t count = bounds.given() ? bounds.size[0] - 1 : in.x[0].size[0];
    for (int64_t n = 0; n < count; n++) {
      Sequence s = {n, 0, in.x[0].size[1], offset.given() ? offset.integer(n) : 0, places};
      if (bounds.given())
        s.batch = 0, s.token = bounds.integer(n), s.length = bounds.integer(n + 1) - s.token;
      if (s.length) places += (s.offset + s.length + segment - 1) / segment;
      sequence.push_back(s);
    }
  }

  int64_t sequences() const { return sequence.size(); }
  int y_dim() const { return transposed ? d[1] : m[1]; }
};
