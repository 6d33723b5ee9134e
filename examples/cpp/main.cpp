// What a C++ program does with tidegate: a module's forward and backward pass, and an op as a
// function. CMakeLists.txt beside it says how to build and run it; README.md shows it as its C++
// example.
#include <tidegate/tidegate.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  tidegate::nn::HGRU mixer(tidegate::nn::HGRUOptions(32));
  auto x = torch::randn({2, 17, 32}, torch::requires_grad());  // [batch, time, width]
  auto [y, state] = mixer->forward(x);
  y.square().mean().backward();

  if (y.sizes() != x.sizes() || !x.grad().isfinite().all().item<bool>()) return 1;
  for (const auto& parameter : mixer->named_parameters()) {
    if (!parameter.value().grad().defined()) {
      std::printf("no gradient for %s\n", parameter.key().c_str());
      return 1;
    }
  }

  // The ops are functions as well: pre-activations and gate logits in, h and the last state out.
  auto [h, last] = tidegate::hgru(torch::randn({1, 5, 8}), torch::randn({1, 5, 8}));
  if (h.size(1) != 5 || last.scalar_type() != torch::kFloat) return 1;
  std::printf("tidegate %s: forward and backward of HGRU\n", tidegate::version());
  return 0;
}
