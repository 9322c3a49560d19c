// SPDX-License-Identifier: BSL-1.0
#include "support/averaging_oracle.hpp"

#include <cstring>
#include <type_traits>

#include "support/sum_tree.hpp"

namespace gradsync_test {

Bytes combined(gradsync::DType dtype, const std::vector<Bytes>& by_rank, const std::vector<gradsync::Contribution>& by) {
    return with_type(dtype, [&]<class T>(T*) {
        using A = std::conditional_t<gradsync::is_low_precision(gradsync::dtype_of<T>), float, T>;
        std::vector<T> result(by_rank.front().size() / sizeof(T), element_of<T>(0));
        double weight = 0;
        for (const gradsync::Contribution& c : by) weight += c.weight;
        for (std::size_t k = 0; k < result.size(); ++k) {
            const auto leaf = [&](std::size_t r) -> std::optional<A> {
                if (by[r].scale == 0) return std::nullopt;
                T x;
                std::memcpy(&x, by_rank[r].data() + k * sizeof(T), sizeof(T));
                return static_cast<A>(static_cast<A>(x) * static_cast<A>(by[r].scale));
            };
            A sum = tree_sum(0, by_rank.size(), leaf, [](A a, A b) -> std::optional<A> { return static_cast<A>(a + b); }).value_or(A{});
            if (weight == 0) sum = A{};
            else if (weight != 1) sum = static_cast<A>(sum * static_cast<A>(1 / weight));
            result[k] = static_cast<T>(sum);
        }
        return bytes_of(gradsync::const_buffer(result));
    });
}

Bytes mean_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank) {
    return combined(dtype, by_rank, std::vector<gradsync::Contribution>(by_rank.size()));
}

Bytes sum_of(gradsync::DType dtype, const std::vector<Bytes>& by_rank) {
    std::vector<gradsync::Contribution> by(by_rank.size(), {1, 0});
    by.front().weight = 1;
    return combined(dtype, by_rank, by);
}

std::vector<Bytes> gradients_of_all(const Tensor& t, int ranks, int batch, std::size_t i) {
    std::vector<Bytes> result;
    for (int r = 0; r < ranks; ++r) result.push_back(random_gradient(t, r, batch, i));
    return result;
}

Bytes expected_mean(const Tensor& t, int ranks, int batch, std::size_t i) { return mean_of(t.dtype, gradients_of_all(t, ranks, batch, i)); }

}  // namespace gradsync_test
