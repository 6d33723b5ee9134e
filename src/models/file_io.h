// Small file helpers of the model files; no torch.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tidegate::models {

/// A file that appears under its name only when it is complete: written to a temporary name in the
/// same folder, flushed to disk and renamed by commit(). Without commit() the temporary file is
/// removed and whatever was at the name before stays.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;
  std::string temporary_;
  int descriptor_ = -1;
};

/// Replaces the file `path` with `text`, atomically.
void write_text(const std::filesystem::path& path, std::string_view text);

/// The whole file as text; throws c10::Error that names it when it is missing or unreadable.
std::string read_text(const std::filesystem::path& path);

/// `text` with every byte that is not printable ASCII replaced: parsers quote what they could not
/// read, which may be any bytes, and messages are text.
std::string printable(std::string text);

}  // namespace tidegate::models
