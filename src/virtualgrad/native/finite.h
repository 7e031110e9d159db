// The look for a NaN or an infinity among many tensors, without Python (virtualgrad.operators.finite).
//
// On a GPU by the look of torch.amp's GradScaler, as Python has it; on a CPU a number is not finite
// if all bits of its exponent are set, and to see that, it need not be written back.

#pragma once

#include <ATen/ATen.h>
#include <c10/util/bit_cast.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "numbers.h"
#include "transform.h"

namespace virtualgrad {

// The bits of a number's exponent.
template <typename Number, typename Bits>
constexpr Bits exponent() {
  static_assert(sizeof(Number) == sizeof(Bits));
  return c10::bit_cast<Bits>(std::numeric_limits<Number>::infinity());
}

// Whether all numbers that lie one behind the other are finite.
template <typename Number, typename Bits>
VIRTUALGRAD_WIDE bool are_finite(const void* numbers, int64_t size) {
  constexpr int64_t TOGETHER = 4096;  // then it is asked whether one was not
  const auto all = exponent<Number, Bits>();
  const auto* const bits = static_cast<const Bits*>(numbers);
  for (int64_t begin = 0; begin < size; begin += TOGETHER) {
    const int64_t end = std::min(begin + TOGETHER, size);
    Bits found = 0;
    for (int64_t at = begin; at < end; ++at) found |= (bits[at] & all) == all;
    if (found) return false;
  }
  return true;
}

// None: of another kind than those that are looked at here.
inline std::optional<bool> is_finite_on_cpu(const Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return std::nullopt;
  const auto* const numbers = tensor.const_data_ptr();
  const auto dtype = tensor.scalar_type();
  if (tensor.numel() >= 2 * FEW && (dtype == at::kFloat || dtype == at::kDouble)) {
    // Whatever is added to a NaN or an infinity is none of the finite numbers; torch adds in several
    // threads, each of which has a part of a gradient in its cache.
    if (std::isfinite(at::sum(tensor).item<double>())) return true;
  }
  switch (dtype) {
    case at::kFloat: return are_finite<float, uint32_t>(numbers, tensor.numel());
    case at::kDouble: return are_finite<double, uint64_t>(numbers, tensor.numel());
    case at::kHalf: return are_finite<at::Half, uint16_t>(numbers, tensor.numel());
    case at::kBFloat16: return are_finite<at::BFloat16, uint16_t>(numbers, tensor.numel());
    default: return std::nullopt;
  }
}

// One if some tensor is not finite, else zero, on their device; none where that cannot be seen
// here: they are of several kinds, or of one that only Python knows.
inline MaybeTensor look(const std::vector<Tensor>& tensors) {
  const auto& first = tensors.front();
  const auto device = first.device();
  if (!device.is_cpu() && !device.is_cuda()) return std::nullopt;
  for (const auto& each : tensors) {
    if (!Kind::is_plain(each) || each.device() != device) return std::nullopt;
    if (each.scalar_type() != first.scalar_type() || !each.is_floating_point()) {
      return std::nullopt;
    }
  }
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return std::nullopt;
  py::gil_scoped_release others_may_run;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  if (device.is_cpu()) {
    const at::AutoDispatchBelowADInplaceOrView unrecorded;
    for (const auto& each : tensors) {
      const auto finite = is_finite_on_cpu(each);
      if (!finite) return std::nullopt;
      if (!*finite) return at::ones({1}, options);
    }
    return at::zeros({1}, options);
  }
  for (const auto& each : tensors) {
    if (!each.is_non_overlapping_and_dense()) return std::nullopt;
  }
  auto found = at::zeros({1}, options);
  try {
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, at::ones({1}, options));
  } catch (const c10::Error&) {  // a dtype that it does not know
    return std::nullopt;
  }
  return found;
}

inline void show_finite(py::module_& module) { module.def("look", &look); }

}  // namespace virtualgrad
