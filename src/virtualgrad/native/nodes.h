// What all nodes of C++ have in common: what a layer is, what a node keeps, what a pass asks for.
//
//     sigma = f(x, W, b);      g to x,   T(g) to W, and to b if it has a T
//
// A node of Python costs as much time as the layers of a small network. These cost what torch's own
// cost. They do what a Function of virtualgrad.virtual does, op by op, in the plainest pass of all,
// the one of a training step, with T by transform.h, or by Python where that has none; any other
// pass goes to the backward of that Function.

#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transform.h"

namespace virtualgrad {  // by which virtual_grad knows the nodes of an attached optimizer

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ------------------------------------------------------------------------------- its T in a pass

// Which T acts on which arguments of a layer, in all passes of a kind.
struct Parts {
  py::object make;      // pass -> (argument -> Transform)
  py::object op, site;  // of the one T that serves the weight, or both of weight and bias; or None
  bool serves_bias;
};

// The same in one pass. Python's Transforms are made when somebody asks for them.
class Transforms {
 public:
  explicit Transforms(py::object made) : made_(std::move(made)) {}
  Transforms(std::shared_ptr<const Parts> parts, py::object current)
      : parts_(std::move(parts)), current_(std::move(current)) {}

  // Argument -> Transform.
  py::dict get() const { return made_ ? made_ : parts_->make(current_); }

  // The one T, if there is just one, and it serves the weight and no input.
  std::optional<Asked> only_one() const {
    if (parts_) {
      if (parts_->op.is_none()) return std::nullopt;
      return Asked{parts_->op, parts_->site, current_, parts_->serves_bias};
    }
    const py::dict made = made_;
    if (!made.contains("weight") || made.contains("input")) return std::nullopt;
    const py::object transform = made["weight"];
    const bool serves_bias = made.contains("bias");
    if (serves_bias && !transform.is(made["bias"])) return std::nullopt;
    const auto& names = Names::get();
    return Asked{names.operator_.of(transform), names.site.of(transform),
                 names.current.of(transform), serves_bias};
  }

  // Let go of Python's objects; if it is gone, they are gone with it.
  void forget(bool is_python_there) {
    if (is_python_there) {
      made_ = current_ = py::object();
      parts_.reset();
    } else {
      made_.release();
      current_.release();
      new std::shared_ptr(std::move(parts_));  // never to be freed, as they are Python's
    }
  }

 private:
  py::object made_, current_;
  std::shared_ptr<const Parts> parts_;
};

// ------------------------------------------------------------------------------------ a layer

// What is the same in all passes through a layer. What the two questions to Python are told
// differs from one kind of layer to another.
struct Layer : torch::CustomClassHolder {
  MaybeTensor weight, bias;
  py::object python;     // (transforms, x) -> sigma, by the Function of Python
  py::object incoming;   // (transform, g, ...) -> Incoming, in the plainest pass
  py::object by_python;  // (saved, needed, transforms, g, ...) -> gradients, in any other

  Layer(MaybeTensor weight, MaybeTensor bias, py::object python, py::object incoming,
        py::object by_python)
      : weight(std::move(weight)),
        bias(std::move(bias)),
        python(std::move(python)),
        incoming(std::move(incoming)),
        by_python(std::move(by_python)) {}

  virtual Tensor with_t(const Transforms& transforms, const Tensor& x) const = 0;
  virtual Tensor without_t(const Tensor& x) const = 0;  // torch's own op
};

// ---------------------------------------------------------------------------- what a node keeps

inline bool is_needed(const MaybeTensor& tensor) { return tensor && tensor->requires_grad(); }

inline std::optional<at::ScalarType> dtype_of(const MaybeTensor& tensor) {
  return tensor ? std::optional(tensor->scalar_type()) : std::nullopt;
}

// What one pass knows beside its saved tensors: it holds none itself, so that they go when autograd
// lets them go. Python's objects are let go with the GIL held, wherever the graph ends.
struct Kept : torch::CustomClassHolder {
  Transforms transforms;
  py::object incoming, by_python;
  at::ScalarType x_dtype;
  std::optional<at::ScalarType> weight_dtype, bias_dtype;
  std::array<bool, 3> needed;  // x, W and b

  Kept(Transforms transforms, const Layer& layer, const Tensor& x)
      : transforms(std::move(transforms)),
        incoming(layer.incoming),
        by_python(layer.by_python),
        x_dtype(x.scalar_type()),
        weight_dtype(dtype_of(layer.weight)),
        bias_dtype(dtype_of(layer.bias)),
        needed{x.requires_grad(), is_needed(layer.weight), is_needed(layer.bias)} {}

  ~Kept() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      transforms.forget(true);
      incoming = by_python = py::object();
    } else {  // the interpreter is gone, and its objects with it
      transforms.forget(false);
      incoming.release();
      by_python.release();
    }
  }
};

constexpr auto KEPT = "kept";

template <typename Kind>
void keep(AutogradContext* ctx, c10::intrusive_ptr<Kind> kept, variable_list saved) {
  ctx->set_materialize_grads(false);
  ctx->saved_data[KEPT] = c10::IValue::make_capsule(std::move(kept));
  ctx->save_for_backward(std::move(saved));
}

inline Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

inline bool is_cast_by_autocast(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline bool is_in_autocast(at::DeviceType device) {
  // Of some devices ("meta") it knows nothing, and would raise.
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

// ------------------------------------------------------------------ what a backward pass asks for

// What W is to pull back; b pulls back the same if T serves it, and the true g if not.
struct OfLayer : Incoming {
  bool serves_bias;
};

// One backward pass through a node: g, and what was saved.
template <typename Kind>
struct Passage {
  AutogradContext* ctx;
  const Kind& kept;
  Tensor g;
  variable_list saved;

  Passage(AutogradContext* ctx, const Tensor& g)
      : ctx(ctx),
        kept(*c10::static_intrusive_pointer_cast<Kind>(ctx->saved_data[KEPT].toCapsule())),
        g(g),
        saved(ctx->get_saved_variables()) {}

  // Whether the pass goes on to x (0), W (1) or b (2). (Without a W, b has another place among the
  // edges: then nothing but x may be asked for here.)
  bool wants(size_t operand) const {
    return kept.needed[operand] && ctx->needs_input_grad(operand);
  }

  // T, in the plainest pass: one T, for W, which is wanted, and the same or none for b; x an
  // activation; a graph that is not kept, and was not. None: another one. (The GIL is held.)
  std::optional<Asked> asked() const {
    if (at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_keep_graph()) {
      return std::nullopt;
    }
    if (!wants(1)) return std::nullopt;
    auto by = kept.transforms.only_one();
    if (!by || (by->serves_bias && kept.needed[2] && !wants(2))) return std::nullopt;
    if (py::len(Names::get().kept.of(by->current)) != 0) return std::nullopt;
    return by;
  }

  // Python's Transform of the weight. (The GIL is held.)
  py::object transform() const { return kept.transforms.get()["weight"]; }

  // T(g) by C++, if that has one for what the layer can use (transform.h); of g as it is laid out
  // for kernels, if they read it otherwise. (The GIL is held.)
  std::optional<OfLayer> plain(const Asked& by, const std::vector<Tensor>& others, bool in_rows,
                               const std::optional<std::string>& wanted,
                               const Sizes& window = {},
                               const MaybeTensor& laid_out = std::nullopt) const {
    auto made = plain_incoming(by, laid_out.value_or(g), others, window, in_rows, wanted);
    if (!made) return std::nullopt;
    return OfLayer{*std::move(made), by.serves_bias};
  }

  // The gradients of x, W and b by the backward of Python, in the places of what apply takes; it
  // is told what this kind of layer keeps besides. (The GIL is held.)
  template <typename... Told>
  variable_list by_python(const Told&... told) const {
    py::tuple tensors(saved.size());
    for (size_t k = 0; k < saved.size(); ++k) tensors[k] = py::cast(saved[k]);
    const py::tuple made = kept.by_python(tensors, kept.needed, kept.transforms.get(), g, told...);
    variable_list found(2);
    for (const auto& each : made) found.push_back(each.is_none() ? Tensor() : each.cast<Tensor>());
    return found;
  }
};

// In the places of what apply takes: the transforms, the layer, x, W and b.
inline variable_list in_places(Tensor x, Tensor weight, Tensor bias) {
  return {Tensor(), Tensor(), std::move(x), std::move(weight), std::move(bias)};
}

// ------------------------------------------------------------------------------ what Python gets

// Run a layer; by the Function of Python, whose op they see, where others watch torch's functions:
// a mode, or an x that is no plain tensor.
inline Tensor run(const Layer& layer, const py::object& transforms, const py::object& x) {
  if (at::impl::PythonTorchFunctionTLS::stack_len() > 0 || !THPVariable_CheckExact(x.ptr())) {
    return layer.python(transforms, x).cast<Tensor>();
  }
  return layer.with_t(Transforms(transforms), THPVariable_Unpack(x.ptr()));
}

inline void show_nodes(py::module_& module) {
  py::class_<Parts, std::shared_ptr<Parts>>(module, "Parts")
      .def(py::init([](py::object make, py::object op, py::object site, bool serves_bias) {
        return std::make_shared<Parts>(Parts{make, op, site, serves_bias});
      }));
  py::class_<Layer, c10::intrusive_ptr<Layer>>(module, "Layer").def("__call__", &run);
}

// A class of Python for a kind of layer, made of what its constructor takes.
template <typename Kind, typename... Given>
void show_layer(py::module_& module, const char* name) {
  py::class_<Kind, Layer, c10::intrusive_ptr<Kind>>(module, name)
      .def(py::init<MaybeTensor, MaybeTensor, py::object, py::object, py::object, Given...>());
}

}  // namespace virtualgrad
