// SPDX-License-Identifier: BSL-1.0
#include "support/tensor.hpp"

namespace gradsync_test {

Bytes constant_bytes(gradsync::DType dtype, std::size_t count, double x) {
    return with_type(dtype, [&]<class T>(T*) {
        const std::vector<T> values(count, element_of<T>(x));
        return bytes_of(gradsync::const_buffer(values));
    });
}

std::vector<double> numbers(gradsync::ConstBufferView view) {
    return with_type(view.dtype, [&]<class T>(T*) {
        std::vector<double> result;
        for (std::size_t i = 0; i < view.count; ++i) result.push_back(number_of(static_cast<const T*>(view.data)[i]));
        return result;
    });
}

Bytes random_gradient(gradsync::DType dtype, std::size_t count, int rank, int batch, std::size_t i) {
    Random random((static_cast<std::uint64_t>(rank) * 1'000'003 + static_cast<std::uint64_t>(batch)) * 1'000'003 + i);
    return with_type(dtype, [&]<class T>(T*) {
        std::vector<T> values(count);
        for (T& x : values) {
            const std::uint64_t bits = random();
            if (gradsync::is_floating(dtype))
                x = element_of<T>((static_cast<double>(bits % 2001) - 1000) * 0.001 / static_cast<double>(1u << (bits >> 32) % 8));
            else x = element_of<T>(static_cast<double>(bits % 40));
        }
        return bytes_of(gradsync::const_buffer(values));
    });
}

}  // namespace gradsync_test
