// Reading and writing of safetensors files: the weights that `CausalLM::save` leaves beside
// config.json, and that the Python package reads and writes too.
//
// The format: eight bytes with the header's length (little endian), the header (JSON: name ->
// {dtype, shape, data_offsets}, and an optional "__metadata__" of strings), then the raw values,
// row-major, without holes.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace tidegate::models {

/// What a file holds: contiguous CPU tensors by name.
using TensorMap = std::map<std::string, at::Tensor>;

/// Writes `tensors` (any device, any strides, dtypes fp64, fp32, fp16, bf16, int64, int32, int16,
/// int8, uint8, bool) to `path`. The values go to a temporary file beside it, which is renamed over
/// `path` once it is complete and on disk: a reader, or a process killed in the middle, never
/// leaves half a file under that name. Threads and processes may save to one path at a time: a
/// whole file of one of them stays. Throws c10::Error when the folder cannot be written, the
/// disk is full, or a dtype has no name in the format. The metadata gets "crc32", the checksum of
/// the whole file, as Python's files have it.
void save_safetensors(const TensorMap& tensors, const std::string& path,
                      const std::map<std::string, std::string>& metadata = {});

/// Reads every tensor of `path` to the CPU. Strict: a header that is not JSON or nested deeply, a
/// name twice, an unknown dtype, a size that does not fit the shape, holes, overlaps, a truncated
/// file, bytes after the last tensor, or other bytes than those that "crc32" in the metadata was
/// made of, where it is there, are a c10::Error that names the file and what is wrong with it.
/// Reads each value once, straight into its tensor.
TensorMap load_safetensors(const std::string& path);

}  // namespace tidegate::models
