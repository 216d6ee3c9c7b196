// The two-pass compression memory: forward and backward, one (sequence, head) at a time. No torch
// headers: Python calls the C functions at the end of this file (see ../custom_op.py).
#include <cstdlib>
#include <memory>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include "pass.h"
#include "step.h"

namespace {

struct Buffer {
  explicit Buffer(size_t floats) {
    const size_t page = size_t(1) << 21, bytes = (4 * floats + page - 1) / page * page;
    if (posix_memalign(reinterpret_cast<void**>(&data), page, bytes)) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);  // fewer misses in the translation of addresses
#endif
    std::memset(data, 0, 4 * floats);
  }
  ~Buffer() { std::free(data); }
  float* data;
};

// Chunks end at multiples of 16 inside a mini-batch and at its end. Positions count from the start
// of the mini-batch that the sequence starts in.
struct Plan {
  int64_t minibatch, segment;
  int64_t end_of_chunk(int64_t at, int64_t last) const {
    if (minibatch == 1) return std::min((at / C + 1) * C, last);
    const int64_t first = at / minibatch * minibatch;
    return std::min({first + ((at - first) / C + 1) * C, first + minibatch, last});
  }
  bool starts_minibatch(int64_t at) const { return at % minibatch == 0; }
};

// Tokens of a head's turn.
constexpr int64_t TURN = 64;

template <int S>
struct Runner {
  const Problem& p;
  Mask mask1, mask2, mask_y;
  Pass<S, S> one, two;
  Plan plan;
  bool stale;
  size_t size[2];  // of the memories

  explicit Runner(const Problem& p)
      : p(p), mask1(p.m[0]), mask2(p.m[1]), mask_y(p.y_dim()), one(pass(0, mask1)),
        two(pass(1, mask2)), plan{p.minibatch, p.segment}, stale(p.minibatch > 1),
        size{size_t(one.D()) * one.M(), size_t(two.D()) * two.M()} {}

  Pass<S, S> pass(int i, const Mask& mask) const {
    const int d = padded(p.d[i]), m = padded(p.m[i]);
    return {d, m, p.phi[i], {p.m[i], m, mask.on}, p.minibatch > 1, p.after};
  }
  size_t both() const { return size[0] + size[1]; }
  int y_padded() const { return p.transposed ? two.D() : two.M(); }
  Width y_shape() const { return {p.y_dim(), y_padded(), mask_y.on}; }
  int widest() const { return std::max({one.D(), one.M(), two.D(), two.M()}); }

  void read_inputs(
      Chunk& a, Chunk& b, float* q, const Sequence& s, int64_t h, int64_t at, int count) const {
    const int64_t token = s.token + at - s.offset;
    auto rows = [&](const Tensor& x, float* out, int n) {
      read_rows(x, s.batch, token, h, count, out, n, padded(n));
    };
    rows(p.in.q, q, p.d[0]);
    rows(p.in.x[0], a.x, p.d[0]), rows(p.in.x[1], b.x, p.d[1]);
    rows(p.in.target[0], a.target, p.m[0]);
    if (p.shared_target)
      std::memcpy(b.target, a.target, 4 * C * one.M());
    else
      rows(p.in.target[1], b.target, p.m[1]);
    for (int i = 0; i < 2; i++) {
      Chunk& c = i ? b : a;
      read_rows(p.in.log_decay[i], s.batch, token, h, count, c.log_decay, 1, 1);
      read_rows(p.in.step_size[i], s.batch, token, h, count, c.step_size, 1, 1);
    }
  }

  // The chunk to be read next. Its rows are asked for one by one during the substitution, which
  // leaves the memory idle; all at once they would stall.
  struct Ahead {
    int64_t batch, token, h;
    int count;
  };

  static Ahead ahead(const Sequence& s, int64_t h, int64_t at, int64_t last) {
    return {s.batch, s.token + at - s.offset, h, int(std::clamp<int64_t>(last - at, 0, C))};
  }

  void prefetch(const Ahead& next, int t) const {
    if (t >= next.count) return;
    auto row = [&](const Tensor& x, int n) {
      prefetch_rows(x, next.batch, next.token + t, next.h, 1, n);
    };
    row(p.in.q, p.d[0]), row(p.in.x[0], p.d[0]), row(p.in.target[0], p.m[0]);
    row(p.in.x[1], p.d[1]);
    if (!p.shared_target) row(p.in.target[1], p.m[1]);
  }

  // The writes of both passes. Their substitutions do not depend on each other, so they run side
  // by side and hide each other's latency.
  void write(Chunk& a, Chunk& b, int count, const Ahead& next) const {
    one.prepare(a);
    two.prepare(b);
    for (int t = 0; t < C; t++) {
      prefetch(next, t);
      if (t >= count) continue;
      one.substitute(a, t);
      two.substitute(b, t);
    }
    one.clear_writes(a, count);
    two.clear_writes(b, count);
  }

  // f of `count` rows; what follows reads all 16, so the others are zeros.
  void apply_f(const float* yhat, float* out, int count) const {
    for (int t = 0; t < count; t++) activate(p.f, yhat + t * one.M(), out + t * one.M(), one.wide);
    clear_rows(out, one.M(), count);
  }

  // What a head keeps between its turns, for both passes.
  struct Head {
    int64_t h, at;
    float* memory[2];  // in the backward: its gradient
    float* anchor[2];  // stale mode; in the backward: its gradient
    float* origin[2];  // backward of stale mode: the anchor that the sequence started with
  };

  size_t head_floats(bool forwards) const { return both() * (stale ? (forwards ? 2 : 3) : 1); }

  float* carve(Head& head, float* space) const {
    for (int i = 0; i < 2; i++) {
      head.memory[i] = space, space += size[i];
      if (stale) head.anchor[i] = space, space += size[i];
    }
    return space;
  }

  float* of(float* state, int64_t n, int64_t h, int i) const {
    return state + (n * p.heads + h) * p.m[i] * p.d[i];
  }

  void load_memory(float* state, int64_t n, int64_t h, int i, float* out) const {
    read_state(of(state, n, h, i), out, p.m[i], p.d[i], padded(p.m[i]), padded(p.d[i]));
  }

  void load_state(const State& state, int64_t n, Head& head) const {
    for (int i = 0; i < 2; i++) {
      load_memory(state.memory[i], n, head.h, i, head.memory[i]);
      if (stale) load_memory(state.anchor[i], n, head.h, i, head.anchor[i]);
    }
  }

  void store_state(const State& state, int64_t n, const Head& head) const {
    for (int i = 0; i < 2; i++) {
      const int m = p.m[i], d = p.d[i];
      write_state(of(state.memory[i], n, head.h, i), head.memory[i], m, d, padded(m));
      if (stale) write_state(of(state.anchor[i], n, head.h, i), head.anchor[i], m, d, padded(m));
    }
  }

  void set_anchors(const Head& head) const {
    for (int i = 0; i < 2; i++) std::memcpy(head.anchor[i], head.memory[i], 4 * size[i]);
  }

  size_t forward_floats(int64_t heads) const {
    return one.chunk_floats(one.D(), one.M()) + two.chunk_floats(two.D(), two.M()) +
           heads * head_floats(true) + size_t(7) * C * widest() + C * C;
  }

  // Heads take turns of a few chunks: their tokens lie side by side in memory, and each page is
  // visited once for all of them.
  void forward(int64_t n, int64_t from, int64_t to, float* space) const {
    const Sequence& s = p.sequence[n];
    std::vector<Head> heads(to - from);
    for (auto& head : heads) {
      head.h = from + (&head - heads.data()), head.at = s.offset;
      space = carve(head, space);
      load_state(p.start, n, head);
    }
    const int64_t last = s.offset + s.length;
    for (int64_t until = TURN; until < last + TURN; until += TURN)
      for (auto& head : heads) {
        // The first chunk behind this turn: the next head's, or the first head's next.
        const Head& next = &head == &heads.back() ? heads.front() : *(&head + 1);
        forward_turn(s, head, next, std::min(until, last), last, space);
      }
    for (auto& head : heads) {
      // Between two mini-batches the anchor is the memory.
      if (stale && plan.starts_minibatch(last)) set_anchors(head);
      store_state(p.final, n, head);
    }
  }

  void forward_turn(
      const Sequence& s, Head& head, const Head& next, int64_t until, int64_t last,
      float* space) const {
    Chunk a, b;
    space = two.carve(b, one.carve(a, space));
    auto take = [&](size_t count) { float* q = space; space += count; return q; };
    float *q = take(C * widest()), *yhat = take(C * widest()), *qm = take(C * widest());
    float *y = take(C * widest()), *lanes = take(C * widest()), *lanes2 = take(C * widest());
    float *scratch = take(C * widest()), *scores = take(C * C);
    a.memory = head.memory[0], b.memory = head.memory[1];
    a.u = a.z, b.u = b.z;  // of no use here once they are written
    a.anchor = head.anchor[0], b.anchor = head.anchor[1];
    const int64_t h = head.h;

    for (int64_t end; head.at < until; head.at = end) {
      const int64_t at = head.at;
      end = plan.end_of_chunk(at, last);
      const int count = end - at;
      if (p.saved.given() && (at == s.offset || at % plan.segment == 0)) {
        float* place = p.saved.floats() + ((s.saved + at / plan.segment) * p.heads + h) * both();
        std::memcpy(place, a.memory, 4 * size[0]);
        std::memcpy(place + size[0], b.memory, 4 * size[1]);
      }
      if (stale && plan.starts_minibatch(at)) set_anchors(head);
      read_inputs(a, b, q, s, h, at, count);
      prefetch_rows<true>(p.y, s.batch, s.token + at - s.offset, h, count, p.y_dim());
      write(a, b, count, end < until ? ahead(s, h, end, until) : ahead(s, next.h, next.at, last));
      const int broken1 = one.contain(a), broken2 = two.contain(b);
      one.read(a, q, yhat, qm, scores);
      apply_f(yhat, yhat, count);
      if (p.transposed)
        two.read_transposed(b, yhat, y, lanes, lanes2);
      else
        two.read(b, yhat, y, qm, scores);
      if (p.psi != IDENTITY)
        for (int t = 0; t < count; t++)
          activate(p.psi, y + t * y_padded(), y + t * y_padded(), y_shape());
      const int broken = std::min(broken1, broken2);
      for (int i = broken * y_padded(); i < C * y_padded(); i++) y[i] = NAN;
      write_rows(p.y, s.batch, s.token + at - s.offset, h, count, y, p.y_dim(), y_padded());
      one.next(a, a.memory, scratch);
      two.next(b, b.memory, scratch);
      if (broken1 < C) std::fill_n(a.memory, size[0], NAN);
      if (broken2 < C) std::fill_n(b.memory, size[1], NAN);
    }
  }

  // Chunks of a segment at most: the first may be short of a multiple of 16, and so may every
  // mini-batch.
  int segment_chunks() const {
    if (!stale) return p.segment / C;
    return p.segment / p.minibatch * ((p.minibatch + C - 1) / C);
  }

  size_t backward_floats(int64_t heads) const {
    const size_t chunk = one.chunk_floats(one.D(), one.M()) +
                         two.chunk_floats(two.D(), two.M()) + C * widest();
    return chunk * segment_chunks() + Pass<S, S>::Back::floats(one.D(), one.M()) +
           Pass<S, S>::Back::floats(two.D(), two.M()) + heads * head_floats(false) +
           size_t(11) * C * widest() + 2 * C * C + 4 * C;
  }

  void backward(int64_t n, int64_t from, int64_t to, float* space) const {
    const Sequence& s = p.sequence[n];
    const int64_t last = s.offset + s.length;
    std::vector<Head> heads(to - from);
    for (auto& head : heads) {
      head.h = from + (&head - heads.data());
      space = carve(head, space);
      load_state(p.final, n, head);
      if (!stale) continue;
      for (int i = 0; i < 2; i++) {
        head.origin[i] = space, space += size[i];
        load_memory(p.origin.anchor[i], n, head.h, i, head.origin[i]);
      }
      if (plan.starts_minibatch(last)) move_anchors(head);
    }
    const int64_t segments = s.length ? (last + plan.segment - 1) / plan.segment : 0;
    for (int64_t g = segments - 1; g >= 0; g--)
      for (auto& head : heads) backward_segment(s, head, g, space);
    for (auto& head : heads) store_state(p.start, n, head);
  }

  // The chunks of segment g: forward once more from its saved memory, then backward.
  void backward_segment(const Sequence& s, Head& head, int64_t g, float* space) const {
    auto take = [&](size_t count) { float* q = space; space += count; return q; };
    const int most = segment_chunks();
    std::vector<Chunk> as(most), bs(most);
    std::vector<float*> qs(most);
    std::vector<int64_t> ats(most);
    for (int i = 0; i < most; i++) {
      space = two.carve(bs[i], one.carve(as[i], space));
      qs[i] = take(C * widest());
    }
    typename Pass<S, S>::Back ba, bb;
    space = ba.carve(space, one.D(), one.M());
    space = bb.carve(space, two.D(), two.M());
    float *yhat = take(C * widest()), *qm = take(C * widest()), *r = take(C * widest());
    float *dy = take(C * widest()), *dr = take(C * widest()), *dyhat = take(C * widest());
    float *qm2 = take(C * widest()), *y = take(C * widest()), *rows = take(C * widest());
    float *lanes = take(C * widest()), *lanes2 = take(C * widest());
    float *scores = take(C * C), *scores2 = take(C * C), *gates = take(4 * C);
    float *dstep1 = gates, *dstep2 = gates + C, *ddecay1 = gates + 2 * C, *ddecay2 = gates + 3 * C;
    float *d1 = head.memory[0], *d2 = head.memory[1];  // gradients of the memories behind the chunk

    const int64_t h = head.h, last = s.offset + s.length;
    const int64_t stop = std::min((g + 1) * plan.segment, last);
    const float* place = p.saved.floats() + ((s.saved + g) * p.heads + h) * both();
    int chunks = 0;
    for (int64_t at = std::max(g * plan.segment, s.offset), end; at < stop; at = end, chunks++) {
      end = plan.end_of_chunk(at, last);
      Chunk &a = as[chunks], &b = bs[chunks];
      ats[chunks] = at;
      if (chunks == 0) {
        std::memcpy(a.memory, place, 4 * size[0]);
        std::memcpy(b.memory, place + size[0], 4 * size[1]);
      } else {
        one.next(as[chunks - 1], a.memory, rows);
        two.next(bs[chunks - 1], b.memory, rows);
      }
      if (plan.starts_minibatch(at))
        a.anchor = a.memory, b.anchor = b.memory;
      else if (at == s.offset)
        a.anchor = head.origin[0], b.anchor = head.origin[1];
      else
        a.anchor = as[chunks - 1].anchor, b.anchor = bs[chunks - 1].anchor;
      read_inputs(a, b, qs[chunks], s, h, at, end - at);
      write(a, b, end - at, ahead(s, h, end, stop));
    }
    for (int i = chunks - 1; i >= 0; i--) {
      const Chunk &a = as[i], &b = bs[i];
      const float* q = qs[i];
      const int64_t token = s.token + ats[i] - s.offset;
      const int count = plan.end_of_chunk(ats[i], last) - ats[i];
      read_rows(p.y, s.batch, token, h, count, dy, p.y_dim(), y_padded());
      if (i > 0) prefetch_rows(p.y, s.batch, token - C, h, C, p.y_dim());
      auto soon = [&](const Tensor& x, int n) {
        prefetch_rows<true>(x, s.batch, token, h, count, n);
      };
      soon(p.grad.q, p.d[0]), soon(p.grad.x[0], p.d[0]), soon(p.grad.x[1], p.d[1]);
      soon(p.grad.target[0], p.m[0]);
      one.read(a, q, yhat, qm, scores);
      apply_f(yhat, r, count);
      if (!p.transposed) two.read(b, r, y, qm2, scores2);
      if (p.psi != IDENTITY) {
        if (p.transposed) two.read_transposed(b, r, y, lanes, lanes2);
        for (int t = 0; t < count; t++) {
          float* row = dy + t * y_padded();
          pull_back(p.psi, y + t * y_padded(), row, rows, y_shape());
          std::memcpy(row, rows, 4 * y_padded());
        }
      }
      const float* dquery = bb.rows;
      if (p.transposed) {
        two.back_read_transposed(b, r, dy, d2, dr, bb);
        dquery = dr;
      } else {
        two.back_read(b, r, qm2, scores2, dy, d2, bb);
      }
      for (int t = 0; t < count; t++)
        pull_back(p.f, yhat + t * one.M(), dquery + t * one.M(), dyhat + t * one.M(), one.wide);
      clear_rows(dyhat, one.M(), count);
      one.back_read(a, q, qm, scores, dyhat, d1, ba);
      write_rows(p.grad.q, s.batch, token, h, count, ba.rows, p.d[0], one.D());
      for (int t = count - 1; t >= 0; t--) {
        one.substitute_back(a, ba, dstep1, t, count);
        two.substitute_back(b, bb, dstep2, t, count);
      }
      one.clear_gradients(ba, count);
      two.clear_gradients(bb, count);
      one.finish(a, ba, q, dyhat, d1, head.anchor[0], ddecay1);
      two.finish(b, bb, p.transposed ? dy : r, p.transposed ? r : dy, d2, head.anchor[1],
                 ddecay2);
      if (stale && plan.starts_minibatch(ats[i])) move_anchors(head);
      auto put = [&](const Tensor& x, const float* in, int n) {
        write_rows(x, s.batch, token, h, count, in, n, padded(n));
      };
      to_rows(ba.dx_lanes, rows, one.D());
      put(p.grad.x[0], rows, p.d[0]);
      to_rows(bb.dx_lanes, rows, two.D());
      put(p.grad.x[1], rows, p.d[1]);
      if (p.shared_target)
        for (int j = 0; j < C * one.M(); j++) ba.dtarget[j] += bb.dtarget[j];
      else
        put(p.grad.target[1], bb.dtarget, p.m[1]);
      put(p.grad.target[0], ba.dtarget, p.m[0]);
      write_gates(p.grad.log_decay, s.batch, token, h, count, ddecay1, ddecay2);
      write_gates(p.grad.step_size, s.batch, token, h, count, dstep1, dstep2);
    }
  }

  // Gradients of a gate of both passes. A gate that they share was given once.
  static void write_gates(
      const Tensor (&gate)[2], int64_t batch, int64_t token, int64_t h, int count, float* d1,
      const float* d2) {
    if (gate[1].given())
      write_rows(gate[1], batch, token, h, count, d2, 1, 1);
    else
      for (int t = 0; t < count; t++) d1[t] += d2[t];
    write_rows(gate[0], batch, token, h, count, d1, 1, 1);
  }

  // The gradients of anchors join those of the memories that they are copies of.
  void move_anchors(const Head& head) const {
    for (int i = 0; i < 2; i++)
      for (size_t j = 0; j < size[i]; j++)
        head.memory[i][j] += head.anchor[i][j], head.anchor[i][j] = 0;
  }

  int run(bool forwards) const {
    if (forwards && p.saved.given()) {  // places that no sequence has are part of the result
      const int64_t place = p.heads * both();
      std::memset(p.saved.floats() + p.places * place, 0, 4 * (p.saved.size[0] - p.places) * place);
    }
    // Heads that take turns in one task: enough tasks for all threads, and memories that fit L2.
    const int64_t group = std::clamp<int64_t>(
        p.sequences() * p.heads / (2 * p.threads), 1, std::min<int64_t>(p.heads, 6));
    const int64_t groups = (p.heads + group - 1) / group, tasks = p.sequences() * groups;
    const size_t floats = forwards ? forward_floats(group) : backward_floats(group);
    bool failed = false;
#pragma omp parallel num_threads(p.threads)
    {
      std::unique_ptr<Buffer> space;
      try {
        space.reset(new Buffer(floats));
      } catch (const std::bad_alloc&) {
#pragma omp atomic write
        failed = true;
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < tasks; i++) {
        if (!space) continue;
        const int64_t n = i / groups, from = i % groups * group;
        const int64_t to = std::min(from + group, p.heads);
        if (forwards)
          forward(n, from, to, space->data);
        else
          backward(n, from, to, space->data);
      }
    }
    return failed;
  }
};

int run(const Problem& p, bool forwards) {
  if (forwards && Step::fits(p)) return Step(p).run();
  const bool square64 = padded(p.d[0]) == 64 && padded(p.m[0]) == 64 && padded(p.d[1]) == 64 &&
                        padded(p.m[1]) == 64;
  return square64 ? Runner<64>(p).run(forwards) : Runner<0>(p).run(forwards);
}

int called(
    const char* options, const char* names, const Tensor* tensors, int64_t threads, bool forwards) {
  try {
    return run(Problem({options, names, tensors}, threads, forwards), forwards);
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::invalid_argument&) {
    return 2;
  }
}

}  // namespace

extern "C" {

// 0: done; 1: out of memory; 2: an option is missing or has an unknown value.
int trellis_forward(
    const char* options, const char* names, const Tensor* tensors, int64_t threads) {
  return called(options, names, tensors, threads, true);
}

int trellis_backward(
    const char* options, const char* names, const Tensor* tensors, int64_t threads) {
  return called(options, names, tensors, threads, false);
}

// What Python has to know: the largest size, tokens between saved memories, and the size of a saved
// memory for x of size d and a target of size m.
int64_t trellis_widest() { return WIDEST; }
int64_t trellis_segment(int64_t minibatch) { return segment_tokens(minibatch); }
int64_t trellis_saved(int64_t d, int64_t m) { return int64_t(padded(d)) * padded(m); }

int trellis_vector_length() { return VL; }
}
