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

// Addresses of tensors, and numbers in float64, and how the tensors are laid out: all that a kernel
// which walks over them goes by.
class AddressBook {
 public:
  explicit AddressBook(const Tensor& into)
      : begin_(into.data_ptr<int64_t>()), place_(begin_), end_(begin_ + into.numel()) {}

  // Write down where a tensor lies; false where it is more, or less, than its memory, or there is
  // no room.
  bool add(const Tensor& tensor) {
    if (place_ == end_ || !Kind::is_plain(tensor)) return false;
    const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
    *place_++ = static_cast<int64_t>(address);
    tell(static_cast<int64_t>(tensor.scalar_type()));
    tell(tensor.get_device());
    tell(static_cast<int64_t>(address % ALIGNED));
    tell(tensor.dim());
    for (const auto size : tensor.sizes()) tell(size);
    for (const auto stride : tensor.strides()) tell(stride);
    return true;
  }

  // Write down a number.
  bool add(double number) {
    if (place_ == end_) return false;
    std::memcpy(place_++, &number, sizeof number);
    tell(-1);  // which no tensor's dtype is
    return true;
  }

  int64_t length() const { return place_ - begin_; }
  const std::string& layout() const { return layout_; }

 private:
  void tell(int64_t number) {
    layout_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }

  int64_t *begin_, *place_, *end_;
  std::string layout_;
};

// Write all of it down, and tell the layout; none where a tensor is not its memory.
inline std::optional<py::bytes> write_addresses(const py::list& everything, const Tensor& into) {
  TORCH_CHECK(into.scalar_type() == at::kLong && into.is_contiguous() && into.device().is_cpu(),
              "addresses go into whole numbers of 64 bits, on the host");
  TORCH_CHECK(static_cast<int64_t>(everything.size()) <= into.numel(), "there is no room for ",
              everything.size(), " addresses");
  AddressBook book(into);
  for (const auto& each : everything) {
    if (PyFloat_Check(each.ptr())) {
      book.add(PyFloat_AS_DOUBLE(each.ptr()));
      continue;
    }
    TORCH_CHECK(THPVariable_Check(each.ptr()), "neither a tensor nor a float");
    if (!book.add(THPVariable_Unpack(each.ptr()))) return std::nullopt;
  }
  return py::bytes(book.layout());
}

inline void show_addresses(py::module_& module) { module.def("write_addresses", &write_addresses); }

}  // namespace virtualgrad
