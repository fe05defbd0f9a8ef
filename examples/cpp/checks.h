// What a caller checks before it runs compiled code, which would read beyond the end of other tensors.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

// A dynamic size: code takes it in its unit.
struct Size {
  int64_t whole, unit;
  int64_t local() const { return whole / unit; }
};

// The dynamic sizes of a call in order; each is a line "unit dim input name" in `text`, and "least most name" in `bounds`.
inline std::vector<Size> sizes_of(const std::string& text, const std::string& bounds, const std::map<std::string, at::Tensor>& tensors) {
  std::vector<Size> found;
  std::istringstream lines(text), ranges(bounds);
  std::string input, name, same;
  for (int64_t unit, dim, least, most; lines >> unit >> dim >> input && std::getline(lines >> std::ws, name);) {
    TORCH_CHECK(tensors.count(input), "there is no tensor ", input);
    TORCH_CHECK(ranges >> least >> most && std::getline(ranges >> std::ws, same) && same == name, "no bounds for ", name, ": export it again");
    const auto size = tensors.at(input).size(dim);
    TORCH_CHECK(least <= size && size <= most, name, " is ", size, ", the code serves ", least, " to ", most);
    TORCH_CHECK(size % unit == 0, name, " is ", size, ", shards are even at multiples of ", unit, " only");
    found.push_back({size, unit});
  }
  return found;
}

// Refuses a tensor unless it has the dtype and the sizes of `line`, such as "float32 8 -2": -2 stands for the first of the `dynamic` sizes, -3
// for the second, and so on, -1 for one that is computed from them. `cut` makes what this rank gives of a whole tensor.
inline void check(const std::string& name, const at::Tensor& tensor, const std::string& line, const std::vector<Size>& dynamic,
                  const std::function<at::Tensor(at::Tensor)>& cut) {
  std::istringstream words(line);
  std::string dtype;
  std::vector<int64_t> sizes;
  words >> dtype;
  for (int64_t size; words >> size;) {
    const auto given = static_cast<int64_t>(sizes.size()) < tensor.dim() ? tensor.size(sizes.size()) : 0;
    sizes.push_back(size >= 0 ? size : size == -1 ? given : dynamic.at(-2 - size).whole);
  }
  const auto wanted = cut(at::empty(sizes, at::kMeta)).sizes().vec();
  TORCH_CHECK(dtype == c10::getDtypeNames(tensor.scalar_type()).first && tensor.sizes() == wanted, name, " is ", tensor.scalar_type(),
              tensor.sizes(), ", this rank takes ", dtype, at::IntArrayRef(wanted));
}
