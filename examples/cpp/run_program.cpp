// One rank of a program that `fxshard export --aot-inductor` compiled, on the CPU over gloo, without Python.
//
//   run_program PROGRAM.pt2 RANK STORE IN.safetensors OUT.safetensors [--weights RANK.safetensors] [--steps N] [--unchecked 1]
//
// STORE: a new file by which the ranks find each other. IN: whole tensors by the program's names. Weights are those in the program, or, with
// --weights, the rank's own, from the file beside it. OUT: what this rank holds of the outputs and of changed weights, after N steps.
// Sizes beyond the code's bounds are refused; so are programs with other conditions on sizes, which it cannot check, but with --unchecked 1.
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <regex>
#include <iostream>

#include "checks.h"
#include "safetensors.h"

struct Axis { std::string name; int64_t size, index; };
struct End { std::string kind, layout, name; };  // an input or output of the program

// Sums of products may differ in their last bit where memory is not aligned, as in a mapped file.
at::Tensor aligned(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64 ? tensor.clone() : tensor; }

// The shard of `whole` in a layout such as S(0)R, which has a placement for each axis.
at::Tensor shard(at::Tensor whole, const std::string& layout, const std::vector<Axis>& mesh) {
  const std::regex placement(R"(R|S\((\d+)\))");
  auto rest = layout.begin();
  for (const auto& axis : mesh) {
    std::smatch found;
    TORCH_CHECK(std::regex_search(rest, layout.end(), found, placement, std::regex_constants::match_continuous), "cannot cut ", layout);
    rest = found[0].second;
    if (!found[1].matched) continue;
    const int64_t dim = std::stoll(found[1]), size = whole.size(dim), chunk = (size + axis.size - 1) / axis.size;
    whole = whole.slice(dim, std::min(axis.index * chunk, size), std::min((axis.index + 1) * chunk, size));
  }
  return aligned(whole.contiguous());
}

// One process group for each axis, under the axis's name, by which the code finds it.
void make_groups(const std::vector<Axis>& mesh, const std::string& file, int world) {
  static std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> alive;  // torch's registry does not keep them
  auto store = c10::make_intrusive<c10d::FileStore>(file, world);
  for (const auto& axis : mesh) {
    std::string others = axis.name;
    for (const auto& other : mesh) others += other.name == axis.name ? "" : "/" + std::to_string(other.index);
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(others, store);
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface("lo"));  // on several machines: createDefaultDevice()
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, axis.index, axis.size, options);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, axis.index, axis.size);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    group->setGroupName(axis.name);
    c10d::register_process_group(axis.name, group);
    alive.push_back(group);
  }
}

std::vector<End> ends(const std::string& text) {
  std::vector<End> found;
  std::istringstream lines(text);
  for (End one; lines >> one.kind >> one.layout && std::getline(lines >> std::ws, one.name);) found.push_back(one);
  return found;
}

int main(int count, char** given) try {
  const std::vector<std::string> args(given, given + count);
  TORCH_CHECK(count >= 6, "usage: run_program PROGRAM.pt2 RANK STORE IN OUT [--weights RANK.safetensors] [--steps N] [--unchecked 1]");
  std::map<std::string, std::string> options{{"--weights", ""}, {"--steps", "1"}, {"--unchecked", "0"}};
  for (int i = 6; i + 1 < count; i += 2) options.at(args[i]) = args[i + 1];
  const int rank = std::stoi(args[2]);
  auto said = torch::inductor::AOTIModelPackageLoader::load_metadata_from_package(args[1], "model");

  std::vector<Axis> mesh;  // the last axis counts fastest
  std::istringstream axes(said.at("fxshard_mesh")), models(said.at("fxshard_models"));
  for (std::string axis; axes >> axis;) mesh.push_back({axis.substr(0, axis.find('=')), std::stoll(axis.substr(axis.find('=') + 1)), 0});
  int world = 1;
  for (auto axis = mesh.rbegin(); axis != mesh.rend(); world *= axis->size, ++axis) axis->index = rank / world % axis->size;
  std::string name;
  for (int i = 0; i <= rank; i++) models >> name;
  torch::inductor::AOTIModelPackageLoader model(args[1], name);
  said = model.get_metadata();

  const std::string own = options["--weights"], inside = "fxshard/weights.safetensors";
  caffe2::serialize::PyTorchStreamReader archive(args[1]);
  auto tensors = !own.empty() ? read(own) : archive.hasRecord(inside) ? read(args[1], archive.getRecordOffset(inside)) : Tensors();
  tensors.merge(read(args[4]));
  std::vector<at::Tensor> inputs;
  std::map<std::string, size_t> index;
  const auto index_on = [&](const std::string& name) { return std::find_if(mesh.begin(), mesh.end(), [&](auto& a) { return a.name == name; })->index; };
  const auto& conditions = said["fxshard_conditions"];
  std::istringstream lines(said.at("fxshard_tensors"));
  std::string line;
  size_t number = 0;
  TORCH_CHECK(conditions.empty() || options["--unchecked"] == "1", "--unchecked 1 is needed, these are not checked:\n", conditions);
  const auto dynamic = sizes_of(said["fxshard_sizes"], said["fxshard_bounds"], tensors);
  for (const auto& [kind, layout, input] : ends(said.at("fxshard_inputs"))) {
    index[input] = inputs.size();
    if (kind == "axis_index") {
      inputs.push_back(at::scalar_tensor(index_on(input), at::kLong));
    } else if (kind == "size" || kind == "rank") {  // a tensor whose shape says the number
      inputs.push_back(at::empty({kind == "size" ? dynamic.at(number++).local() : index_on(input) + 1, 0}));
    } else {
      TORCH_CHECK(std::getline(lines, line), "the metadata say nothing of ", input);
      TORCH_CHECK(tensors.count(input), "there is no tensor ", input);
      const bool held = kind == "parameter" && !own.empty();
      check(input, tensors[input], line, dynamic, [&](at::Tensor whole) { return held ? shard(whole, layout, mesh) : whole; });
      inputs.push_back(held ? aligned(tensors[input]) : shard(tensors[input], layout, mesh));
    }
  }

  make_groups(mesh, args[3], world);
  Tensors results;
  for (int step = 0; step < std::stoi(options["--steps"]); step++) {
    auto outputs = model.run(inputs);
    size_t i = 0;
    for (const auto& [kind, layout, output] : ends(said.at("fxshard_outputs"))) {
      if (kind == "mutation" && inputs[index[output]].data_ptr() != outputs[i].data_ptr()) inputs[index[output]].copy_(outputs[i]);
      results[output] = outputs[i++];
    }
  }
  write(args[5], results);
} catch (const c10::Error& error) {
  return std::cerr << error.what_without_backtrace() << "\n", 2;
} catch (const std::exception& error) {
  return std::cerr << error.what() << "\n", 2;
}
