// A whole step that a GPU makes only if all its numbers are finite, without Python
// (virtualgrad.operators.guard): addresses are written down, and kernels launched that Triton has
// compiled.
//
// What is launched hangs on how the tensors of a step are laid out. For a layout that is new, Python
// makes the step, and tells what it has launched; then C++ does that again, with the addresses and
// numbers of another step. No kernel is known here but by the order of its arguments.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "addresses.h"
#include "launches.h"
#include "steps.h"

namespace virtualgrad {

// What a kernel walks over (Table of virtualgrad.operators.walks): the kernel, sizes, parts, like,
// and where its addresses begin.
using Walked = std::tuple<std::shared_ptr<Kernel>, Tensor, Tensor, Tensor, int64_t>;

class GuardedSteps {
 public:
  explicit GuardedSteps(py::tuple types) : types_(std::move(types)) {}

  // Make a step, or none where it is Python's: (groups and those of their parameters that had a
  // gradient, keys of the sites that were reached, and of those that count, sites that had no r
  // before, what compiled passes keep, how many tensors were looked at).
  //
  // Args:
  //   groups, kept: as gather wants them.
  //   staged, sent: room for addresses on the host and on the device.
  //   flag, answer, number: of the step (Guard).
  //   stream: of the device.
  std::optional<py::tuple> step(const py::iterable& groups, const py::dict& kept, const Tensor& staged,
                                const Tensor& sent, const Tensor& flag, const Tensor& answer,
                                double number, uintptr_t stream) {
    pending_.reset();
    if (!Driver::get().launch || !Driver::get().has_context()) return std::nullopt;
    const auto work = gather(groups, kept, types_, at::kCUDA);
    if (!work || work->descents.empty()) return std::nullopt;
    auto written = write(*work, staged);
    if (!written) return std::nullopt;
    const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& plan) {
      return plan.layout == written->layout;
    });
    if (found == plans_.end()) {
      pending_ = std::move(written);
      return std::nullopt;
    }
    if (answer.numel() <= written->looked_at) return std::nullopt;
    std::rotate(plans_.begin(), found, found + 1);  // what is used is found first
    launch(plans_.front(), *work, *written, {staged, sent, flag, answer, number, stream});
    py::list owners;
    for (const auto& each : work->descents) owners.append(py::make_tuple(each.group, each.owners));
    auto fresh = note_commit(*work);
    py::list compiled;
    for (const auto& each : work->traced) compiled.append(each.compiled);
    return py::make_tuple(owners, work->keys, work->counting, fresh, compiled, written->looked_at);
  }

  // Be told what Python has launched in the step that was asked for last, in its order: the look,
  // the descents, the new r of sites that are alike, and what compiled passes have made of r.
  void learn(std::vector<Walked> walked, bool is_small) {
    auto pending = std::exchange(pending_, std::nullopt);
    if (!pending || walked.size() != pending->begins.size()) return;
    for (size_t place = 0; place < walked.size(); ++place) {
      if (std::get<4>(walked[place]) != pending->begins[place]) return;  // in another order
    }
    if (plans_.size() >= MOST_KEPT) plans_.pop_back();
    plans_.insert(plans_.begin(), {std::move(pending->layout), std::move(walked), is_small});
  }

 private:
  static constexpr size_t MOST_KEPT = 64;  // layouts of steps: those of one kind have one

  // Where addresses were written, and how their tensors are laid out.
  struct Written {
    std::string layout;
    std::vector<int64_t> begins;           // of each table: the look, descents, sites, traced
    std::vector<std::vector<size_t>> alike;  // sites that one launch serves
    int64_t length = 0, looked_at = 0;
  };

  struct Plan {
    std::string layout;
    std::vector<Walked> walked;
    bool is_small;  // kernels may read addresses from the host
  };

  struct Given {
    const Tensor &staged, &sent, &flag, &answer;
    double number;
    uintptr_t stream;
  };

  // Sites that one launch can serve, in the order of Python's step.
  static std::vector<std::vector<size_t>> sorted(const std::vector<Reached>& sites) {
    std::vector<std::vector<size_t>> alike;
    for (size_t place = 0; place < sites.size(); ++place) {
      const auto found = std::find_if(alike.begin(), alike.end(), [&](const auto& some) {
        return sites[place].is_like(sites[some.front()]);
      });
      if (found == alike.end()) {
        alike.push_back({place});
      } else {
        found->push_back(place);
      }
    }
    return alike;
  }

  std::optional<Written> write(const Work& work, const Tensor& staged) const {
    Written written;
    written.alike = sorted(work.sites);
    AddressBook book(staged);
    std::vector<int64_t> of_sites, of_descents;
    for (const auto& some : written.alike) {
      of_sites.push_back(book.length());
      const auto add_all = [&](const auto& member) {
        return std::all_of(some.begin(), some.end(), [&](size_t place) {
          return book.add(work.sites[place].*member);
        });
      };
      if (!add_all(&Reached::r) || !add_all(&Reached::norm)) return std::nullopt;
      const bool has_factors = work.sites[some.front()].factor.defined();
      if (has_factors && !add_all(&Reached::factor)) return std::nullopt;
      if (!add_all(&Reached::weight)) return std::nullopt;
    }
    const auto of_traced = book.length();
    for (const auto tensor : {&Traced::r, &Traced::candidate}) {
      for (const auto& each : work.traced) {
        if (!book.add(each.*tensor)) return std::nullopt;
      }
    }
    const auto add = [&book](const Tensor& each) { return book.add(each); };
    for (const auto& each : work.descents) {
      of_descents.push_back(book.length());
      if (!std::all_of(each.params.begin(), each.params.end(), add)) return std::nullopt;
      if (!std::all_of(each.grads.begin(), each.grads.end(), add)) return std::nullopt;
    }
    written.begins = {book.length()};
    const auto looked_at = work.looked_at();
    written.looked_at = static_cast<int64_t>(looked_at.size());
    if (!std::all_of(looked_at.begin(), looked_at.end(), add)) return std::nullopt;
    written.begins.insert(written.begins.end(), of_descents.begin(), of_descents.end());
    written.begins.insert(written.begins.end(), of_sites.begin(), of_sites.end());
    if (!work.traced.empty()) written.begins.push_back(of_traced);
    written.length = book.length();
    written.layout = book.layout();
    for (const auto begin : written.begins) {  // who has how many
      written.layout.append(reinterpret_cast<const char*>(&begin), sizeof begin);
    }
    return written;
  }

  static void launch(const Plan& plan, const Work& work, const Written& written, const Given& given) {
    py::gil_scoped_release others_may_run;  // the driver waits where its queue is full
    if (!plan.is_small) {
      const at::AutoDispatchBelowADInplaceOrView unrecorded;
      given.sent.narrow(0, 0, written.length)
          .copy_(given.staged.narrow(0, 0, written.length), /*non_blocking=*/true);
    }
    const auto& addresses = plan.is_small ? given.staged : given.sent;
    size_t place = 0;
    const auto begin = [&](std::vector<uint64_t>& values) -> const Kernel& {
      const auto& [kernel, sizes, parts, like, at] = plan.walked[place];
      for (const auto* each : std::initializer_list<const Tensor*>{&addresses, &sizes, &parts, &like,
                                                                   &given.flag}) {
        values.push_back(reinterpret_cast<uintptr_t>(each->data_ptr()));
      }
      if (place == 0) values.push_back(reinterpret_cast<uintptr_t>(given.answer.data_ptr()));
      values.push_back(static_cast<uint64_t>(at));
      values.push_back(Kernel::value_of(given.number));
      ++place;
      return *kernel;
    };
    const auto end = [&](const Kernel& kernel, std::vector<uint64_t>& values) {
      values.resize(kernel.kinds().size());  // constants
      kernel.launch(given.stream, values);
    };
    std::vector<uint64_t> values;
    const auto& look = begin(values);
    values.push_back(0);  // the first of the tensors
    end(look, values);
    for (const auto& each : work.descents) {
      values.clear();
      const auto& kernel = begin(values);
      for (const double by : {1.0, 0.0, 1.0, each.by}) values.push_back(Kernel::value_of(by));
      values.push_back(each.params.size());
      end(kernel, values);
      for (const auto& theta : each.params) theta.unsafeGetTensorImpl()->bump_version();
    }
    for (const auto& some : written.alike) {
      values.clear();
      const auto& kernel = begin(values);
      const auto& one = work.sites[some.front()];
      for (const double by : {one.rho, one.eps, one.s}) values.push_back(Kernel::value_of(by));
      values.push_back(some.size());
      end(kernel, values);
    }
    if (work.traced.empty()) return;
    values.clear();
    const auto& exchange = begin(values);
    values.push_back(work.traced.size());
    end(exchange, values);
  }

  py::tuple types_;
  std::vector<Plan> plans_;
  std::optional<Written> pending_;  // in a layout that is new
};

inline void show_guarded_steps(py::module_& module) {
  py::class_<GuardedSteps>(module, "GuardedSteps")
      .def(py::init<py::tuple>())
      .def("step", &GuardedSteps::step)
      .def("learn", &GuardedSteps::learn);
}

}  // namespace virtualgrad
