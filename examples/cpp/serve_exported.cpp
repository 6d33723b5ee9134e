// Runs a language model that Python exported (tidegate.export.package), without Python: libtorch's
// AOTInductor runs the compiled graph, libtidegate has the ops.
//
//   python -c 'from tidegate import export, models
//   export.package(models.CausalLM.load("MODEL"), "model.pt2")'
//   build/tidegate_serve_exported model.pt2 "The " [BYTES [cuda]]
//
// A byte-level model is asked here; of any other, map text to ids and back as its tokenizer does.
#include <tidegate/tidegate.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

// The two programs of a package, and the state between their calls.
class Server {
 public:
  explicit Server(const std::string& package)
      : prefill_(package, "prefill"), step_(package, "step") {}

  // Reads prompts int64 [B, T]: logits [B, vocab] of what comes next.
  at::Tensor begin(const at::Tensor& ids) {
    state_ = prefill_.run({ids});
    const auto logits = state_.front();
    state_.erase(state_.begin());
    return logits;
  }

  // Reads a token of each sequence, int64 [B]: logits of what comes next. The state's tensors are
  // updated in place.
  at::Tensor next(const at::Tensor& ids) {
    std::vector<at::Tensor> inputs = {ids};
    inputs.insert(inputs.end(), state_.begin(), state_.end());
    return step_.run(inputs).front();
  }

 private:
  torch::inductor::AOTIModelPackageLoader prefill_, step_;
  std::vector<at::Tensor> state_;
};

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: tidegate_serve_exported MODEL.pt2 PROMPT [BYTES [cuda]]\n");
    return 2;
  }
  const std::string prompt = words[2];
  const int bytes = count > 3 ? std::atoi(words[3]) : 100;
  const torch::Device device(count > 4 ? words[4] : "cpu");  // the one that it was compiled for
  try {
    c10::InferenceMode guard;
    Server server(words[1]);
    std::vector<int64_t> ids(prompt.begin(), prompt.end());
    for (auto& id : ids) id &= 255;
    auto logits = server.begin(torch::tensor(ids).unsqueeze(0).to(device));
    std::string text = prompt;
    for (int i = 0; i < bytes; ++i) {
      const auto token = logits.argmax(-1);
      text += static_cast<char>(token.item<int64_t>());
      if (i + 1 < bytes) logits = server.next(token);
    }
    std::printf("%s\n", text.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tidegate_serve_exported: %s\n", error.what());
    return 1;
  }
  return 0;
}
