// The library that python -m virtualgrad.native builds.

#include "addresses.h"
#include "commit.h"
#include "finite.h"
#include "forward.h"
#include "guarded.h"
#include "launches.h"
#include "layers.h"
#include "norms.h"
#include "recipes.h"
#include "sequence.h"
#include "step_on_cpu.h"
#include "transform.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Nodes of autograd's graph, T, and launches of kernels in C++ (virtualgrad.native).";
  virtualgrad::show_addresses(module);
  virtualgrad::show_commit(module);
  virtualgrad::show_finite(module);
  virtualgrad::show_nodes(module);
  virtualgrad::show_layers(module);
  virtualgrad::show_norms(module);
  virtualgrad::show_launches(module);
  virtualgrad::show_recipes(module);
  virtualgrad::show_transform(module);
  virtualgrad::show_forward(module);
  virtualgrad::show_sequences(module);
  virtualgrad::show_steps(module);
  virtualgrad::show_guarded_steps(module);
}
