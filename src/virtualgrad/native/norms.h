// Encapsulation 1 in C++: a batch norm and a layer norm as nodes of autograd's graph.
//
//     sigma = w x^ + b,  x^ the normalized x;      g to x,   T(g) to w and b
//
// They do what virtualgrad.virtual.norms.BatchNorm and .layer_norms.LayerNorm do (nodes.h).
//
// Layout of this file: what both pull back, the two norms, what Python gets of them.

#pragma once

#include "nodes.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

namespace virtualgrad {

using Mask = std::array<bool, 3>;  // x, w and b
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

inline Tensor or_undefined(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

inline MaybeTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

// The gradients of x, w and b in the plainest pass: of g, or of T(g), as each of them gets it. What
// pulls back the same does so in one call of backward: (what is pulled back, mask) -> Gradients.
template <typename Kind, typename Backward>
Gradients pulled_back(const Passage<Kind>& pass, OfLayer made, const Backward& backward) {
  at::AutoDispatchBelowADInplaceOrView unrecorded;
  const bool wants_x = pass.wants(0), wants_bias = pass.wants(2);
  const bool of_true_g = made.g.is_same(pass.g), with_x = wants_x && of_true_g;
  const bool with_bias = wants_bias && (made.serves_bias || of_true_g);
  auto [of_x, of_weight, of_bias] = backward(made.g, Mask{with_x, true, with_bias});
  of_weight = made.scaled(of_weight);
  if (with_bias && made.serves_bias) of_bias = made.scaled(of_bias);
  made.g.reset();  // T(g), before more is made
  if (wants_x != with_x || wants_bias != with_bias) {
    const Mask others{wants_x && !with_x, false, wants_bias && !with_bias};
    const auto found = backward(pass.g, others);
    if (others[0]) of_x = std::get<0>(found);
    if (others[2]) of_bias = std::get<2>(found);
  }
  return {of_x, of_weight, of_bias};
}

// ------------------------------------------------------------------------------------ batch norm

struct BatchNormLayer : Layer {
  MaybeTensor running_mean, running_var;
  bool training;
  double momentum, eps;

  BatchNormLayer(MaybeTensor weight, MaybeTensor bias, py::object python, py::object incoming,
                 py::object by_python, MaybeTensor running_mean, MaybeTensor running_var,
                 bool training, double momentum, double eps)
      : Layer(std::move(weight), std::move(bias), std::move(python), std::move(incoming),
              std::move(by_python)),
        running_mean(std::move(running_mean)),
        running_var(std::move(running_var)),
        training(training),
        momentum(momentum),
        eps(eps) {}

  Tensor with_t(const Transforms& transforms, const Tensor& x) const override;
  Tensor without_t(const Tensor& x) const override {
    return at::batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps,
                          at::globalContext().userEnabledCuDNN());
  }
};

struct KeptOfBatchNorm : Kept {
  int64_t kernel;  // which of torch's own has run
  bool training;
  double eps;

  KeptOfBatchNorm(const Transforms& transforms, const BatchNormLayer& layer, const Tensor& x,
                  int64_t kernel)
      : Kept(transforms, layer, x), kernel(kernel), training(layer.training), eps(layer.eps) {}
};

struct BatchNorm : Function<BatchNorm> {
  static Tensor forward(AutogradContext* ctx, const Transforms& transforms,
                        const BatchNormLayer* layer, const Tensor& x,
                        const MaybeTensor& weight, const MaybeTensor& bias) {
    const auto [sigma, mean, deviation, reserve, kernel] = [&] {
      py::gil_scoped_release others_may_run;
      return at::_batch_norm_impl_index(x, weight, bias, layer->running_mean, layer->running_var,
                                        layer->training, layer->momentum, layer->eps,
                                        at::globalContext().userEnabledCuDNN());
    }();
    keep(ctx, c10::make_intrusive<KeptOfBatchNorm>(transforms, *layer, x, kernel),
         {x, or_undefined(weight), or_undefined(layer->running_mean),
          or_undefined(layer->running_var), mean, deviation, reserve});
    return sigma;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    const Passage<KeptOfBatchNorm> pass(ctx, grads[0]);
    const auto& kept = pass.kept;
    const auto& saved = pass.saved;
    const auto &x = saved[0], &weight = saved[1];
    std::optional<OfLayer> incoming;
    {
      py::gil_scoped_acquire gil;
      const auto by = pass.asked();
      if (!by) return pass.by_python(kept.kernel);
      const auto others = for_kernels(pass, by->serves_bias);
      std::optional<std::string> wanted;
      if (!others.empty()) wanted = pass.wants(0) ? "all" : "all but x";
      incoming = pass.plain(*by, others, true, wanted);
      if (!incoming && !others.empty() && x.is_cuda()) {  // kernels read g as x lies
        if (const auto g = laid_out_as(x, pass.g)) {
          incoming = pass.plain(*by, others, true, wanted, {}, *g);
        }
      }
      if (!incoming) {
        const py::tuple made = kept.incoming(pass.transform(), pass.g, others, wanted);
        incoming = OfLayer{Incoming::of_python(made), by->serves_bias};
      }
    }
    if (incoming->weight) {  // all at once, by kernels of our own
      return in_places(pass.wants(0) ? incoming->g : Tensor(),
                       as_dtype(*incoming->weight, weight.scalar_type()),
                       as_dtype(*incoming->total, weight.scalar_type()));
    }
    const auto torchs_own = [&](const Tensor& g, Mask mask) {
      return at::_batch_norm_impl_index_backward(
          kept.kernel, x, g, if_defined(weight), if_defined(saved[2]), if_defined(saved[3]),
          saved[4], saved[5], kept.training, kept.eps, mask, saved[6]);
    };
    const auto [of_x, of_weight, of_bias] = pulled_back(pass, *std::move(incoming), torchs_own);
    return in_places(of_x, of_weight, of_bias);
  }

  // The numbers of each sample of g as those of x lie in memory; none if they do so already.
  static MaybeTensor laid_out_as(const Tensor& x, const Tensor& g) {
    if (!virtualgrad::Kind::is_plain(x) || !virtualgrad::Kind::is_plain(g)) return std::nullopt;
    for (int64_t axis = 1; axis < g.dim(); ++axis) {
      if (g.size(axis) > 1 && g.stride(axis) != x.stride(axis)) {
        return at::empty_like(x, g.options()).copy_(g);
      }
    }
    return std::nullopt;
  }

  // What kernels of our own take behind g: the fields of a Norm. Nothing where they do not know the
  // pass: whatever else torch may have run (MIOpen, say) keeps other things.
  static std::vector<Tensor> for_kernels(const Passage<KeptOfBatchNorm>& pass, bool serves_bias) {
    const auto& kept = pass.kept;
    const bool is_known = kept.training && (kept.kernel == 0 || kept.kernel == 1);
    if (!is_known || !serves_bias || !pass.wants(2)) return {};
    return {pass.saved[0], pass.saved[4], pass.saved[5], pass.saved[1]};
  }
};

// ------------------------------------------------------------------------------------ layer norm

struct LayerNormLayer : Layer {
  Sizes shape;
  double eps;

  LayerNormLayer(MaybeTensor weight, MaybeTensor bias, py::object python, py::object incoming,
                 py::object by_python, Sizes shape, double eps)
      : Layer(std::move(weight), std::move(bias), std::move(python), std::move(incoming),
              std::move(by_python)),
        shape(std::move(shape)),
        eps(eps) {}

  Tensor with_t(const Transforms& transforms, const Tensor& x) const override;
  Tensor without_t(const Tensor& x) const override {
    return at::layer_norm(x, shape, weight, bias, eps, at::globalContext().userEnabledCuDNN());
  }
};

struct KeptOfLayerNorm : Kept {
  Sizes shape;

  KeptOfLayerNorm(const Transforms& transforms, const LayerNormLayer& layer, const Tensor& x)
      : Kept(transforms, layer, x), shape(layer.shape) {}
};

struct LayerNorm : Function<LayerNorm> {
  static Tensor forward(AutogradContext* ctx, const Transforms& transforms,
                        const LayerNormLayer* layer, const Tensor& x,
                        const MaybeTensor& weight, const MaybeTensor& bias) {
    auto kept = c10::make_intrusive<KeptOfLayerNorm>(transforms, *layer, x);
    py::gil_scoped_release others_may_run;
    auto input = x;
    auto scale = weight, shift = bias;
    if (is_run_in_float32(x.device().type())) {
      input = in_float32(x);
      if (weight) scale = in_float32(*weight);
      if (bias) shift = in_float32(*bias);
    }
    const auto [sigma, mean, deviation] =
        at::native_layer_norm(input, layer->shape, scale, shift, layer->eps);
    keep(ctx, std::move(kept), {input, or_undefined(scale), or_undefined(shift), mean, deviation});
    return sigma;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return in_places({}, {}, {});
    const Passage<KeptOfLayerNorm> pass(ctx, grads[0]);
    const auto& kept = pass.kept;
    const auto& saved = pass.saved;
    std::optional<OfLayer> incoming;
    {
      py::gil_scoped_acquire gil;
      const auto by = pass.asked();
      if (!by) {
        return pass.by_python(py::make_tuple(kept.x_dtype, kept.weight_dtype, kept.bias_dtype));
      }
      incoming = pass.plain(*by, {}, kept.shape.size() == 1, std::nullopt);
      if (!incoming) {
        const py::tuple made = kept.incoming(pass.transform(), pass.g);
        incoming = OfLayer{Incoming::of_python(made), by->serves_bias};
      }
    }
    const auto torchs_own = [&](const Tensor& g, Mask mask) {
      return at::native_layer_norm_backward(g, saved[0], kept.shape, saved[3], saved[4],
                                            if_defined(saved[1]), if_defined(saved[2]), mask);
    };
    auto [of_x, of_weight, of_bias] = pulled_back(pass, *std::move(incoming), torchs_own);
    if (of_x.defined()) of_x = as_dtype(of_x, kept.x_dtype);
    if (of_bias.defined()) of_bias = as_dtype(of_bias, *kept.bias_dtype);
    return in_places(of_x, as_dtype(of_weight, *kept.weight_dtype), of_bias);
  }

  // Whether autocast runs a layer norm in float32 now: on a CPU it leaves it as it is.
  static bool is_run_in_float32(at::DeviceType device) {
    if (!is_in_autocast(device)) return false;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::layer_norm", "");
    return op.hasKernelForDispatchKey(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
  }

  static Tensor in_float32(const Tensor& tensor) {
    return is_cast_by_autocast(tensor.scalar_type()) ? as_dtype(tensor, at::kFloat) : tensor;
  }
};

inline Tensor BatchNormLayer::with_t(const Transforms& transforms, const Tensor& x) const {
  return BatchNorm::apply(transforms, this, x, weight, bias);
}

inline Tensor LayerNormLayer::with_t(const Transforms& transforms, const Tensor& x) const {
  return LayerNorm::apply(transforms, this, x, weight, bias);
}

inline void show_norms(py::module_& module) {
  show_layer<BatchNormLayer, MaybeTensor, MaybeTensor, bool, double, double>(
      module, "BatchNorm");
  show_layer<LayerNormLayer, Sizes, double>(module, "LayerNorm");
}

}  // namespace virtualgrad
