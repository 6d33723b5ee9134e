// The rows of the comparison as JSON and as a table.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/models/work.h"

namespace tidegate::benchmarks {

/// One model at one context, a result a round; what failed has an error instead.
struct Row {
  std::string mixer;
  int64_t context = 0, batch = 0, layers = 0, glu_hidden = 0, parameters = 0;
  std::vector<TrainResult> train;
  std::vector<DecodeResult> decode;
  std::vector<AttentionResult> attention;
  std::vector<std::string> errors;
};

/// The mean over the rounds, which run to and fro so that a machine that gets slower or faster
/// favours nobody; largest memory, errors and losses of the last round.
TrainResult mean(const std::vector<TrainResult>& rounds);
DecodeResult mean(const std::vector<DecodeResult>& rounds);
AttentionResult mean(const std::vector<AttentionResult>& rounds);

/// `record` with the rows that have begun, each beside the Transformer's of the same context, and
/// "pairs": a forgetting attention's step against its Transformer's, split in attention and the
/// rest.
nlohmann::ordered_json with_rows(nlohmann::ordered_json record, const std::vector<Row>& rows);

/// Column names, and a row of with_rows() under them.
std::string table_head();
std::string table_line(const nlohmann::ordered_json& row);
/// Where a step's time goes, beside the floor.
std::string split_line(const nlohmann::ordered_json& row);
std::string pair_line(const nlohmann::ordered_json& pair);

/// Written beside `path` and renamed into it: whoever is interrupted leaves the rows before.
void write_json(const std::string& path, const nlohmann::ordered_json& record);

}  // namespace tidegate::benchmarks
