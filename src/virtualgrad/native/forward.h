// A forward pass without Python: layers of torch.nn that run as they ran before.
//
// What a layer means (its sites, their T) Python has found out, and written down with all on which
// it depends: what must be the very same object as then, and in which situations it was run. Here
// that is compared, the use is counted, and the op runs: as a node with T, or, where T leaves the
// layer out, as torch's own. If anything is not as it was, Python runs the layer
// (virtualgrad.virtual.unwatched).

#pragma once

#include "nodes.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace virtualgrad {

// Which use of a layer in a pass it is, with which sizes.
struct Situation {
  int64_t number;  // of the use
  Sizes weight, x;
  at::ScalarType dtype;
  std::optional<int64_t> batch_size;
  int64_t batch_dim;

  bool operator==(const Situation& other) const = default;
};

// A layer that was run before.
class KnownLayer {
 public:
  using Entry = std::tuple<py::dict, py::object, py::object>;       // (a dict, a name, its value)
  using Attribute = std::tuple<py::object, py::object, py::object>;  // (a class, a name, its value)

  // Args:
  //   module, own: the module, and its __dict__.
  //   entries: what dicts must have; Ellipsis: they must have nothing of that name.
  //   attributes: what classes must have.
  //   wanted: tensors, and whether they require grad.
  //   key: under which its uses are counted.
  //   weight: its weight.
  //   layer: runs it; None: its forward does, where T leaves it out.
  //   forward: of its class, as torch has written it.
  //   left_out: which uses T leaves out, and what may be the number of x's axes there; none: it
  //     leaves out none of them.
  //   batches: counts the batches of a batch norm, if that is counted.
  KnownLayer(py::object module, py::object own, std::vector<Entry> entries,
             std::vector<Attribute> attributes, std::vector<std::pair<Tensor, bool>> wanted,
             py::str key, Tensor weight, std::optional<c10::intrusive_ptr<Layer>> layer,
             py::object forward, std::optional<std::pair<Sizes, Sizes>> left_out,
             MaybeTensor batches)
      : module_(std::move(module)),
        own_(std::move(own)),
        entries_(std::move(entries)),
        attributes_(std::move(attributes)),
        wanted_(std::move(wanted)),
        key_(std::move(key)),
        weight_(std::move(weight)),
        layer_(std::move(layer)),
        forward_(std::move(forward)),
        left_out_(std::move(left_out)),
        batches_(std::move(batches)) {}

  // Run again in a situation as this one was.
  void add(const std::tuple<int64_t, Sizes, Sizes, at::ScalarType, std::optional<int64_t>, int64_t>&
               situation,
           std::shared_ptr<Parts> parts) {
    const auto& [number, weight, x, dtype, batch_size, batch_dim] = situation;
    situations_.emplace_back(Situation{number, weight, x, dtype, batch_size, batch_dim},
                             std::move(parts));
  }

  // Whether a module is this one, and nothing has changed on which its forward depends.
  bool is_same(PyObject* module) const {
    if (module != module_.ptr()) return false;
    const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (own.ptr() != own_.ptr()) return false;
    for (const auto& [dict, name, value] : entries_) {
      PyObject* found = PyDict_GetItem(dict.ptr(), name.ptr());
      if (found != (value.ptr() == Py_Ellipsis ? nullptr : value.ptr())) return false;
    }
    for (const auto& [type, name, value] : attributes_) {
      const auto found =
          py::reinterpret_steal<py::object>(PyObject_GetAttr(type.ptr(), name.ptr()));
      if (!found) throw py::error_already_set();
      if (found.ptr() != value.ptr()) return false;
    }
    return std::all_of(wanted_.begin(), wanted_.end(), [](const auto& each) {
      return each.first.requires_grad() == each.second;
    });
  }

  // Run it, if this was its situation before; else null.
  py::object run(const py::object& current, PyObject* uses, const Tensor& x,
                 std::optional<int64_t> batch_size, int64_t batch_dim) const {
    PyObject* counted = PyDict_GetItem(uses, key_.ptr());
    const int64_t number = counted == nullptr ? 0 : PyLong_AsLongLong(counted);
    std::shared_ptr<Parts> parts;
    if (left_out_) {
      const auto& [numbers, axes] = *left_out_;
      if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) return {};
      if (layer_ && !is_plain_input(x, axes)) return {};
    } else {
      const auto found =
          std::find_if(situations_.begin(), situations_.end(), [&](const auto& each) {
            const auto& now = each.first;
            return now.number == number && now.x == x.sizes() && now.dtype == x.scalar_type() &&
                   now.batch_size == batch_size && now.batch_dim == batch_dim &&
                   now.weight == weight_.sizes();
          });
      if (found == situations_.end()) return {};
      parts = found->second;
    }
    if (PyDict_SetItem(uses, key_.ptr(), py::int_(number + 1).ptr()) != 0) {
      throw py::error_already_set();
    }
    if (!layer_) return by_forward(x);
    auto sigma = left_out_ ? without_t(x) : (*layer_)->with_t(Transforms(parts, current), x);
    if (batches_) batches_->add_(1);
    return py::cast(std::move(sigma));
  }

 private:
  // Whether torch would take an x for this layer: of a number of axes, if that matters, and of
  // several values for each channel, if they are to be normalized.
  static bool is_plain_input(const Tensor& x, const Sizes& axes) {
    if (axes.empty()) return true;
    return std::find(axes.begin(), axes.end(), x.dim()) != axes.end() && x.numel() > x.size(1);
  }

  Tensor without_t(const Tensor& x) const {
    py::gil_scoped_release others_may_run;
    return (*layer_)->without_t(x);
  }

  // Its forward, of whose ops nobody wants to know.
  py::object by_forward(const Tensor& x) const {
    using TLS = at::impl::PythonTorchFunctionTLS;
    struct Disabled {
      at::impl::TorchFunctionDisabledState before = TLS::get_disabled_state();
      Disabled() { TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::SUBCLASSES_DISABLED); }
      ~Disabled() { TLS::set_disabled_state(before); }
    } disabled;
    return forward_(module_, x);
  }

  py::object module_, own_;
  std::vector<Entry> entries_;
  std::vector<Attribute> attributes_;
  std::vector<std::pair<Tensor, bool>> wanted_;
  py::str key_;
  Tensor weight_;
  std::optional<c10::intrusive_ptr<Layer>> layer_;
  py::object forward_;
  std::optional<std::pair<Sizes, Sizes>> left_out_;
  MaybeTensor batches_;
  std::vector<std::pair<Situation, std::shared_ptr<Parts>>> situations_;
};

// The layers of a model that can run again.
class KnownLayers {
 public:
  void put(const py::object& module, std::shared_ptr<KnownLayer> layer) {
    layers_[module.ptr()] = std::move(layer);
  }

  void clear() { layers_.clear(); }

  // From now on, in this thread, layers belong to a pass of so many samples.
  void begin(py::object current, std::optional<int64_t> batch_size, int64_t batch_dim) {
    uses_ = Names::get().uses.of(current);
    current_ = std::move(current);
    batch_size_ = batch_size;
    batch_dim_ = batch_dim;
    thread_ = std::this_thread::get_id();
  }

  void end() { current_ = uses_ = py::object(); }

  // Run a layer; None if it has to be run by Python.
  py::object run(const py::object& module, const py::object& x) const {
    if (!current_ || reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != THPVariableClass) {
      return py::none();
    }
    const auto found = layers_.find(module.ptr());
    if (found == layers_.end() || thread_ != std::this_thread::get_id() || is_watched() ||
        !at::GradMode::is_enabled()) {
      return py::none();
    }
    const auto layer = found->second;  // which a forward may replace
    if (!layer->is_same(module.ptr())) return py::none();
    auto sigma = layer->run(current_, uses_.ptr(), THPVariable_Unpack(x.ptr()), batch_size_, batch_dim_);
    return sigma ? sigma : py::none();
  }

 private:
  // Whether others want to see the ops: a mode, or a transform of functorch.
  static bool is_watched() {
    return at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
           c10::impl::tls_is_dispatch_key_included(
               c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  }

  std::unordered_map<PyObject*, std::shared_ptr<KnownLayer>> layers_;
  py::object current_, uses_;
  std::optional<int64_t> batch_size_;
  int64_t batch_dim_ = 0;
  std::thread::id thread_;
};

inline void show_forward(py::module_& module) {
  py::class_<KnownLayer, std::shared_ptr<KnownLayer>>(module, "KnownLayer")
      .def(py::init<py::object, py::object, std::vector<KnownLayer::Entry>,
                    std::vector<KnownLayer::Attribute>, std::vector<std::pair<Tensor, bool>>,
                    py::str, Tensor, std::optional<c10::intrusive_ptr<Layer>>, py::object,
                    std::optional<std::pair<Sizes, Sizes>>, MaybeTensor>(),
           py::kw_only(), py::arg("module"), py::arg("own"), py::arg("entries"),
           py::arg("attributes"), py::arg("wanted"), py::arg("key"), py::arg("weight"),
           py::arg("layer"), py::arg("forward"), py::arg("left_out"), py::arg("batches"))
      .def("add", &KnownLayer::add);
  py::class_<KnownLayers>(module, "KnownLayers")
      .def(py::init<>())
      .def("put", &KnownLayers::put)
      .def("clear", &KnownLayers::clear)
      .def("begin", &KnownLayers::begin)
      .def("end", &KnownLayers::end)
      .def("run", &KnownLayers::run);
}

}  // namespace virtualgrad
