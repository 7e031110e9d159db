// An nn.Sequential in a forward pass without Python: its modules are not called, but run.
//
// A call of a module looks for hooks, and then runs its forward. Where a call would be that and no
// more, that is run: of layers with parameters as they ran before (forward.h), of layers without
// any, such as ReLU, their own. What virtualgrad.virtual.leaves asks before, is asked here.

#pragma once

#include "forward.h"

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace virtualgrad {

// What calls are: as torch has written them, with which hooks on all modules.
struct Calls {
  py::dict leaves;              // the names of virtualgrad.virtual.leaves
  py::dict profiler;            // those of torch.autograd.profiler
  std::vector<py::dict> hooks;  // on all modules

  // What leaves.py calls by a name.
  py::handle known_as(const char* name) const { return PyDict_GetItemString(leaves.ptr(), name); }

  // Whether modules that are called plainly may be run by their forward.
  bool may_be_skipped() const {
    static PyObject* const enabled = PyUnicode_InternFromString("_is_profiler_enabled");
    if (PyDict_GetItem(profiler.ptr(), enabled) != Py_False) return false;
    for (const auto& each : hooks) {
      if (PyDict_Size(each.ptr()) != 0) return false;
    }
    return true;
  }

  // Whether a call of a module is its forward and no more, as long as they may be skipped.
  bool are_plain_for(PyObject* module) const {
    static const Name called("__call__"), implemented("_call_impl");
    static PyObject* const in_own[] = {
        PyUnicode_InternFromString("_forward_hooks"),
        PyUnicode_InternFromString("_forward_pre_hooks"),
        PyUnicode_InternFromString("_backward_hooks"),
        PyUnicode_InternFromString("_backward_pre_hooks"),
    };
    static PyObject* const not_in_own[] = {
        PyUnicode_InternFromString("forward"),
        PyUnicode_InternFromString("_call_impl"),
    };
    static PyObject* const compiled = PyUnicode_InternFromString("_compiled_call_impl");
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(module)));
    if (!called.of(type).is(known_as("CALL"))) return false;
    if (!implemented.of(type).is(known_as("CALL_IMPL"))) return false;
    const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    for (PyObject* const name : in_own) {
      PyObject* const hooks_of_own = PyDict_GetItem(own.ptr(), name);
      if (hooks_of_own == nullptr || PyObject_IsTrue(hooks_of_own) != 0) return false;
    }
    for (PyObject* const name : not_in_own) {
      if (PyDict_GetItem(own.ptr(), name) != nullptr) return false;
    }
    PyObject* const by_compiler = PyDict_GetItem(own.ptr(), compiled);
    return by_compiler == nullptr || by_compiler == Py_None;
  }

  // The forward of a layer without parameters, if a call would be that, all still torch's own.
  py::object forward_of_bare(PyObject* module) const {
    static const Name forward("forward"), place("place"), name("name"), function("function");
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(module));
    PyObject* const found = PyDict_GetItem(known_as("BARE_LEAVES").ptr(), type);
    if (found == nullptr) return {};
    const py::handle leaf(found);
    auto own = forward.of(leaf);
    if (!forward.of(type).is(own)) return {};
    const auto op = name.of(leaf);
    if (!op.is_none() && !py::getattr(place.of(leaf), op).is(function.of(leaf))) return {};
    return own;
  }
};

class KnownSequence : public KnownModule {
 public:
  KnownSequence(py::object module, py::object base, py::object path, py::object intercept,
                std::shared_ptr<Calls> calls, const KnownModules& others)
      : KnownModule(std::move(module), std::move(base), py::str("forward"), std::move(path),
                    std::move(intercept)),
        calls_(std::move(calls)),
        others_(others) {}

 protected:
  py::object run_forward(const py::object& x) const override {
    static const Name forward("forward"), in_order("__iter__"), modules("_modules");
    const bool is_torchs_own = forward.of(base_).is(calls_->known_as("SEQUENCE")) &&
                               in_order.of(base_).is(calls_->known_as("IN_ORDER"));
    if (!is_torchs_own) return KnownModule::run_forward(x);
    auto value = x;
    const auto all = py::reinterpret_steal<py::list>(PyDict_Values(modules.of(module_).ptr()));
    for (const auto& module : all) value = run_one(py::cast<py::object>(module), value);
    return value;
  }

 private:
  py::object run_one(const py::object& module, const py::object& x) const {
    const bool is_activation =
        reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) == THPVariableClass;
    if (is_activation && calls_->may_be_skipped() && calls_->are_plain_for(module.ptr())) {
      if (others_.is_attached(module)) {
        auto done = others_.run(module, x);
        if (done.ptr() != Py_NotImplemented) return done;
      } else if (const auto forward = calls_->forward_of_bare(module.ptr())) {
        return forward(module, x);
      }
    }
    return module(x);
  }

  std::shared_ptr<Calls> calls_;
  const KnownModules& others_;  // which has this one, too
};

inline void show_sequences(py::module_& module) {
  py::class_<Calls, std::shared_ptr<Calls>>(module, "Calls")
      .def(py::init([](py::dict leaves, py::dict profiler, std::vector<py::dict> hooks) {
        return std::make_shared<Calls>(Calls{leaves, profiler, std::move(hooks)});
      }));
  py::class_<KnownSequence, KnownModule, std::shared_ptr<KnownSequence>>(module, "KnownSequence")
      .def(py::init<py::object, py::object, py::object, py::object, std::shared_ptr<Calls>,
                    const KnownModules&>());
}

}  // namespace virtualgrad
