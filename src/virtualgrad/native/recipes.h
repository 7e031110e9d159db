// What a pass of Python has launched, to be launched once more with other tensors and numbers.
//
// Rooms are places in memory: first those of tensors that are given, then new ones. The kernels, in
// what order, with which sizes, and which rooms they read and write, is what Python has found out
// (virtualgrad.operators.recipes); nothing of it is known here.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "launches.h"

namespace virtualgrad {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

class Recipe {
 public:
  // Sizes, strides and dtype; none of what a sum makes.
  using Room = std::optional<std::tuple<Sizes, Sizes, at::ScalarType>>;
  using Pointer = std::optional<std::pair<size_t, int64_t>>;  // a room, and bytes into it
  using Launch = std::tuple<std::shared_ptr<Kernel>, std::vector<Pointer>, py::tuple>;
  using View = std::tuple<size_t, Sizes, Sizes, int64_t>;  // of a room: sizes, strides, offset
  using Sum = std::tuple<View, int64_t, size_t>;           // along an axis, into a room
  static constexpr size_t NUMBERS = 4;                     // rho, w, s and eps

  // steps: launches (a kernel, its tensors, and what comes behind them) and sums by torch;
  // views: what is returned; stream_on: device -> its stream, which torch tells Python, and here
  // only by a header of CUDA.
  Recipe(std::vector<Room> rooms, const std::vector<std::variant<Launch, Sum>>& steps,
         std::vector<std::optional<View>> views, py::object stream_on)
      : rooms_(std::move(rooms)),
        views_(std::move(views)),
        stream_on_(std::move(stream_on)) {
    for (const auto& each : steps) {
      if (const auto* sum = std::get_if<Sum>(&each)) {
        steps_.emplace_back(*sum);
        continue;
      }
      const auto& [kernel, tensors, others] = std::get<Launch>(each);
      Relaunch step{kernel, std::vector<uint64_t>(kernel->kinds().size(), 0), {}, {}};
      TORCH_CHECK(tensors.size() + others.size() == step.values.size(), "not its arguments");
      for (size_t place = 0; place < step.values.size(); ++place) {
        const auto& kind = kernel->kinds()[place];
        if (place < tensors.size()) {
          TORCH_CHECK(kind == (tensors[place] ? "*" : ""), "a tensor where none is taken");
          if (tensors[place]) step.pointers.emplace_back(place, *tensors[place]);
        } else if (kind == "fp32") {
          step.numbers.push_back(place);
        } else {
          step.values[place] = Kernel::value_of(kind, others[place - tensors.size()].ptr());
        }
      }
      TORCH_CHECK(step.numbers.size() <= NUMBERS, "numbers of which nothing is known");
      steps_.push_back(std::move(step));
    }
  }

  // Whether tensors begin where those of before did, and this thread can launch on their device.
  bool may_run(const std::vector<Tensor>& given) const {
    uintptr_t addresses = 0;
    for (const auto& tensor : given) addresses |= reinterpret_cast<uintptr_t>(tensor.data_ptr());
    const auto device = given.front().device();
    return addresses % ALIGNED == 0 && Driver::get().has_context() &&
           c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
  }

  // Launch all of it, and return the views. The last numbers are those of kernels with fewer.
  std::vector<MaybeTensor> operator()(std::vector<Tensor> tensors,
                                      const std::array<double, NUMBERS>& numbers) const {
    const auto options = tensors.front().options();
    const auto stream = stream_on_(tensors.front().get_device()).cast<uintptr_t>();
    for (const auto& room : rooms_) {
      tensors.push_back(room ? at::empty_strided(std::get<0>(*room), std::get<1>(*room),
                                                 options.dtype(std::get<2>(*room)))
                             : Tensor());
    }
    {
      py::gil_scoped_release others_may_run;
      for (const auto& step : steps_) {
        if (const auto* sum = std::get_if<Sum>(&step)) {
          const auto& [parts, axis, into] = *sum;
          tensors[into] = seen(tensors, parts).sum(axis);
        } else {
          launch(std::get<Relaunch>(step), stream, tensors, numbers);
        }
      }
    }
    std::vector<MaybeTensor> found;
    for (const auto& view : views_) {
      found.push_back(view ? MaybeTensor(seen(tensors, *view)) : std::nullopt);
    }
    return found;
  }

 private:
  struct Relaunch {
    std::shared_ptr<Kernel> kernel;
    std::vector<uint64_t> values;
    std::vector<std::pair<size_t, std::pair<size_t, int64_t>>> pointers;
    std::vector<size_t> numbers;
  };
  static constexpr uintptr_t ALIGNED = 16;  // bytes, as in virtualgrad.operators.launches

  static void launch(const Relaunch& step, uintptr_t stream, const std::vector<Tensor>& tensors,
                     const std::array<double, NUMBERS>& numbers) {
    auto values = step.values;
    for (const auto& [place, pointer] : step.pointers) {
      const auto& [room, offset] = pointer;
      values[place] = reinterpret_cast<uintptr_t>(tensors[room].data_ptr()) + offset;
    }
    const auto unused = NUMBERS - step.numbers.size();
    for (size_t number = 0; number < step.numbers.size(); ++number) {
      values[step.numbers[number]] = Kernel::value_of(numbers[unused + number]);
    }
    step.kernel->launch(stream, values);
  }

  static Tensor seen(const std::vector<Tensor>& tensors, const View& view) {
    const auto& [room, sizes, strides, offset] = view;
    const auto& whole = tensors[room];
    const bool is_whole = whole.sizes() == sizes && whole.strides() == strides && offset == 0;
    return is_whole ? whole : whole.as_strided(sizes, strides, offset);
  }

  std::vector<Room> rooms_;
  std::vector<std::optional<View>> views_;
  py::object stream_on_;
  std::vector<std::variant<Relaunch, Sum>> steps_;
};

inline void show_recipes(py::module_& module) {
  py::class_<Recipe, std::shared_ptr<Recipe>>(module, "Recipe")
      .def(py::init<std::vector<Recipe::Room>,
                    const std::vector<std::variant<Recipe::Launch, Recipe::Sum>>&,
                    std::vector<std::optional<Recipe::View>>, py::object>());
}

}  // namespace virtualgrad
