// theta <- theta - lr v on a CPU: what torch's add_ makes of few numbers, to the same bits and
// without the op, which takes longer than they do.
//
// torch goes through them in vectors, with one rounding for the product and the sum, and through the
// rest one by one. How long its vectors are, and how it rounds the rest, it is asked once.

#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <optional>

#include "numbers.h"

namespace virtualgrad {

// Numbers that are added together, and whether these, and those that are left, are rounded once.
struct Adding {
  int64_t together;
  bool once, rest_once;
};

VIRTUALGRAD_FUSED inline void add_once(float* to, const float* v, float by, int64_t begin,
                                       int64_t end) {
  for (int64_t at = begin; at < end; ++at) to[at] = __builtin_fmaf(v[at], by, to[at]);
}

// (The library is compiled without contractions.)
inline void add_twice(float* to, const float* v, float by, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) to[at] += by * v[at];
}

// to <- to + by v
inline void add(float* to, const float* v, float by, int64_t size, Adding as) {
  const auto whole = size - size % as.together;
  (as.once ? add_once : add_twice)(to, v, by, 0, whole);
  (as.rest_once ? add_once : add_twice)(to, v, by, whole, size);
}

// How torch adds; none if it does otherwise than is known here.
inline std::optional<Adding> adds_as_torch() {
  static const auto found = []() -> std::optional<Adding> {
    const at::AutoDispatchBelowADInplaceOrView unrecorded;
    const auto agrees = [](Adding as) {
      for (const int64_t size : {1, 2, 7, 15, 16, 31, 33, 47, 64, 100, 1003}) {
        for (const double by : {-0.1, -1e-9, 0.7}) {
          const auto theta = some_numbers({size}), v = some_numbers({size});
          const auto expected = at::add(theta, v, by);
          add(theta.data_ptr<float>(), v.const_data_ptr<float>(), static_cast<float>(by), size, as);
          if (!are_same(theta, expected)) return false;
        }
      }
      return true;
    };
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    const bool can = __builtin_cpu_supports("fma");
#else
    const bool can = true;
#endif
    for (const Adding as : {Adding{16, true, true}, {16, true, false}, {32, true, false},
                            {8, true, false}, {4, true, false}, {16, false, false}}) {
      if ((can || !as.once) && agrees(as)) return as;
    }
    return std::nullopt;
  }();
  return found;
}

// Whether a parameter and its gradient can be added here, or by torch's op.
inline bool can_descend(const Tensor& theta, const Tensor& v) {
  return theta.is_cpu() && v.is_cpu() && theta.scalar_type() == at::kFloat &&
         v.scalar_type() == at::kFloat && theta.sizes() == v.sizes() &&
         at::get_overlap_status(theta, v) != at::MemOverlapStatus::Partial;
}

// theta <- theta + by v
inline void descend(const Tensor& theta, const Tensor& v, double by, Adding as) {
  const bool lie_alike = theta.strides() == v.strides() && theta.is_non_overlapping_and_dense();
  if (lie_alike && theta.dim() > 0 && theta.numel() < FEW) {
    add(theta.data_ptr<float>(), v.const_data_ptr<float>(), static_cast<float>(by), theta.numel(),
        as);
  } else {
    theta.add_(v, by);
  }
  theta.unsafeGetTensorImpl()->bump_version();
}

}  // namespace virtualgrad
