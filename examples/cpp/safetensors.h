// Named tensors of the CPU in files of safetensors: the length of the header, the header (JSON), the tensors' bytes.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

using Tensors = std::map<std::string, at::Tensor>;

inline const std::map<std::string, at::ScalarType> dtypes = {
    {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
    {"I64", at::kLong}, {"I32", at::kInt}, {"U8", at::kByte}, {"BOOL", at::kBool}};

// The tensors of the safetensors that begin at `start` of a file, mapped, by name.
inline Tensors read(const std::string& path, int64_t start = 0) {
  auto file = at::from_file(path, /*shared=*/false, std::filesystem::file_size(path), at::kByte).slice(0, start);
  uint64_t length;
  std::memcpy(&length, file.const_data_ptr(), 8);
  const std::string header(static_cast<const char*>(file.const_data_ptr()) + 8, length);
  const std::regex entry(R"re("([^"]+)":\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})re");
  Tensors found;
  for (std::sregex_iterator at(header.begin(), header.end(), entry), end; at != end; ++at) {
    std::vector<int64_t> shape;
    std::istringstream sizes((*at)[3]);
    for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::stoll(size));
    auto bytes = file.slice(0, 8 + length + std::stoll((*at)[4]), 8 + length + std::stoll((*at)[5]));
    found[(*at)[1]] = (bytes.numel() ? bytes : bytes.clone()).view(dtypes.at((*at)[2])).view(shape);
  }
  return found;
}

inline void write(const std::string& path, const Tensors& tensors) {
  std::string header, data;
  for (const auto& [name, tensor] : tensors) {
    auto value = tensor.contiguous();
    auto dtype = std::find_if(dtypes.begin(), dtypes.end(), [&](auto& one) { return one.second == value.scalar_type(); })->first;
    std::string shape;
    for (auto size : value.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(size);
    const auto begin = std::to_string(data.size());
    data.append(static_cast<const char*>(value.const_data_ptr()), value.nbytes());
    header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + begin +
        "," + std::to_string(data.size()) + "]}";
  }
  header += "}" + std::string((8 - (header.size() + 1) % 8) % 8, ' ');
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << header << data;
}
