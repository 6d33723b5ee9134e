// tidegate::nn::HGRU2 as a layer of a module of one's own: trained over whole sequences, then run
// one sample at a time, as a controller or a filter is.
//
//   build/tidegate_embed [--steps 150]
//
// The task: to say, at every step, the running mean of a noisy signal over all steps so far.
#include <tidegate/tidegate.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>

#include <cstdio>
#include <cstdlib>
#include <string>

// A model like any other of LibTorch's: children are registered, parameters() finds theirs.
class FilterImpl : public torch::nn::Module {
 public:
  explicit FilterImpl(int64_t dim) {
    enter = register_module("enter", torch::nn::Linear(2, dim));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    mixer =
        register_module("mixer", tidegate::nn::HGRU2(tidegate::nn::HGRU2Options(dim).num_heads(2)));
    leave = register_module("leave", torch::nn::Linear(dim, 1));
  }

  // A whole sequence: x [batch, time, 2] -> [batch, time, 1].
  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = enter(x);
    return leave(h + std::get<0>(mixer->forward(norm(h))));
  }

  // One sample: x [batch, 2] -> [batch, 1]; the state is updated in place.
  torch::Tensor step(const torch::Tensor& x, const torch::Tensor& state) {
    const auto h = enter(x);
    return leave(h + mixer->step(norm(h), state));
  }

  torch::nn::Linear enter{nullptr}, leave{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  tidegate::nn::HGRU2 mixer{nullptr};
};
TORCH_MODULE(Filter);

int main(int count, char** words) {
  const int steps = count == 3 && std::string(words[1]) == "--steps" ? std::atoi(words[2]) : 150;
  torch::manual_seed(0);
  Filter filter(32);
  torch::optim::Adam optimizer(filter->parameters(), torch::optim::AdamOptions(1e-2));
  const int64_t time = 32;
  const auto draw = [&] {
    const auto level = torch::randn({16, 1, 1}).expand({16, time, 1});
    const auto signal = level + torch::randn({16, time, 1});
    return torch::cat({signal, torch::ones_like(signal)}, -1);
  };
  for (int step = 0; step <= steps; ++step) {
    const auto x = draw();
    const auto counts = torch::arange(1, time + 1).view({1, time, 1});
    const auto mean = x.narrow(-1, 0, 1).cumsum(1) / counts;
    const auto loss = torch::mse_loss(filter->forward(x), mean);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 50 == 0) std::printf("step %d: squared error %.4f\n", step, loss.item<double>());
  }

  // Sample after sample, with constant work and memory, gives what the whole sequence gave.
  torch::NoGradGuard no_grad;
  const auto x = draw();
  const auto whole = filter->forward(x);
  const auto state = filter->mixer->init_state(x.size(0));
  double difference = 0.0;
  for (int64_t t = 0; t < time; ++t) {
    const auto y = filter->step(x.select(1, t), state);
    difference = std::max(difference, (y - whole.select(1, t)).abs().max().item<double>());
  }
  std::printf("one sample at a time: %s\n", difference < 1e-4 ? "the same" : "something else");
  return difference < 1e-4 ? 0 : 1;
}
