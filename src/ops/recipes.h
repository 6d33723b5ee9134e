#pragma once

// What is cheap to make again is not kept for the backward pass.
//
// A matrix product keeps its input for its weight's gradient. Where that input is a norm's result
// or a GLU's product, it follows in one pass over memory from what the norm or the GLU keeps
// anyway, so while a `Recomputing` lives, a product keeps a recipe in its place. This is
// tidegate/nn/_recompute.py in C++, where torch has no hooks that see every saved tensor: our ops
// save by save_or_recipe(), and torch's products are given hooks one by one.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <vector>

namespace tidegate::ops {

/// The tensor that was remembered, from the inputs it was remembered with.
using MakeAgain = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct Recipes;

/// While one lives, on its thread, tensors given to remember() are not kept for the backward pass
/// but made again in it, once for all that need them.
class Recomputing {
 public:
  Recomputing();
  ~Recomputing();
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;

 private:
  std::unique_ptr<Recipes> recipes_;
  Recipes* before_;
};

/// Whether results that are cheap to make again should be given to remember().
bool is_recomputing();

/// y is make(inputs), bit for bit, outside autocast and without gradients; the inputs are kept for
/// the backward pass by what made y.
void remember(const at::Tensor& y, std::vector<at::Tensor> inputs, MakeAgain make);

/// Does what context->save_for_backward(tensors) does, but saves what remembered tensors, or views
/// of them, are made from in their place. Read by saved_or_made().
void save_or_recipe(torch::autograd::AutogradContext* context,
                    torch::autograd::variable_list tensors);

/// What was given to save_or_recipe(). Throws c10::Error where a tensor has been modified in place
/// since, which a recipe reads.
torch::autograd::variable_list saved_or_made(torch::autograd::AutogradContext* context);

/// y is torch's own product with x: its node keeps x's recipe, where x has one.
void keep_recipe_of_product(const at::Tensor& y, const at::Tensor& x);

}  // namespace tidegate::ops
