// phi, f and psi on one row of n numbers, padded with zeros to np; and their derivatives.
#pragma once
#include <stdexcept>
#include <string_view>
#include "simd.h"

enum Activation {
  IDENTITY, SILU, GELU, TANH, LAYERNORM, L2NORM, LN_SILU, SOFT_LN_SILU, L2_SILU, SOFTMAX
};
constexpr std::string_view NAMES[] = {
    "identity", "silu", "gelu", "tanh", "layernorm", "l2norm", "ln_silu", "soft_ln_silu", "l2_silu",
    "softmax"};
// The largest size of keys, values and codes.
constexpr int WIDEST = 256;

static inline int activation(std::string_view name) {
  for (int i = IDENTITY; i <= SOFTMAX; i++)
    if (NAMES[i] == name) return i;
  throw std::invalid_argument("there is no such activation");
}

// Sizes are padded with zeros to multiples of 16, whole vectors of any instruction set.
static inline int padded(int n) { return (n + 15) / 16 * 16; }

struct Width {
  int n, np;
  const float* mask;  // 1 for the n real entries, 0 for the padding
};

struct Mask {
  alignas(64) float on[WIDEST];
  explicit Mask(int n) {
    for (int i = 0; i < WIDEST; i++) on[i] = i < n;
  }
};

// Functions of single entries: their values and first two derivatives.
struct Silu {
  INLINE void at(vf z, vf& value, vf& slope, vf& curvature) {
    const vf s = vsigmoid(z), rest = 1.f - s;
    value = z * s;
    slope = s + value * rest;
    curvature = s * rest * (2.f + z * (rest - s));
  }
};

struct Gelu {
  INLINE void at(vf z, vf& value, vf& slope, vf& curvature) {
    vf density;
    const vf below = vnormal(z, density);
    value = z * below;
    slope = below + z * density;
    curvature = density * (2.f - z * z);
  }
};

struct Tanh {
  INLINE void at(vf z, vf& value, vf& slope, vf& curvature) {
    value = vtanh(z);
    slope = 1.f - value * value;
    curvature = -2.f * value * slope;
  }
};

struct Identity {
  INLINE void at(vf z, vf& value, vf& slope, vf& curvature) {
    value = z;
    slope = splat(1.f);
    curvature = vf{};
  }
};

// use(F{}) for the function of single entries that `act` names; false if it names another.
template <class Use>
INLINE bool elementwise(int act, Use use) {
  switch (act) {
    case IDENTITY: use(Identity{}); return true;
    case SILU: use(Silu{}); return true;
    case GELU: use(Gelu{}); return true;
    case TANH: use(Tanh{}); return true;
    default: return false;
  }
}

INLINE float dot(const float* a, const float* b, int np) {
  vf total{};
  for (int i = 0; i < np; i += VL) total += load(a + i) * load(b + i);
  return sum(total);
}

// layernorm (centred) or l2norm: normal = scale * P z; returns scale.
static inline float normalise(
    const float* z, float* normal, Width w, bool centred, float epsilon = 1e-5f) {
  const float mean = centred ? dot(z, w.mask, w.np) / w.n : 0;
  vf squares{};
  for (int i = 0; i < w.np; i += VL) {
    const vf c = (load(z + i) - mean) * load(w.mask + i);
    store(normal + i, c);
    squares += c * c;
  }
  const float s = sum(squares);
  const float scale = 1.f / std::sqrt(centred ? s / w.n + epsilon : s + 1e-6f);
  for (int i = 0; i < w.np; i += VL) store(normal + i, load(normal + i) * scale);
  return scale;
}

// out = J v of that normalisation, whose Jacobian is symmetric.
static inline void normalise_jacobian(
    const float* normal, float scale, const float* v, float* out, Width w, bool centred) {
  const float mean = centred ? dot(v, w.mask, w.np) / w.n : 0;
  const float along = dot(normal, v, w.np) * (centred ? 1.f / w.n : 1.f);
  for (int i = 0; i < w.np; i += VL)
    store(out + i, scale * ((load(v + i) - mean) * load(w.mask + i) - load(normal + i) * along));
}

template <class F>
INLINE void value_of(F, const float* z, float* out, int np) {
  for (int i = 0; i < np; i += VL) {
    vf value, slope, curvature;
    F::at(load(z + i), value, slope, curvature);
    store(out + i, value);
  }
}

template <class F>
INLINE void slope_times(F, const float* z, const float* g, float* out, int np) {
  for (int i = 0; i < np; i += VL) {
    vf value, slope, curvature;
    F::at(load(z + i), value, slope, curvature);
    store(out + i, slope * load(g + i));
  }
}

// out = act(z). `out` may be `z`.
static __attribute__((noinline)) void activate(int act, const float* z, float* out, Width w) {
  alignas(64) float inner[WIDEST];
  if (elementwise(act, [&](auto f) { value_of(f, z, out, w.np); })) return;
  switch (act) {
    case LAYERNORM:
    case L2NORM: normalise(z, out, w, act == LAYERNORM); break;
    case LN_SILU:
    case SOFT_LN_SILU:
    case L2_SILU:
      value_of(Silu{}, z, inner, w.np);
      normalise(inner, out, w, act != L2_SILU, act == LN_SILU ? 1e-5f : 0.1f);
      break;
    case SOFTMAX: {
      float top = -INFINITY;
      for (int i = 0; i < w.n; i++) top = z[i] > top || z[i] != z[i] ? z[i] : top;
      vf total{};
      for (int i = 0; i < w.np; i += VL) {
        const vf e = vexp(load(z + i) - top) * load(w.mask + i);
        store(out + i, e);
        total += e;
      }
      const float scale = 1.f / sum(total);
      for (int i = 0; i < w.np; i += VL) store(out + i, load(out + i) * scale);
    }
  }
}

// out = J(z)^T g.
static __attribute__((noinline)) void pull_back(
    int act, const float* z, const float* g, float* out, Width w) {
  alignas(64) float inner[WIDEST], normal[WIDEST];
  if (elementwise(act, [&](auto f) { slope_times(f, z, g, out, w.np); })) return;
  switch (act) {
    case LAYERNORM:
    case L2NORM: {
      const float scale = normalise(z, normal, w, act == LAYERNORM);
      normalise_jacobian(normal, scale, g, out, w, act == LAYERNORM);
      break;
    }
    case LN_SILU:
    case SOFT_LN_SILU:
    case L2_SILU: {
      value_of(Silu{}, z, inner, w.np);
      const bool centred = act != L2_SILU;
      const float scale = normalise(inner, normal, w, centred, act == LN_SILU ? 1e-5f : 0.1f);
      normalise_jacobian(normal, scale, g, inner, w, centred);
      slope_times(Silu{}, z, inner, out, w.np);
      break;
    }
    case SOFTMAX: {
      activate(SOFTMAX, z, inner, w);
      const float along = dot(inner, g, w.np);
      for (int i = 0; i < w.np; i += VL) store(out + i, load(inner + i) * (load(g + i) - along));
    }
  }
}

static __attribute__((noinline)) void general_gradient(
    int phi, const float* z, const float* target, float* u, Width w) {
  alignas(64) float error[WIDEST];
  activate(phi, z, error, w);
  for (int i = 0; i < w.np; i += VL) store(error + i, load(error + i) - load(target + i));
  pull_back(phi, z, error, u, w);
}

// u = J(z)^T (phi(z) - target): the gradient that the memory steps along.
INLINE void gradient(int phi, const float* z, const float* target, float* u, Width w) {
  const bool done = elementwise(phi, [&](auto f) {
    for (int i = 0; i < w.np; i += VL) {
      vf value, slope, curvature;
      f.at(load(z + i), value, slope, curvature);
      store(u + i, slope * (value - load(target + i)));
    }
  });
  if (!done) general_gradient(phi, z, target, u, w);
}

static __attribute__((noinline)) void normalise_tangent(
    const float* z, const float* target, const float* v, float* change, float* moved, Width w,
    bool centred) {
  alignas(64) float normal[WIDEST], error[WIDEST], first[WIDEST], last[WIDEST];
  const float scale = normalise(z, normal, w, centred);
  const float share = centred ? 1.f / w.n : 1.f;
  for (int i = 0; i < w.np; i += VL) store(error + i, load(normal + i) - load(target + i));
  normalise_jacobian(normal, scale, v, moved, w, centred);
  normalise_jacobian(normal, scale, error, first, w, centred);
  normalise_jacobian(normal, scale, moved, last, w, centred);
  const float relative = -share * scale * dot(normal, v, w.np);
  const float ne = dot(normal, error, w.np), me = dot(moved, error, w.np);
  for (int i = 0; i < w.np; i += VL)
    store(change + i,
          relative * load(first + i)
              - share * scale * (load(moved + i) * ne + load(normal + i) * me) + load(last + i));
}

static __attribute__((noinline)) void ln_silu_tangent(
    const float* z, const float* target, const float* v, float* change, float* moved, Width w) {
  alignas(64) float inner[WIDEST], direction[WIDEST], outer[WIDEST], twist[WIDEST];
  value_of(Silu{}, z, inner, w.np);
  slope_times(Silu{}, z, v, direction, w.np);
  normalise_tangent(inner, target, direction, outer, moved, w, true);
  general_gradient(LAYERNORM, inner, target, twist, w);
  for (int i = 0; i < w.np; i += VL) {
    vf value, slope, curvature;
    Silu::at(load(z + i), value, slope, curvature);
    store(change + i, curvature * load(v + i) * load(twist + i) + slope * load(outer + i));
  }
}

// change = du/dz v, moved = J v.
INLINE void tangent(
    int phi, const float* z, const float* target, const float* v, float* change, float* moved,
    Width w) {
  const bool done = elementwise(phi, [&](auto f) {
    for (int i = 0; i < w.np; i += VL) {
      vf value, slope, curvature;
      f.at(load(z + i), value, slope, curvature);
      const vf along = slope * load(v + i);
      store(change + i, curvature * (value - load(target + i)) * load(v + i) + slope * along);
      store(moved + i, along);
    }
  });
  if (done) return;
  if (phi == LN_SILU)
    ln_silu_tangent(z, target, v, change, moved, w);
  else
    normalise_tangent(z, target, v, change, moved, w, phi == LAYERNORM);
}
