// SPDX-License-Identifier: BSL-1.0
#include "support/ranks.hpp"

#include <utility>

namespace gradsync_test {

std::string findings(int size, const std::function<void(gradsync::ThreadBackend, Finding&)>& f, gradsync::ThreadOptions options) {
    const auto texts = gradsync::run_threads(
        size,
        [&](gradsync::ThreadBackend backend) {
            Finding finding;
            const int rank = backend.rank();
            f(std::move(backend), finding);
            return finding.text().empty() ? std::string() : "rank " + std::to_string(rank) + ": " + finding.text();
        },
        options);
    for (const std::string& text : texts)
        if (!text.empty()) return text;
    return {};
}

std::vector<Outcome> outcomes(int size, const std::function<void(gradsync::ThreadBackend)>& f, gradsync::ThreadOptions options) {
    std::vector<Outcome> result(static_cast<std::size_t>(size));
    try {
        gradsync::run_threads(
            size,
            [&](gradsync::ThreadBackend backend) {
                Outcome& mine = result[static_cast<std::size_t>(backend.rank())];
                try {
                    f(std::move(backend));
                } catch (const gradsync::Error& e) {
                    mine = {e, e.what()};
                    throw;
                } catch (const std::exception& e) {
                    mine = {std::nullopt, std::string("not a gradsync::Error: ") + e.what()};
                    throw;
                }
            },
            options);
    } catch (const std::exception&) {  // it is among the outcomes
    }
    return result;
}

}  // namespace gradsync_test
