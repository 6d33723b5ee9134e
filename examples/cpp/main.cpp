// What a C++ program does with tidegate: a module's forward and backward pass, and an op as a
// function. CMakeLists.txt beside it says how to build and run it; README.md shows it as its C++
// example.
#include <tidegate/tidegate.h>

#include <cstdio>

int main() {
  tidegate::nn::HGRU mixer(tidegate::nn::HGRUOptions(32));
  auto x = torch::randn({2, 17, 32}, torch::requires_grad());  // [batch, time, width]
  auto [y, state] = mixer->forward(x);
  y.square().mean().backward();

  // The op below it: pre-activations and gate logits in.
  auto [h, last] = tidegate::hgru(torch::randn({1, 5, 8}), torch::randn({1, 5, 8}));
  if (h.size(1) != 5 || !x.grad().isfinite().all().item<bool>()) return 1;
  std::printf("tidegate %s: forward and backward of HGRU\n", tidegate::version());
}
