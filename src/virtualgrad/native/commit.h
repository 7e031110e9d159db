// The commit of running means on a CPU, of few numbers each, without torch's ops
// (virtualgrad.operators.running).

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "numbers.h"
#include "transform.h"

namespace virtualgrad {

// r <- rho r + w N^2 at each site, and f <- s / sqrt(r + eps) where T goes by that; false, and
// nothing was done, where it is torch's ops that are to do it. All of it is kept in float32.
//
// Args:
//   means, norms, weights: r, N and w of each site.
//   rho: of all of them.
//   factors: f of each; none of them is one for all.
//   factor_of: s and eps, where there are factors.
inline bool commit(const std::vector<Tensor>& means, const std::vector<Tensor>& norms,
                   const std::vector<double>& weights, double rho,
                   const std::vector<Tensor>& factors,
                   const std::optional<std::pair<double, double>>& factor_of) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || !rounds_once()) return false;
  const auto are_ours = [&](const std::vector<Tensor>& tensors) {
    TORCH_CHECK(tensors.size() == means.size(), "a commit of ", means.size(), " sites got ",
                tensors.size(), " tensors");
    for (size_t site = 0; site < tensors.size(); ++site) {
      const auto& each = tensors[site];
      if (!Kind::is_plain(each) || !each.is_cpu() || each.numel() >= FEW) return false;
      if (each.scalar_type() != at::kFloat || !each.is_contiguous()) return false;
      if (each.sizes() != means[site].sizes()) return false;
    }
    return true;
  };
  if (!are_ours(means) || !are_ours(norms) || (factor_of && !are_ours(factors))) return false;
  TORCH_CHECK(weights.size() == means.size(), "a commit wants a weight for each site");
  const auto [s, eps] = factor_of.value_or(std::pair{1.0, 0.0});
  for (size_t site = 0; site < means.size(); ++site) {
    const Numbers by{static_cast<float>(rho), static_cast<float>(weights[site]),
                     static_cast<float>(eps), static_cast<float>(s)};
    const auto size = means[site].numel();
    auto* const r = means[site].data_ptr<float>();
    renew(r, r, norms[site].const_data_ptr<float>(), size, by);
    means[site].unsafeGetTensorImpl()->bump_version();
    if (!factor_of) continue;
    make_factor(factors[site].data_ptr<float>(), r, size, by);
    factors[site].unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

inline void show_commit(py::module_& module) {
  module.def("commit", &commit);
  module.def("rounds_once", &rounds_once);
  module.def("sums_as_torch", [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& axes) {
    return sums_as_torch(sizes, axes);
  });
}

}  // namespace virtualgrad
