// What torch's ops make of few numbers on a CPU, to the same bits and without the ops, each of which
// takes longer than its numbers.
//
// How torch was compiled, and so how it rounds and in what order it sums, is nowhere written down:
// it is asked once, with numbers of ours. Where it does otherwise than is known here, its ops stay.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

// As wide as the CPU can, which the compiler cannot know: it writes one for each kind.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VIRTUALGRAD_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define VIRTUALGRAD_WIDE
#endif

// Where a product and a sum in one, rounded once, are an instruction of their own.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define VIRTUALGRAD_FUSED __attribute__((target("fma")))
#else
#define VIRTUALGRAD_FUSED
#endif

namespace virtualgrad {

using at::Tensor;

constexpr int64_t FEW = 32768;  // numbers: from here on torch shares them out among threads

// ---------------------------------------------------------------------------------- r and T's factor

struct Numbers {
  float rho, weight, eps, s;
};

inline Numbers numbers_of(double rho, double weight, double eps, double s) {
  return {static_cast<float>(rho), static_cast<float>(weight), static_cast<float>(eps),
          static_cast<float>(s)};
}

// r <- rho r + w N^2, with one rounding for the product with N and the sum.
VIRTUALGRAD_FUSED inline void renew_fused(float* out, const float* r, const float* norm,
                                          int64_t size, Numbers by) {
  for (int64_t at = 0; at < size; ++at) {
    out[at] = __builtin_fmaf(by.weight * norm[at], norm[at], r[at] * by.rho);
  }
}

// The same with two. (The library is compiled without contractions.)
inline void renew_apart(float* out, const float* r, const float* norm, int64_t size, Numbers by) {
  for (int64_t at = 0; at < size; ++at) {
    out[at] = by.weight * norm[at] * norm[at] + r[at] * by.rho;
  }
}

// f = s / sqrt(r + eps)
inline void make_factor(float* out, const float* r, int64_t size, Numbers by) {
  for (int64_t at = 0; at < size; ++at) {
    const float f = 1.0F / std::sqrt(r[at] + by.eps);
    out[at] = by.s == 1 ? f : f * by.s;
  }
}

// Numbers from 0 to 2, as different as they come, that are nobody's random ones; others each time.
inline Tensor some_numbers(at::IntArrayRef sizes) {
  auto made = at::empty(sizes, at::kFloat);
  static std::atomic<uint32_t> seed{0};
  uint32_t state = ++seed;
  for (auto *to = made.data_ptr<float>(), *end = to + made.numel(); to != end; ++to) {
    state = 1664525 * state + 1013904223;
    *to = static_cast<float>(state >> 8) / (1 << 23);
  }
  return made;
}

inline bool are_same(const Tensor& one, const Tensor& other) {
  return std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

// Whether torch rounds the sum in addcmul together with its product; none if it does neither, or
// makes f otherwise.
inline std::optional<bool> rounds_once() {
  static const auto found = [] () -> std::optional<bool> {
    const at::AutoDispatchBelowADInplaceOrView unrecorded;
    const Numbers by{0.9F, 0.0123F, 1e-6F, 0.7F};
    const auto r = some_numbers({1003}), norm = r.flip(0);
    const auto renewed = at::mul(r, by.rho).addcmul_(norm, norm, by.weight);
    const auto factor = at::add(renewed, by.eps).rsqrt_().mul_(by.s);
    auto out = at::empty_like(r);
    auto *to = out.data_ptr<float>();
    make_factor(to, renewed.const_data_ptr<float>(), 1003, by);
    if (!are_same(out, factor)) return std::nullopt;
    for (const bool once : {true, false}) {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
      if (once && !__builtin_cpu_supports("fma")) continue;
#endif
      (once ? renew_fused : renew_apart)(to, r.const_data_ptr<float>(),
                                         norm.const_data_ptr<float>(), 1003, by);
      if (are_same(out, renewed)) return once;
    }
    return std::nullopt;
  }();
  return found;
}

inline void renew(float* out, const float* r, const float* norm, int64_t size, Numbers by) {
  (*rounds_once() ? renew_fused : renew_apart)(out, r, norm, size, by);
}

// ------------------------------------------------------------------------------------- sums of g^2

constexpr int64_t WIDE = 32;  // columns that torch sums at once, where there are as many

// The sum of g^2 in each of some columns of g, in m rows that are so far apart: sixteen rows are
// summed, then sixteen of such sums, and so on.
VIRTUALGRAD_WIDE inline void sum_squares(float* out, const float* g, int64_t m, int64_t apart,
                                         int64_t columns) {
  constexpr int64_t LEVELS = 4, POWER = 4, STEP = 1 << POWER;
  float sums[LEVELS][WIDE] = {};
  const auto add_row = [&](int64_t row) {
    const auto* const of = g + row * apart;
    for (int64_t at = 0; at < columns; ++at) sums[0][at] += of[at] * of[at];
  };
  int64_t row = 0;
  while (row + STEP <= m) {
    for (const int64_t end = row + STEP; row < end; ++row) add_row(row);
    for (int64_t level = 1; level < LEVELS; ++level) {
      for (int64_t at = 0; at < columns; ++at) {
        sums[level][at] += sums[level - 1][at];
        sums[level - 1][at] = 0;
      }
      if ((row & ((STEP - 1) << (level * POWER))) != 0) break;
    }
  }
  for (; row < m; ++row) add_row(row);
  for (int64_t level = 1; level < LEVELS; ++level) {
    for (int64_t at = 0; at < columns; ++at) sums[0][at] += sums[level][at];
  }
  std::copy_n(sums[0], columns, out);
}

// The same where torch has every fourth row for itself, and then adds up the four.
inline void sum_squares_by_fours(float* out, const float* g, int64_t m, int64_t apart,
                                 int64_t columns) {
  constexpr int64_t FOUR = 4;
  float sums[FOUR][WIDE];
  for (int64_t part = 0; part < FOUR; ++part) {
    sum_squares(sums[part], g + part * apart, m / FOUR, FOUR * apart, columns);
  }
  for (int64_t at = 0; at < columns; ++at) {
    for (int64_t row = m / FOUR * FOUR; row < m; ++row) {
      sums[0][at] += g[row * apart + at] * g[row * apart + at];
    }
    for (int64_t part = 1; part < FOUR; ++part) sums[0][at] += sums[part][at];
    out[at] = sums[0][at];
  }
}

// The sum of g^2 in each column of g, in m rows of n, in torch's order. (Its root is left to torch's
// op, which may round otherwise than IEEE.)
inline void sum_squares_of_columns(float* out, const float* g, int64_t m, int64_t n) {
  constexpr int64_t NARROW = 8, FOUR = 4;
  const auto at_once = n < NARROW ? FOUR : WIDE;
  for (int64_t first = 0; first < n;) {
    const auto columns = std::min(at_once, n - first);
    (columns == at_once ? sum_squares : sum_squares_by_fours)(out + first, g + first, m, n, columns);
    first += columns;
  }
}

// Whether torch sums the squares of a g of these sizes like this, over axes that are its first ones;
// asked once. Two orders of few numbers often come to the same bits: so it is asked of many columns.
inline bool sums_as_torch(at::IntArrayRef sizes, at::IntArrayRef axes) {
  const auto numel = c10::multiply_integers(sizes);
  if (numel == 0 || numel >= FEW) return false;
  static std::map<std::pair<std::vector<int64_t>, size_t>, bool> known;  // the GIL is held
  const std::pair key{sizes.vec(), axes.size()};
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const at::AutoDispatchBelowADInplaceOrView unrecorded;
  constexpr int64_t COLUMNS = 2048, NUMBERS = 1 << 17;
  for (int64_t columns = 0, numbers = 0; columns < COLUMNS && numbers < NUMBERS; numbers += numel) {
    const auto g = some_numbers(sizes);
    const auto expected = g.square().sum(axes);
    auto out = at::empty_like(expected);
    sum_squares_of_columns(out.data_ptr<float>(), g.const_data_ptr<float>(),
                           numel / expected.numel(), expected.numel());
    if (!are_same(out, expected)) return known[key] = false;
    columns += expected.numel();
  }
  return known[key] = true;  // not before: torch may have failed on the way
}

// f g, of m rows.
VIRTUALGRAD_WIDE inline void multiply_rows(float* out, const float* g, const float* f, int64_t m,
                                           int64_t n) {
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t at = 0; at < n; ++at) out[row * n + at] = g[row * n + at] * f[at];
  }
}

}  // namespace virtualgrad
