// Small file helpers of the model files; no torch.
//
// POSIX calls and std::string, not std::filesystem: libtorch_cpu.so exports the std::filesystem of
// the compiler that built it, whose path has another layout. A program that is linked with it and
// uses a newer libstdc++'s std::filesystem crashes, so neither this code nor its interface does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tidegate::models {

/// A file that appears under its name only when it is complete: written to a temporary name in the
/// same folder, flushed to disk and renamed by commit(). Without commit() the temporary file is
/// removed and whatever was at the name before stays. Each object has a temporary file that nobody
/// else has, so that threads and processes may write to one path: the last commit() is what stays.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  /// Replaces bytes that were written before.
  void overwrite(uint64_t offset, const void* data, size_t size);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

/// `folder`/`name`.
std::string join(const std::string& folder, const std::string& name);

/// Whether there is a regular file under this name.
bool is_file(const std::string& path);

/// Whether the folder holds a name that begins so; false where there is no such folder.
bool holds_name(const std::string& folder, std::string_view beginning);

/// Makes the folder and those above it where they are missing; throws c10::Error when it cannot.
void make_folders(const std::string& folder);

/// Replaces the file `path` with `text`, atomically.
void write_text(const std::string& path, std::string_view text);

/// The whole file as text; throws c10::Error that names it when it is missing or unreadable.
std::string read_text(const std::string& path);

/// The CRC-32 of zlib, PNG and Ethernet, of `size` bytes that follow those whose checksum `before`
/// is (0: of nothing).
uint32_t crc32(uint32_t before, const void* data, size_t size);

/// `text` with every byte that is not printable ASCII replaced: parsers quote what they could not
/// read, which may be any bytes, and messages are text.
std::string printable(std::string text);

}  // namespace tidegate::models
