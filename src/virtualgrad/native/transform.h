// T of SVGD at a site in the plainest pass of all, the first since a commit, without Python.
//
//     r of before:      f = s / sqrt(r + eps)
//     r updated first:  f = s / sqrt(rho r + w q + eps),      w = (1 - rho) u^2 / e
//
// with q the sum of g^2 (virtualgrad.operators.running). Kernels of a GPU make T(g), or what a weight
// gets (a Recipe); torch's ops make f, by which g is multiplied, or the rows of the gradients, where
// r differs along the channels alone. Python's T has run at the site before, and has left there
// which of it is to be done; what may have changed since is looked at, and if anything has, Python's
// T runs again. It is the oracle, bit for bit.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"
#include "recipes.h"

namespace virtualgrad {

// Incoming of virtualgrad.operators.channels.
struct Incoming {
  Tensor g;
  MaybeTensor rows, total, weight, padded;

  static Incoming of_python(const py::tuple& made) {
    return {made[0].cast<Tensor>(), made[1].cast<MaybeTensor>(), made[2].cast<MaybeTensor>(),
            made[3].cast<MaybeTensor>(), made[4].cast<MaybeTensor>()};
  }

  Tensor scaled(Tensor gradient) const {
    if (!rows.has_value()) return gradient;
    Sizes shape(gradient.dim(), 1);
    shape[0] = -1;
    return at::mul_out(gradient, gradient, rows->view(shape));  // it is nobody else's yet
  }
};

// ------------------------------------------------------------------------- attributes of Python's

// A name, made once.
class Name {
 public:
  explicit Name(const char* text) : name_(PyUnicode_InternFromString(text)) {}

  py::object of(const py::handle& object) const {
    PyObject* found = PyObject_GetAttr(object.ptr(), name_);
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }

  void set(const py::handle& object, const py::handle& value) const {
    if (PyObject_SetAttr(object.ptr(), name_, value.ptr()) != 0) throw py::error_already_set();
  }

 private:
  PyObject* name_;
};

struct Names {
  Name operator_{"operator"}, site{"site"}, current{"current"}, consumed{"consumed"};
  Name sites{"sites"}, kept{"kept"}, key{"key"}, settings{"settings"}, ranks{"ranks"};
  Name plain{"plain"}, norm{"norm"}, compiled{"compiled"}, factor{"factor"};
  Name factor_of{"factor_of"}, rho{"rho"}, loss_scale{"loss_scale"};
  Name elements{"elements"}, samples{"samples"}, stale{"stale"}, uses{"uses"};

  static const Names& get() {
    static const Names names;
    return names;
  }
};

// A number of the user's; none if it is something else, such as a tensor.
inline std::optional<double> number(PyObject* object) {
  if (PyFloat_Check(object)) return PyFloat_AS_DOUBLE(object);
  if (!PyLong_CheckExact(object)) return std::nullopt;
  const double found = PyLong_AsDouble(object);
  if (PyErr_Occurred() == nullptr) return found;
  PyErr_Clear();  // larger than any: Python tells what is wrong with it
  return std::nullopt;
}

// ------------------------------------------------------------------------------------- one tensor

// Shape, strides and dtype of a tensor, on one device.
struct Kind {
  Sizes sizes, strides;
  at::ScalarType dtype;
  at::Device device;

  explicit Kind(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()) {}

  bool is_of(const Tensor& tensor) const {
    return is_plain(tensor) && tensor.scalar_type() == dtype && tensor.device() == device &&
           tensor.sizes() == sizes && tensor.strides() == strides;
  }

  // Whether a tensor is its memory and no more: no subclass, no batch of functorch's, no zeros that
  // are nowhere.
  static bool is_plain(const Tensor& tensor) {
    using at::DispatchKey;
    constexpr at::DispatchKeySet OTHERS(
        {DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
         DispatchKey::Batched, DispatchKey::Functionalize, DispatchKey::Conjugate,
         DispatchKey::Negative, DispatchKey::ZeroTensor});
    return tensor.defined() && tensor.layout() == at::kStrided && !tensor.key_set().has_any(OTHERS);
  }
};

// ------------------------------------------------------------------------------------------ the T

class PlainT {
 public:
  // Args:
  //   of_class: the class of operators that this is the T of: RMS, and no class derived from it.
  //   g: as it was.
  //   r: of the site.
  //   others: tensors that kernels were given beside them, as they were.
  //   window: of a convolution, where kernels were chosen by it: sizes of W, stride, padding and
  //     dilation.
  //   in_rows, wanted: what the layer could use: T as a factor for rows, and a total for its bias,
  //     or all its gradients.
  //   averaged: the axes over which g^2 is averaged.
  //   counts: e and m of one pass.
  //   unit_is_sample, stale: of the operator.
  //   f_for: what f multiplies, "rows" or "g"; none: kernels have it.
  //   beside: the shape in which f stands beside g; none: its own.
  //   recipe: what was launched, if anything; its views are (T(g), N, total, weight, padded).
  //   uses_tf32: whether convolutions may use TF32, as a kernel was chosen by; none: it was not.
  PlainT(py::type of_class, const Tensor& g, Tensor r, const std::vector<Tensor>& others,
         Sizes window, bool in_rows, std::optional<std::string> wanted, Sizes averaged, std::pair<int64_t, int64_t> counts,
         bool unit_is_sample, bool stale, const std::optional<std::string>& f_for,
         std::optional<Sizes> beside, std::shared_ptr<Recipe> recipe,
         std::optional<std::pair<py::object, bool>> uses_tf32)
      : g_(g),
        r_(std::move(r)),
        window_(std::move(window)),
        in_rows_(in_rows),
        wanted_(std::move(wanted)),
        averaged_(std::move(averaged)),
        counts_(std::move(counts)),
        unit_is_sample_(unit_is_sample),
        stale_(stale),
        makes_f_(f_for.has_value()),
        is_rows_(f_for == "rows"),
        beside_(std::move(beside)),
        recipe_(std::move(recipe)),
        uses_tf32_(std::move(uses_tf32)) {
    for (const auto& other : others) others_.emplace_back(other);
    // (Where others watch torch's ops, they are not to see those by which it is asked.)
    if (!recipe_ && c10::impl::TorchDispatchModeTLS::stack_len() == 0) rows_ = few_rows(g);
    sums_ = rows_ && sums_as_torch(g.sizes(), averaged_);
    operators() = of_class.ptr();  // it lives as long as Python does
  }

  // The class of operators for which there may be one; null until there is.
  static PyObject*& operators() {
    static PyObject* found = nullptr;
    return found;
  }

  // T(g), taken in; none where Python is to make it. (The GIL is held.)
  std::optional<Incoming> operator()(const py::object& op, const py::object& site,
                                     const py::object& running, const Tensor& g,
                                     const std::vector<Tensor>& others, const Sizes& window,
                                     bool in_rows,
                                     const std::optional<std::string>& wanted) const {
    const auto& names = Names::get();
    if (in_rows != in_rows_ || wanted != wanted_ || !g_.is_of(g)) return std::nullopt;
    std::vector<Tensor> tensors{g, r_};
    if (others.size() < others_.size()) return std::nullopt;
    if (!others_.empty() && window != window_) return std::nullopt;
    if (names.stale.of(op).cast<bool>() != stale_) return std::nullopt;
    for (size_t other = 0; other < others_.size(); ++other) {
      if (!others_[other].is_of(others[other])) return std::nullopt;
      tensors.push_back(others[other]);
    }
    if (uses_tf32_ && uses_tf32_->first().cast<bool>() != uses_tf32_->second) return std::nullopt;
    if (!stale_ && !names.ranks.of(op).is_none()) return std::nullopt;  // all of them are asked
    const py::tuple given = names.settings.of(op)(site);
    const auto s = number(given[0].ptr()), rho = number(given[1].ptr()),
               eps = number(given[2].ptr());
    const auto loss_scale = names.loss_scale.of(op);
    const auto scaled_by = number(loss_scale.ptr());
    if (!s || !rho || !eps || !scaled_by) return std::nullopt;
    if (recipe_ && !stale_ && *rho == 1) return std::nullopt;  // a kernel of its own
    const auto [elements, samples] = counts_;
    const double unit = (unit_is_sample_ ? static_cast<double>(samples) : 1.0) / *scaled_by;
    const double weight = (1 - *rho) * unit * unit / static_cast<double>(elements);
    if (recipe_ && !recipe_->may_run(tensors)) return std::nullopt;
    Tensor factor;
    if (makes_f_ && stale_) {
      const auto made_of = names.factor_of.of(running);
      if (made_of.is_none()) return std::nullopt;
      const py::tuple of = made_of;
      if (number(of[0].ptr()) != s || number(of[1].ptr()) != eps) return std::nullopt;
      factor = names.factor.of(running).cast<Tensor>();
    }

    Incoming made{g, {}, {}, {}, {}};
    Tensor norm;
    if (recipe_) {
      const auto found = (*recipe_)(std::move(tensors), stale_ ? std::array{1.0, 0.0, *s, *eps}
                                                               : std::array{*rho, weight, *s, *eps});
      made = {found[0].value_or(g), {}, found[2], found[3], found[4]};
      norm = *found[1];
    } else {
      norm = root_of_squares(g);
    }
    if (makes_f_) {
      if (!stale_) factor = factor_of_new_r(norm, *s, *rho, *eps, weight);
      if (is_rows_) {
        made.rows = factor;
      } else {
        made.g = product(g, factor);
      }
    }
    names.rho.set(running, given[1]);
    names.loss_scale.set(running, loss_scale);
    names.elements.set(running, py::int_(elements));
    names.samples.set(running, py::int_(samples));
    names.norm.set(running, py::cast(norm));
    return made;
  }

 private:
  // How many rows g is of, where it is few numbers on a CPU, g^2 is averaged over all axes but the
  // last ones, and torch rounds as numbers.h does; none elsewhere.
  std::optional<int64_t> few_rows(const Tensor& g) const {
    if (!g.is_cpu() || g.scalar_type() != at::kFloat || !g.is_contiguous()) return std::nullopt;
    if (r_.scalar_type() != at::kFloat || !r_.is_contiguous() || !rounds_once()) return std::nullopt;
    int64_t rows = 1;
    for (size_t place = 0; place < averaged_.size(); ++place) {
      if (averaged_[place] != static_cast<int64_t>(place)) return std::nullopt;
      rows *= g.size(averaged_[place]);
    }
    if (rows * r_.numel() != g.numel() || g.numel() >= FEW) return std::nullopt;
    return rows;
  }

  // As in virtualgrad.operators.rms and .statistic.
  Tensor product(const Tensor& g, const Tensor& factor) const {
    if (rows_ && factor.is_contiguous() && factor.scalar_type() == at::kFloat) {
      auto out = at::empty_like(g);
      multiply_rows(out.data_ptr<float>(), g.const_data_ptr<float>(),
                    factor.const_data_ptr<float>(), *rows_, factor.numel());
      return out;
    }
    const auto beside = beside_ ? factor.view(*beside_) : factor;
    if (factor.scalar_type() == g.scalar_type()) return at::mul(g, beside);
    auto out = at::empty_like(g);
    return at::mul_out(out, g, beside);
  }

  Tensor factor_of_new_r(const Tensor& norm, double s, double rho, double eps,
                         double weight) const {
    if (rows_) {
      auto made = at::empty_like(norm);
      auto* const f = made.data_ptr<float>();
      const Numbers by{static_cast<float>(rho), static_cast<float>(weight),
                       static_cast<float>(eps), static_cast<float>(s)};
      const auto* const r = r_.const_data_ptr<float>();
      renew(f, r, norm.const_data_ptr<float>(), norm.numel(), by);
      make_factor(f, f, norm.numel(), by);
      return made;
    }
    auto made = at::mul(r_, rho).addcmul_(norm, norm, weight).add_(eps).rsqrt_();
    return s == 1 ? made : made.mul_(s);
  }

  Tensor root_of_squares(const Tensor& g) const {
    if (sums_) {
      auto made = at::empty(r_.sizes(), r_.options());
      sum_squares_of_columns(made.data_ptr<float>(), g.const_data_ptr<float>(), *rows_,
                             made.numel());
      return made.sqrt_();
    }
    if (g.is_cpu()) return g.square().sum(averaged_).sqrt_();
    return at::linalg_vector_norm(g, 2, averaged_, false, r_.scalar_type());
  }

  Kind g_;
  Tensor r_;
  std::vector<Kind> others_;
  Sizes window_;
  bool in_rows_;
  std::optional<std::string> wanted_;
  Sizes averaged_;
  std::pair<int64_t, int64_t> counts_;
  bool unit_is_sample_, stale_, makes_f_, is_rows_;
  std::optional<Sizes> beside_;
  std::optional<int64_t> rows_;
  bool sums_ = false;  // as torch does
  std::shared_ptr<Recipe> recipe_;
  std::optional<std::pair<py::object, bool>> uses_tf32_;
};

// The T of a pass at a layer's weight, and whether it serves the bias, too.
struct Asked {
  py::object op, site, current;
  bool serves_bias;
};

// What a layer is to pull back for g, if there is a T for it here; others: what kernels may want
// beside g. (The GIL is held.)
inline std::optional<Incoming> plain_incoming(const Asked& by, const Tensor& g,
                                              const std::vector<Tensor>& others,
                                              const Sizes& window, bool in_rows,
                                              const std::optional<std::string>& wanted) {
  const auto& names = Names::get();
  const auto& [op, site, current, _] = by;
  if (reinterpret_cast<PyObject*>(Py_TYPE(op.ptr())) != PlainT::operators()) return std::nullopt;
  // Where others watch torch's ops, they see those of Python's T.
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) return std::nullopt;
  const auto kept = names.kept.of(names.sites.of(op));
  const auto running = py::reinterpret_borrow<py::object>(
      PyDict_GetItem(kept.ptr(), names.key.of(site).ptr()));
  if (!running || !names.site.of(running).is(site)) return std::nullopt;
  const auto plain = names.plain.of(running);
  if (plain.is_none() || !names.norm.of(running).is_none()) return std::nullopt;
  if (!names.compiled.of(running).is_none()) return std::nullopt;
  if (names.elements.of(running).cast<int64_t>() != 0) return std::nullopt;
  names.consumed.set(current, py::bool_(true));  // also if this fails
  at::AutoDispatchBelowADInplaceOrView unrecorded;
  return plain.cast<const PlainT&>()(op, site, running, g, others, window, in_rows, wanted);
}

inline void show_transform(py::module_& module) {
  py::class_<PlainT>(module, "PlainT")
      .def(py::init<py::type, const Tensor&, Tensor, const std::vector<Tensor>&, Sizes, bool,
                    std::optional<std::string>, Sizes, std::pair<int64_t, int64_t>, bool, bool,
                    const std::optional<std::string>&, std::optional<Sizes>,
                    std::shared_ptr<Recipe>, std::optional<std::pair<py::object, bool>>>(),
           py::kw_only(), py::arg("of_class"), py::arg("g"), py::arg("r"), py::arg("others"),
           py::arg("window"),
           py::arg("in_rows"), py::arg("wanted"), py::arg("averaged"), py::arg("counts"),
           py::arg("unit_is_sample"), py::arg("stale"), py::arg("f_for"), py::arg("beside"),
           py::arg("recipe"), py::arg("uses_tf32"))
      // A copy of an operator, or a pickled one, has none: it is found again.
      .def("__reduce__", [](const py::object&) {
        return py::make_tuple(py::type::of(py::none()), py::tuple());
      });
}

}  // namespace virtualgrad
