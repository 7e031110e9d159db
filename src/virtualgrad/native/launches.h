// Launches of kernels that Triton has compiled, without its Python.
//
// Triton launches from Python: it asks for device and stream, for hooks, for memory that a kernel
// may want beside its arguments, and then passes them on. In the middle of a backward pass, where
// nothing of it lies in a cache, that takes the host 25 to 40 us. Here the arguments go straight to
// the driver, as Triton's own launcher passes them: those that are no constants, in order, and then
// two pointers to memory that a kernel may want, which are null here: a kernel that wants some is
// launched by Triton. (Hooks on Triton's launches, as profilers set them, do not see these.)
//
// The driver's library is opened when the first kernel comes, so no header of CUDA is needed.

#pragma once

#include <dlfcn.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace virtualgrad {

namespace py = pybind11;

// Functions of the driver; its handles are pointers, 0 is success.
struct Driver {
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void*, void**, void**);
  using ParamInfo = int (*)(void*, size_t, size_t*, size_t*);
  using CurrentContext = int (*)(void**);
  Launch launch = nullptr;
  ParamInfo param_info = nullptr;  // since CUDA 12.4
  CurrentContext current_context = nullptr;

  static const Driver& get() {
    static const Driver driver = [] {
      Driver found;
      if (void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
        found.launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernel"));
        found.param_info = reinterpret_cast<ParamInfo>(dlsym(library, "cuFuncGetParamInfo"));
        found.current_context =
            reinterpret_cast<CurrentContext>(dlsym(library, "cuCtxGetCurrent"));
      }
      return found;
    }();
    return driver;
  }

  // Whether this thread has a context yet; if not, Triton makes one.
  bool has_context() const {
    void* context = nullptr;
    return current_context(&context) == 0 && context != nullptr;
  }
};

// A compiled kernel with its grid.
class Kernel {
 public:
  // kinds: for each argument "*" (a pointer), "i32", "i64" or "fp32"; "" for a constant.
  // compiled: what Triton has made, which owns the function.
  Kernel(uintptr_t function, std::vector<std::string> kinds, std::vector<unsigned> grid,
         unsigned threads, unsigned shared, py::object compiled)
      : function_(reinterpret_cast<void*>(function)),
        kinds_(std::move(kinds)),
        grid_(std::move(grid)),
        threads_(threads),
        shared_(shared),
        compiled_(std::move(compiled)) {}

  const std::vector<std::string>& kinds() const { return kinds_; }

  // Whether the driver is there, and says that the kernel takes what would be passed.
  bool is_as_expected() const {
    const auto& driver = Driver::get();
    if (!driver.launch || !driver.param_info || !driver.current_context) return false;
    std::vector<size_t> sizes;
    for (const auto& kind : kinds_) {
      if (!kind.empty()) sizes.push_back(kind == "i32" || kind == "fp32" ? 4 : 8);
    }
    sizes.insert(sizes.end(), SCRATCH, 8);
    size_t offset = 0, size = 0;
    for (size_t place = 0; place < sizes.size(); ++place) {
      if (driver.param_info(function_, place, &offset, &size) != 0 || size != sizes[place]) {
        return false;
      }
    }
    return driver.param_info(function_, sizes.size(), &offset, &size) != 0;  // and no more
  }

  // Launch it; false in a thread that has no context of the driver yet.
  bool operator()(uintptr_t stream, const py::tuple& tensors, const py::tuple& others) const {
    if (!Driver::get().has_context()) return false;
    std::vector<uint64_t> values;
    values.reserve(kinds_.size());
    for (const auto& given : {tensors, others}) {
      for (const auto& argument : given) {
        values.push_back(value_of(kinds_.at(values.size()), argument.ptr()));
      }
    }
    py::gil_scoped_release others_may_run;  // the driver waits where its queue is full
    launch(stream, values);
    return true;
  }

  // Launch it with a value for each argument.
  void launch(uintptr_t stream, const std::vector<uint64_t>& values) const {
    TORCH_CHECK(values.size() == kinds_.size(), "a kernel of ", kinds_.size(), " arguments got ",
                values.size());
    std::array<uint64_t, SCRATCH> scratch{};
    std::vector<void*> arguments;
    arguments.reserve(values.size() + SCRATCH);
    for (size_t place = 0; place < values.size(); ++place) {
      if (!kinds_[place].empty()) arguments.push_back(const_cast<uint64_t*>(&values[place]));
    }
    for (auto& each : scratch) arguments.push_back(&each);
    const int failed = Driver::get().launch(function_, grid_[0], grid_[1], grid_[2], threads_, 1, 1,
                                            shared_, reinterpret_cast<void*>(stream),
                                            arguments.data(), nullptr);
    TORCH_CHECK(failed == 0, "the driver refused a launch with error ", failed);
  }

  // An argument as it lies in memory; of a constant nothing is passed.
  static uint64_t value_of(const std::string& kind, PyObject* argument) {
    if (kind.empty()) return 0;
    uint64_t value = 0;
    if (kind == "*") {
      TORCH_CHECK(THPVariable_Check(argument), "a kernel wants a tensor");
      value = reinterpret_cast<uintptr_t>(THPVariable_Unpack(argument).data_ptr());
    } else if (kind == "fp32") {
      value = value_of(PyFloat_AsDouble(argument));
    } else {  // the first four bytes of a small number are its 32 bits
      value = static_cast<uint64_t>(PyLong_AsLongLong(argument));
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  }

  static uint64_t value_of(double number) {
    const auto rounded = static_cast<float>(number);
    uint64_t value = 0;
    std::memcpy(&value, &rounded, sizeof rounded);
    return value;
  }

 private:
  static constexpr size_t SCRATCH = 2;  // pointers behind the arguments

  void* function_;
  std::vector<std::string> kinds_;
  std::vector<unsigned> grid_;
  unsigned threads_, shared_;
  py::object compiled_;
};

inline void show_launches(py::module_& module) {
  py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
      .def(py::init<uintptr_t, std::vector<std::string>, std::vector<unsigned>, unsigned, unsigned,
                    py::object>())
      .def("is_as_expected", &Kernel::is_as_expected)
      .def("__call__", &Kernel::operator());
}

}  // namespace virtualgrad
