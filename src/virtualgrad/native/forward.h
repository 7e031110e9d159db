// A forward pass without Python: layers of torch.nn that run as they ran before, in modules of which
// it must be known that they run.
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

// The pass to which what is run now belongs.
struct CurrentPass {
  py::object current, uses;
  std::optional<int64_t> batch_size;
  int64_t batch_dim = 0;
};

// A module that was run before.
class Known {
 public:
  explicit Known(py::object module) : module_(std::move(module)) {}
  virtual ~Known() = default;

  // Whether it is this module, with the class that an attachment has given it, and none on top.
  bool is_of(const py::object& module) const {
    return module.is(module_) && reinterpret_cast<PyObject*>(Py_TYPE(module.ptr())) == kind_.ptr();
  }

  // Its class, as an attachment has given it, and the method of that class by which it comes here.
  void came_by(py::object kind, py::object forward) {
    kind_ = std::move(kind);
    forward_of_kind_ = std::move(forward);
  }

  // Whether its forward still comes here.
  bool comes_here() const {
    static const Name forward("forward");
    return forward.of(kind_).is(forward_of_kind_);
  }

  // Run it on an input; null if Python has to.
  virtual py::object run(const CurrentPass& pass, const py::object& x) const = 0;

  // Show Python's collector of garbage what is kept of Python here: a model has its classes, and
  // they have this, which has the model.
  virtual int traverse(visitproc visit, void* arg) const {
    Py_VISIT(module_.ptr());
    Py_VISIT(kind_.ptr());
    Py_VISIT(forward_of_kind_.ptr());
    return 0;
  }

 protected:
  py::object module_;

 private:
  py::object kind_, forward_of_kind_;
};

// A layer that was run before.
class KnownLayer : public Known {
 public:
  using Entry = std::tuple<py::object, py::object, py::object>;  // (a dict, a name, its value)
  using Attribute = Entry;                                        // (a class, a name, its value)

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
      : Known(std::move(module)),
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

  py::object run(const CurrentPass& pass, const py::object& x) const override {
    if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != THPVariableClass || !is_same()) return {};
    return run(pass, THPVariable_Unpack(x.ptr()));
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(own_.ptr());
    for (const auto* found : {&entries_, &attributes_}) {
      for (const auto& [place, name, value] : *found) {
        Py_VISIT(place.ptr());
        Py_VISIT(value.ptr());
      }
    }
    for (const auto& [_, parts] : situations_) {
      if (parts.use_count() > 1) continue;  // a graph has it, too
      Py_VISIT(parts->make.ptr());
      Py_VISIT(parts->op.ptr());
      Py_VISIT(parts->site.ptr());
    }
    Py_VISIT(forward_.ptr());
    return Known::traverse(visit, arg);
  }

 private:
  // Whether nothing has changed on which its forward depends.
  bool is_same() const {
    const auto own =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module_.ptr(), nullptr));
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
  py::object run(const CurrentPass& pass, const Tensor& x) const {
    PyObject* const uses = pass.uses.ptr();
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
                   now.batch_size == pass.batch_size && now.batch_dim == pass.batch_dim &&
                   now.weight == weight_.sizes();
          });
      if (found == situations_.end()) return {};
      parts = found->second;
    }
    if (PyDict_SetItem(uses, key_.ptr(), py::int_(number + 1).ptr()) != 0) {
      throw py::error_already_set();
    }
    if (!layer_) return by_forward(x);
    auto sigma = left_out_ ? without_t(x) : (*layer_)->with_t(Transforms(parts, pass.current), x);
    if (batches_) batches_->add_(1);
    return py::cast(std::move(sigma));
  }

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

  py::object own_;
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

// Any other module: its own forward runs, under its path.
class KnownModule : public Known {
 public:
  // Args:
  //   module: the module.
  //   base, method: its class, as it was before that of an attachment, and what runs it there.
  //   path: its name in the model.
  //   intercept: which has to know it.
  KnownModule(py::object module, py::object base, py::str method, py::object path,
              py::object intercept)
      : Known(std::move(module)),
        base_(std::move(base)),
        method_(std::move(method)),
        path_(std::move(path)),
        intercept_(std::move(intercept)) {}

  py::object run(const CurrentPass&, const py::object& x) const override {
    static const Name path("path");
    struct Inside {
      const py::object& intercept;
      py::object outer;
      Inside(const py::object& intercept, const py::object& here)
          : intercept(intercept), outer(path.of(intercept)) {
        path.set(intercept, here);
      }
      ~Inside() { PyObject_SetAttrString(intercept.ptr(), "path", outer.ptr()); }
    } inside(intercept_, path_);
    return run_forward(x);
  }

  int traverse(visitproc visit, void* arg) const override {
    Py_VISIT(base_.ptr());
    Py_VISIT(path_.ptr());
    Py_VISIT(intercept_.ptr());
    return Known::traverse(visit, arg);
  }

 protected:
  virtual py::object run_forward(const py::object& x) const {
    return base_.attr(method_)(module_, x);  // others may have put theirs in its place since
  }

  py::object base_;

 private:
  py::str method_;
  py::object path_, intercept_;
};

// The modules of a model that can run again.
class KnownModules {
 public:
  void put(const py::object& module, std::shared_ptr<Known> known) {
    known_[module.ptr()] = std::move(known);
  }

  void clear() {
    const auto gone = std::exchange(known_, {});  // whatever goes with them may come here
    pass_.reset();
  }

  int traverse(visitproc visit, void* arg) const {
    for (const auto& [_, known] : known_) {
      if (known.use_count() > 1) continue;  // it is somebody else's, too
      if (const int done = known->traverse(visit, arg)) return done;
    }
    if (pass_) {
      Py_VISIT(pass_->current.ptr());
      Py_VISIT(pass_->uses.ptr());
    }
    return 0;
  }

  // From now on, in this thread, what is run belongs to a pass of so many samples.
  void begin(py::object current, std::optional<int64_t> batch_size, int64_t batch_dim) {
    auto uses = Names::get().uses.of(current);
    pass_ = CurrentPass{std::move(current), std::move(uses), batch_size, batch_dim};
    thread_ = std::this_thread::get_id();
  }

  void end() { pass_.reset(); }

  // Whether a module is one of these, and would come here if its forward were called.
  bool is_attached(const py::object& module) const {
    const auto found = known_.find(module.ptr());
    return found != known_.end() && found->second->is_of(module) && found->second->comes_here();
  }

  // Run a module; NotImplemented if it has to be run by Python: also where x is no plain tensor, but
  // of a class that wants to see its ops, or may have such in it.
  py::object run(const py::object& module, const py::object& x) const {
    if (pass_ && THPVariable_CheckExact(x.ptr()) && thread_ == std::this_thread::get_id() && !is_watched() &&
        at::GradMode::is_enabled()) {
      const auto found = known_.find(module.ptr());
      if (found != known_.end() && found->second->is_of(module)) {
        const auto known = found->second;  // a forward may put others in their places,
        const auto pass = *pass_;          // and end the pass
        if (auto done = known->run(pass, x)) return done;
      }
    }
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  }

 private:
  // Whether others want to see the ops: a mode, or a transform of functorch.
  static bool is_watched() {
    return at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
           c10::impl::tls_is_dispatch_key_included(
               c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  }

  std::unordered_map<PyObject*, std::shared_ptr<Known>> known_;
  std::optional<CurrentPass> pass_;
  std::thread::id thread_;
};

inline bool is_made(PyObject* object) {
  auto* const made = reinterpret_cast<py::detail::instance*>(object);
  return made->get_value_and_holder().holder_constructed();
}

// Let Python's collector of garbage look into objects of a class, and clear them.
template <typename Kind>
py::custom_type_setup collectable() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    auto* const type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      return is_made(self) ? py::cast<Kind&>(py::handle(self)).traverse(visit, arg) : 0;
    };
    type->tp_clear = [](PyObject* self) {
      if (is_made(self)) py::cast<Kind&>(py::handle(self)).clear();
      return 0;
    };
  });
}

inline void show_forward(py::module_& module) {
  py::class_<Known, std::shared_ptr<Known>>(module, "Known").def("came_by", &Known::came_by);
  py::class_<KnownLayer, Known, std::shared_ptr<KnownLayer>>(module, "KnownLayer")
      .def(py::init<py::object, py::object, std::vector<KnownLayer::Entry>,
                    std::vector<KnownLayer::Attribute>, std::vector<std::pair<Tensor, bool>>,
                    py::str, Tensor, std::optional<c10::intrusive_ptr<Layer>>, py::object,
                    std::optional<std::pair<Sizes, Sizes>>, MaybeTensor>(),
           py::kw_only(), py::arg("module"), py::arg("own"), py::arg("entries"),
           py::arg("attributes"), py::arg("wanted"), py::arg("key"), py::arg("weight"),
           py::arg("layer"), py::arg("forward"), py::arg("left_out"), py::arg("batches"))
      .def("add", &KnownLayer::add);
  py::class_<KnownModule, Known, std::shared_ptr<KnownModule>>(module, "KnownModule")
      .def(py::init<py::object, py::object, py::str, py::object, py::object>());
  py::class_<KnownModules>(module, "KnownModules", collectable<KnownModules>())
      .def(py::init<>())
      .def("put", &KnownModules::put)
      .def("clear", &KnownModules::clear)
      .def("begin", &KnownModules::begin)
      .def("end", &KnownModules::end)
      .def("run", &KnownModules::run);
}

}  // namespace virtualgrad
