#include "src/models/file_io.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace tidegate::models {
namespace {

// The name carries the process id, so that two writers do not share a temporary file.
std::string temporary_name(const std::filesystem::path& path) {
  return path.string() + ".tmp." + std::to_string(::getpid());
}

// A rename is durable once the folder that holds the name is on disk. Not every file system can
// sync a folder, and the data is complete either way, so a failure here is not an error.
void sync_folder(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path)
    : path_(path), temporary_(temporary_name(path)) {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("cannot create the file");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what) const {
  const int code = errno;
  TORCH_CHECK(false, "tidegate: ", path_.string(), ": ", what, ": ", std::strerror(code));
}

void AtomicFile::write(const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(descriptor_, bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot write");
    bytes += written;
    size -= static_cast<size_t>(written);
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("cannot flush to disk");
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) fail("cannot close");
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot rename into place");
  temporary_.clear();
  sync_folder(path_);
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "tidegate: ", path.string(), ": cannot open: ", std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  TORCH_CHECK(!file.bad() && !text.fail(), "tidegate: ", path.string(), ": cannot read");
  return text.str();
}

std::string printable(std::string text) {
  const auto is_control = [](unsigned char c) { return c < 0x20 || c > 0x7e; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}

}  // namespace tidegate::models
