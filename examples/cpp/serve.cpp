// Serves a byte-level language model: every line of the standard input is a prompt, and what the
// model adds to it is printed as it comes. Prompts enter the running batch whenever a slot is free.
//
//   printf 'the tide\nonce upon' | tidegate_serve FOLDER [NEW_TOKENS] [TEMPERATURE]
//
// FOLDER: what CausalLM.save() wrote, in Python or C++.
#include <tidegate/models/decoder.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr int64_t kSlots = 8;
constexpr int64_t kTokensAtOnce = 4;

// Lines that have been read and not yet taken, with their numbers.
class Lines {
 public:
  Lines() : reader_([this] { read(); }) {}
  ~Lines() { reader_.join(); }

  // The next line; waits for one where `wait` says so. False: there is none now, or none any more.
  bool take(bool wait, std::pair<int, std::string>* line) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) came_.wait(lock, [this] { return is_done_ || !lines_.empty(); });
    if (lines_.empty()) return false;
    *line = std::move(lines_.front());
    lines_.pop_front();
    return true;
  }

 private:
  void read() {
    std::string line;
    for (int number = 1; std::getline(std::cin, line); ++number) {
      const std::lock_guard<std::mutex> lock(mutex_);
      lines_.emplace_back(number, line);
      came_.notify_one();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    is_done_ = true;
    came_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::pair<int, std::string>> lines_;
  bool is_done_ = false;
  std::thread reader_;
};

torch::Tensor bytes_of(const std::string& text) {
  std::vector<int64_t> ids(text.begin(), text.end());
  for (int64_t& id : ids) id &= 255;
  return torch::tensor(ids, torch::kLong);
}

}  // namespace

int main(int count, char** arguments) try {
  if (count < 2) {
    std::fprintf(stderr, "usage: tidegate_serve FOLDER [NEW_TOKENS] [TEMPERATURE]\n");
    return 2;
  }
  using namespace tidegate::models;
  CausalLM model = CausalLM::load(arguments[1]);
  if (model->config.vocab_size < 256) {
    std::fprintf(stderr, "%s: expected a vocabulary of 256 bytes\n", arguments[1]);
    return 2;
  }
  Decoder decoder(model, DecoderOptions(kSlots));
  const auto options = SequenceOptions()
                           .max_new_tokens(count > 2 ? std::atoll(arguments[2]) : 64)
                           .temperature(count > 3 ? std::atof(arguments[3]) : 0.8)
                           .top_p(0.95);
  Lines lines;
  std::map<int64_t, std::pair<int, std::string>> running;  // by slot
  std::pair<int, std::string> line;
  while (true) {
    while (decoder.taken() < kSlots && lines.take(/*wait=*/running.empty(), &line)) {
      if (line.second.empty()) continue;
      running[decoder.add(bytes_of(line.second), options)] = line;
    }
    if (running.empty()) break;
    for (const DecodedToken& token : decoder.steps(kTokensAtOnce)) {
      std::string& text = running[token.slot].second;
      text += static_cast<char>(token.token);
      if (!token.is_last) continue;
      std::printf("%d: %s\n", running[token.slot].first, text.c_str());
      std::fflush(stdout);
      running.erase(token.slot);
      decoder.remove(token.slot);
    }
  }
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  return 1;
}
