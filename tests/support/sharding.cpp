// SPDX-License-Identifier: BSL-1.0
#include "support/sharding.hpp"

#include <optional>

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

template <class O>
std::vector<Bytes> weights_of_whole(int size, const Training& t, O optimizer, std::vector<double>* norms) {
    std::vector<Bytes> result;
    gradsync::run_threads(
        size,
        [&](gradsync::ThreadBackend comm) {
            auto model = initial_tensors(t.counts, t.dtype);
            WholeOptimizer<O> whole(optimizer, model);
            gradsync::Reducer sync(comm, model, t.reducer);
            for (int s = 0; s < t.steps; ++s) {
                for (int m = 0; m < t.micro_batches; ++m) {
                    auto last = m + 1 < t.micro_batches ? std::nullopt : std::optional(0);
                    std::optional<decltype(sync.no_sync())> guard;
                    if (!last) guard.emplace(sync.no_sync());
                    for (std::size_t i = model.size(); i-- > 0;) {
                        write_gradient(sync.gradient_view(i), model[i].value_view(), comm.rank(), t.batch(s, m), i, m > 0);
                        sync.mark_ready(i);
                    }
                }
                sync.finish();
                const double norm = sync.gradient_norm() / t.micro_batches;
                if (norms != nullptr && comm.rank() == 0) norms->push_back(norm);
                const double scale = (t.max_norm > 0 ? gradsync::clip_factor(norm, t.max_norm) : 1.0) / t.micro_batches;
                whole.begin_step();
                for (std::size_t i = 0; i < model.size(); ++i) whole.step(i, sync.gradient_view(i), scale, model[i].value_view());
            }
            if (comm.rank() == 0)
                for (const Tensor& p : model) result.push_back(p.value);
        },
        patient);
    return result;
}

template std::vector<Bytes> weights_of_whole(int, const Training&, AdamW, std::vector<double>*);
template std::vector<Bytes> weights_of_whole(int, const Training&, Sgd, std::vector<double>*);

}  // namespace gradsync_test
