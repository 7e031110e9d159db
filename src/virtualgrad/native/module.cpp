// The library that python -m virtualgrad.native builds.

#include "launches.h"
#include "layers.h"
#include "norms.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Nodes of autograd's graph, and launches of kernels, in C++ (virtualgrad.native).";
  virtualgrad::show_layers(module);
  virtualgrad::show_norms(module);
  virtualgrad::show_launches(module);
}
