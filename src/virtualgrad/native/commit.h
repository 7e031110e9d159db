// The commit of running means on a CPU, of few numbers each, without torch's ops
// (virtualgrad.operators.running).

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "numbers.h"
#include "transform.h"

namespace virtualgrad {

// Whether tensors are ones of few numbers in float32, one behind the other, of the sizes of r.
inline bool are_few(std::initializer_list<const Tensor*> tensors) {
  const auto& r = **tensors.begin();
  return std::all_of(tensors.begin(), tensors.end(), [&r](const Tensor* each) {
    if (!each->defined()) return true;
    if (!Kind::is_plain(*each) || !each->is_cpu() || each->numel() >= FEW) return false;
    return each->scalar_type() == at::kFloat && each->is_contiguous() && each->sizes() == r.sizes();
  });
}

// r <- rho r + w N^2, and f <- s / sqrt(r + eps) if there is a factor.
inline void commit_site(const Tensor& r, const Tensor& norm, const Tensor& factor, Numbers by) {
  auto* const to = r.data_ptr<float>();
  renew(to, to, norm.const_data_ptr<float>(), r.numel(), by);
  r.unsafeGetTensorImpl()->bump_version();
  if (!factor.defined()) return;
  make_factor(factor.data_ptr<float>(), to, r.numel(), by);
  factor.unsafeGetTensorImpl()->bump_version();
}

// The same at each site; false, and nothing was done, where it is torch's ops that are to do it. All of it is kept in float32.
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
  const auto count = means.size();
  TORCH_CHECK(norms.size() == count, "a commit of ", count, " sites got ", norms.size(), " tensors");
  TORCH_CHECK(weights.size() == count, "a commit wants a weight for each site");
  TORCH_CHECK(!factor_of || factors.size() == count, "a commit wants a factor for each site");
  const auto factor_at = [&](size_t site) { return factor_of ? factors[site] : Tensor(); };
  for (size_t site = 0; site < count; ++site) {
    const auto factor = factor_at(site);
    if (!are_few({&means[site], &norms[site], &factor})) return false;
  }
  const auto [s, eps] = factor_of.value_or(std::pair{1.0, 0.0});
  for (size_t site = 0; site < count; ++site) {
    commit_site(means[site], norms[site], factor_at(site), numbers_of(rho, weights[site], eps, s));
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
