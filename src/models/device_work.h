// Work on a device beside the caller's: a stream of its own, CUDA graphs, copies to the host that
// nobody waits for. On the CPU all of it is what is left without: the work itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <thread>

namespace tidegate::models {

/// A stream for the work of one object, one at a time.
class OwnStream {
 public:
  explicit OwnStream(at::Device device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  /// Until all of the stream's work is done.
  void wait() const;

  /// The stream's work from now on comes after what the caller's stream has so far.
  void follow_caller() const;

  /// The stream reads or writes `tensor`, which was allocated on another: its memory is not given
  /// to anyone else before that is done.
  void uses(const at::Tensor& tensor) const;

  /// While it lives, the stream and its device are the current ones. The stream's work comes after
  /// what the caller's stream had before, and before what the caller's stream gets after.
  class Scope {
   public:
    explicit Scope(OwnStream& stream);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Streams;
    std::unique_ptr<Streams> streams_;
  };

 private:
  friend class CapturedWork;
  struct Stream;
  std::unique_ptr<Stream> stream_;  // none on the CPU
};

/// Work that is the same at every call: a thread's first one runs it, since libraries allocate then
/// what they keep for the thread; the next one captures a CUDA graph, which it and all later ones
/// replay. What the work reads and writes must stay where it is, all of it on one stream, and it
/// draws nothing from torch's generators. On the CPU, and where graphs are switched off, every call
/// runs it. So does one whose capture something else in the process has broken: waiting for a whole
/// device, in any thread, ends every capture on it.
class CapturedWork {
 public:
  CapturedWork();
  ~CapturedWork();
  CapturedWork(CapturedWork&&) noexcept;
  CapturedWork& operator=(CapturedWork&&) noexcept;

  /// Within a Scope of `stream`.
  void run(OwnStream& stream, bool use_graph, const std::function<void()>& work);

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
  std::set<std::thread::id> prepared_;  // threads that have run the work
};

/// A copy of a tensor on the host, which is there once wait() returns. Begun within a Scope.
class HostCopy {
 public:
  HostCopy() = default;
  explicit HostCopy(const at::Tensor& source);
  /// Waits for the copy alone, not for what was begun after it.
  const at::Tensor& wait();

 private:
  struct Event;
  at::Tensor values_;
  std::shared_ptr<Event> event_;
};

/// Whether steps on `device` are replayed from CUDA graphs: a CUDA device, TIDEGATE_CUDA_GRAPHS is
/// not 0, and autocast, whose copies of weights do not outlive it, is off.
bool uses_cuda_graphs(at::Device device);

/// Bytes that can be had on the device now, as far as is known; none where nothing is.
std::optional<int64_t> free_bytes(at::Device device);
/// All the device has.
std::optional<int64_t> all_bytes(at::Device device);

}  // namespace tidegate::models
