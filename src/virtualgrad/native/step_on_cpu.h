// A whole step on a CPU, to the bits of Python's (virtualgrad.optim.native_steps).

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>

#include "commit.h"
#include "descent.h"
#include "finite.h"
#include "steps.h"

namespace virtualgrad {

// Whether what compiled passes have made of r can be taken as it lies in memory; not where they keep
// a sum of g as well.
inline bool can_take(const Traced& each) {
  const auto &r = each.r, &candidate = each.candidate;
  if (!StepNames::get().gradient.of(each.compiled).is_none()) return false;
  return Kind::is_plain(r) && Kind(r).is_of(candidate) && r.is_cpu() &&
         r.is_non_overlapping_and_dense() && Kind::is_plain(each.counts) &&
         each.counts.is_contiguous();
}

// r <- candidate, and compiled passes count anew.
inline void take(const Traced& each) {
  std::memcpy(each.r.data_ptr(), each.candidate.const_data_ptr(), each.r.nbytes());
  std::memset(each.counts.data_ptr(), 0, each.counts.nbytes());
  for (const auto* tensor : {&each.r, &each.counts}) tensor->unsafeGetTensorImpl()->bump_version();
}

// Make a step: look at all that is not to be a NaN or infinite, descend, and commit. Nothing was
// done if it is not true: then it is Python's, which also tells what is not finite.
//
// Args:
//   groups, kept, types: as gather wants them.
//   looks: whether anybody looks.
inline bool step_on_cpu(const py::iterable& groups, const py::dict& kept, const py::tuple& types,
                        bool looks) {
  const auto adding = adds_as_torch();
  if (!adding || !rounds_once()) return false;
  const auto work = gather(groups, kept, types, at::kCPU);
  if (!work) return false;
  for (const auto& each : work->descents) {
    for (size_t place = 0; place < each.params.size(); ++place) {
      if (!can_descend(each.params[place], each.grads[place])) return false;
    }
  }
  if (!std::all_of(work->traced.begin(), work->traced.end(), can_take)) return false;
  for (const auto& each : work->sites) {
    if (!are_few({&each.r, &each.norm, &each.factor})) return false;
  }
  {
    py::gil_scoped_release others_may_run;
    const at::AutoDispatchBelowADInplaceOrView unrecorded;
    if (looks) {
      const auto some = work->looked_at();
      const auto is_finite = [](const Tensor& each) {
        return is_finite_on_cpu(each).value_or(false);
      };
      if (!std::all_of(some.begin(), some.end(), is_finite)) return false;
    }
    for (const auto& each : work->descents) {
      for (size_t place = 0; place < each.params.size(); ++place) {
        descend(each.params[place], each.grads[place], each.by, *adding);
      }
    }
    for (const auto& each : work->sites) {
      commit_site(each.r, each.norm, each.factor,
                  numbers_of(each.rho, each.weight, each.eps, each.s));
    }
    std::for_each(work->traced.begin(), work->traced.end(), take);
  }
  note_commit(*work);
  for (const auto& each : work->traced) {
    StepNames::get().is_written.set(each.compiled, py::bool_(false));
  }
  return true;
}

inline void show_steps(py::module_& module) {
  module.def("step_on_cpu", &step_on_cpu);
  module.def("forget_gradients", &forget_gradients);
  module.def("adds_as_torch", [] { return adds_as_torch().has_value(); });
}

}  // namespace virtualgrad
