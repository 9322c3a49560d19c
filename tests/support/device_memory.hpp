// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <gradsync/cuda/runtime.hpp>

namespace gradsync_test {

/// A buffer on a device, for the suite of backends.
class DeviceMemory {
public:
    explicit DeviceMemory(const std::vector<std::byte>& bytes) : size_(bytes.size()), memory_(bytes.size()) { write(bytes); }
    DeviceMemory(const DeviceMemory& other) : DeviceMemory(other.read()) {}
    DeviceMemory(DeviceMemory&&) noexcept = default;
    DeviceMemory& operator=(DeviceMemory&&) noexcept = default;

    std::byte* data() noexcept { return static_cast<std::byte*>(memory_.data()); }

    void write(const std::vector<std::byte>& bytes) {
        if (!bytes.empty())
            gradsync::cuda::check(cudaMemcpy(memory_.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    std::vector<std::byte> read() const {
        std::vector<std::byte> bytes(size_);
        if (size_ != 0) gradsync::cuda::check(cudaMemcpy(bytes.data(), memory_.data(), size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
        return bytes;
    }

private:
    std::size_t size_;
    gradsync::cuda::DeviceMemory memory_;
};

}  // namespace gradsync_test
