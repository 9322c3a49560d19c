// SPDX-License-Identifier: BSL-1.0
#include "support/sharding.hpp"

namespace gradsync_test {

void write_gradient(gradsync::BufferView gradient, gradsync::ConstBufferView value, int rank, int batch, std::size_t i, bool add) {
    const Bytes noise = random_gradient(gradient.dtype, gradient.count, rank, batch, i);
    with_type(gradient.dtype, [&]<class T>(T*) {
        auto* g = static_cast<T*>(gradient.data);
        const auto* x = reinterpret_cast<const T*>(noise.data());
        with_type(value.dtype, [&]<class V>(V*) {
            const auto* w = static_cast<const V*>(value.data);
            for (std::size_t k = 0; k < gradient.count; ++k) {
                const double own = number_of(element_of<T>(number_of(x[k]) + 0.1 * number_of(w[k])));
                g[k] = element_of<T>(add ? number_of(g[k]) + own : own);
            }
        });
    });
}

}  // namespace gradsync_test
