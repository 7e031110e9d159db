// Encapsulation 1 in C++: a linear layer and a convolution as nodes of autograd's graph.
//
//     sigma = f(x, W) + b;      g to x,   T(g) to W, and to b if it has a T
//
// They do what virtualgrad.virtual.products.Linear and .convolutions.Convolution do (nodes.h).
//
// Layout of this file: what a node keeps, what a backward pass asks, the two layers, what Python
// gets of them.

#pragma once

#include "nodes.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace virtualgrad {

// ---------------------------------------------------------------------------- what a node keeps

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

struct LinearLayer : Layer {
  using Layer::Layer;
  Tensor with_t(const Transforms& transforms, const Tensor& x) const override;
  Tensor without_t(const Tensor& x) const override { return at::linear(x, *weight, bias); }
};

struct ConvolutionLayer : Layer {
  std::shared_ptr<const Geometry> geometry;

  ConvolutionLayer(MaybeTensor weight, MaybeTensor bias, py::object python, py::object incoming,
                   py::object by_python,
                   std::tuple<Sizes, Sizes, Sizes, bool, Sizes, int64_t> shape)
      : Layer(std::move(weight), std::move(bias), std::move(python), std::move(incoming),
              std::move(by_python)) {
    auto [stride, padding, dilation, transposed, output_padding, groups] = std::move(shape);
    geometry = std::make_shared<const Geometry>(
        Geometry{stride, padding, dilation, output_padding, transposed, groups});
  }

  Tensor with_t(const Transforms& transforms, const Tensor& x) const override;
  Tensor without_t(const Tensor& x) const override { return geometry->forward(x, *weight, bias); }
};

struct KeptOfProduct : Kept {
  int64_t weight_numel;
  std::optional<Sizes> bias_sizes;
  std::shared_ptr<const Geometry> geometry;  // of a convolution

  KeptOfProduct(const Transforms& transforms, const Layer& layer, const Tensor& x,
                std::shared_ptr<const Geometry> geometry = nullptr)
      : Kept(transforms, layer, x),
        weight_numel(layer.weight->numel()),
        geometry(std::move(geometry)) {
    if (layer.bias) bias_sizes = layer.bias->sizes().vec();
  }
};

// A tensor in the dtype in which autocast would give it to a product.
inline Tensor in_autocast(const Tensor& tensor) {
  const auto device = tensor.device().type();
  if (!is_in_autocast(device) || !is_cast_by_autocast(tensor.scalar_type())) return tensor;
  return as_dtype(tensor, at::autocast::get_autocast_dtype(device));
}

// ------------------------------------------------------------------ what a backward pass asks for

// One backward pass through a node: g, and the saved x and W.
struct PassageOfProduct : Passage<KeptOfProduct> {
  Tensor x, weight;

  PassageOfProduct(AutogradContext* ctx, const Tensor& g)
      : Passage(ctx, g), x(saved[0]), weight(saved[1]) {}

  // T(g), in the plainest pass; None in another one. (The GIL is held.)
  std::optional<OfLayer> incoming(bool in_rows) const {
    const auto by = asked();
    if (!by) return std::nullopt;
    std::optional<std::string> total;
    if (kept.needed[2]) total = by->serves_bias ? "T(g)" : "g";
    const auto sizes = weight.defined() ? weight.sizes().vec() : Sizes();
    const Sizes kernel(sizes.begin() + std::min<size_t>(2, sizes.size()), sizes.end());
    auto window = kernel;
    if (kept.geometry) {
      const auto& shape = *kept.geometry;
      for (const auto* part : {&shape.stride, &shape.padding, &shape.dilation}) {
        window.insert(window.end(), part->begin(), part->end());
      }
    }
    if (auto made = plain(*by, {x}, in_rows, total, window)) return made;
    const py::tuple made =
        kept.incoming(transform(), g, x, py::tuple(py::cast(kernel)), in_rows, total);
    return OfLayer{Incoming::of_python(made), by->serves_bias};
  }

  // The gradients by the backward of Python. (The GIL is held.)
  variable_list by_python() const {
    const auto dtypes = py::make_tuple(kept.x_dtype, kept.weight_dtype, kept.bias_dtype);
    return Passage::by_python(dtypes, kept.weight_numel, kept.bias_sizes);
  }
};

// ------------------------------------------------------------------------------------ the layers

inline Tensor rows_of(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Transforms& transforms,
                        const LinearLayer* layer, const Tensor& x,
                        const MaybeTensor& weight, const MaybeTensor& bias) {
    const auto factor = in_autocast(x), other = in_autocast(*weight);
    keep(ctx, c10::make_intrusive<KeptOfProduct>(transforms, *layer, x),
         {weight->requires_grad() ? factor : Tensor(), x.requires_grad() ? other : Tensor()});
    py::gil_scoped_release others_may_run;
    const auto sigma = at::linear(factor, other, bias);
    // Of a view no op in place is allowed behind a node: the same memory, but none.
    return sigma.is_view() ? at::_unsafe_view(sigma, sigma.sizes()) : sigma;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    const PassageOfProduct pass(ctx, grads[0]);
    const auto& g = pass.g;
    std::optional<OfLayer> made;
    {
      py::gil_scoped_acquire gil;
      made = pass.incoming(pass.kept.weight_numel < g.numel());
      if (!made) return pass.by_python();
    }
    at::AutoDispatchBelowADInplaceOrView unrecorded;
    Tensor of_x, of_bias;
    auto of_weight = at::mm(rows_of(made->padded.value_or(made->g)).t(),
                            as_dtype(rows_of(pass.x), g.scalar_type()));
    if (made->padded) of_weight = of_weight.narrow(0, 0, g.size(-1));
    of_weight = made->scaled(as_dtype(of_weight, *pass.kept.weight_dtype));
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
  static Tensor forward(AutogradContext* ctx, const Transforms& transforms,
                        const ConvolutionLayer* layer, const Tensor& x,
                        const MaybeTensor& weight, const MaybeTensor& bias) {
    const auto factor = in_autocast(x), other = in_autocast(*weight);
    keep(ctx, c10::make_intrusive<KeptOfProduct>(transforms, *layer, x, layer->geometry),
         {factor, other});
    py::gil_scoped_release others_may_run;
    MaybeTensor added = bias;
    if (bias) added = in_autocast(*bias);
    return layer->geometry->forward(factor, other, added);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    PassageOfProduct pass(ctx, grads[0]);
    const auto& g = pass.g;
    const auto& geometry = *pass.kept.geometry;
    const auto& bias = pass.kept.bias_sizes;
    std::optional<OfLayer> made;
    const auto x = as_dtype(pass.x, g.scalar_type());
    {
      py::gil_scoped_acquire gil;
      pass.x = x;
      made = pass.incoming(pass.kept.weight_numel < g.numel() && !geometry.transposed);
      if (!made) return pass.by_python();
    }
    at::AutoDispatchBelowADInplaceOrView unrecorded;
    const auto weight = as_dtype(pass.weight, g.scalar_type());
    const bool wants_bias = pass.wants(2), of_true_g = made->g.is_same(g);
    Tensor of_x, of_weight, of_bias;
    if (made->weight) {
      of_weight = as_dtype(*made->weight, *pass.kept.weight_dtype);
    } else {  // with it, whatever is to pull back the same
      const bool with_bias = wants_bias && !made->total && (made->serves_bias || of_true_g);
      std::tie(of_x, of_weight, of_bias) =
          geometry.backward(made->g, x, weight, bias,
                            {pass.wants(0) && of_true_g, true, with_bias});
      of_weight = made->scaled(as_dtype(of_weight, *pass.kept.weight_dtype));
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

inline Tensor LinearLayer::with_t(const Transforms& transforms, const Tensor& x) const {
  return Linear::apply(transforms, this, x, weight, bias);
}

inline Tensor ConvolutionLayer::with_t(const Transforms& transforms, const Tensor& x) const {
  return Convolution::apply(transforms, this, x, weight, bias);
}

inline void show_layers(py::module_& module) {
  show_layer<LinearLayer>(module, "Linear");
  show_layer<ConvolutionLayer, std::tuple<Sizes, Sizes, Sizes, bool, Sizes, int64_t>>(
      module, "Convolution");
}

}  // namespace virtualgrad
