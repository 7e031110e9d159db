// Where the tensors of a step lie, and how, without Python (virtualgrad.operators.addresses).

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transform.h"

namespace virtualgrad {

constexpr uintptr_t ALIGNED = 16;  // bytes that a thread of a GPU reads at once

// Write addresses from a place on, and tell how the tensors are laid out: all that a kernel which
// walks over them goes by. None where one is more, or less, than its memory.
inline std::optional<py::bytes> write_addresses(const std::vector<Tensor>& tensors,
                                                const Tensor& into, int64_t begin) {
  TORCH_CHECK(into.scalar_type() == at::kLong && into.is_contiguous() && into.device().is_cpu(),
              "addresses go into whole numbers of 64 bits, on the host");
  TORCH_CHECK(begin >= 0 && begin + static_cast<int64_t>(tensors.size()) <= into.numel(),
              "there is no room for ", tensors.size(), " addresses");
  auto* place = into.data_ptr<int64_t>() + begin;
  std::string layout;
  const auto add = [&layout](int64_t number) {
    layout.append(reinterpret_cast<const char*>(&number), sizeof number);
  };
  for (const auto& each : tensors) {
    if (!Kind::is_plain(each)) return std::nullopt;
    const auto address = reinterpret_cast<uintptr_t>(each.data_ptr());
    *place++ = static_cast<int64_t>(address);
    add(static_cast<int64_t>(each.scalar_type()));
    add(each.get_device());
    add(static_cast<int64_t>(address % ALIGNED));
    add(each.dim());
    for (const auto size : each.sizes()) add(size);
    for (const auto stride : each.strides()) add(stride);
  }
  return py::bytes(layout);
}

inline void show_addresses(py::module_& module) { module.def("write_addresses", &write_addresses); }

}  // namespace virtualgrad
