// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/store/store.hpp>

namespace gradsync_test {

/// A store in memory with the faults of one far away: a request is lost before it is carried out or its answer afterwards, a request is
/// carried out twice, and readers see names later than they were created.
class SimulatedStore {
public:
    struct State {
        std::mutex mutex;
        std::mt19937_64 random{63};
        std::map<std::string, std::pair<gradsync::Blob, int>, std::less<>> entries;  // the bytes, and how many reads still miss them
    };
    using Shared = std::shared_ptr<State>;

    /// `lost`: the part of the calls that fail; `late`: of the names that readers see late.
    explicit SimulatedStore(Shared state, double lost = 0, double late = 0) : state_{std::move(state)}, lost_{lost}, late_{late} {}

    gradsync::Blob create(std::string_view name, std::span<const std::byte> bytes) {
        gradsync::bootstrap::check_entry(name, bytes.size(), "create");
        const std::lock_guard lock{state_->mutex};
        lose();
        for (int times = chance(lost_) ? 2 : 1; times > 0; --times)
            state_->entries.try_emplace(std::string(name), gradsync::Blob(bytes.begin(), bytes.end()), chance(late_) ? 3 : 0);
        lose();
        return state_->entries.find(name)->second.first;
    }
    std::optional<gradsync::Blob> read(std::string_view name) {
        gradsync::bootstrap::check_entry(name, 0, "read");
        const std::lock_guard lock{state_->mutex};
        const auto found = state_->entries.find(name);
        if (found == state_->entries.end() || found->second.second-- > 0) return std::nullopt;
        return found->second.first;
    }
    std::vector<std::string> names(std::string_view prefix) {
        const std::lock_guard lock{state_->mutex};
        std::vector<std::string> found;
        for (auto& [name, entry] : state_->entries)
            if (name.starts_with(prefix) && entry.second-- <= 0) found.push_back(name);
        return found;
    }

private:
    bool chance(double part) { return part > 0 && std::uniform_real_distribution<>{}(state_->random) < part; }
    void lose() {
        if (chance(lost_)) gradsync::bootstrap::raise(gradsync::Errc::storage, "the simulated store does not answer");
    }

    Shared state_;
    double lost_, late_;
};

}  // namespace gradsync_test
