// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/core/error.hpp>

#include "slow_build.hpp"

/// Functions on several ranks, whose results and errors are looked at afterwards, on the thread of the test: nothing
/// of doctest is called on the ranks.

namespace gradsync_test {

/// With a limit of waits that is not meant to be reached.
inline constexpr gradsync::ThreadOptions patient{.timeout = std::chrono::seconds(30)};

/// Collects what one rank finds wrong; the first finding is enough.
class Finding {
public:
    void check(bool good, const std::string& what) {
        if (!good && text_.empty()) text_ = what.empty() ? "something that has no text" : what;
    }
    const std::string& text() const noexcept { return text_; }

private:
    std::string text_;
};

/// Runs `f(backend, finding)` on `size` ranks. Returns the first finding of any rank, or "".
std::string findings(int size, const std::function<void(gradsync::ThreadBackend, Finding&)>& f, gradsync::ThreadOptions options = patient);

/// What a rank threw: a gradsync::Error, something else ("not a gradsync::Error: ..."), or nothing ("").
struct Outcome {
    std::optional<gradsync::Error> error;
    std::string text;

    bool is(gradsync::Errc code) const { return error && error->errc() == code; }
    bool says(const std::string& words) const { return text.find(words) != std::string::npos; }
};

/// The outcome of calling `f` here.
template <class F>
Outcome outcome_of(F&& f) {
    try {
        f();
        return {};
    } catch (const gradsync::Error& e) {
        return {e, e.what()};
    } catch (const std::exception& e) {
        return {std::nullopt, std::string("not a gradsync::Error: ") + e.what()};
    }
}

/// Runs `f(backend)` on `size` ranks and returns what left it, rank by rank. As with run_threads, an exception ends
/// the communicator.
std::vector<Outcome> outcomes(int size, const std::function<void(gradsync::ThreadBackend)>& f, gradsync::ThreadOptions options = patient);

inline bool all_equal(const std::vector<std::string>& texts) {
    return std::all_of(texts.begin(), texts.end(), [&](const std::string& text) { return text == texts.front(); });
}

}  // namespace gradsync_test
