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
  Pass<S, S> one, two;
  Mask mask1, mask2, mask_d2;
  Plan plan;
  bool stale;

  explicit Runner(const Problem& p)
      : p(p), mask1(p.m1), mask2(p.m2), mask_d2(p.d2), plan{p.minibatch, p.segment},
        stale(p.minibatch > 1) {
    one = {padded(p.d1), padded(p.m1), int(p.phi1), {int(p.m1), padded(p.m1), mask1.on}, stale};
    two = {padded(p.d2), padded(p.m2), int(p.phi2), {int(p.m2), padded(p.m2), mask2.on}, stale};
  }

  size_t memory1() const { return size_t(one.D()) * one.M(); }
  size_t memory2() const { return size_t(two.D()) * two.M(); }
  int y_width() const { return p.transposed ? p.d2 : p.m2; }
  int y_padded() const { return p.transposed ? two.D() : two.M(); }
  Width y_shape() const {
    return {y_width(), y_padded(), p.transposed ? mask_d2.on : mask2.on};
  }
  int widest() const { return std::max({one.D(), one.M(), two.D(), two.M()}); }

  float* of(float* state, int64_t n, int64_t h, int64_t m, int64_t d) const {
    return state + (n * p.heads + h) * m * d;
  }

  void read_inputs(
      Chunk& a, Chunk& b, float* q, const Sequence& s, int64_t h, int64_t at, int count) const {
    const int64_t token = s.token + at - s.offset;
    read_rows(p.in.q, s.batch, token, h, count, q, p.d1, one.D());
    read_rows(p.in.x1, s.batch, token, h, count, a.x, p.d1, one.D());
    read_rows(p.in.t1, s.batch, token, h, count, a.target, p.m1, one.M());
    read_rows(p.in.x2, s.batch, token, h, count, b.x, p.d2, two.D());
    if (p.shared_target)
      std::memcpy(b.target, a.target, 4 * C * one.M());
    else
      read_rows(p.in.t2, s.batch, token, h, count, b.target, p.m2, two.M());
    read_gate(p.in.log_decay1, s.batch, token, h, count, a.log_decay);
    read_gate(p.in.step_size1, s.batch, token, h, count, a.step_size);
    read_gate(p.in.log_decay2, s.batch, token, h, count, b.log_decay);
    read_gate(p.in.step_size2, s.batch, token, h, count, b.step_size);
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
    prefetch_rows(p.in.q, next.batch, next.token + t, next.h, 1, p.d1);
    prefetch_rows(p.in.x1, next.batch, next.token + t, next.h, 1, p.d1);
    prefetch_rows(p.in.t1, next.batch, next.token + t, next.h, 1, p.m1);
    prefetch_rows(p.in.x2, next.batch, next.token + t, next.h, 1, p.d2);
    if (!p.shared_target) prefetch_rows(p.in.t2, next.batch, next.token + t, next.h, 1, p.m2);
  }

  // The writes of both passes. Their substitutions do not depend on each other, so they run side
  // by side and hide each other's latency.
  void write(Chunk& a, Chunk& b, const Ahead& next) const {
    one.prepare(a);
    two.prepare(b);
    for (int t = 0; t < C; t++) {
      prefetch(next, t);
      one.substitute(a, t);
      two.substitute(b, t);
    }
  }

  // What a head keeps between its turns.
  struct Head {
    int64_t h, at;
    float *first, *second;                // memories; in the backward their gradients
    float *first_anchor, *second_anchor;  // stale mode; in the backward their gradients
    float *origin_anchor1, *origin_anchor2;  // backward: the anchors that the sequence started with
  };

  size_t head_floats(bool forwards) const {
    return (memory1() + memory2()) * (stale ? (forwards ? 2 : 3) : 1);
  }

  float* carve(Head& head, float* space) const {
    auto take = [&](size_t count) { float* q = space; space += count; return q; };
    head.first = take(memory1()), head.second = take(memory2());
    if (stale) head.first_anchor = take(memory1()), head.second_anchor = take(memory2());
    return space;
  }

  void load_state(const State& state, int64_t n, Head& head) const {
    const int64_t h = head.h;
    read_state(of(state.first, n, h, p.m1, p.d1), head.first, p.m1, p.d1, one.M(), one.D());
    read_state(of(state.second, n, h, p.m2, p.d2), head.second, p.m2, p.d2, two.M(), two.D());
    if (stale) load_anchors(state, n, h, head.first_anchor, head.second_anchor);
  }

  void load_anchors(const State& state, int64_t n, int64_t h, float* first, float* second) const {
    read_state(of(state.first_anchor, n, h, p.m1, p.d1), first, p.m1, p.d1, one.M(), one.D());
    read_state(of(state.second_anchor, n, h, p.m2, p.d2), second, p.m2, p.d2, two.M(), two.D());
  }

  void store_state(const State& state, int64_t n, const Head& head) const {
    const int64_t h = head.h;
    write_state(of(state.first, n, h, p.m1, p.d1), head.first, p.m1, p.d1, one.M());
    write_state(of(state.second, n, h, p.m2, p.d2), head.second, p.m2, p.d2, two.M());
    if (!stale) return;
    write_state(of(state.first_anchor, n, h, p.m1, p.d1), head.first_anchor, p.m1, p.d1, one.M());
    write_state(of(state.second_anchor, n, h, p.m2, p.d2), head.second_anchor, p.m2, p.d2, two.M());
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
      if (stale && plan.starts_minibatch(last)) {
        std::memcpy(head.first_anchor, head.first, 4 * memory1());
        std::memcpy(head.second_anchor, head.second, 4 * memory2());
      }
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
    a.memory = head.first, b.memory = head.second;
    a.u = a.z, b.u = b.z;  // of no use here once they are written
    a.anchor = head.first_anchor, b.anchor = head.second_anchor;
    const int64_t h = head.h;
    const size_t both = memory1() + memory2();

    for (int64_t end; head.at < until; head.at = end) {
      const int64_t at = head.at;
      end = plan.end_of_chunk(at, last);
      const int count = end - at;
      if (p.saved.given() && (at == s.offset || at % plan.segment == 0)) {
        float* place = p.saved.floats() + ((s.saved + at / plan.segment) * p.heads + h) * both;
        std::memcpy(place, a.memory, 4 * memory1());
        std::memcpy(place + memory1(), b.memory, 4 * memory2());
      }
      if (stale && plan.starts_minibatch(at)) {
        std::memcpy(head.first_anchor, a.memory, 4 * memory1());
        std::memcpy(head.second_anchor, b.memory, 4 * memory2());
      }
      read_inputs(a, b, q, s, h, at, count);
      prefetch_rows<true>(p.y, s.batch, s.token + at - s.offset, h, count, y_width());
      write(a, b, end < until ? ahead(s, h, end, until) : ahead(s, next.h, next.at, last));
      const int broken1 = one.contain(a), broken2 = two.contain(b);
      one.read(a, q, yhat, qm, scores);
      for (int t = 0; t < C; t++)
        activate(p.f, yhat + t * one.M(), yhat + t * one.M(), one.wide);
      if (p.transposed)
        two.read_transposed(b, yhat, y, lanes, lanes2);
      else
        two.read(b, yhat, y, qm, scores);
      if (p.psi != IDENTITY)
        for (int t = 0; t < C; t++)
          activate(p.psi, y + t * y_padded(), y + t * y_padded(), y_shape());
      const int broken = std::min(broken1, broken2);
      for (int i = broken * y_padded(); i < C * y_padded(); i++) y[i] = NAN;
      write_rows(p.y, s.batch, s.token + at - s.offset, h, count, y, y_width(), y_padded());
      one.next(a, a.memory, scratch);
      two.next(b, b.memory, scratch);
      if (broken1 < C) std::fill_n(a.memory, memory1(), NAN);
      if (broken2 < C) std::fill_n(b.memory, memory2(), NAN);
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
      head.origin_anchor1 = space, head.origin_anchor2 = space + memory1();
      space += memory1() + memory2();
      load_anchors(p.origin, n, head.h, head.origin_anchor1, head.origin_anchor2);
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
    float *d1 = head.first, *d2 = head.second;  // gradients of the memories behind the chunk

    const int64_t h = head.h, last = s.offset + s.length;
    const int64_t stop = std::min((g + 1) * plan.segment, last);
    const float* place = p.saved.floats() + ((s.saved + g) * p.heads + h) * (memory1() + memory2());
    int chunks = 0;
    for (int64_t at = std::max(g * plan.segment, s.offset), end; at < stop; at = end, chunks++) {
      end = plan.end_of_chunk(at, last);
      Chunk &a = as[chunks], &b = bs[chunks];
      ats[chunks] = at;
      if (chunks == 0) {
        std::memcpy(a.memory, place, 4 * memory1());
        std::memcpy(b.memory, place + memory1(), 4 * memory2());
      } else {
        one.next(as[chunks - 1], a.memory, rows);
        two.next(bs[chunks - 1], b.memory, rows);
      }
      if (plan.starts_minibatch(at))
        a.anchor = a.memory, b.anchor = b.memory;
      else if (at == s.offset)
        a.anchor = head.origin_anchor1, b.anchor = head.origin_anchor2;
      else
        a.anchor = as[chunks - 1].anchor, b.anchor = bs[chunks - 1].anchor;
      read_inputs(a, b, qs[chunks], s, h, at, end - at);
      write(a, b, ahead(s, h, end, stop));
    }
    for (int i = chunks - 1; i >= 0; i--) {
      const Chunk &a = as[i], &b = bs[i];
      const float* q = qs[i];
      const int64_t token = s.token + ats[i] - s.offset;
      const int count = plan.end_of_chunk(ats[i], last) - ats[i];
      read_rows(p.y, s.batch, token, h, count, dy, y_width(), y_padded());
      if (i > 0) prefetch_rows(p.y, s.batch, token - C, h, C, y_width());
      prefetch_rows<true>(p.grad.q, s.batch, token, h, count, p.d1);
      prefetch_rows<true>(p.grad.x1, s.batch, token, h, count, p.d1);
      prefetch_rows<true>(p.grad.x2, s.batch, token, h, count, p.d2);
      prefetch_rows<true>(p.grad.t1, s.batch, token, h, count, p.m1);
      one.read(a, q, yhat, qm, scores);
      for (int t = 0; t < C; t++)
        activate(p.f, yhat + t * one.M(), r + t * one.M(), one.wide);
      if (!p.transposed) two.read(b, r, y, qm2, scores2);
      if (p.psi != IDENTITY) {
        if (p.transposed) two.read_transposed(b, r, y, lanes, lanes2);
        for (int t = 0; t < C; t++) {
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
      for (int t = 0; t < C; t++)
        pull_back(p.f, yhat + t * one.M(), dquery + t * one.M(), dyhat + t * one.M(), one.wide);
      one.back_read(a, q, qm, scores, dyhat, d1, ba);
      write_rows(p.grad.q, s.batch, token, h, count, ba.rows, p.d1, one.D());
      for (int t = C - 1; t >= 0; t--) {
        one.substitute_back(a, ba, dstep1, t);
        two.substitute_back(b, bb, dstep2, t);
      }
      one.finish(a, ba, q, dyhat, d1, head.first_anchor, ddecay1);
      two.finish(b, bb, p.transposed ? dy : r, p.transposed ? r : dy, d2, head.second_anchor,
                 ddecay2);
      if (stale && plan.starts_minibatch(ats[i])) move_anchors(head);
      to_rows(ba.dx_lanes, rows, one.D());
      write_rows(p.grad.x1, s.batch, token, h, count, rows, p.d1, one.D());
      to_rows(bb.dx_lanes, rows, two.D());
      write_rows(p.grad.x2, s.batch, token, h, count, rows, p.d2, two.D());
      if (p.shared_target)
        for (int j = 0; j < C * one.M(); j++) ba.dtarget[j] += bb.dtarget[j];
      else
        write_rows(p.grad.t2, s.batch, token, h, count, bb.dtarget, p.m2, two.M());
      write_rows(p.grad.t1, s.batch, token, h, count, ba.dtarget, p.m1, one.M());
      write_gates(p.grad.log_decay1, p.grad.log_decay2, s.batch, token, h, count, ddecay1, ddecay2);
      write_gates(p.grad.step_size1, p.grad.step_size2, s.batch, token, h, count, dstep1, dstep2);
    }
  }

  // Gradients of a gate of both passes. A gate that they share was given once.
  static void write_gates(
      const Tensor& one, const Tensor& two, int64_t batch, int64_t token, int64_t h, int count,
      float* d1, const float* d2) {
    if (two.given())
      write_gate(two, batch, token, h, count, d2);
    else
      for (int t = 0; t < count; t++) d1[t] += d2[t];
    write_gate(one, batch, token, h, count, d1);
  }

  // The gradients of anchors join those of the memories that they are copies of.
  void move_anchors(Head& head) const {
    auto move = [](float* anchor, float* memory, size_t n) {
      for (size_t i = 0; i < n; i++) memory[i] += anchor[i], anchor[i] = 0;
    };
    move(head.first_anchor, head.first, memory1());
    move(head.second_anchor, head.second, memory2());
  }

  int run(bool forwards) const {
    if (forwards && p.saved.given()) {  // places that no sequence has are part of the result
      const int64_t place = p.heads * (memory1() + memory2());
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
  const bool square64 = padded(p.d1) == 64 && padded(p.m1) == 64 && padded(p.d2) == 64 &&
                        padded(p.m2) == 64;
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
