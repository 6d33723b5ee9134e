#include "src/ops/recipes.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace tidegate::ops {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// How to compute one tensor again, shared by all nodes that need it. It holds no inputs: each node
/// saves those beside it, so that they are freed with the rest of the node.
class Recipe {
 public:
  explicit Recipe(MakeAgain make) : make_(std::move(make)) {}

  void keep() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++kept_;
  }

  /// The tensor, which is let go when every place that keeps the recipe has had it.
  at::Tensor make(const std::vector<at::Tensor>& inputs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!made_.defined()) {
      const at::NoGradGuard no_grad;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      made_ = make_(inputs);
      left_ = kept_;
    }
    at::Tensor made = made_;
    if (--left_ == 0) {
      made_ = at::Tensor();
    }
    return made;
  }

 private:
  const MakeAgain make_;
  std::mutex mutex_;
  at::Tensor made_;
  int kept_ = 0;  // places that keep this recipe
  int left_ = 0;  // of these, how many have not asked yet
};

/// A tensor that is remembered, while its Recomputing lives. The storage is not held but cannot be
/// another's: its address is not given away before.
struct Remembered {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  at::ScalarType dtype;
  int64_t version;
  std::vector<at::Tensor> inputs;
  std::shared_ptr<Recipe> recipe;
};

struct Recipes {
  std::unordered_map<const c10::StorageImpl*, Remembered> by_storage;

  /// What remembers t, or a tensor that t is a view of, with the values that it was made with.
  const Remembered* find(const at::Tensor& t) const {
    if (!t.defined() || !t.has_storage() || t.is_inference()) {
      return nullptr;
    }
    const auto found = by_storage.find(t.storage().unsafeGetStorageImpl());
    if (found == by_storage.end()) {
      return nullptr;
    }
    const Remembered& it = found->second;
    return t.scalar_type() == it.dtype && t._version() == it.version ? &it : nullptr;
  }
};

namespace {

/// The place of a tensor in its storage.
struct View {
  std::vector<int64_t> sizes, strides;
  int64_t offset;

  explicit View(const at::Tensor& t)
      : sizes(t.sizes().vec()), strides(t.strides().vec()), offset(t.storage_offset()) {}
  at::Tensor of(const at::Tensor& made) const { return made.as_strided(sizes, strides, offset); }
};

thread_local Recipes* active = nullptr;

constexpr char kRecipes[] = "recipes";

/// The recipes that a node of ours keeps.
struct KeptRecipes : torch::CustomClassHolder {
  struct Kept {
    size_t place;         // of the tensor among those saved
    size_t first, count;  // its inputs, which are saved behind all others
    std::shared_ptr<Recipe> recipe;
    View view;
  };
  size_t tensors = 0;  // how many were to be saved
  std::vector<Kept> kept;
};

/// The recipe that a product of torch's keeps in the place of its rows.
class RecipeHooks final : public torch::autograd::SavedVariableHooks {
 public:
  RecipeHooks(const Remembered& remembered, const at::Tensor& rows)
      : recipe_(remembered.recipe), view_(rows) {
    inputs_.reserve(remembered.inputs.size());
    for (const at::Tensor& input : remembered.inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
    }
    recipe_->keep();
  }

  void call_pack_hook(const at::Tensor& /*tensor*/) override {}

  at::Tensor call_unpack_hook() override {
    std::vector<at::Tensor> inputs;
    inputs.reserve(inputs_.size());
    for (const SavedVariable& input : inputs_) {
      inputs.push_back(input.unpack());
    }
    return view_.of(recipe_->make(inputs));
  }

 private:
  std::shared_ptr<Recipe> recipe_;
  View view_;
  std::vector<SavedVariable> inputs_;
};

/// The rows that a product of torch's saves; null of any other node.
SavedVariable* saved_rows(Node* node) {
  namespace generated = torch::autograd::generated;
  if (auto* product = dynamic_cast<generated::MmBackward0*>(node)) {
    return &product->self_;
  }
  if (auto* product = dynamic_cast<generated::AddmmBackward0*>(node)) {
    return &product->mat1_;
  }
  return nullptr;
}

}  // namespace

Recomputing::Recomputing() : recipes_(std::make_unique<Recipes>()), before_(active) {
  active = recipes_.get();
}

Recomputing::~Recomputing() { active = before_; }

bool is_recomputing() { return active != nullptr && c10::GradMode::is_enabled(); }

void remember(const at::Tensor& y, std::vector<at::Tensor> inputs, MakeAgain make) {
  if (!is_recomputing() || !y.requires_grad()) {
    return;  // without a gradient nothing keeps the inputs
  }
  for (at::Tensor& input : inputs) {
    input = input.defined() ? input.detach() : input;
  }
  const auto& storage = y.storage().getWeakStorageImpl();
  active->by_storage.insert_or_assign(
      y.storage().unsafeGetStorageImpl(),
      Remembered{storage, y.scalar_type(), y._version(), std::move(inputs),
                 std::make_shared<Recipe>(std::move(make))});
}

void save_or_recipe(AutogradContext* context, variable_list tensors) {
  if (active == nullptr) {
    context->save_for_backward(std::move(tensors));
    return;
  }
  auto recipes = c10::make_intrusive<KeptRecipes>();
  recipes->tensors = tensors.size();
  for (size_t place = 0; place < recipes->tensors; ++place) {
    const Remembered* remembered = active->find(tensors[place]);
    if (remembered == nullptr) {
      continue;
    }
    remembered->recipe->keep();
    recipes->kept.push_back({place, tensors.size(), remembered->inputs.size(), remembered->recipe,
                             View(tensors[place])});
    tensors[place] = at::Tensor();
    tensors.insert(tensors.end(), remembered->inputs.begin(), remembered->inputs.end());
  }
  context->save_for_backward(std::move(tensors));
  if (!recipes->kept.empty()) {
    context->saved_data[kRecipes] = c10::IValue::make_capsule(std::move(recipes));
  }
}

variable_list saved_or_made(AutogradContext* context) {
  variable_list saved = context->get_saved_variables();
  const auto found = context->saved_data.find(kRecipes);
  if (found == context->saved_data.end()) {
    return saved;
  }
  const auto recipes = c10::static_intrusive_pointer_cast<KeptRecipes>(found->second.toCapsule());
  for (const KeptRecipes::Kept& kept : recipes->kept) {
    const auto first = saved.begin() + static_cast<int64_t>(kept.first);
    const std::vector<at::Tensor> inputs(first, first + static_cast<int64_t>(kept.count));
    saved[kept.place] = kept.view.of(kept.recipe->make(inputs));
  }
  saved.resize(recipes->tensors);
  return saved;
}

void keep_recipe_of_product(const at::Tensor& y, const at::Tensor& x) {
  if (active == nullptr || active->find(x) == nullptr) {
    return;
  }
  // A product of matrices lies behind the views of its result, and a bias that is added to it.
  constexpr int kMostNodesBefore = 4;
  Node* node = y.grad_fn().get();
  for (int i = 0; i < kMostNodesBefore && node != nullptr; ++i) {
    if (SavedVariable* const saved = saved_rows(node)) {
      const std::optional<at::Tensor> rows = saved->get_raw_data();
      if (!rows || !rows->defined()) {
        return;  // hooks of somebody else, or no gradient of the weight is asked for
      }
      if (const Remembered* remembered = active->find(*rows)) {
        saved->register_hooks(std::make_unique<RecipeHooks>(*remembered, *rows));
      }
      return;
    }
    node = node->num_outputs() == 0 ? nullptr : node->next_edge(0).function.get();
  }
}

}  // namespace tidegate::ops
