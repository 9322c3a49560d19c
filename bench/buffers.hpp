// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/core/dtype.hpp>
#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/host_buffer.hpp>
#include <gradsync/kernel/tables.hpp>

#include "contest.hpp"

namespace bench {

/// These values as elements of `dtype`.
inline std::vector<std::byte> pattern(gradsync::DType dtype, const std::vector<double>& values) {
    const std::vector<float> floats(values.begin(), values.end());
    std::vector<std::byte> bytes(values.size() * gradsync::size_of(dtype));
    gradsync::kernel::register_kernels(dtype);
    if (dtype == gradsync::DType::f64) std::memcpy(bytes.data(), values.data(), bytes.size());
    else if (dtype == gradsync::DType::f32) std::memcpy(bytes.data(), floats.data(), bytes.size());
    else gradsync::kernel::convert(floats.data(), gradsync::DType::f32, bytes.data(), dtype, floats.size());
    return bytes;
}
inline std::vector<std::byte> pattern(gradsync::DType dtype, float value) { return pattern(dtype, std::vector<double>(1024, value)); }

/// Splits the data into pieces of the pattern's size, the last one shorter.
template <class Use>
void for_each_piece(void* data, std::size_t bytes, const std::vector<std::byte>& pattern, Use&& use) {
    for (std::size_t at = 0; at < bytes; at += pattern.size())
        use(static_cast<std::byte*>(data) + at, std::min(pattern.size(), bytes - at));
}

/// Repeats the pattern.
inline void fill(void* data, std::size_t bytes, const std::vector<std::byte>& pattern) {
    for_each_piece(data, bytes, pattern, [&](std::byte* piece, std::size_t size) { std::memcpy(piece, pattern.data(), size); });
}
/// Makes all elements equal to `value`.
inline void fill(void* data, std::size_t bytes, gradsync::DType dtype, float value) { fill(data, bytes, pattern(dtype, value)); }

/// The number of elements that differ from the repeated pattern.
inline std::size_t count_wrong(void* data, std::size_t bytes, gradsync::DType dtype, const std::vector<std::byte>& pattern) {
    const std::size_t element = gradsync::size_of(dtype);
    std::size_t wrong = 0;
    for_each_piece(data, bytes, pattern, [&](std::byte* piece, std::size_t size) {
        if (std::memcmp(piece, pattern.data(), size) == 0) return;
        for (std::size_t at = 0; at < size; at += element) wrong += std::memcmp(piece + at, pattern.data() + at, element) != 0;
    });
    return wrong;
}

/// Throws unless all elements are equal to `value`.
inline void check_filled(void* data, std::size_t bytes, gradsync::DType dtype, float value, const std::string& who) {
    if (count_wrong(data, bytes, dtype, pattern(dtype, value)) != 0) throw std::runtime_error(who + ": the sum is wrong");
}

/// The sum of buffers full of 1, 2, ...
inline float sum_of_ranks(int ranks) { return static_cast<float>(ranks * (ranks + 1) / 2); }

/// One buffer a rank, of the kind that the library's buckets are; all contestants use the same ones. Zeros: sums
/// of them stay what they are, however often they are taken.
class Buffers {
public:
    Buffers(int ranks, std::size_t bytes) : bytes_(bytes) {
        for (int r = 0; r < ranks; ++r) memory_.emplace_back(bytes);
    }

    std::size_t bytes() const { return bytes_; }
    std::vector<void*> pointers() const {
        std::vector<void*> all;
        for (const auto& buffer : memory_) all.push_back(buffer.data());
        return all;
    }

    /// Throws unless the contestant turns buffers full of 1, 2, ... into their sum.
    void check_sum(Contestant& contestant, gradsync::DType dtype, const std::string& who) {
        const int ranks = static_cast<int>(memory_.size());
        for (int r = 0; r < ranks; ++r) fill_rank(r, dtype, static_cast<float>(r + 1));
        std::vector<std::thread> threads;
        for (int r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                if (!contestant.takes_part(r)) return;
                contestant.meet(r);
                contestant.run(r, 1);
            });
        for (std::thread& thread : threads) thread.join();
        for (const auto& buffer : memory_) check_filled(buffer.data(), bytes_, dtype, sum_of_ranks(ranks), who);
        for (int r = 0; r < ranks; ++r) fill_rank(r, dtype, 0);
    }

private:
    void fill_rank(int rank, gradsync::DType dtype, float value) {
        fill(memory_[static_cast<std::size_t>(rank)].data(), bytes_, dtype, value);
    }

    std::size_t bytes_;
    std::vector<gradsync::kernel::HostBuffer> memory_;
};

}  // namespace bench
