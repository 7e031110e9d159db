// Where the tensors of a step lie, and how, without Python (virtualgrad.operators.addresses).

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "transform.h"

namespace virtualgrad {

constexpr uintptr_t ALIGNED = 16;  // bytes that a thread of a GPU reads at once

// Write the addresses of tensors, and numbers in float64, and tell how the tensors are laid out: all
// that a kernel which walks over them goes by. None where one is more, or less, than its memory.
inline std::optional<py::bytes> write_addresses(const py::list& everything, const Tensor& into) {
  TORCH_CHECK(into.scalar_type() == at::kLong && into.is_contiguous() && into.device().is_cpu(),
              "addresses go into whole numbers of 64 bits, on the host");
  TORCH_CHECK(static_cast<int64_t>(everything.size()) <= into.numel(), "there is no room for ",
              everything.size(), " addresses");
  auto* place = into.data_ptr<int64_t>();
  std::string layout;
  layout.reserve(64 * everything.size());
  const auto add = [&layout](int64_t number) {
    layout.append(reinterpret_cast<const char*>(&number), sizeof number);
  };
  for (const auto& each : everything) {
    if (PyFloat_Check(each.ptr())) {
      const double number = PyFloat_AS_DOUBLE(each.ptr());
      std::memcpy(place++, &number, sizeof number);
      add(-1);  // which no tensor's dtype is
      continue;
    }
    TORCH_CHECK(THPVariable_Check(each.ptr()), "neither a tensor nor a float");
    const auto& tensor = THPVariable_Unpack(each.ptr());
    if (!Kind::is_plain(tensor)) return std::nullopt;
    const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
    *place++ = static_cast<int64_t>(address);
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.get_device());
    add(static_cast<int64_t>(address % ALIGNED));
    add(tensor.dim());
    for (const auto size : tensor.sizes()) add(size);
    for (const auto stride : tensor.strides()) add(stride);
  }
  return py::bytes(layout);
}

inline void show_addresses(py::module_& module) { module.def("write_addresses", &write_addresses); }

}  // namespace virtualgrad
