// The classes of gloo that torch's ProcessGroupGloo.hpp names. Their code is in libtorch; nothing here is called from outside of it.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
namespace rendezvous {
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout);
};
} // namespace rendezvous
namespace transport {
class Device {
 public:
  virtual ~Device() = 0;
};
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
} // namespace transport
} // namespace gloo
