// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <string>

#include <gradsync/bootstrap/job.hpp>
#include <gradsync/core/error.hpp>

#include "data.hpp"

namespace gradsync_train {

/// What the launcher says in the environment, for a backend that `flag` names. Throws UsageError.
inline gradsync::Job place_in_job(const std::string& flag) {
    try {
        return gradsync::Job::from_environment();
    } catch (const gradsync::Error& error) {
        throw UsageError(flag + ": " + error.what());
    }
}

}  // namespace gradsync_train
