// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/thread_backend.hpp>

#include "run.hpp"

template gradsync_test::Trained gradsync_test::run_rank(gradsync::ThreadBackend, const DrawnTraining&, const Leg&);
