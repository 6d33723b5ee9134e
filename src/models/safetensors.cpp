#include "tidegate/models/safetensors.h"
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "src/models/file_io.h"
#include "src/models/json.h"

namespace tidegate::models {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors values are little endian; this reader copies them as they are");

constexpr uint64_t kLengthBytes = 8;
// The reference implementation refuses longer headers too: a broken length must not allocate.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr char kMetadata[] = "__metadata__";
// The metadata that holds the file's checksum: the CRC-32 of all its bytes, in eight hexadecimal
// digits, which count as zeros themselves. Python writes and compares it too.
constexpr char kChecksum[] = "crc32";
constexpr char kNoChecksum[] = "00000000";

constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {
    {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
    {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
    {"U8", at::kByte},    {"BOOL", at::kBool},
};

struct Entry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin;
  uint64_t end;
};

std::string dtype_name(const std::string& tensor, at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return std::string(name);
  }
  TORCH_CHECK(false, "save_safetensors: tensor '", tensor, "': expected a dtype that safetensors ",
              "files can hold, got ", dtype);
}

// std::nullopt where the product does not fit 64 bits: no tensor of that size is in any file. The
// other extents of an empty tensor have to fit all the same: its strides are their products.
std::optional<uint64_t> byte_size(const std::vector<int64_t>& shape, uint64_t item) {
  uint64_t size = item;
  bool is_empty = false;
  for (const int64_t extent : shape) {
    is_empty = is_empty || extent == 0;
    const auto factor = static_cast<uint64_t>(std::max<int64_t>(extent, 1));
    if (size > std::numeric_limits<int64_t>::max() / factor) return std::nullopt;
    size *= factor;
  }
  return is_empty ? 0 : size;
}

Entry parse_entry(const std::string& name, const Json& value, const std::string& file) {
  const auto bad = [&](const char* what) {
    TORCH_CHECK(false, file, "broken safetensors header: tensor ", shown(name), ": ", what);
  };
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    bad("expected {dtype, shape, data_offsets}");
  }
  const auto& dtype = value["dtype"];
  const auto& shape = value["shape"];
  const auto& offsets = value["data_offsets"];
  if (!dtype.is_string()) bad("dtype is not a string");
  const auto known = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& pair) {
    return dtype.get_ref<const std::string&>() == pair.first;
  });
  TORCH_CHECK(known != std::end(kDtypes), file, "tensor ", shown(name), ": dtype ", shown(dtype),
              " is not supported");
  Entry entry{name, known->second, {}, 0, 0};
  if (!shape.is_array() || shape.size() > 64) bad("shape is not a list of sizes");
  for (const auto& extent : shape) {
    if (!extent.is_number_unsigned() ||
        extent.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
      bad("shape holds something that is no size");
    }
    entry.shape.push_back(extent.get<int64_t>());
  }
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    bad("data_offsets is not [begin, end]");
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.end = offsets[1].get<uint64_t>();
  const auto size = byte_size(entry.shape, c10::elementSize(entry.dtype));
  if (entry.end < entry.begin || !size || *size != entry.end - entry.begin) {
    bad("data_offsets do not fit its dtype and shape");
  }
  return entry;
}

Json parse_header(const std::string& text, const std::string& file) {
  try {
    Json header = parse_json(text);
    TORCH_CHECK(header.is_object(), file, "broken safetensors header: not a JSON object");
    return header;
  } catch (const JsonError& error) {
    TORCH_CHECK(false, file, "broken safetensors header: ", error.what());
  }
}

// In the order of the data; checked to cover it without a hole or an overlap.
std::vector<Entry> parse_entries(const Json& header, uint64_t data_bytes, const std::string& file) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadata) entries.push_back(parse_entry(name, value, file));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t expected = 0;
  for (const Entry& entry : entries) {
    TORCH_CHECK(entry.begin == expected, file, "broken safetensors header: tensor ",
                shown(entry.name), " begins at byte ", entry.begin, ", expected ", expected);
    expected = entry.end;
  }
  TORCH_CHECK(expected <= data_bytes, file, "truncated: the header promises ", expected,
              " bytes of values, the file holds ", data_bytes);
  TORCH_CHECK(expected == data_bytes, file, "holds ", data_bytes - expected,
              " bytes after the last tensor");
  return entries;
}

// The checksum as the header has it.
std::string checksum_entry(const std::string& digits) {
  return std::string("\"") + kChecksum + "\":\"" + digits + '"';
}

std::string digits_of(uint32_t checksum) {
  std::string digits = kNoChecksum;
  for (size_t i = 0; i < digits.size(); ++i) {
    digits[digits.size() - 1 - i] = "0123456789abcdef"[checksum >> (4 * i) & 0xf];
  }
  return digits;
}

// The checksum that the header notes; empty where it notes none.
std::string noted_checksum(const Json& header) {
  const auto metadata = header.find(kMetadata);
  if (metadata == header.end() || !metadata->is_object()) return "";
  const auto noted = metadata->find(kChecksum);
  return noted != metadata->end() && noted->is_string() ? noted->get<std::string>() : "";
}

// The checksum of length and header, in which the one that is noted counts as zeros.
uint32_t header_checksum(uint64_t length, std::string text, const std::string& noted) {
  const size_t place = text.find(checksum_entry(noted));
  if (place != std::string::npos) {
    text.replace(place, checksum_entry(noted).size(), checksum_entry(kNoChecksum));
  }
  return crc32(crc32(0, &length, kLengthBytes), text.data(), text.size());
}

void read_exactly(std::ifstream& stream, void* target, uint64_t size, const std::string& file) {
  stream.read(static_cast<char*>(target), static_cast<std::streamsize>(size));
  TORCH_CHECK(stream.good() && static_cast<uint64_t>(stream.gcount()) == size, file,
              "cannot read: expected ", size, " more bytes, got ", stream.gcount());
}

}  // namespace

void save_safetensors(const TensorMap& tensors, const std::string& path,
                      const std::map<std::string, std::string>& metadata) {
  // Larger items first, so that every value lies on a multiple of its size in the file.
  std::vector<std::pair<std::string, at::Tensor>> ordered(tensors.begin(), tensors.end());
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  nlohmann::json header = nlohmann::json::object();
  header[kMetadata] = metadata;
  header[kMetadata][kChecksum] = kNoChecksum;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : ordered) {
    TORCH_CHECK(name != kMetadata, "save_safetensors: '", name, "' is no name for a tensor");
    header[name] = {{"dtype", dtype_name(name, tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the values begin on a multiple of eight
  const uint64_t length = text.size();
  AtomicFile file(path);
  file.write(&length, kLengthBytes);
  file.write(text.data(), text.size());
  uint32_t checksum = header_checksum(length, text, kNoChecksum);
  for (const auto& [name, tensor] : ordered) {
    const at::Tensor values = tensor.detach().cpu().contiguous();
    file.write(values.const_data_ptr(), values.nbytes());
    checksum = crc32(checksum, values.const_data_ptr(), values.nbytes());
  }
  const std::string entry = checksum_entry(digits_of(checksum));
  const size_t place = text.find(checksum_entry(kNoChecksum));
  file.overwrite(kLengthBytes + place, entry.data(), entry.size());
  file.commit();
}

TensorMap load_safetensors(const std::string& path) {
  const std::string file = "tidegate: " + path + ": ";
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  TORCH_CHECK(stream.good(), file, "cannot open: ", std::strerror(errno));
  const auto position = stream.tellg();
  TORCH_CHECK(position >= 0, file, "not a regular file");
  const auto size = static_cast<uint64_t>(position);
  TORCH_CHECK(size >= kLengthBytes, file, "truncated: ", size,
              " bytes are too few for a safetensors file");
  stream.seekg(0);
  uint64_t length = 0;
  read_exactly(stream, &length, kLengthBytes, file);
  TORCH_CHECK(length <= kMaxHeaderBytes, file, "not a safetensors file: its header would be ",
              length, " bytes long");
  TORCH_CHECK(length <= size - kLengthBytes, file, "truncated: the header is ", length,
              " bytes long, the file holds ", size - kLengthBytes);
  std::string text(length, '\0');
  read_exactly(stream, text.data(), length, file);
  const Json header = parse_header(text, file);
  const std::string noted = noted_checksum(header);
  uint32_t checksum = header_checksum(length, text, noted);
  TensorMap tensors;
  for (const Entry& entry : parse_entries(header, size - kLengthBytes - length, file)) {
    at::Tensor tensor = at::empty(entry.shape, at::TensorOptions(entry.dtype));
    // Entries lie one after the other, so the stream is already where this one begins.
    read_exactly(stream, tensor.mutable_data_ptr(), tensor.nbytes(), file);
    if (!noted.empty()) checksum = crc32(checksum, tensor.const_data_ptr(), tensor.nbytes());
    tensors.emplace(entry.name, std::move(tensor));
  }
  TORCH_CHECK(noted.empty() || noted == digits_of(checksum), file, "damaged: its checksum is ",
              digits_of(checksum), ", and ", shown(noted), " was noted when it was written");
  return tensors;
}

}  // namespace tidegate::models
