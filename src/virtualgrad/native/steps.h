// What the plainest step of all is about to read and to write, gathered without Python.
//
//   theta <- theta - lr v,      r <- rho r + w N^2,      f <- s / sqrt(r + eps)
//
// v lies in .grad of each parameter, N and what w is made of at each site that a backward pass has
// reached (virtualgrad.operators.running). Where compiled passes come by, they have written the new
// r themselves, beside the old one, and count. Momentum, weight decay, a tensor for lr, and all else
// that is not plain, are Python's.

#pragma once

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "transform.h"

namespace virtualgrad {

// The parameters of a group that have a gradient.
struct Descent {
  py::dict group;
  py::list owners;  // the parameters, as Python has them
  std::vector<Tensor> params, grads;
  double by;  // -lr
};

// A site that was reached.
struct Reached {
  py::object running;
  Tensor r, norm, factor;  // no factor where T does not go by it
  double rho, weight, s, eps;

  // Whether one launch can serve two of them.
  bool is_like(const Reached& other) const {
    return rho == other.rho && factor.defined() == other.factor.defined() && s == other.s &&
           eps == other.eps;
  }
};

// A site where compiled passes come by.
struct Traced {
  py::object running, compiled;
  Tensor r, candidate, counts;
};

struct Work {
  std::vector<Descent> descents;
  std::vector<Reached> sites;
  std::vector<Traced> traced;
  std::vector<Tensor> witnesses, counts;  // what sites have seen, and what compiled passes count
  py::list keys, counting;                // of the sites of both

  // All that must be finite: gradients, and those.
  std::vector<Tensor> looked_at() const {
    std::vector<Tensor> found;
    for (const auto& each : descents) {
      found.insert(found.end(), each.grads.begin(), each.grads.end());
    }
    found.insert(found.end(), witnesses.begin(), witnesses.end());
    found.insert(found.end(), counts.begin(), counts.end());
    return found;
  }
};

struct StepNames {
  Name params{"params"}, lr{"lr"}, momentum{"momentum"}, weight_decay{"weight_decay"};
  Name gradient{"gradient"}, r{"r"}, unit_is_sample{"unit_is_sample"}, committed{"committed"};
  Name candidate{"candidate"}, counts{"counts"}, is_written{"is_written"};

  static const StepNames& get() {
    static const StepNames names;
    return names;
  }
};

// Whether somebody watches what torch does: then it is Python that does it.
inline bool is_watched() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         at::impl::PythonTorchFunctionTLS::stack_len() > 0;
}

// Whether a number is one in float32, too; of others torch tells what is wrong with them.
inline bool fits(double number) {
  return std::abs(number) <= static_cast<double>(std::numeric_limits<float>::max());
}

// Whether a parameter is of a plain class (types): others may want to know what is done to them.
inline bool is_of(const py::handle& owner, const py::tuple& types) {
  return std::any_of(types.begin(), types.end(), [&owner](const auto& type) {
    return reinterpret_cast<PyObject*>(Py_TYPE(owner.ptr())) == type.ptr();
  });
}

// Let go of all gradients; false, and none is gone, where that is Python's.
inline bool forget_gradients(const py::iterable& groups, const py::tuple& types) {
  if (is_watched()) return false;
  std::vector<Tensor> params;
  for (const auto& group : groups) {
    for (const auto& owner : group["params"].cast<py::list>()) {
      if (!is_of(owner, types)) return false;
      params.push_back(THPVariable_Unpack(owner.ptr()));
    }
  }
  for (const auto& each : params) each.mutable_grad().reset();
  return true;
}

// The parameters of a group; none where it wants more than descent, or they are of other classes
// than plain ones (types), or elsewhere.
inline std::optional<Descent> descent_of(const py::dict& group, const py::tuple& types,
                                         at::DeviceType device) {
  const auto number_at = [&group](const char* name) { return number(group[name].ptr()); };
  const auto lr = number_at("lr");
  if (!lr || !fits(*lr) || number_at("momentum") != 0.0 || number_at("weight_decay") != 0.0) return std::nullopt;
  const bool is_whole = PyLong_Check(group["lr"].ptr());  // of which there is no -0
  Descent found{group, py::list(), {}, {}, is_whole ? 0.0 - *lr : -*lr};
  for (const auto& owner : group["params"].cast<py::list>()) {
    if (!is_of(owner, types)) return std::nullopt;
    const auto& parameter = THPVariable_Unpack(owner.ptr());
    if (parameter.device().type() != device) return std::nullopt;
    const auto& grad = parameter.grad();
    if (!grad.defined()) continue;
    if (!Kind::is_plain(parameter) || !Kind::is_plain(grad)) return std::nullopt;
    found.owners.append(owner);
    found.params.push_back(parameter);
    found.grads.push_back(grad);
  }
  return found;
}

inline const Tensor& tensor_of(const Name& name, const py::object& object) {
  return THPVariable_Unpack(name.of(object).ptr());
}

// A site by what is kept of it; not if it has more than a plain pass leaves there.
inline std::optional<Reached> reached(const py::object& running, int64_t elements) {
  const auto &names = Names::get();
  const auto &more = StepNames::get();
  const auto norm = names.norm.of(running), factor_of = names.factor_of.of(running);
  if (norm.is_none() || !more.gradient.of(running).is_none()) return std::nullopt;
  const auto rho = number(names.rho.of(running).ptr());
  const auto loss_scale = number(names.loss_scale.of(running).ptr());
  if (!rho || !loss_scale) return std::nullopt;
  Reached found{running, tensor_of(more.r, running), tensor_of(names.norm, running),
                Tensor(), *rho, 0, 1, 0};
  const bool is_sample = more.unit_is_sample.of(running).cast<bool>();
  const double units = is_sample ? names.samples.of(running).cast<double>() : 1;
  const double unit = units / *loss_scale;
  found.weight = (1 - *rho) * unit * unit / static_cast<double>(std::max<int64_t>(elements, 1));
  if (!factor_of.is_none()) {
    const auto numbers = factor_of.cast<py::tuple>();
    const auto s = number(numbers[0].ptr()), eps = number(numbers[1].ptr());
    if (!s || !eps || !fits(*s) || !fits(*eps)) return std::nullopt;
    found.factor = tensor_of(names.factor, running);
    found.s = *s;
    found.eps = *eps;
  }
  for (const auto* each : {&found.r, &found.norm, &found.factor}) {
    if (each->defined() && !Kind::is_plain(*each)) return std::nullopt;
  }
  return found;
}

// All of a step; none where a part of it is Python's.
//
// Args:
//   groups: of parameters.
//   kept: of each site, by its key.
//   types: plain classes of parameters.
//   device: where they are to be.
inline std::optional<Work> gather(const py::iterable& groups, const py::dict& kept,
                                  const py::tuple& types, at::DeviceType device) {
  if (is_watched()) return std::nullopt;
  Work work;
  for (const auto& group : groups) {
    auto found = descent_of(group.cast<py::dict>(), types, device);
    if (!found) return std::nullopt;
    if (!found->params.empty()) work.descents.push_back(std::move(*found));
  }
  const auto &names = Names::get();
  const auto &more = StepNames::get();
  for (const auto& [key, each] : kept) {
    const auto running = py::reinterpret_borrow<py::object>(each);
    const auto elements = names.elements.of(running).cast<int64_t>();
    if (const auto compiled = names.compiled.of(running); !compiled.is_none()) {
      if (elements != 0) return std::nullopt;
      work.traced.push_back({running, compiled, tensor_of(more.r, compiled),
                             tensor_of(more.candidate, compiled),
                             tensor_of(more.counts, compiled)});
      work.witnesses.push_back(work.traced.back().candidate);
      work.counts.push_back(work.traced.back().counts);
      work.keys.append(key);
      work.counting.append(key);
      continue;
    }
    if (elements == 0) {
      if (!names.norm.of(running).is_none()) return std::nullopt;  // of an empty batch
      continue;
    }
    auto found = reached(running, elements);
    if (!found) return std::nullopt;
    work.witnesses.push_back(found->norm);
    work.sites.push_back(std::move(*found));
    work.keys.append(key);
  }
  return work;
}

// Note that the sites are committed; those that were not before.
inline py::list note_commit(const Work& work) {
  const auto &names = Names::get();
  const auto &more = StepNames::get();
  const py::int_ zero(0);
  py::list fresh;
  const auto note = [&](const py::object& running) {
    if (more.committed.of(running).cast<bool>()) return;
    fresh.append(running);
    more.committed.set(running, py::bool_(true));
  };
  for (const auto& each : work.traced) note(each.running);
  for (const auto& each : work.sites) {
    note(each.running);
    names.norm.set(each.running, py::none());
    names.elements.set(each.running, zero);
    names.samples.set(each.running, zero);
  }
  return fresh;
}

}  // namespace virtualgrad
