// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <map>
#include <mutex>
#include <string>

namespace gradsync_fake {

/// Codes that functions are to fail with the next time that they are called; once. For any thread.
template <class Code>
class PlannedFailures {
public:
    void plan(const std::string& function, Code code) {
        const std::lock_guard lock(mutex_);
        codes_[function] = code;
    }
    /// 0, which is success, if nothing is planned.
    Code take(const char* function) {
        const std::lock_guard lock(mutex_);
        const auto planned = codes_.extract(function);
        return planned.empty() ? Code{} : planned.mapped();
    }

private:
    std::mutex mutex_;
    std::map<std::string, Code> codes_;
};

}  // namespace gradsync_fake
