// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/mpi.hpp>

#include "run.hpp"

template gradsync_test::Trained gradsync_test::run_rank(gradsync::MpiBackend, const DrawnTraining&, const Leg&);
