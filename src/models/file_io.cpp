#include "src/models/file_io.h"

#include <c10/util/Exception.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

namespace tidegate::models {
namespace {

// Makes a file beside `path` under a name that nothing had, and returns its descriptor, or -1 with
// errno. O_EXCL is what makes the name this writer's alone, also among other threads and machines;
// and it follows no symbolic link that somebody who foresaw the name has laid there. The numbers
// only make it likely that the first name is free. The mode is open()'s, so that umask applies.
int make_temporary(const std::string& path, std::string& name) {
  static std::atomic<uint64_t> count{0};
  for (int attempt = 0; attempt < 10'000; ++attempt) {
    name = path + ".tmp." + std::to_string(::getpid()) + '.' + std::to_string(count++);
    constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    const int descriptor = ::open(name.c_str(), kFlags, 0666);
    if (descriptor >= 0 || errno != EEXIST) return descriptor;
  }
  return -1;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool is_folder(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// A rename is durable once the folder that holds the name is on disk. Not every file system can
// sync a folder, and the data is complete either way, so a failure here is not an error.
void sync_folder(const std::string& path) {
  const std::string folder = folder_of(path);
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

// tables[k][b]: what byte b, k bytes before the end of eight, adds to their checksum, so that eight
// are taken at a time.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

CrcTables make_crc_tables() {
  constexpr uint32_t kPolynomial = 0xedb88320;
  CrcTables tables;
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t b = 0; b < 256; ++b) {
      tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xff];
    }
  }
  return tables;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path)
    : path_(path), descriptor_(make_temporary(path, temporary_)) {
  if (descriptor_ < 0) fail("cannot create the file");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what) const {
  const int code = errno;
  TORCH_CHECK(false, "tidegate: ", path_, ": ", what, ": ", std::strerror(code));
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

void AtomicFile::overwrite(uint64_t offset, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::pwrite(descriptor_, bytes, size, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot write");
    bytes += written;
    offset += static_cast<uint64_t>(written);
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

std::string join(const std::string& folder, const std::string& name) {
  return folder.empty() || folder.back() == '/' ? folder + name : folder + '/' + name;
}

bool is_file(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool holds_name(const std::string& folder, std::string_view beginning) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
  if (!opened) return false;
  while (const dirent* entry = ::readdir(opened.get())) {
    if (std::string_view(entry->d_name).starts_with(beginning)) return true;
  }
  return false;
}

void make_folders(const std::string& folder) {
  if (folder.empty() || is_folder(folder)) return;
  if (const std::string above = folder_of(folder); above != folder) make_folders(above);
  // Another process may have made it meanwhile.
  if (::mkdir(folder.c_str(), 0777) == 0 || is_folder(folder)) return;
  const int code = errno;
  TORCH_CHECK(false, "tidegate: ", folder, ": cannot make the folder: ", std::strerror(code));
}

void write_text(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "tidegate: ", path, ": cannot open: ", std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  TORCH_CHECK(!file.bad() && !text.fail(), "tidegate: ", path, ": cannot read");
  return text.str();
}

uint32_t crc32(uint32_t before, const void* data, size_t size) {
  static const CrcTables tables = make_crc_tables();
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    word ^= crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= tables[7 - i][word >> (8 * i) & 0xff];
  }
  for (; size > 0; --size, ++bytes) crc = crc >> 8 ^ tables[0][(crc ^ *bytes) & 0xff];
  return ~crc;
}

std::string printable(std::string text) {
  const auto is_control = [](unsigned char c) { return c < 0x20 || c > 0x7e; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}

}  // namespace tidegate::models
