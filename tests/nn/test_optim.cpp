// The optimisers of C++ against their equations in float64: Muon, and steps of fp32 masters. That
// their bits are Python's is tests/python/test_training_cpp_optim.py's matter.

#include <gtest/gtest.h>
#include <tidegate/models/causal_lm.h>
#include <tidegate/nn/stacked_linear.h>
#include <tidegate/optim/masters.h>
#include <tidegate/optim/muon.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace tidegate::optim {
namespace {

using models::CausalLM;
using torch::Tensor;
using torch::optim::AdamWOptions;

models::LMConfig two_layers(const std::string& mixer = "hgrn2") {
  models::LMConfig config;
  config.mixer = mixer;
  config.vocab_size = 19;
  config.dim = 16;
  config.layers = 2;
  return config;
}

CausalLM a_model(uint64_t seed = 0) {
  torch::manual_seed(seed);
  return CausalLM(two_layers());
}

/// Draws gradients that are equal for models of equal parameters, in their dtypes.
void draw_gradients(const CausalLM& model, uint64_t seed) {
  torch::manual_seed(seed);
  for (Tensor& p : model->parameters()) {
    p.mutable_grad() = at::randn(p.sizes()).to(at::kBFloat16).to(p.scalar_type());
  }
}

void expect_equal(const std::vector<Tensor>& one, const std::vector<Tensor>& two) {
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << i;
}

/// Has `to` read what `from` writes into a file.
template <class Saved>
void load_saved(const Saved& from, Saved& to) {
  torch::serialize::OutputArchive out;
  from.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  to.load(in);
}

TEST(Muon, SingularValuesEndNearOne) {
  torch::manual_seed(0);
  for (const auto& [rows, columns] : {std::pair{24, 8}, {8, 24}, {16, 16}}) {
    const Tensor values = at::linalg_svdvals(orthogonalize(at::randn({3, rows, columns})));
    EXPECT_GT(values.min().item<double>(), 0.4);
    EXPECT_LT(values.max().item<double>(), 1.4);
  }
}

TEST(Muon, StackedMatricesMoveAsIfApart) {
  torch::manual_seed(0);
  Tensor stacked = at::randn({12, 4}).requires_grad_();
  std::vector<Tensor> parts;
  for (const Tensor& part : stacked.detach().split(4)) {
    parts.push_back(part.clone().requires_grad_());
  }
  stacked.mutable_grad() = at::randn({12, 4});
  for (size_t i = 0; i < 3; ++i) {
    parts[i].mutable_grad() = stacked.grad().split(4)[i].clone();
  }
  const MuonOptions options = MuonOptions(0.1).weight_decay(0.1);
  Muon({stacked}, {{4, 4, 4}}, options).step();
  Muon(parts, {{4}, {4}, {4}}, options).step();
  EXPECT_TRUE(at::allclose(stacked, at::cat(parts)));
}

TEST(Muon, AFirstStepIsTheEquation) {
  Tensor weight = at::eye(4).requires_grad_();
  weight.mutable_grad() = 3 * at::eye(4);
  Muon({weight}, {{4}}, MuonOptions(0.1).momentum(0.5).weight_decay(0.5)).step();
  double value = 0.5;  // of the identity over its norm
  for (int i = 0; i < 5; ++i) {
    value = 3.4445 * value - 4.775 * std::pow(value, 3) + 2.0315 * std::pow(value, 5);
  }
  // In bf16, where that is fast, whose roundings the iteration makes larger.
  const Tensor wanted = (1 - 0.1 * 0.5 - 0.1 * value) * at::eye(4);
  EXPECT_TRUE(at::allclose(weight, wanted, 0.0, 0.1 * 0.15)) << weight << wanted;
}

TEST(Muon, SplitsHaveToAddUp) {
  try {
    Muon({at::zeros({4, 2})}, {{3}});
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("Muon: splits: expected rows that add up"),
              std::string::npos);
  }
}

/// Matrices of these shapes with gradients, the same at every call.
std::vector<Tensor> matrices(const std::vector<std::pair<int64_t, int64_t>>& shapes,
                             at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(0);
  std::vector<Tensor> made;
  for (const auto& [rows, columns] : shapes) {
    made.push_back(at::randn({rows, columns}).to(dtype).requires_grad_());
    made.back().mutable_grad() = at::randn({rows, columns}).to(dtype);
  }
  return made;
}

TEST(Muon, GroupsStepByTheirOwnOptions) {
  const MuonOptions options = MuonOptions(0.3).weight_decay(0.5).momentum(0.5);
  const std::vector<Tensor> together = matrices({{4, 4}, {6, 4}, {4, 4}});
  const std::vector<Tensor> alone = matrices({{4, 4}, {6, 4}, {4, 4}});
  using Group = torch::optim::OptimizerParamGroup;
  Muon muon(std::vector<Group>{Group({together[0]}),
                               Group({together[1]}, std::make_unique<MuonOptions>(options))},
            {{4}, {2, 4}}, MuonOptions(0.1));
  muon.add_param_group(Group({together[2]}, std::make_unique<MuonOptions>(0.2)));
  muon.step();
  Muon({alone[0]}, {{4}}, MuonOptions(0.1)).step();
  Muon({alone[1]}, {{2, 4}}, options).step();
  Muon({alone[2]}, {{4}}, MuonOptions(0.2)).step();
  expect_equal(together, alone);
}

TEST(Muon, DtypesBesideEachOtherStepAsIfAlone) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    const std::vector<Tensor> pair{matrices({{4, 4}})[0], matrices({{4, 4}}, dtype)[0]};
    const std::vector<Tensor> alone{matrices({{4, 4}})[0], matrices({{4, 4}}, dtype)[0]};
    Muon(pair, {{4}, {4}}).step();
    for (const Tensor& p : alone) Muon(std::vector<Tensor>{p}, {{4}}).step();
    expect_equal(pair, alone);
  }
}

TEST(Muon, PassesOverMatricesWithoutElements) {
  for (const auto& shape : {std::pair<int64_t, int64_t>{0, 3}, {3, 0}}) {
    const std::vector<Tensor> pair = matrices({shape, {3, 3}});
    const Tensor before = pair[1].detach().clone();
    Muon(pair, {{shape.first}, {0, 3}}).step();
    EXPECT_FALSE(at::equal(before, pair[1]));
  }
}

template <class Error, class Call>
void expect_message(const Call& call, const std::string& message) {
  try {
    call();
    FAIL() << message;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

Tensor sparse_like(const Tensor& p) { return at::ones_like(p).to_sparse(); }

TEST(Muon, NamesWhatItCannotStep) {
  std::vector<Tensor> given = matrices({{4, 2}});
  expect_message<c10::ValueError>([&] { Muon(given, {{-1, 5}}); },
                                  "Muon: splits: expected rows that add up");
  expect_message<c10::ValueError>([&] { Muon(given, {{4}, {4}}); },
                                  "Muon: splits: expected one a parameter, 1; got 2");
  Muon muon(given, {{4}}, MuonOptions().weight_decay(1.0));
  Tensor vector = at::ones({3}).requires_grad_();
  muon.add_param_group(torch::optim::OptimizerParamGroup({vector}));
  vector.mutable_grad() = at::ones({3});
  const Tensor before = given[0].detach().clone();
  expect_message<c10::ValueError>([&] { muon.step(); }, "of a matrix of shape (3,), got []");
  vector.mutable_grad() = Tensor();
  given[0].mutable_grad() = sparse_like(before);
  expect_message<c10::Error>([&] { muon.step(); },
                             "Muon: expected dense gradients; got a sparse one");
  EXPECT_TRUE(at::equal(before, given[0]));
}

TEST(MuonAdamW, TakesTheMatricesOfTheBlocks) {
  CausalLM model = a_model();
  MuonAdamW optimizer(*model, MuonOptions(), AdamWOptions(1e-3).weight_decay(0.1));
  const std::vector<std::vector<int64_t>> layer{{16, 16, 16}, {16}, {40, 40}, {16}};
  std::vector<std::vector<int64_t>> found = optimizer.muon.splits();
  ASSERT_EQ(found.size(), 2 * layer.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].size(), layer[i % layer.size()].size()) << i;
  }
  size_t rest = 0;
  for (const auto& group : optimizer.adamw.param_groups()) {
    rest += group.params().size();
    EXPECT_EQ(static_cast<const AdamWOptions&>(group.options()).weight_decay(), 0.0);
  }
  EXPECT_EQ(rest + found.size(), model->parameters().size());
  try {
    MuonAdamW(*torch::nn::Embedding(3, 4), MuonOptions(), AdamWOptions());
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("MuonAdamW: model: expected one with linear layers"),
              std::string::npos);
  }
}

TEST(MuonAdamW, StepsNothingWhereAdamWCannot) {
  CausalLM model = a_model();
  MuonAdamW optimizer(*model, MuonOptions(), AdamWOptions(1e-2));
  draw_gradients(model, 0);
  Tensor other = optimizer.adamw.param_groups()[0].params()[0];
  other.mutable_grad() = sparse_like(other.detach());
  std::vector<Tensor> before;
  for (const Tensor& p : model->parameters()) before.push_back(p.detach().clone());
  expect_message<c10::Error>([&] { optimizer.step(); }, "AdamW: expected dense gradients");
  expect_equal(model->parameters(), before);
}

TEST(MuonAdamW, GoesOnFromAFile) {
  CausalLM one = a_model(), two = a_model();
  MuonAdamW whole(*one, MuonOptions(), AdamWOptions(1e-2));
  MuonAdamW first(*two, MuonOptions(), AdamWOptions(1e-2));
  for (uint64_t step = 0; step < 2; ++step) {
    for (const CausalLM& model : {one, two}) draw_gradients(model, step);
    whole.step();
    first.step();
  }
  MuonAdamW second(*two, MuonOptions(), AdamWOptions(1e-2));
  load_saved(first, second);
  for (const CausalLM& model : {one, two}) draw_gradients(model, 5);
  whole.step();
  second.step();
  expect_equal(one->parameters(), two->parameters());
}

TEST(StackedLinear, SaysWhatItStacks) {
  nn::StackedLinearImpl stacked(4, {2, 3}, false);
  EXPECT_EQ(stacked.weight.sizes(), at::IntArrayRef({5, 4}));
  EXPECT_EQ(nn::stacked_rows(stacked), (std::vector<int64_t>{2, 3}));
  const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(stacked.clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(nn::stacked_rows(*copy), (std::vector<int64_t>{2, 3}));
  EXPECT_TRUE(at::equal(copy->weight, stacked.weight));
  EXPECT_EQ(nn::stacked_rows(*torch::nn::Linear(3, 7)), std::vector<int64_t>{7});
}

/// Steps of masters beside steps of fp32 weights by the same gradients, which bf16 can hold.
template <class Optimizer, class Make>
void expect_masters_to_step_as_weights(const Make& make) {
  CausalLM wide = a_model(), narrow = a_model();
  Optimizer of_wide = make(*wide), of_narrow = make(*narrow);
  MasterWeights masters(*narrow, of_narrow);
  EXPECT_FALSE(masters.weights().empty());
  for (uint64_t step = 0; step < 3; ++step) {
    draw_gradients(wide, step);
    draw_gradients(narrow, step);
    of_wide.step();
    masters.step();
  }
  for (size_t i = 0; i < masters.weights().size(); ++i) {
    EXPECT_TRUE(at::equal(masters.weights()[i], masters.masters()[i].to(at::kBFloat16))) << i;
    EXPECT_FALSE(masters.weights()[i].grad().defined());
  }
  const auto one = wide->parameters(), two = narrow->parameters();
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_TRUE(at::equal(one[i].to(two[i].scalar_type()), two[i])) << i;
  }
}

TEST(MasterWeights, StepAsWideWeightsDo) {
  expect_masters_to_step_as_weights<AdamW>([](const auto& model) {
    return AdamW(model.parameters(), AdamWOptions(1e-2).weight_decay(0.1));
  });
  expect_masters_to_step_as_weights<AdamW>([](const auto& model) {  // not in one pass
    return AdamW(model.parameters(), AdamWOptions(1e-2).amsgrad(true));
  });
  expect_masters_to_step_as_weights<MuonAdamW>(
      [](const auto& model) { return MuonAdamW(model, MuonOptions(0.02), AdamWOptions(1e-2)); });
}

TEST(MasterWeights, ClipByTheNormOfAllGradients) {
  for (const bool in_one_pass : {true, false}) {
    CausalLM model = a_model();
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2).amsgrad(!in_one_pass));
    MasterWeights masters(*model, optimizer);
    draw_gradients(model, 1);
    Tensor total = at::zeros({}, at::kDouble);
    for (const Tensor& p : model->parameters()) total += p.grad().to(at::kDouble).square().sum();
    const double norm = total.sqrt().item<double>();
    EXPECT_NEAR(masters.clip_gradients(1.5).item<double>(), norm, 1e-4 * norm);
    EXPECT_NEAR(masters.clip_gradients(INFINITY).item<double>(), 1.5, in_one_pass ? 2e-4 : 1e-5);
    EXPECT_EQ(masters.weights()[0].grad().defined(), in_one_pass);
  }
}

TEST(MasterWeights, NameWhatTheyCannotTake) {
  CausalLM model = a_model();
  AdamW optimizer(model->parameters(), AdamWOptions(1e-2));
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    model->to(narrow);
    expect_message<c10::ValueError>([&] { MasterWeights(*model, optimizer); },
                                    "MasterWeights: model: expected parameters in float32");
  }
  model->to(at::kFloat);
  MasterWeights masters(*model, optimizer);
  Tensor weight = masters.weights().front();
  weight.mutable_grad() = sparse_like(weight.detach());
  const std::string message = "MasterWeights: expected dense gradients; got a sparse one";
  expect_message<c10::ValueError>([&] { masters.clip_gradients(1.0); }, message);
}

TEST(MasterWeights, RefuseTheFileOfALargerModel) {
  torch::nn::ModuleList one(torch::nn::Linear(3, 3)),
      two(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  AdamW of_one(one->parameters(), AdamWOptions(1e-2)), of_two(two->parameters(), AdamWOptions());
  MasterWeights small(*one, of_one), large(*two, of_two);
  const Tensor before = small.masters()[0].detach().clone();
  expect_message<c10::ValueError>([&] { load_saved(large, small); },
                                  "MasterWeights: masters: expected 2; got more");
  EXPECT_TRUE(at::equal(before, small.masters()[0]));
}

TEST(MasterWeights, HaveParametersWithoutElements) {
  for (const bool in_one_pass : {true, false}) {
    torch::nn::ModuleList model(torch::nn::Linear(torch::nn::LinearOptions(3, 0)),
                                torch::nn::Linear(3, 2));
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2).amsgrad(!in_one_pass));
    MasterWeights masters(*model, optimizer);
    for (Tensor& p : model->parameters()) p.mutable_grad() = at::ones_like(p);
    const Tensor before = masters.masters()[2].detach().clone();
    EXPECT_NEAR(masters.clip_gradients(1.0).item<double>(), std::sqrt(8.0), 1e-5);
    masters.step();
    EXPECT_FALSE(at::equal(before, masters.masters()[2]));
  }
}

TEST(MasterWeights, OfTwoDevicesAreClippedTogether) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const bool in_one_pass : {true, false}) {
    torch::nn::ModuleList model(torch::nn::Linear(3, 5), torch::nn::Linear(5, 4));
    model[1]->to(at::kCUDA);
    AdamW optimizer(model->parameters(), AdamWOptions(1e-2).amsgrad(!in_one_pass));
    MasterWeights masters(*model, optimizer);
    double total = 0;
    for (Tensor& p : model->parameters()) {
      p.mutable_grad() = at::randn_like(p);
      total += p.grad().to(at::kDouble).square().sum().item<double>();
    }
    const double norm = std::sqrt(total);
    EXPECT_NEAR(masters.clip_gradients(norm / 2).item<double>(), norm, 1e-5 * norm);
    EXPECT_NEAR(masters.clip_gradients(INFINITY).item<double>(), norm / 2, 5e-3 * norm);
    masters.step();
    for (size_t i = 0; i < masters.weights().size(); ++i) {
      EXPECT_TRUE(at::equal(masters.weights()[i], masters.masters()[i].to(at::kBFloat16))) << i;
    }
  }
}

TEST(MasterWeights, GoOnFromAFile) {
  CausalLM one = a_model(), two = a_model(), three = a_model(7);
  AdamW of_one(one->parameters(), AdamWOptions(1e-2));
  AdamW of_two(two->parameters(), AdamWOptions(1e-2));
  AdamW of_three(three->parameters(), AdamWOptions(1e-2));
  MasterWeights whole(*one, of_one), first(*two, of_two), second(*three, of_three);
  for (const CausalLM& model : {one, two}) draw_gradients(model, 1);
  whole.step();
  first.step();
  load_saved(first, second);
  for (const CausalLM& model : {one, three}) draw_gradients(model, 2);
  whole.step();
  second.step();
  expect_equal(whole.weights(), second.weights());
  EXPECT_THROW(MasterWeights(*one, of_one), c10::ValueError);
}

}  // namespace
}  // namespace tidegate::optim
