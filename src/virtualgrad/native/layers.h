// Encapsulation 1 in C++: a linear layer and a convolution as nodes of autograd's graph.
//
//     sigma = f(x, W) + b;      g to x,   T(g) to W, and to b if it has a T
//
// A node of Python costs as much time as the layers of a small network. These cost what torch's own
// cost. They do what virtualgrad.virtual.products.Linear and .convolutions.Convolution do, op by
// op, in the plainest pass of all, the one of a training step, with T by transform.h, or by Python
// where that has none; any other pass goes to the backward of those two.
//
// Layout of this file: what a layer is, what a node keeps, what a backward pass asks, the two
// layers, what Python gets of them.

#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "transform.h"

namespace virtualgrad {  // by which virtual_grad knows the nodes of an attached optimizer

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ------------------------------------------------------------------------------------ a layer

// Geometry.in_backward of virtualgrad.virtual.convolutions.
struct Geometry {
  Sizes stride, padding, dilation, output_padding;
  bool transposed;
  int64_t groups;

  Tensor forward(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) const {
    return at::convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                           groups);
  }

  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g, const Tensor& x,
                                              const Tensor& weight,
                                              const std::optional<Sizes>& bias,
                                              std::array<bool, 3> mask) const {
    at::OptionalIntArrayRef sizes;
    if (bias) sizes = *bias;
    return at::convolution_backward(g, x, weight, sizes, stride, padding, dilation, transposed,
                                    output_padding, groups, mask);
  }
};

// What is the same in all passes through a layer.
struct Layer : torch::CustomClassHolder {
  Tensor weight;
  MaybeTensor bias;
  py::object python;     // (transforms, x) -> sigma, by the Function of Python
  py::object incoming;   // (transform, g, x, kernel, in_rows, total) -> Incoming, the plainest pass
  py::object by_python;  // (saved, needed, transforms, dtypes, size, bias, g) -> gradients, others
  std::shared_ptr<const Geometry> geometry;  // of a convolution

  Layer(Tensor weight, MaybeTensor bias, py::object python, py::object incoming,
        py::object by_python)
      : weight(std::move(weight)),
        bias(std::move(bias)),
        python(std::move(python)),
        incoming(std::move(incoming)),
        by_python(std::move(by_python)) {}
};

struct ConvolutionLayer : Layer {
  ConvolutionLayer(Tensor weight, MaybeTensor bias, py::object python, py::object incoming,
                   py::object by_python,
                   std::tuple<Sizes, Sizes, Sizes, bool, Sizes, int64_t> shape)
      : Layer(std::move(weight), std::move(bias), std::move(python), std::move(incoming),
              std::move(by_python)) {
    auto [stride, padding, dilation, transposed, output_padding, groups] = std::move(shape);
    geometry = std::make_shared<const Geometry>(
        Geometry{stride, padding, dilation, output_padding, transposed, groups});
  }
};

// ---------------------------------------------------------------------------- what a node keeps

// What one pass knows beside its saved tensors: it holds none itself, so that they go when autograd
// lets them go. Python's objects are let go with the GIL held, wherever the graph ends.
struct Kept : torch::CustomClassHolder {
  py::object transforms, incoming, by_python;
  std::shared_ptr<const Geometry> geometry;
  at::ScalarType x_dtype, weight_dtype;
  int64_t weight_numel;
  std::optional<at::ScalarType> bias_dtype;
  std::optional<Sizes> bias_sizes;
  std::array<bool, 3> needed;  // x, W and b

  Kept(py::object transforms, const Layer& layer, const Tensor& x)
      : transforms(std::move(transforms)),
        incoming(layer.incoming),
        by_python(layer.by_python),
        geometry(layer.geometry),
        x_dtype(x.scalar_type()),
        weight_dtype(layer.weight.scalar_type()),
        weight_numel(layer.weight.numel()),
        needed{x.requires_grad(), layer.weight.requires_grad(),
               layer.bias.has_value() && layer.bias->requires_grad()} {
    if (layer.bias) {
      bias_dtype = layer.bias->scalar_type();
      bias_sizes = layer.bias->sizes().vec();
    }
  }

  ~Kept() override {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      transforms = incoming = by_python = py::object();
    } else {  // the interpreter is gone, and its objects with it
      transforms.release();
      incoming.release();
      by_python.release();
    }
  }
};

inline Tensor as_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// A tensor in the dtype in which autocast would give it to a product.
inline Tensor in_autocast(const Tensor& tensor) {
  const auto device = tensor.device().type();
  // Of some devices ("meta") it knows nothing, and would raise.
  if (!at::autocast::is_autocast_available(device)) return tensor;
  if (!at::autocast::is_autocast_enabled(device)) return tensor;
  const auto own = tensor.scalar_type();
  const bool is_cast = own == at::kFloat || own == at::kBFloat16 || own == at::kHalf;
  return is_cast ? as_dtype(tensor, at::autocast::get_autocast_dtype(device)) : tensor;
}

constexpr auto KEPT = "kept";

inline const Kept& kept_in(AutogradContext* ctx) {
  return *c10::static_intrusive_pointer_cast<Kept>(ctx->saved_data[KEPT].toCapsule());
}

inline void keep(AutogradContext* ctx, const py::object& transforms,
                 const c10::intrusive_ptr<Layer>& layer, const Tensor& x, variable_list saved) {
  ctx->set_materialize_grads(false);
  ctx->saved_data[KEPT] =
      c10::IValue::make_capsule(c10::make_intrusive<Kept>(transforms, *layer, x));
  ctx->save_for_backward(std::move(saved));
}

// ------------------------------------------------------------------ what a backward pass asks for

// Of W; b pulls back the same if T serves it, and the true g if not.
struct OfLayer : Incoming {
  bool serves_bias;
};

// One backward pass through a node: g, and the saved x and W.
struct Passage {
  AutogradContext* ctx;
  const Kept& kept;
  Tensor g, x, weight;

  Passage(AutogradContext* ctx, const Tensor& g) : ctx(ctx), kept(kept_in(ctx)), g(g) {
    const auto saved = ctx->get_saved_variables();
    x = saved[0];
    weight = saved[1];
  }

  // Whether the pass goes on to x (0), W (1) or b (2).
  bool wants(size_t operand) const {
    return kept.needed[operand] && ctx->needs_input_grad(operand);
  }

  // T(g), in the plainest pass: one T, for W, which is wanted, and the same or none for b; x an
  // activation; a graph that is not kept, and was not. None: another one. (The GIL is held.)
  std::optional<OfLayer> incoming(bool in_rows) const {
    if (at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_keep_graph()) {
      return std::nullopt;
    }
    const auto transforms = py::cast<py::dict>(kept.transforms);
    if (!wants(1) || !transforms.contains("weight") || transforms.contains("input")) {
      return std::nullopt;
    }
    const py::object transform = transforms["weight"];
    const bool serves_bias = transforms.contains("bias");
    if (serves_bias && !transform.is(transforms["bias"])) return std::nullopt;
    if (serves_bias && kept.needed[2] && !wants(2)) return std::nullopt;
    if (py::len(transform.attr("current").attr("kept")) != 0) return std::nullopt;
    std::optional<std::string> total;
    if (kept.needed[2]) total = serves_bias ? "T(g)" : "g";
    if (auto made = plain_incoming(transform, g, {x}, in_rows, total)) {
      return OfLayer{std::move(*made), serves_bias};
    }
    const auto sizes = weight.defined() ? weight.sizes().vec() : Sizes();
    const Sizes kernel(sizes.begin() + std::min<size_t>(2, sizes.size()), sizes.end());
    const py::tuple made =
        kept.incoming(transform, g, x, py::tuple(py::cast(kernel)), in_rows, total);
    return OfLayer{Incoming::of_python(made), serves_bias};
  }

  // The gradients of x, W and b by the backward of Python. (The GIL is held.)
  variable_list by_python() const {
    const auto dtypes = py::make_tuple(kept.x_dtype, kept.weight_dtype, kept.bias_dtype);
    const auto saved = py::make_tuple(x, weight);
    const py::tuple made = kept.by_python(saved, kept.needed, kept.transforms, dtypes,
                                          kept.weight_numel, kept.bias_sizes, g);
    variable_list found;
    for (const auto& each : made) found.push_back(each.is_none() ? Tensor() : each.cast<Tensor>());
    return found;
  }
};

// In the places of what apply takes: the transforms, the layer, x, W and b.
inline variable_list in_places(Tensor x, Tensor weight, Tensor bias) {
  return {Tensor(), Tensor(), std::move(x), std::move(weight), std::move(bias)};
}

// ------------------------------------------------------------------------------------ the layers

inline Tensor rows_of(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const py::object& transforms,
                        const c10::intrusive_ptr<Layer>& layer, const Tensor& x,
                        const Tensor& weight, const MaybeTensor& bias) {
    const auto factor = in_autocast(x), other = in_autocast(weight);
    keep(ctx, transforms, layer, x,
         {weight.requires_grad() ? factor : Tensor(), x.requires_grad() ? other : Tensor()});
    py::gil_scoped_release others_may_run;
    const auto sigma = at::linear(factor, other, bias);
    // Of a view no op in place is allowed behind a node: the same memory, but none.
    return sigma.is_view() ? at::_unsafe_view(sigma, sigma.sizes()) : sigma;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    const Passage pass(ctx, grads[0]);
    const auto& g = pass.g;
    std::optional<OfLayer> made;
    {
      py::gil_scoped_acquire gil;
      made = pass.incoming(pass.kept.weight_numel < g.numel());
      if (!made) {
        const auto found = pass.by_python();
        return in_places(found[0], found[1], found[2]);
      }
    }
    at::AutoDispatchBelowADInplaceOrView unrecorded;
    Tensor of_x, of_bias;
    auto of_weight = at::mm(rows_of(made->padded.value_or(made->g)).t(),
                            as_dtype(rows_of(pass.x), g.scalar_type()));
    if (made->padded) of_weight = of_weight.narrow(0, 0, g.size(-1));
    of_weight = made->scaled(as_dtype(of_weight, pass.kept.weight_dtype));
    if (pass.wants(2)) {
      const auto& of = made->serves_bias ? made->g : g;
      of_bias = made->total ? *made->total : rows_of(of).sum(0);
      of_bias = as_dtype(of_bias, *pass.kept.bias_dtype);
      if (made->serves_bias) of_bias = made->scaled(of_bias);
    }
    made.reset();  // and T(g) with it, before there is a gradient of x
    if (pass.wants(0)) {
      auto shape = g.sizes().vec();
      shape.back() = pass.weight.size(1);
      of_x = at::mm(rows_of(g), as_dtype(pass.weight, g.scalar_type())).view(shape);
      of_x = as_dtype(of_x, pass.kept.x_dtype);
    }
    return in_places(of_x, of_weight, of_bias);
  }
};

struct Convolution : Function<Convolution> {
  static Tensor forward(AutogradContext* ctx, const py::object& transforms,
                        const c10::intrusive_ptr<Layer>& layer, const Tensor& x,
                        const Tensor& weight, const MaybeTensor& bias) {
    const auto factor = in_autocast(x), other = in_autocast(weight);
    keep(ctx, transforms, layer, x, {factor, other});
    py::gil_scoped_release others_may_run;
    MaybeTensor added = bias;
    if (bias) added = in_autocast(*bias);
    return layer->geometry->forward(factor, other, added);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    Passage pass(ctx, grads[0]);
    const auto& g = pass.g;
    const auto& geometry = *pass.kept.geometry;
    const auto& bias = pass.kept.bias_sizes;
    std::optional<OfLayer> made;
    const auto x = as_dtype(pass.x, g.scalar_type());
    {
      py::gil_scoped_acquire gil;
      pass.x = x;
      made = pass.incoming(pass.kept.weight_numel < g.numel() && !geometry.transposed);
      if (!made) {
        const auto found = pass.by_python();
        return in_places(found[0], found[1], found[2]);
      }
    }
    at::AutoDispatchBelowADInplaceOrView unrecorded;
    const auto weight = as_dtype(pass.weight, g.scalar_type());
    const bool wants_bias = pass.wants(2), of_true_g = made->g.is_same(g);
    Tensor of_x, of_weight, of_bias;
    if (made->weight) {
      of_weight = as_dtype(*made->weight, pass.kept.weight_dtype);
    } else {  // with it, whatever is to pull back the same
      const bool with_bias = wants_bias && !made->total && (made->serves_bias || of_true_g);
      std::tie(of_x, of_weight, of_bias) =
          geometry.backward(made->g, x, weight, bias,
                            {pass.wants(0) && of_true_g, true, with_bias});
      of_weight = made->scaled(as_dtype(of_weight, pass.kept.weight_dtype));
    }
    if (wants_bias) {
      if (made->total) of_bias = *made->total;
      if (!of_bias.defined()) of_bias = sum_of_channels(made->serves_bias ? made->g : g);
      of_bias = as_dtype(of_bias, *pass.kept.bias_dtype);
      if (made->serves_bias) of_bias = made->scaled(of_bias);
    }
    made.reset();  // and T(g) with it, before more is made
    if (pass.wants(0)) {
      if (!of_x.defined()) {
        of_x = std::get<0>(geometry.backward(g, x, weight, bias, {true, false, false}));
      }
      of_x = as_dtype(of_x, pass.kept.x_dtype);
    }
    return in_places(of_x, of_weight, of_bias);
  }

  static Tensor sum_of_channels(const Tensor& g) {
    Sizes others;
    for (int64_t axis = 0; axis < g.dim(); ++axis) {
      if (axis != 1) others.push_back(axis);
    }
    return g.sum(others);
  }
};

// Run a layer; by the Function of Python, whose op they see, where others watch torch's functions:
// a mode, or an x that is no plain tensor.
template <typename Node, typename Kind>
Tensor run(const c10::intrusive_ptr<Kind>& layer, const py::object& transforms,
           const py::object& x) {
  const c10::intrusive_ptr<Layer> plain = layer;
  if (at::impl::PythonTorchFunctionTLS::stack_len() > 0 || !THPVariable_CheckExact(x.ptr())) {
    return plain->python(transforms, x).template cast<Tensor>();
  }
  return Node::apply(transforms, plain, THPVariable_Unpack(x.ptr()), plain->weight, plain->bias);
}

inline void show_layers(py::module_& module) {
  py::class_<Layer, c10::intrusive_ptr<Layer>>(module, "Linear")
      .def(py::init<Tensor, MaybeTensor, py::object, py::object, py::object>())
      .def("__call__", &run<Linear, Layer>);
  py::class_<ConvolutionLayer, c10::intrusive_ptr<ConvolutionLayer>>(module, "Convolution")
      .def(py::init<Tensor, MaybeTensor, py::object, py::object, py::object,
                    std::tuple<Sizes, Sizes, Sizes, bool, Sizes, int64_t>>())
      .def("__call__", &run<Convolution, ConvolutionLayer>);
}

}  // namespace virtualgrad
