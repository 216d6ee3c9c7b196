// One pass of the memory over a chunk of up to 16 tokens: write, read, and their backward.
//
// Rows are tokens, [16][M] or [16][D]; "lanes" are tokens in the last dimension, [D][16]. Memories
// are stored as [D][M], the transpose of the states. Missing tokens are zero rows that neither
// write nor decay. The equations are in ../README.md.
#pragma once
#include "activations.h"

constexpr int C = 16;

// Small matrix products.

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
    // Six rows fill the registers of AVX2, four those of SSE; the rest of the rows is 0, 4 or 8.
    constexpr int R = VL == 8 ? 6 : 4;
    const int most = rows % R == 2 ? rows - 8 : rows - rows % R;
    tiles<R, 2>(most, cols, K, a, ar, ak, b, bk, done);
    tiles<4, 2>(rows - most, cols, K, a + most * ar, ar, ak, b, bk,
                [&](int r, int c, vf v) { done(most + r, c, v); });
  }
}

// What one chunk of one pass needs again in the backward.
struct Chunk {
  float *memory;       // [D][M], before the chunk
  float *x, *x_lanes;  // [16][D], [D][16]
  float *target;       // [16][M]
  float *z, *u, *writes;                 // [16][M]; writes = step_size u
  // [16][16]: w(t,s); how the write of s < t has decayed when z_t reads it, w(t-1,s) or w(t,s) if
  // the error is taken after the decay; the same times x_s.x_t.
  float *within, *z_within, *coupling;
  // [16]: the gates; exp(L_t); how the memory or the anchor has decayed when z_t reads it.
  float *log_decay, *step_size, *start, *z_start;
  const float* anchor;                   // [D][M] in stale mode
};

// Zeros from row `count` of rows [16][width] on: the tokens that a short chunk lacks.
static inline void clear_rows(float* rows, int width, int count) {
  std::memset(rows + count * width, 0, 4 * size_t(C - count) * width);
}

// v times the weights at w; exactly zero where the weight is, also for an infinite v.
static inline vf weigh(vf v, const float* w) { return select(load(w) != 0.f, v * load(w), vf{}); }

// D and M as constants where DC and MC are not 0.
template <int DC, int MC>
struct Pass {
  int D_, M_, phi;
  Width wide;  // of a code, M
  bool stale;
  bool after;  // the error is taken after the token's own decay
  inline int D() const { return DC ? DC : D_; }
  inline int M() const { return MC ? MC : M_; }

  static size_t chunk_floats(int D, int M) {
    return size_t(D) * M + 2 * C * D + 4 * C * M + 3 * C * C + 4 * C;
  }

  // Lay a chunk out in memory; returns what is left.
  float* carve(Chunk& c, float* p) const {
    auto take = [&](size_t n) { float* q = p; p += n; return q; };
    c.memory = take(size_t(D()) * M());
    c.x = take(C * D()), c.x_lanes = take(C * D());
    c.target = take(C * M()), c.z = take(C * M()), c.u = take(C * M()), c.writes = take(C * M());
    c.within = take(C * C), c.z_within = take(C * C), c.coupling = take(C * C);
    c.log_decay = take(C), c.step_size = take(C), c.start = take(C), c.z_start = take(C);
    return p;
  }

  // From x, target, log_decay, step_size and memory: everything up to z before the substitution.
  void prepare(Chunk& c) const {
    float total = 1;
    for (int t = 0; t < C; t++) {
      const float decay = c.log_decay[t] == 0 ? 1.f : std::exp(c.log_decay[t]);
      const float kept = after ? decay : 1.f;  // of what z_t reads, by the token itself
      c.z_start[t] = stale ? kept : total * kept;
      total *= decay;
      c.start[t] = total;
      for (int s = 0; s < C; s += VL) {
        const vf w = t ? load(c.within + (t - 1) * C + s) : vf{};
        store(c.z_within + t * C + s, w * kept);
        store(c.within + t * C + s, w * decay);
      }
      c.within[t * C + t] = 1;
    }
    to_lanes(c.x, c.x_lanes, D());
    if (!stale)
      product(C, C, D(), c.x, D(), 1, c.x_lanes, C, [&](int t, int s, vf v) {
        store(c.coupling + t * C + s, weigh(v, c.z_within + t * C + s));
      });
    product(C, M(), D(), c.x, D(), 1, stale ? c.anchor : c.memory, M(),
            [&](int t, int i, vf v) { store(c.z + t * M() + i, v * c.z_start[t]); });
  }

  // row [M] -= sum over s from `from` to `to` - 1 of factors[s * step] rows[s][M].
  INLINE void subtract(
      const Pass& p, float* row, const float* rows, const float* factors, int step, int from,
      int to) {
    constexpr int V = MC % (4 * VL) == 0 && MC ? 4 : 1;
    for (int i = 0; i < p.M(); i += V * VL) {
      vf acc[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[v] = load(row + i + v * VL);
      for (int s = from; s < to; s++) {
        const float n = factors[s * step];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[v] -= n * load(rows + s * p.M() + i + v * VL);
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(row + i + v * VL, acc[v]);
    }
  }

  // Row t of the forward substitution.
  inline void substitute(Chunk& c, int t) const {
    float* z = c.z + t * M();
    if (!stale) subtract(*this, z, c.writes, c.coupling + t * C, 1, 0, t);
    float *u = c.u + t * M(), *write = c.writes + t * M();
    gradient(phi, z, c.target + t * M(), u, {wide.n, M(), wide.mask});
    for (int i = 0; i < M(); i += VL) store(write + i, load(u + i) * c.step_size[t]);
  }

  void clear_writes(Chunk& c, int count) const {
    clear_rows(c.u, M(), count), clear_rows(c.writes, M(), count);
  }

  // Keep a non-finite write away from the rows before it, which multiply it by zero. Returns the
  // first broken row, or 16.
  int contain(Chunk& c) const {
    vf total{};
    for (int i = 0; i < C * M(); i += VL) total += load(c.writes + i) * 0.f;
    for (int i = 0; i < C * D(); i += VL) total += load(c.x + i) * 0.f;
    if (sum(total) == 0) return C;
    int first = 0;
    auto finite = [](const float* p, int n) {
      for (int i = 0; i < n; i++)
        if (!(p[i] * 0.f == 0.f)) return false;
      return true;
    };
    while (first < C && finite(c.writes + first * M(), M()) && finite(c.x + first * D(), D()))
      first++;
    std::memset(c.writes + first * M(), 0, 4 * (C - first) * M());
    std::memset(c.x + first * D(), 0, 4 * (C - first) * D());
    to_lanes(c.x, c.x_lanes, D());
    return first;
  }

  // next [D][M] = exp(L_C) memory - sum_s w(C,s) x_s writes_s^T; `next` may be the memory.
  void next(const Chunk& c, float* next, float* scratch) const {
    for (int s = 0; s < C; s++) {
      const float w = c.within[(C - 1) * C + s];
      for (int i = 0; i < M(); i += VL)
        store(scratch + s * M() + i, load(c.writes + s * M() + i) * w);
    }
    const float whole = c.start[C - 1];
    product(D(), M(), C, c.x, 1, D(), scratch, M(), [&](int d, int i, vf v) {
      store(next + d * M() + i, load(c.memory + d * M() + i) * whole - v);
    });
  }

  // y [16][M] = M_t query_t, query [16][D]. qm [16][M] receives memory . query, unscaled.
  void read(const Chunk& c, const float* query, float* y, float* qm, float* scores) const {
    product(C, C, D(), query, D(), 1, c.x_lanes, C, [&](int t, int s, vf v) {
      store(scores + t * C + s, weigh(v, c.within + t * C + s));
    });
    product(C, M(), D(), query, D(), 1, c.memory, M(),
            [&](int t, int i, vf v) { store(qm + t * M() + i, v); });
    product(C, M(), C, scores, C, 1, c.writes, M(), [&](int t, int i, vf v) {
      store(y + t * M() + i, load(qm + t * M() + i) * c.start[t] - v);
    });
  }

  // y [16][D] = M_t^T query_t, query [16][M].
  void read_transposed(
      const Chunk& c, const float* query, float* y, float* query_lanes, float* y_lanes) const {
    alignas(64) float scores[C * C], within[C * C];
    to_lanes(query, query_lanes, M());
    transpose_block(c.within, C, within, C);
    product(C, C, M(), c.writes, M(), 1, query_lanes, C, [&](int s, int t, vf v) {
      store(scores + s * C + t, weigh(v, within + s * C + t));
    });
    product(D(), C, M(), c.memory, M(), 1, query_lanes, C, [&](int d, int t, vf v) {
      store(y_lanes + d * C + t, v * load(c.start + t));
    });
    product(D(), C, C, c.x, 1, D(), scores, C, [&](int d, int t, vf v) {
      store(y_lanes + d * C + t, load(y_lanes + d * C + t) - v);
    });
    to_rows(y_lanes, y, D());
  }

  // Buffers of the backward of a chunk.
  struct Back {
    float *dwrites, *dz, *dtarget;    // [16][M]
    float *dx_lanes, *rows;           // [D][16]; rows [16][D] of a gradient
    float *writes_lanes, *lanes;      // [M][16]
    float *pairs;                     // [16][16]: weigh the decays of s+1 .. t
    float *starts;                    // [16]: weigh the decays of 1 .. t
    float *scratch;                   // [16][max(D, M)]
    static size_t floats(int D, int M) {
      return 4 * C * M + 2 * C * D + 2 * C * M + C * C + C + C * (D > M ? D : M);
    }
    float* carve(float* p, int D, int M) {
      auto take = [&](size_t n) { float* q = p; p += n; return q; };
      dwrites = take(C * M), dz = take(C * M), dtarget = take(C * M);
      dx_lanes = take(C * D), rows = take(C * D);
      writes_lanes = take(C * M), lanes = take(C * M);
      pairs = take(C * C), starts = take(C), scratch = take(C * (D > M ? D : M));
      return p;
    }
  };

  // What both reads share: dwrites and dx of the next memory, and the decay towards it.
  // dwrites and dx_lanes hold minus the gradient of the read when this is called.
  void back_next(const Chunk& c, const float* dnext, Back& b) const {
    const float* end = c.within + (C - 1) * C;
    product(C, M(), D(), c.x, D(), 1, dnext, M(), [&](int s, int i, vf v) {
      store(b.scratch + s * M() + i, v);
      store(b.dwrites + s * M() + i, -load(b.dwrites + s * M() + i) - v * end[s]);
    });
    product(D(), C, M(), dnext, M(), 1, b.writes_lanes, C, [&](int d, int s, vf v) {
      store(b.dx_lanes + d * C + s, -load(b.dx_lanes + d * C + s) - v * load(end + s));
    });
    for (int s = 0; s < C; s++)
      b.pairs[(C - 1) * C + s] -= end[s] * dot(c.writes + s * M(), b.scratch + s * M(), M());
    vf total{};
    for (int i = 0; i < D() * M(); i += VL) total += load(dnext + i) * load(c.memory + i);
    b.starts[C - 1] += c.start[C - 1] * sum(total);
  }

  // Backward of `read`: dy [16][M], query [16][D], qm and scores from the read.
  // Leaves dquery in rows order in b.rows.
  void back_read(
      const Chunk& c, const float* query, const float* qm, const float* scores, const float* dy,
      const float* dnext, Back& b) const {
    alignas(64) float inner[C * C], inner_lanes[C * C];
    to_lanes(c.writes, b.writes_lanes, M());
    product(C, C, M(), dy, M(), 1, b.writes_lanes, C, [&](int t, int s, vf v) {
      store(inner + t * C + s, weigh(v, c.within + t * C + s));
      store(b.pairs + t * C + s, -v * load(scores + t * C + s));
    });
    for (int t = 0; t < C; t++)
      b.starts[t] = c.start[t] * dot(dy + t * M(), qm + t * M(), M());
    transpose_block(inner, C, inner_lanes, C);
    to_lanes(dy, b.lanes, M());
    product(D(), C, M(), c.memory, M(), 1, b.lanes, C, [&](int d, int t, vf v) {
      store(b.dx_lanes + d * C + t, v * load(c.start + t));
    });
    product(D(), C, C, c.x, 1, D(), inner_lanes, C, [&](int d, int t, vf v) {
      store(b.dx_lanes + d * C + t, load(b.dx_lanes + d * C + t) - v);
    });
    to_rows(b.dx_lanes, b.rows, D());
    product(C, M(), C, scores, 1, C, dy, M(),
            [&](int s, int i, vf v) { store(b.dwrites + s * M() + i, v); });
    product(D(), C, C, query, 1, D(), inner, C,
            [&](int d, int s, vf v) { store(b.dx_lanes + d * C + s, v); });
    back_next(c, dnext, b);
  }

  // Backward of `read_transposed`: dy [16][D], query [16][M]; dquery [16][M] is written.
  void back_read_transposed(
      const Chunk& c, const float* query, const float* dy, const float* dnext, float* dquery,
      Back& b) const {
    alignas(64) float inner[C * C], scores[C * C];
    product(C, C, D(), dy, D(), 1, c.x_lanes, C, [&](int t, int s, vf v) {
      store(inner + t * C + s, weigh(v, c.within + t * C + s));
      store(b.pairs + t * C + s, v);
    });
    to_lanes(c.writes, b.writes_lanes, M());
    product(C, C, M(), query, M(), 1, b.writes_lanes, C, [&](int t, int s, vf v) {
      const vf score = weigh(v, c.within + t * C + s);
      store(scores + t * C + s, score);
      store(b.pairs + t * C + s, -score * load(b.pairs + t * C + s));
    });
    product(C, M(), D(), dy, D(), 1, c.memory, M(),
            [&](int t, int i, vf v) { store(dquery + t * M() + i, v * c.start[t]); });
    for (int t = 0; t < C; t++) b.starts[t] = dot(query + t * M(), dquery + t * M(), M());
    product(C, M(), C, inner, C, 1, c.writes, M(), [&](int t, int i, vf v) {
      store(dquery + t * M() + i, load(dquery + t * M() + i) - v);
    });
    product(C, M(), C, inner, 1, C, query, M(),
            [&](int s, int i, vf v) { store(b.dwrites + s * M() + i, v); });
    product(D(), C, C, dy, 1, D(), scores, C,
            [&](int d, int s, vf v) { store(b.dx_lanes + d * C + s, v); });
    back_next(c, dnext, b);
  }

  // Row t of the substitution in reverse, from dwrites to dz, dtarget and dstep_size.
  inline void substitute_back(
      const Chunk& c, Back& b, float* dstep_size, int t, int count) const {
    float* dwrite = b.dwrites + t * M();
    if (!stale) subtract(*this, dwrite, b.dz, c.coupling + t, C, t + 1, count);
    alignas(64) float direction[WIDEST];
    vf total{};
    for (int i = 0; i < M(); i += VL) {
      total += load(c.u + t * M() + i) * load(dwrite + i);
      store(direction + i, load(dwrite + i) * c.step_size[t]);
    }
    dstep_size[t] = sum(total);
    float* dtarget = b.dtarget + t * M();
    tangent(phi, c.z + t * M(), c.target + t * M(), direction, b.dz + t * M(), dtarget,
            {wide.n, M(), wide.mask});
    for (int i = 0; i < M(); i += VL) store(dtarget + i, -load(dtarget + i));
  }

  void clear_gradients(Back& b, int count) const {
    clear_rows(b.dz, M(), count), clear_rows(b.dtarget, M(), count);
  }

  // What z fed on; dmemory [D][M] becomes the gradient of the memory before the chunk.
  // left [16][D] and right [16][M] are the read's outer product: (query, dy), or (dy, query).
  void finish(
      const Chunk& c, Back& b, const float* left, const float* right, float* dmemory,
      float* danchor, float* dlog_decay) const {
    const float whole = c.start[C - 1];
    for (int t = 0; t < C; t++)
      for (int i = 0; i < M(); i += VL)
        store(b.scratch + t * M() + i, load(right + t * M() + i) * c.start[t]);
    product(D(), M(), C, left, 1, D(), b.scratch, M(), [&](int d, int i, vf v) {
      store(dmemory + d * M() + i, load(dmemory + d * M() + i) * whole + v);
    });
    to_lanes(b.dz, b.lanes, M());
    const float* scaled_dz = b.dz;  // times z_start: 1 for an anchor that has not decayed
    if (!stale || after) {
      for (int t = 0; t < C; t++)
        for (int i = 0; i < M(); i += VL)
          store(b.scratch + t * M() + i, load(b.dz + t * M() + i) * c.z_start[t]);
      scaled_dz = b.scratch;
    }
    if (stale) {
      product(D(), M(), C, c.x, 1, D(), scaled_dz, M(), [&](int d, int i, vf v) {
        store(danchor + d * M() + i, load(danchor + d * M() + i) + v);
      });
      product(D(), C, M(), c.anchor, M(), 1, b.lanes, C, [&](int d, int t, vf v) {
        store(b.dx_lanes + d * C + t, load(b.dx_lanes + d * C + t) + v * load(c.z_start + t));
      });
    } else {
      alignas(64) float mixed[C * C], flipped[C * C];
      product(D(), M(), C, c.x, 1, D(), scaled_dz, M(), [&](int d, int i, vf v) {
        store(dmemory + d * M() + i, load(dmemory + d * M() + i) + v);
      });
      vf rows[C / VL] = {};
      product(D(), C, M(), c.memory, M(), 1, b.lanes, C, [&](int d, int t, vf v) {
        const vf scaled = v * load(c.z_start + t);
        rows[t / VL] += scaled * load(c.x_lanes + d * C + t);
        store(b.dx_lanes + d * C + t, load(b.dx_lanes + d * C + t) + scaled);
      });
      alignas(64) float starts[C];
      for (int t = 0; t < C; t += VL) store(starts + t, rows[t / VL]);
      // Before its token's decay z_t sees the decays up to t - 1: one row up.
      const int up = after ? 0 : 1;
      for (int t = up; t < C; t++) b.starts[t - up] += starts[t];
      product(C, C, M(), b.dz, M(), 1, b.writes_lanes, C, [&](int t, int s, vf v) {
        store(mixed + t * C + s, weigh(v, c.z_within + t * C + s));
        if (t >= up) {
          float* pair = b.pairs + (t - up) * C + s;
          store(pair, load(pair) - v * load(c.coupling + t * C + s));
        }
      });
      transpose_block(mixed, C, flipped, C);
      for (int i = 0; i < C * C; i += VL) store(mixed + i, load(mixed + i) + load(flipped + i));
      product(D(), C, C, c.x, 1, D(), mixed, C, [&](int d, int t, vf v) {
        store(b.dx_lanes + d * C + t, load(b.dx_lanes + d * C + t) - v);
      });
    }
    // d log_decay_i = sum over s < i <= t of pairs[t][s] + sum over t >= i of starts[t]
    alignas(64) float columns[C * C];
    vf below[C / VL] = {};
    for (int i = C - 1; i >= 0; i--)
      for (int s = 0; s < C; s += VL) {
        below[s / VL] += load(b.pairs + i * C + s);
        store(columns + i * C + s, below[s / VL]);
      }
    float from = 0;
    for (int i = C - 1; i >= 0; i--) {
      from += b.starts[i];
      float across = 0;
      for (int s = 0; s < i; s++) across += columns[i * C + s];
      dlog_decay[i] = from + across;
    }
    if (stale && after)  // z_t is proportional to its token's decay
      for (int t = 0; t < C; t++) dlog_decay[t] += dot(b.dz + t * M(), c.z + t * M(), M());
  }
};
